"""Writes the statements of a fence for each parameter style, and inspects connections. Imports no driver."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from redfence._errors import InvalidArgumentError, StaleTokenError
from redfence._messages.fencing_tokens import FencingToken

_TABLE_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)?", re.ASCII)

# For each style: the two placeholders, and whether the values have names.
_STYLES: Mapping[str, tuple[str, str, bool]] = {
    "qmark": ("?", "?", False),
    "format": ("%s", "%s", False),
    "numeric_dollar": ("$1", "$2", False),
    "named": (":resource", ":token", True),
    "pyformat": ("%(resource)s", "%(token)s", True),
}

_AUTOCOMMIT = (
    "is in autocommit mode, so the check would not protect the next statement; begin a transaction first"
)
_SAVEPOINT = (
    "is in a savepoint that may be the whole transaction on SQLite, so its release may commit the check; "
    "check before the savepoint, or begin each transaction with BEGIN "
    "(SQLAlchemy: isolation_level None in the driver, and a listener of the event `begin` that runs BEGIN)"
)
_PIPELINED = (
    "is in autocommit mode, and its pipeline hides whether a transaction is open; "
    "check in a transaction and before the pipeline"
)
# libpq's numbers, which psycopg and psycopg2 share.
_IDLE, _ACTIVE, _IN_TRANSACTION, _IN_FAILED_TRANSACTION = range(4)
_LEGACY_TRANSACTION_CONTROL = -1

Statement = tuple[str, Any]


def create_table(table: str) -> str:
    """Return the statement that creates the table of a fence, if it is missing."""
    return (
        f"CREATE TABLE IF NOT EXISTS {checked_table(table)} "
        "(resource text PRIMARY KEY, highest_token bigint NOT NULL)"
    )


@dataclass(frozen=True, slots=True)
class Statements:
    """The statements that check one token, for one driver."""

    fencing: FencingToken
    table: str
    style: str

    def raise_highest(self) -> Statement:
        """Return the statement that raises the highest token, and returns no row if it is higher.

        An equal token writes a new version of the row too. Otherwise two transactions with snapshots
        could both pass the check and not see each other.
        """
        resource, token, _ = _STYLES[self.style]
        # The names come from `checked_table` and this module.
        text = (
            f"INSERT INTO {self.table} AS fence (resource, highest_token) VALUES ({resource}, {token}) "  # noqa: S608
            "ON CONFLICT (resource) DO UPDATE SET highest_token = excluded.highest_token "
            "WHERE fence.highest_token <= excluded.highest_token RETURNING highest_token"
        )
        return text, self._values(self.fencing.resource, self.fencing.token)

    def read_highest(self) -> Statement:
        """Return the statement that reads the highest token."""
        resource, _, _ = _STYLES[self.style]
        text = f"SELECT highest_token FROM {self.table} WHERE resource = {resource}"  # noqa: S608
        return text, self._values(self.fencing.resource)

    def stale(self, rows: list[Any]) -> StaleTokenError:
        """Return the error for a token that was refused, with the rows that `read_highest` gave."""
        highest = _first_value(rows[0])
        resource, token = self.fencing.resource, self.fencing.token
        return StaleTokenError(
            f"fencing token {token} of {resource!r} is stale: {self.table} has seen {highest}; "
            "roll back, and acquire the lock again",
            metadata={"resource": resource, "fencing_token": str(token), "highest_token": str(highest)},
        )

    def _values(self, *values: object) -> Any:
        named = _STYLES[self.style][2]
        return dict(zip(("resource", "token"), values, strict=False)) if named else values


def _first_value(row: Any) -> int:
    if isinstance(row, Mapping):
        row = tuple(row.values())
    return int(row if isinstance(row, int) else row[0])


def return_tuples(cursor: Any) -> None:
    """Let a new cursor of psycopg or sqlite3 return tuples, whatever rows its connection asks for."""
    if hasattr(type(cursor), "row_factory"):
        cursor.row_factory = _row_factory


def _row_factory(_cursor: object, *row: tuple[Any, ...]) -> Any:
    # sqlite3 passes each row. psycopg passes none, and calls the result with each.
    return row[0] if row else tuple


def checked_table(table: str) -> str:
    """Return the name of the table, which becomes part of the statements; raise if it is not a plain name."""
    if not _TABLE_NAME.fullmatch(table):
        raise _invalid("table", f"must be a name or schema.name of letters, digits and _, not {table!r}")
    return table


def style_of(connection: Any, cursor: Any, paramstyle: str | None) -> str:
    """Return the parameter style: the given one, else the one that the driver's module declares."""
    found = paramstyle or _declared_style(type(cursor)) or _declared_style(type(connection))
    if found is None:
        kind = f"{type(cursor).__module__}.{type(cursor).__qualname__}"
        raise _invalid("paramstyle", f"of {kind} is unknown; pass paramstyle= ({', '.join(_STYLES)})")
    if found not in _STYLES:
        raise _invalid("paramstyle", f"must be one of {', '.join(_STYLES)}, not {found!r}")
    return found


def _declared_style(kind: type) -> str | None:
    for parent in kind.__mro__:
        package = parent.__module__.partition(".")[0]
        if package == "django":
            # Its cursors take %s with every driver.
            return "format"
        style = getattr(sys.modules.get(package), "paramstyle", None)
        if isinstance(style, str):
            return style
    return None


def require_transaction(connection: Any, *, in_savepoint: bool) -> None:
    """Raise if a driver's connection shows that the check could commit before the caller's transaction.

    A connection without these attributes is believed. `in_savepoint` tells whether the library above
    the driver has opened a savepoint.
    """
    if isinstance(getattr(connection, "in_transaction", None), bool):
        # sqlite3: without Python 3.12 or its `autocommit`, the isolation level decides.
        mode = getattr(connection, "autocommit", _LEGACY_TRANSACTION_CONTROL)
        is_legacy = mode == _LEGACY_TRANSACTION_CONTROL
        commits = connection.isolation_level is None if is_legacy else bool(mode)
        if commits and not connection.in_transaction:
            raise _invalid("connection", _AUTOCOMMIT)
        if in_savepoint and is_legacy and not commits:
            # The driver runs BEGIN before an INSERT, but not before a SAVEPOINT.
            raise _invalid("connection", _SAVEPOINT)
    elif getattr(connection, "autocommit", None) is True:
        # psycopg: a transaction may be open all the same, begun by `connection.transaction()`.
        status = getattr(getattr(connection, "info", None), "transaction_status", _IDLE)
        if status not in (_IN_TRANSACTION, _IN_FAILED_TRANSACTION):
            raise _invalid("connection", _PIPELINED if status == _ACTIVE else _AUTOCOMMIT)


def is_async(connection: Any) -> bool:
    """Return whether the methods of a connection or cursor must be awaited."""
    return hasattr(connection, "run_sync") or inspect.iscoroutinefunction(
        getattr(connection, "execute", None)
    )


def _invalid(name: str, problem: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"{name} {problem}", metadata={"field": name})
