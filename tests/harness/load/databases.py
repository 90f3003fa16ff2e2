"""Reaches a database by each driver and framework, through one interface: check, then run SQL."""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import sqlalchemy
from psycopg.rows import dict_row
from sqlalchemy.orm import Session

Run = Callable[[str], Any]
Transaction = tuple[Any, Run]
"""The argument for `fence.check`, and the function that runs a statement in the same transaction."""

_LOCK_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Access:
    """One way to reach one database.

    Attributes:
        begin: opens a transaction; it commits at the end, or rolls back on an error.
        autocommit: opens a connection on which each statement commits by itself.
    """

    begin: Callable[[], AbstractContextManager[Transaction]]
    autocommit: Callable[[], AbstractContextManager[Transaction]]


@contextmanager
def _sqlite_connection(path: Path, isolation_level: Any, **options: Any) -> Iterator[Transaction]:
    connect = sqlite3.connect(path, timeout=_LOCK_TIMEOUT_S, isolation_level=isolation_level, **options)
    with closing(connect) as connection, connection:
        yield connection, connection.execute


@contextmanager
def _sqlite_cursor(path: Path) -> Iterator[Transaction]:
    """The program begins the transaction itself, which starts without a lock."""
    with _sqlite_connection(path, None) as (connection, run):
        run("BEGIN DEFERRED")
        yield connection.cursor(), run


@contextmanager
def _psycopg_connection(conninfo: str) -> Iterator[Transaction]:
    with psycopg.connect(conninfo) as connection:
        yield connection, lambda sql: connection.execute(sql.encode())


@contextmanager
def _psycopg_cursor(conninfo: str, *, begins: bool) -> Iterator[Transaction]:
    """Rows are dicts; with `begins`, only a block is a transaction."""
    with (
        closing(psycopg.connect(conninfo, autocommit=True, row_factory=dict_row)) as connection,
        connection.cursor() as cursor,
    ):
        if begins:
            with connection.transaction():
                yield cursor, lambda sql: connection.execute(sql.encode())
        else:
            yield cursor, lambda sql: connection.execute(sql.encode())


def _engine(url: str, **options: Any) -> sqlalchemy.Engine:
    return sqlalchemy.create_engine(url, poolclass=sqlalchemy.NullPool, **options)


@contextmanager
def _core(url: str, **options: Any) -> Iterator[Transaction]:
    with _engine(url, **options).begin() as connection:
        yield connection, lambda sql: connection.execute(sqlalchemy.text(sql))


@contextmanager
def _orm(url: str, **options: Any) -> Iterator[Transaction]:
    with Session(_engine(url, **options)) as session, session.begin():
        yield session, lambda sql: session.execute(sqlalchemy.text(sql))


@contextmanager
def _orm_that_begins(url: str) -> Iterator[Transaction]:
    """SQLAlchemy's recipe for SQLite: the driver begins nothing, and a listener begins each transaction."""
    engine = _engine(url, isolation_level="AUTOCOMMIT")
    sqlalchemy.event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN"))
    sqlalchemy.event.listen(engine, "commit", lambda connection: connection.exec_driver_sql("COMMIT"))
    with engine.connect() as connection:
        yield connection, lambda sql: connection.execute(sqlalchemy.text(sql))
        connection.commit()


@contextmanager
def _django(settings: dict[str, Any], *, begins: bool, cursor: bool) -> Iterator[Transaction]:
    import django
    import django.conf
    from django.db import connections, transaction

    if not django.conf.settings.configured:
        django.conf.settings.configure(LOGGING_CONFIG=None)
        django.setup()
    connections.settings = connections.configure_settings({"default": {}, "data": settings})
    connection = connections["data"]
    # As with DEBUG, where Django also writes the statement with its values into its log.
    connection.force_debug_cursor = True
    try:
        with connection.cursor() as opened:
            if begins:
                with transaction.atomic(using="data"):
                    yield (opened if cursor else connection), opened.execute
            else:
                yield (opened if cursor else connection), opened.execute
    finally:
        connection.close()
        del connections["data"]


def sqlite_accesses(path: Path) -> dict[str, Access]:
    url = f"sqlite:///{path}"
    django = {"ENGINE": "django.db.backends.sqlite3", "NAME": str(path)}
    mode = {"autocommit": False} if sys.version_info >= (3, 12) else {}
    return {
        "sqlite3 autocommit": Access(
            lambda: _sqlite_connection(path, "", **mode),
            lambda: _sqlite_connection(path, "" if mode else None, **dict.fromkeys(mode, True)),
        ),
        "sqlite3 connection": Access(
            lambda: _sqlite_connection(path, ""), lambda: _sqlite_connection(path, None)
        ),
        "sqlite3 cursor": Access(lambda: _sqlite_cursor(path), lambda: _sqlite_connection(path, None)),
        "SQLAlchemy connection": Access(lambda: _core(url), lambda: _core(url, isolation_level="AUTOCOMMIT")),
        "SQLAlchemy session": Access(lambda: _orm(url), lambda: _orm(url, isolation_level="AUTOCOMMIT")),
        "SQLAlchemy listener": Access(
            lambda: _orm_that_begins(url), lambda: _core(url, isolation_level="AUTOCOMMIT")
        ),
        **_django_accesses(django),
    }


def postgres_accesses(conninfo: str) -> dict[str, Access]:
    words = dict(word.split("=") for word in conninfo.split())
    url = f"postgresql+psycopg://{words['user']}@/{words['dbname']}?host={words['host']}"
    django = {
        "ENGINE": "django.db.backends.postgresql",
        "HOST": words["host"],
        "USER": words["user"],
        "NAME": words["dbname"],
    }
    return {
        "psycopg connection": Access(
            lambda: _psycopg_connection(conninfo), lambda: _psycopg_cursor(conninfo, begins=False)
        ),
        "psycopg cursor": Access(
            lambda: _psycopg_cursor(conninfo, begins=True), lambda: _psycopg_cursor(conninfo, begins=False)
        ),
        "SQLAlchemy connection": Access(lambda: _core(url), lambda: _core(url, isolation_level="AUTOCOMMIT")),
        "SQLAlchemy session": Access(lambda: _orm(url), lambda: _orm(url, isolation_level="AUTOCOMMIT")),
        **_django_accesses(django),
    }


def _django_accesses(settings: dict[str, Any]) -> dict[str, Access]:
    def access(*, cursor: bool) -> Access:
        return Access(
            lambda: _django(settings, begins=True, cursor=cursor),
            lambda: _django(settings, begins=False, cursor=cursor),
        )

    return {"Django cursor": access(cursor=True), "Django connection": access(cursor=False)}
