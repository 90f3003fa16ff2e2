"""Runs batches of commands on SQLite: one transaction per batch, on disk before it returns.

The store is synchronous, and one thread may use it at a time; `group_commit` owns that thread.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self, TypeAlias

from redfence_storage.database_file import BUSY_TIMEOUT_MS, open_database
from redfence_storage.errors import StaleToken, StorageFailed
from redfence_storage.store import (
    NO_TOKEN,
    Accepted,
    Command,
    Delete,
    Fence,
    Get,
    KeyPage,
    ListKeys,
    Put,
    Reading,
    Removal,
    StoredValue,
    admit,
)

Outcome: TypeAlias = Accepted | Reading | Removal | KeyPage | StaleToken


class SqliteStore:
    """A fenced store in one SQLite file, which no other process can use meanwhile."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    @classmethod
    def open(cls, path: Path, *, busy_timeout_ms: int = BUSY_TIMEOUT_MS) -> Self:
        """Open or create the file; see `open_database` for the guarantees and errors."""
        return cls(open_database(path, busy_timeout_ms=busy_timeout_ms))

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    def transact(self, commands: Sequence[Command[Any]]) -> list[Outcome]:
        """Run the commands in order, and return only when all their changes are on disk.

        A stale command changes nothing, and its outcome is a `StaleToken`; the other commands are
        not affected. Reads run in the same order, so they see every command before them.

        Raises:
            StorageFailed: the database did not commit the batch; no command was acknowledged.
        """
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                outcomes = [self._outcome(command) for command in commands]
                self._connection.execute("COMMIT")
            except BaseException:
                # A failed COMMIT may leave the transaction open, but some errors roll it back themselves.
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise
        except sqlite3.Error as error:
            raise StorageFailed(f"the database did not commit: {error}; retry with the same token") from error
        return outcomes

    def _outcome(self, command: Command[Any]) -> Outcome:
        try:
            return self._carry_out(command)
        except StaleToken as stale:
            return stale

    def _carry_out(self, command: Command[Any]) -> Outcome:
        match command:
            case Put(resource=resource, token=token, key=key, value=value):
                highest_token = self._raise_to(token, resource=resource)
                self._connection.execute(
                    "INSERT INTO stored_values (resource, key, value, written_token) VALUES (?, ?, ?, ?)"
                    " ON CONFLICT DO UPDATE"
                    " SET value = excluded.value, written_token = excluded.written_token",
                    (resource, key, value, token),
                )
                return Accepted(highest_token)
            case Get(resource=resource, token=None, key=key):
                return Reading(self._stored(resource, key=key), self._highest_token(resource))
            case Get(resource=resource, token=int(token), key=key):
                highest_token = self._raise_to(token, resource=resource)
                return Reading(self._stored(resource, key=key), highest_token)
            case Delete(resource=resource, token=token, key=key):
                highest_token = self._raise_to(token, resource=resource)
                deleted = self._connection.execute(
                    "DELETE FROM stored_values WHERE resource = ? AND key = ?", (resource, key)
                )
                return Removal(deleted.rowcount > 0, highest_token)
            case Fence(resource=resource, token=token):
                return Accepted(self._raise_to(token, resource=resource))
            case ListKeys():
                return self._list_keys(command)
            case _:
                raise TypeError(f"no such command: {command!r}")

    def _highest_token(self, resource: str) -> int:
        row = self._connection.execute(
            "SELECT highest_token FROM fences WHERE resource = ?", (resource,)
        ).fetchone()
        return NO_TOKEN if row is None else int(row[0])

    def _raise_to(self, token: int, *, resource: str) -> int:
        before = self._highest_token(resource)
        highest_token = admit(token, resource=resource, highest_token=before)
        if highest_token != before:
            self._connection.execute(
                "INSERT INTO fences (resource, highest_token) VALUES (?, ?)"
                " ON CONFLICT DO UPDATE SET highest_token = excluded.highest_token",
                (resource, highest_token),
            )
        return highest_token

    def _stored(self, resource: str, *, key: str) -> StoredValue | None:
        row = self._connection.execute(
            "SELECT value, written_token FROM stored_values WHERE resource = ? AND key = ?", (resource, key)
        ).fetchone()
        return None if row is None else StoredValue(value=row[0], written_token=row[1])

    def _list_keys(self, command: ListKeys) -> KeyPage:
        rows = self._connection.execute(
            "SELECT key FROM stored_values WHERE resource = ? AND key > ? ORDER BY key LIMIT ?",
            (command.resource, command.after_key, command.keys_max + 1),
        )
        keys: list[str] = []
        bytes_left = command.bytes_max
        more = False
        for (key,) in rows:
            bytes_left -= len(key.encode())
            # A page always has at least one key. An empty page would make the listing endless.
            if len(keys) == command.keys_max or (keys and bytes_left < 0):
                more = True
                break
            keys.append(key)
        rows.close()
        return KeyPage(tuple(keys), more=more, highest_token=self._highest_token(command.resource))
