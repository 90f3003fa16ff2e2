"""`redfence.fence` on real databases, through every driver and framework that it names."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.rows import class_row
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

import redfence
from harness.load.databases import Access, postgres_accesses, sqlite_accesses
from harness.processes.postgres import PostgresServer
from redfence import FencingToken, InvalidArgumentError, StaleTokenError, fence
from redfence.testing import FakeLockServer

SQLITE = list(sqlite_accesses(Path("unused")))
POSTGRES = list(postgres_accesses("host=h user=u dbname=d"))


@pytest.fixture
def conninfo(postgres: PostgresServer) -> str:
    """An empty database of PostgreSQL with the table of the fence."""
    conninfo = postgres.conninfo(postgres.new_database())
    with psycopg.connect(conninfo) as connection:
        connection.execute(fence.create_table_sql().encode())
    return conninfo


@pytest.fixture(
    params=[*(("sqlite", name) for name in SQLITE), *(("postgres", name) for name in POSTGRES)],
    ids=" ".join,
)
def access(request: pytest.FixtureRequest, tmp_path: Path) -> Access:
    """Each way to each database in turn."""
    engine, name = request.param
    if engine == "postgres":
        found = postgres_accesses(request.getfixturevalue("conninfo"))[name]
    else:
        found = sqlite_accesses(tmp_path / "data.db")[name]
    with found.begin() as (_, run):
        run(fence.create_table_sql())
        run("CREATE TABLE notes (note text NOT NULL)")
    return found


def _note(access: Access, token: int, *, fail: bool = False) -> None:
    with access.begin() as (guarded, run):
        run(f"INSERT INTO notes VALUES ('by {token}')")
        fence.check(guarded, token, resource="orders/42")
        if fail:
            raise KeyboardInterrupt


def _rows(access: Access, query: str) -> list[tuple[Any, ...]]:
    with access.begin() as (_, run):
        result = run(query)
        rows = result.fetchall() if hasattr(result, "fetchall") else _django_rows(run)
        return [tuple(row.values()) if isinstance(row, dict) else tuple(row) for row in rows]


def _django_rows(run: Any) -> list[tuple[Any, ...]]:
    rows: list[tuple[Any, ...]] = run.__self__.fetchall()
    return rows


def test_an_older_token_is_refused_with_all_that_its_transaction_wrote(access: Access) -> None:
    _note(access, 33)
    _note(access, 33)
    with pytest.raises(KeyboardInterrupt):
        _note(access, 35, fail=True)
    # The rollback took the writes of 35 back, so it shuts out no earlier holder.
    _note(access, 34)
    with pytest.raises(
        StaleTokenError, match="33 of 'orders/42' is stale: redfence_fences has seen 34"
    ) as stale:
        _note(access, 33)
    assert stale.value.metadata == {"resource": "orders/42", "fencing_token": "33", "highest_token": "34"}
    assert stale.value.highest_token == 34
    with access.begin() as (guarded, _):
        fence.check(guarded, FencingToken("orders/7", 1), resource="orders/7")
    assert _rows(access, "SELECT note FROM notes ORDER BY note") == [("by 33",), ("by 33",), ("by 34",)]
    found = _rows(access, "SELECT resource, highest_token FROM redfence_fences ORDER BY resource")
    assert found == [("orders/42", 34), ("orders/7", 1)]


def test_autocommit_is_refused_before_anything_is_changed(access: Access) -> None:
    with (
        pytest.raises(InvalidArgumentError, match=r"autocommit mode.*begin a transaction first"),
        access.autocommit() as (guarded, _),
    ):
        fence.check(guarded, 33, resource="orders/42")
    assert _rows(access, "SELECT * FROM redfence_fences") == []


def test_autocommit_is_refused_in_a_pipeline_too(conninfo: str) -> None:
    with closing(psycopg.connect(conninfo, autocommit=True)) as connection:
        with connection.pipeline():
            connection.execute(b"SELECT 1")
            with pytest.raises(InvalidArgumentError, match=r"autocommit mode, and its pipeline hides"):
                fence.check(connection, 33, resource="orders/42")
        with connection.pipeline(), connection.transaction():
            fence.check(connection, 34, resource="orders/42")
        found = connection.execute(b"SELECT highest_token FROM redfence_fences").fetchall()
        assert found == [(34,)]


@pytest.mark.parametrize("name", [name for name in SQLITE if "sqlite3" not in name])
def test_the_release_of_a_savepoint_commits_no_check(tmp_path: Path, name: str) -> None:
    """On SQLite a savepoint is the whole transaction if no BEGIN precedes it."""
    from django.db import transaction

    access, is_django = sqlite_accesses(tmp_path / "data.db")[name], name.startswith("Django")
    with (
        closing(sqlite3.connect(tmp_path / "data.db", isolation_level=None)) as other,
        (access.autocommit if is_django else access.begin)() as (guarded, _),
    ):
        other.execute(fence.create_table_sql())
        if is_django:
            transaction.set_autocommit(False, using="data")

        def check_in_savepoint() -> None:
            with transaction.atomic(using="data") if is_django else guarded.begin_nested():
                fence.check(guarded, 33, resource="orders/42")

        if name == "SQLAlchemy listener":
            check_in_savepoint()
        else:
            with pytest.raises(InvalidArgumentError, match=r"in a savepoint .* check before the savepoint"):
                check_in_savepoint()
            fence.check(guarded, 33, resource="orders/42")
        assert other.execute("SELECT * FROM redfence_fences").fetchall() == []


def _in_thread(call: Callable[[], None]) -> tuple[threading.Thread, list[BaseException]]:
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except (StaleTokenError, psycopg.Error) as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, raised


def _until_one_waits(conninfo: str) -> None:
    """Return once a statement waits for a lock of another transaction."""
    deadline_s = time.monotonic() + 10
    with psycopg.connect(conninfo, autocommit=True) as connection:
        while not connection.execute("SELECT 1 FROM pg_locks WHERE NOT granted").fetchall():
            assert time.monotonic() < deadline_s, "no transaction waits"
            time.sleep(0.005)


@pytest.mark.parametrize(
    ("isolation", "ends", "outcome"),
    [
        ("READ COMMITTED", "COMMIT", StaleTokenError),
        ("READ COMMITTED", "ROLLBACK", None),
        ("REPEATABLE READ", "COMMIT", psycopg.errors.SerializationFailure),
        ("SERIALIZABLE", "COMMIT", psycopg.errors.SerializationFailure),
    ],
)
@pytest.mark.parametrize("first", [None, 32])
def test_an_older_token_waits_for_the_commit_of_a_newer_one(
    conninfo: str, isolation: str, ends: str, outcome: type[BaseException] | None, first: int | None
) -> None:
    """It waits even where the resource has no row yet."""
    if first is not None:
        with psycopg.connect(conninfo) as connection:
            fence.check(connection, first, resource="orders/42")

    def old() -> None:
        with psycopg.connect(conninfo) as connection:
            connection.execute(f"SET TRANSACTION ISOLATION LEVEL {isolation}".encode())
            fence.check(connection, 33, resource="orders/42")

    with psycopg.connect(conninfo) as newer:
        fence.check(newer, 34, resource="orders/42")
        thread, raised = _in_thread(old)
        _until_one_waits(conninfo)
        newer.execute(ends.encode())
        thread.join()
    assert [type(error) for error in raised] == ([] if outcome is None else [outcome])


def test_a_snapshot_from_before_an_older_write_does_not_pass_the_check(conninfo: str) -> None:
    """A fenced read under REPEATABLE READ is told that it is too old, whether its token is newer or equal."""
    for token in (34, 33):
        with psycopg.connect(conninfo) as reader:
            reader.execute(b"SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            reader.execute(b"SELECT 1")
            with psycopg.connect(conninfo) as writer:
                fence.check(writer, 33, resource=f"orders/{token}")
            with pytest.raises(psycopg.errors.SerializationFailure):
                fence.check(reader, token, resource=f"orders/{token}")
            reader.rollback()


@pytest.mark.parametrize("kind", ["connection", "cursor", "SQLAlchemy connection", "SQLAlchemy session"])
async def test_asynchronous_connections_check_likewise(conninfo: str, kind: str) -> None:
    words = dict(word.split("=") for word in conninfo.split())
    engine = create_async_engine(
        f"postgresql+psycopg://{words['user']}@/{words['dbname']}?host={words['host']}"
    )

    async def transact(token: int, *, autocommit: bool = False) -> None:
        if kind == "SQLAlchemy session":
            bound = engine.execution_options(isolation_level="AUTOCOMMIT") if autocommit else engine
            async with AsyncSession(bound) as session, session.begin():
                await fence.check_async(session, token, resource="r")
        elif kind == "SQLAlchemy connection":
            async with engine.connect() as connection:
                if autocommit:
                    await connection.execution_options(isolation_level="AUTOCOMMIT")
                await fence.check_async(connection, token, resource="r")
                await connection.commit()
        else:
            driver = await psycopg.AsyncConnection.connect(conninfo, autocommit=autocommit)
            async with driver, driver.cursor() as cursor:
                await fence.check_async(cursor if kind == "cursor" else driver, token, resource="r")

    await transact(33)
    await transact(34)
    with pytest.raises(StaleTokenError) as stale:
        await transact(33)
    assert stale.value.highest_token == 34
    with pytest.raises(InvalidArgumentError, match="autocommit mode"):
        await transact(35, autocommit=True)
    await transact(34)
    await engine.dispose()


def test_a_lease_and_the_current_lease_are_tokens_and_none_is_refused() -> None:
    with FakeLockServer() as fake, sqlite3.connect(":memory:") as connection:
        connection.execute(fence.create_table_sql())
        with fake.client().lock("orders/42", ttl=60) as lease:
            fence.check(connection, lease)
            fence.check(connection, redfence.current_lease(), resource="orders/42")
        with pytest.raises(InvalidArgumentError, match="token is None; hold the lock"):
            fence.check(connection, redfence.current_lease(), resource="orders/42")
    connection.close()


@pytest.mark.parametrize(
    ("token", "options", "problem"),
    [
        (33, {}, "resource is missing; a number like 33 needs its resource"),
        (FencingToken("a", 33), {"resource": "b"}, "token belongs to 'a'; pass the token of 'b'"),
        (0, {"resource": "a"}, "token is 0; a fencing token is greater than 0"),
        (2**53, {"resource": "a"}, "is greater than 0 and less than 2\\^53"),
        (True, {"resource": "a"}, "token must be an int, not bool"),
        ("33", {"resource": "a"}, "token must be a lease, a FencingToken or an int, not str"),
        (33, {"resource": "a{"}, "braces are reserved"),
        (33, {"resource": "a", "table": "x; DROP TABLE x"}, "table must be a name"),
        (33, {"resource": "a", "paramstyle": "?"}, "paramstyle must be one of qmark, .*, not '\\?'"),
    ],
)
def test_a_wrong_argument_is_refused_before_anything_is_changed(
    token: Any, options: dict[str, Any], problem: str
) -> None:
    connection = sqlite3.connect(":memory:")
    connection.execute(fence.create_table_sql())
    with pytest.raises(InvalidArgumentError, match=problem):
        fence.check(connection, token, **options)
    assert not connection.in_transaction
    connection.close()


def test_a_table_and_a_parameter_style_can_be_given(conninfo: str) -> None:
    with psycopg.connect(conninfo) as connection:
        connection.execute(b"CREATE SCHEMA other")
        connection.execute(fence.create_table_sql("other.fences").encode())
        given: dict[str, Any] = {"resource": "a", "table": "other.fences", "paramstyle": "numeric_dollar"}
        fence.check(psycopg.RawCursor(connection), 34, **given)
        with pytest.raises(StaleTokenError, match=r"other\.fences has seen 34"):
            fence.check(psycopg.RawCursor(connection), 33, **given)


def test_a_cursor_of_an_unknown_library_needs_a_parameter_style() -> None:
    class Wrapped:
        def __init__(self, connection: sqlite3.Connection) -> None:
            cursor = connection.cursor()
            self.execute, self.fetchall = cursor.execute, cursor.fetchall

    connection = sqlite3.connect(":memory:")
    connection.execute(fence.create_table_sql())
    with pytest.raises(InvalidArgumentError, match=r"paramstyle of .*Wrapped is unknown; pass paramstyle="):
        fence.check(Wrapped(connection), 33, resource="a")
    fence.check(Wrapped(connection), 34, resource="a", paramstyle="named")
    with pytest.raises(StaleTokenError):
        fence.check(Wrapped(connection), 33, resource="a", paramstyle="named")
    connection.close()


@dataclass
class _Order:
    number: int


async def test_the_rows_of_a_check_need_not_fit_the_connection(conninfo: str) -> None:
    """A connection may turn each row into an object of the program."""
    given: dict[str, Any] = {"resource": "orders/42"}
    with (
        closing(sqlite3.connect(":memory:")) as lite,
        psycopg.connect(conninfo, row_factory=class_row(_Order)) as connection,
    ):
        lite.execute(fence.create_table_sql())
        lite.row_factory = lambda _, row: _Order(*row)
        for guarded in (lite, connection):
            fence.check(guarded, 34, **given)
            with pytest.raises(StaleTokenError, match="seen 34"):
                fence.check(guarded, 33, **given)
    async with await psycopg.AsyncConnection.connect(conninfo, row_factory=class_row(_Order)) as connecting:
        await fence.check_async(connecting, 34, **given)
        with pytest.raises(StaleTokenError, match="seen 34"):
            await fence.check_async(connecting, 33, **given)


async def test_a_connection_of_the_wrong_kind_names_the_right_function() -> None:
    connection: Any = sqlite3.connect(":memory:")
    with pytest.raises(InvalidArgumentError, match=r"is not asynchronous \(Connection\); call fence.check"):
        await fence.check_async(connection, 33, resource="a")
    connection.close()
    with pytest.raises(InvalidArgumentError, match=r"\(AsyncSession\); await fence.check_async"):
        fence.check(AsyncSession(), 33, resource="a")
    with pytest.raises(InvalidArgumentError, match="must be a connection, a cursor or a session, not object"):
        fence.check(object(), 33, resource="a")
