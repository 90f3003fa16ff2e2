"""Opens the storage's SQLite file: checks its owner and version, locks it, and makes it durable.

The file's `application_id` marks a file of this storage, and its `user_version` is the version of
the schema. Both are checked before the first write, so a database of another program is never
changed.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

from redfence_storage.errors import DatabaseUnusable

# "rfnc" in ASCII. SQLite stores it in the header of the file.
APPLICATION_ID = 0x72666E63
SCHEMA_VERSION = 1
# How long opening waits for an ending process to unlock the file. After that, no other process can lock it.
BUSY_TIMEOUT_MS = 2_000
_STRICT_TABLES_SINCE = (3, 37, 0)

# The table of values has rowids, because SQLite advises against WITHOUT ROWID for large rows.
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
    """Return the only connection to the file; its COMMIT returns only when the data is on disk.

    The connection is in autocommit mode and may be moved to one other thread.

    Args:
        path: the file. It is created if it is missing; its folder is not.
        busy_timeout_ms: how long to wait for another process to unlock the file.

    Raises:
        DatabaseUnusable: the folder is missing, there is no permission, another process has the
            file open, the file belongs to another program, or its schema has another version.
    """
    if sqlite3.sqlite_version_info < _STRICT_TABLES_SINCE:
        raise DatabaseUnusable(
            path, problem=f"Python's SQLite is {sqlite3.sqlite_version}; redfence needs 3.37 or newer"
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
    # Set before the first access, so that the connection keeps the lock until it closes. Then the
    # index of the write-ahead log is in memory and not in a shared file.
    connection.execute("PRAGMA locking_mode = EXCLUSIVE")
    connection.execute("BEGIN EXCLUSIVE")
    try:
        _check_or_create_schema(connection, path=path)
    except BaseException:
        connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")
    connection.execute("PRAGMA journal_mode = WAL")
    # In WAL mode, NORMAL would lose acknowledged commits in a power failure.
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
        raise DatabaseUnusable(path, problem="it is not a redfence storage database; use another path")
    elif version != SCHEMA_VERSION:
        raise DatabaseUnusable(
            path,
            problem=f"its schema has version {version}; this redfence supports only version {SCHEMA_VERSION}",
        )


def _pragma(connection: sqlite3.Connection, name: str) -> int:
    (value,) = connection.execute(f"PRAGMA {name}").fetchone()
    return int(value)


def _problem(error: sqlite3.Error) -> str:
    match getattr(error, "sqlite_errorcode", None):
        case sqlite3.SQLITE_BUSY:
            return "another process has it open; stop that process or use another path"
        case sqlite3.SQLITE_NOTADB:
            return "it is not a redfence storage database; use another path"
        case _:
            return str(error)
