"""Many holders at once on a real database: accepted accesses are in token order, and no update is lost.

Each holder reads a list in one transaction and writes it back with one entry more in another one, as
programs do. The checker of histories judges what the holders saw; it must reject three naive guards.
"""

from __future__ import annotations

import itertools
import random
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import psycopg
import pytest

from harness.history.checker import check
from harness.history.records import History, Kind, Operation, Outcome, in_order
from harness.history.verdict import Invariant
from harness.processes.postgres import PostgresServer
from redfence import StaleTokenError, fence

pytestmark = pytest.mark.slow

_HOLDERS = 6
_LEASES = 200
_UPDATES_MAX = 3
_PAUSE_S_MAX = 0.006
_TRIES_MAX = 1_000

Guard = Callable[["Table", Any, int], None]


@dataclass(frozen=True)
class Table:
    """One row with a list, in one database."""

    connect: Callable[[], AbstractContextManager[Any]]
    mark: str

    def transact(self, act: Callable[[Any], Any]) -> Any:
        """Run one transaction; repeat it where the database asks for that."""
        for _ in range(_TRIES_MAX):
            with (
                suppress(sqlite3.OperationalError, psycopg.errors.SerializationFailure),
                self.connect() as connection,
            ):
                return act(connection)
        raise AssertionError("the database refuses every try")

    def read(self, connection: Any) -> str:
        (entries,) = connection.execute("SELECT entries FROM lists").fetchone()
        return str(entries)

    def write(self, connection: Any, entries: str) -> None:
        connection.execute(f"UPDATE lists SET entries = {self.mark}", (entries,))


def _in_the_transaction(_table: Table, connection: Any, token: int) -> None:
    """The guard that redfence has."""
    fence.check(connection, token, resource="r")


def _before_the_transaction(table: Table, _connection: Any, token: int) -> None:
    """Naive: the check has committed before the access begins, or begins only then."""
    table.transact(lambda own: fence.check(own, token, resource="r"))
    time.sleep(_PAUSE_S_MAX)


def _without_raising(table: Table, connection: Any, token: int) -> None:
    """Naive: the token is compared, and raised by a statement of its own."""
    row = connection.execute("SELECT highest_token FROM redfence_fences WHERE resource = 'r'").fetchone()
    if row is not None and row[0] > token:
        raise StaleTokenError("stale")
    time.sleep(_PAUSE_S_MAX)
    connection.execute(
        f"INSERT INTO redfence_fences VALUES ('r', {table.mark}) "
        "ON CONFLICT (resource) DO UPDATE SET highest_token = excluded.highest_token",
        (token,),
    )


def _no_check(_table: Table, _connection: Any, _token: int) -> None:
    """Naive: a read needs no check."""


class Holders:
    """Holders whose leases overlap, as if each had been paused past its end."""

    def __init__(self, table: Table, seed: int, *, reads: Guard, writes: Guard) -> None:
        self._table = table
        self._guards = {Kind.READ: reads, Kind.APPEND: writes}
        self._tokens = itertools.count(1)
        self._chance = random.Random(seed)
        self._lock = threading.Lock()
        self.operations: list[Operation] = []

    def run(self) -> History:
        with ThreadPoolExecutor(_HOLDERS) as pool:
            for holder in [pool.submit(self._hold) for _ in range(_LEASES)]:
                holder.result()
        kept = self._table.transact(self._table.read).split()
        return History(in_order(self.operations), kept={"r": tuple(kept)})

    def _hold(self) -> None:
        with self._lock:
            chance = random.Random(self._chance.random())
        # Most leases do not overlap; then the holder's updates are accepted.
        time.sleep(_PAUSE_S_MAX * _HOLDERS * chance.random() / 2)
        token = next(self._tokens)
        with suppress(StaleTokenError):
            for number in range(chance.randint(1, _UPDATES_MAX)):
                entry = f"{token}.{number}"
                self._pause(chance)
                entries = self._access(Kind.READ, token, "", self._table.read)
                self._pause(chance)

                def append(connection: Any, entries: str = entries, entry: str = entry) -> None:
                    self._table.write(connection, f"{entries} {entry}")
                    self._pause(chance)

                self._access(Kind.APPEND, token, entry, append)

    def _access(self, kind: Kind, token: int, entry: str, act: Callable[[Any], Any]) -> Any:
        def guarded(connection: Any) -> Any:
            self._guards[kind](self._table, connection, token)
            return act(connection)

        invoked_s, outcome = time.monotonic(), Outcome.OK
        try:
            return self._table.transact(guarded)
        except StaleTokenError:
            outcome = Outcome.FAILED
            raise
        finally:
            call = Operation(
                "holder", kind, "r", str(token), invoked_s, time.monotonic(), outcome, token, entry=entry
            )
            self.operations.append(call)

    def _pause(self, chance: random.Random) -> None:
        # Few pauses are long, so that some holders fall far behind.
        time.sleep(_PAUSE_S_MAX * chance.random() ** 4)


def _prepare(table: Table) -> Table:
    def make(connection: Any) -> None:
        connection.execute(fence.create_table_sql())
        connection.execute("CREATE TABLE lists (entries text NOT NULL)")
        connection.execute("INSERT INTO lists VALUES ('')")

    table.transact(make)
    return table


@pytest.fixture(params=["sqlite", "sqlite WAL", "READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
def table(request: pytest.FixtureRequest, tmp_path: Path) -> Table:
    """Each database and isolation level in turn."""
    return _table(request, request.param, tmp_path)


def _table(request: pytest.FixtureRequest, name: str, folder: Path) -> Table:
    if name.startswith("sqlite"):

        @contextmanager
        def connect() -> Iterator[sqlite3.Connection]:
            with closing(sqlite3.connect(folder / "data.db", timeout=60)) as connection, connection:
                yield connection

        if name.endswith("WAL"):
            with connect() as connection:
                connection.execute("PRAGMA journal_mode = WAL")
        return _prepare(Table(connect, "?"))

    postgres: PostgresServer = request.getfixturevalue("postgres")
    conninfo = postgres.conninfo(postgres.new_database())
    free: SimpleQueue[psycopg.Connection] = SimpleQueue()

    @contextmanager
    def borrow() -> Iterator[psycopg.Connection]:
        try:
            connection = free.get_nowait()
        except Empty:
            connection = psycopg.connect(conninfo, autocommit=True)
            connection.isolation_level = psycopg.IsolationLevel[name.replace(" ", "_")]
            request.addfinalizer(connection.close)
        try:
            with connection.transaction():
                yield connection
        finally:
            free.put(connection)

    return _prepare(Table(borrow, "%s"))


@pytest.mark.parametrize("seed", range(2))
def test_overlapping_holders_access_in_token_order_and_lose_no_update(table: Table, seed: int) -> None:
    history = Holders(table, seed, reads=_in_the_transaction, writes=_in_the_transaction).run()
    violations = [each.words for each in check(history).violations if each.invariant is Invariant.FENCED]
    assert not violations
    # Both outcomes are frequent, so the run proves something.
    refused = sum(call.outcome is Outcome.FAILED for call in history.operations)
    assert min(refused, len(history.kept["r"])) > _LEASES / 20


@pytest.mark.parametrize(
    ("name", "reads", "writes"),
    [
        ("READ COMMITTED", _before_the_transaction, _before_the_transaction),
        ("READ COMMITTED", _without_raising, _without_raising),
        ("READ COMMITTED", _no_check, _in_the_transaction),
        ("sqlite", _before_the_transaction, _before_the_transaction),
        ("sqlite", _no_check, _in_the_transaction),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_the_same_holders_with_a_naive_guard_break_the_promise(
    request: pytest.FixtureRequest, tmp_path: Path, name: str, reads: Guard, writes: Guard
) -> None:
    table = _table(request, name, tmp_path)
    for seed in range(20):
        violations = check(Holders(table, seed, reads=reads, writes=writes).run()).violations
        if any(each.invariant is Invariant.FENCED for each in violations):
            return
        table.transact(lambda connection: connection.execute("UPDATE lists SET entries = ''"))
        table.transact(lambda connection: connection.execute("DELETE FROM redfence_fences"))
    raise AssertionError("the checker accepts a naive guard")
