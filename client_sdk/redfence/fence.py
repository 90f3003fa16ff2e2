"""Checks fencing tokens inside your own database transactions, on PostgreSQL and SQLite.

    with connection.transaction():
        fence.check(connection, lease)
        connection.execute("UPDATE orders SET state = 'paid' WHERE id = 42")

The check stores the token as the highest of the resource, in a table of your database and in one
statement. If a higher one is stored, it raises `StaleTokenError`. That statement locks the row (in
SQLite: the database) until your transaction ends. So a transaction with an older token either
commits before your check returns, or waits and is then refused.

**Check before you read, too.** A fenced read is the check, then the SELECT, in one transaction that
commits. Without the check, an older holder's write could commit after the read, and your next write
would overwrite it unseen.

The promise: transactions that check one resource commit in the order of their tokens, and a fenced
read sees every write of a lower token that ever commits. It holds at every isolation level. Under
REPEATABLE READ and SERIALIZABLE, PostgreSQL raises a serialization failure if a transaction of the
same resource committed meanwhile: roll back, and repeat the transaction with the same token.

A rollback undoes the check together with the writes that it protected. The result of a fenced read
counts only once its transaction has committed. A rollback to a savepoint from before the check
forgets it too: check again. Never delete a row of the table: lower tokens would be accepted again.

SQLite: begin with BEGIN or with the check, not with a savepoint: the release of a first savepoint
commits. sqlite3's `executescript` commits too.
"""

from __future__ import annotations

from contextlib import closing
from typing import Any

from redfence import _sql
from redfence._errors import InvalidArgumentError
from redfence._messages.fencing_tokens import FencingToken, HasFencingToken, expected_token

__all__ = ["TABLE", "check", "check_async", "create_table_sql"]

TABLE = "redfence_fences"
"""The name of the table, unless another one is given."""


def create_table_sql(table: str = TABLE) -> str:
    """Return the statement that creates the table if it is missing; run it once, or in a migration."""
    return _sql.create_table(table)


def check(
    connection: Any,
    token: HasFencingToken | int | None,
    *,
    resource: str | None = None,
    table: str = TABLE,
    paramstyle: str | None = None,
) -> None:
    """Check a fencing token in the open transaction, and shut out lower ones once it commits.

    PostgreSQL: it waits while a transaction that checked the same resource is open. SQLite: it waits
    for any writer, at most the connection's `timeout`. Errors of the driver pass unchanged; roll back.

    Args:
        connection: a DB-API connection or cursor (sqlite3, psycopg …), Django's `connection` or a
            cursor of it, or a `Connection` or `Session` of SQLAlchemy. Rows not yet fetched from a
            cursor are lost. Pass the connection if the cursor's row factory fits only your rows.
        token: a lease, a `redfence.FencingToken`, or a number together with `resource`. None raises
            InvalidArgumentError; `redfence.current_lease()` returns it outside a lock.
        resource: the resource that guards the data. Give it if the token comes from another
            process: then a token of another resource raises.
        table: the name of the table, or schema.name.
        paramstyle: the parameter style of a driver whose module does not declare it, as in PEP 249.

    Raises:
        StaleTokenError: a higher token is stored; nothing was changed. Roll back.
        InvalidArgumentError: there is no token for the resource, or the connection would commit the
            check by itself; nothing was changed. Autocommit is found out for sqlite3, psycopg and
            drivers with an attribute `autocommit`, also below SQLAlchemy and Django.
    """
    fencing = expected_token(token, resource)
    if _sql.is_async(connection):
        raise _invalid(f"is asynchronous ({type(connection).__name__}); await fence.check_async")
    if hasattr(connection, "get_bind"):
        connection = connection.connection()
    if hasattr(connection, "exec_driver_sql"):
        _check_sqlalchemy(connection, fencing, table)
    elif callable(getattr(connection, "cursor", None)):
        with closing(connection.cursor()) as cursor:
            _sql.return_tuples(cursor)
            _check_cursor(cursor, fencing, table, paramstyle)
    elif hasattr(connection, "execute"):
        _check_cursor(connection, fencing, table, paramstyle)
    else:
        raise _invalid(f"must be a connection, a cursor or a session, not {type(connection).__name__}")


async def check_async(
    connection: Any,
    token: HasFencingToken | int | None,
    *,
    resource: str | None = None,
    table: str = TABLE,
    paramstyle: str | None = None,
) -> None:
    """Do what `check` does, with asynchronous connections.

    Cancellation: the transaction may have been checked or not; roll back.

    Args:
        connection: an `AsyncConnection` or `AsyncCursor` of psycopg, or an `AsyncConnection` or
            `AsyncSession` of SQLAlchemy.
        token: as `check`.
        resource: as `check`.
        table: as `check`.
        paramstyle: as `check`.

    Raises:
        StaleTokenError: as `check`.
        InvalidArgumentError: as `check`.
    """
    fencing = expected_token(token, resource)
    if not _sql.is_async(connection):
        raise _invalid(f"is not asynchronous ({type(connection).__name__}); call fence.check")
    if hasattr(connection, "run_sync"):
        await connection.run_sync(check, fencing, table=table)
        return
    opened = connection.cursor() if callable(getattr(connection, "cursor", None)) else None
    cursor = opened or connection
    try:
        if opened is not None:
            _sql.return_tuples(opened)
        statements = _prepare(cursor, fencing, table, paramstyle)
        await cursor.execute(*statements.raise_highest())
        if not await cursor.fetchall():
            await cursor.execute(*statements.read_highest())
            raise statements.stale(await cursor.fetchall())
    finally:
        if opened is not None:
            await opened.close()


def _check_sqlalchemy(connection: Any, fencing: FencingToken, table: str) -> None:
    if not connection.in_transaction():
        # The first statement would do the same. Listeners may begin the driver's transaction here.
        connection.begin()
    driver = connection.connection
    in_savepoint = connection.in_nested_transaction()
    _sql.require_transaction(driver.dbapi_connection, in_savepoint=in_savepoint)
    _sql.require_transaction(driver.driver_connection, in_savepoint=in_savepoint)
    style = _sql.style_of(driver, driver, connection.dialect.paramstyle)
    statements = _sql.Statements(fencing, _sql.checked_table(table), style)
    if not connection.exec_driver_sql(*statements.raise_highest()).fetchall():
        raise statements.stale(connection.exec_driver_sql(*statements.read_highest()).fetchall())


def _check_cursor(cursor: Any, fencing: FencingToken, table: str, paramstyle: str | None) -> None:
    statements = _prepare(cursor, fencing, table, paramstyle)
    cursor.execute(*statements.raise_highest())
    if not cursor.fetchall():
        cursor.execute(*statements.read_highest())
        raise statements.stale(cursor.fetchall())


def _prepare(cursor: Any, fencing: FencingToken, table: str, paramstyle: str | None) -> _sql.Statements:
    driver = getattr(cursor, "connection", None)
    # Django's cursors lead to its connection, which knows the savepoints of `atomic`.
    savepoints = getattr(getattr(cursor, "db", None), "savepoint_ids", ())
    _sql.require_transaction(driver, in_savepoint=any(savepoints))
    style = _sql.style_of(driver, cursor, paramstyle)
    return _sql.Statements(fencing, _sql.checked_table(table), style)


def _invalid(problem: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"connection {problem}", metadata={"field": "connection"})
