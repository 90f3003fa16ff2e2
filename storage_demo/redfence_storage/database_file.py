"""Opens the database file: ours, of a version we know, locked against every other process, and durable.

A file is ours when its `application_id` says so; its `user_version` is the schema's. Nothing is written to a file before both are checked,
so pointing the server at somebody else's database does no harm.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

from redfence_storage.errors import DatabaseUnusable

# "rfnc"; SQLite keeps it in the file's header.
APPLICATION_ID = 0x72666E63
SCHEMA_VERSION = 1
# How long opening waits for a process that is just ending with the file. Once open, nobody else can lock it.
BUSY_TIMEOUT_MS = 2_000
_STRICT_TABLES_SINCE = (3, 37, 0)

# Values are rows of an ordinary table: SQLite advises against WITHOUT ROWID where rows are large.
_SCHEMA = """
CREATE TABLE fences (
  resource      TEXT NOT NULL PRIMARY KEY,
  highest_token INTEGER NOT NULL CHECK (highest_token > 0)
) STRICT, WITHOUT ROWID;
CREATE TABLE stored_values (
  resource      TEXT NOT NULL,
  key           TEXT NOT NULL,
  value         BLOB NOT NULL,
  written_token INTEGER NOT NULL CHECK (written_token > 0),
  PRIMARY KEY (resource, key)
) STRICT;
"""


def open_database(path: Path, *, busy_timeout_ms: int = BUSY_TIMEOUT_MS) -> sqlite3.Connection:
    """Return a connection that alone may use the file, and whose COMMIT returns only when the data is on disk.

    The connection is in autocommit mode and may be handed to one other thread.

    Args:
        path: the file; made if it is missing, its folder is not.
        busy_timeout_ms: how long to wait for another process to let go of the file.

    Raises:
        DatabaseUnusable: missing folder, no permission, another process, another program's file, a newer schema.
    """
    if sqlite3.sqlite_version_info < _STRICT_TABLES_SINCE:
        raise DatabaseUnusable(
            path, problem=f"this Python's SQLite is {sqlite3.sqlite_version}, older than 3.37"
        )
    try:
        connection = sqlite3.connect(
            path, timeout=busy_timeout_ms / 1_000, isolation_level=None, check_same_thread=False
        )
    except sqlite3.Error as error:
        raise DatabaseUnusable(path, problem=str(error)) from error
    try:
        _lock_and_check(connection, path=path)
    except sqlite3.Error as error:
        connection.close()
        raise DatabaseUnusable(path, problem=_problem(error)) from error
    except DatabaseUnusable:
        connection.close()
        raise
    return connection


def _lock_and_check(connection: sqlite3.Connection, *, path: Path) -> None:
    # Set before the first access, so that the lock is never let go again until the connection closes, and the
    # index of the log lives in memory instead of a shared file.
    connection.execute("PRAGMA locking_mode = EXCLUSIVE")
    connection.execute("BEGIN EXCLUSIVE")
    try:
        _check_or_create_schema(connection, path=path)
    except BaseException:
        connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")
    connection.execute("PRAGMA journal_mode = WAL")
    # In WAL mode NORMAL would lose acknowledged commits at a power failure.
    connection.execute("PRAGMA synchronous = FULL")


def _check_or_create_schema(connection: sqlite3.Connection, *, path: Path) -> None:
    application_id = _pragma(connection, "application_id")
    version = _pragma(connection, "user_version")
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    if application_id == 0 and version == 0 and tables == 0:
        for statement in _SCHEMA.split(";"):
            connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    elif application_id != APPLICATION_ID:
        raise DatabaseUnusable(path, problem="it is not a redfence storage database")
    elif version != SCHEMA_VERSION:
        raise DatabaseUnusable(
            path,
            problem=f"its schema has version {version}; this redfence knows version {SCHEMA_VERSION} only",
        )


def _pragma(connection: sqlite3.Connection, name: str) -> int:
    (value,) = connection.execute(f"PRAGMA {name}").fetchone()
    return int(value)


def _problem(error: sqlite3.Error) -> str:
    match getattr(error, "sqlite_errorcode", None):
        case sqlite3.SQLITE_BUSY:
            return "another process has it open"
        case sqlite3.SQLITE_NOTADB:
            return "it is not a redfence storage database"
        case _:
            return str(error)
