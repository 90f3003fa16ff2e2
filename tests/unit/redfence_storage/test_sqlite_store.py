"""The store on real SQLite files."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.doubles.storage_model import StorageModel, comparable
from harness.processes.storage_server import full_disk
from redfence_storage.errors import StorageFailed
from redfence_storage.sqlite_store import SqliteStore
from redfence_storage.store import (
    Accepted,
    Command,
    Delete,
    Fence,
    Get,
    KeyPage,
    ListKeys,
    Put,
    Reading,
    StoredValue,
)

NAME = "orders/42"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "storage.db"


@pytest.fixture
def store(path: Path) -> Iterator[SqliteStore]:
    store = SqliteStore.open(path)
    yield store
    store.close()


def every_command(name: str, *, tokens: tuple[int, ...], keys: tuple[str, ...]) -> list[Command[Any]]:
    """Return each kind of command with each token and key; values tell the token they were written with."""
    pairs = [(token, key) for token in tokens for key in keys]
    return [
        ListKeys(resource=name, after_key="", keys_max=10, bytes_max=1_000),
        *(Fence(resource=name, token=token) for token in tokens),
        *(Get(resource=name, token=None, key=key) for key in keys),
        *(Get(resource=name, token=token, key=key) for token, key in pairs),
        *(Delete(resource=name, token=token, key=key) for token, key in pairs),
        *(Put(resource=name, token=token, key=key, value=b"\0\xff%d" % token) for token, key in pairs),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("one_batch", [True, False])
def test_every_sequence_of_three_commands_does_what_the_model_does(
    store: SqliteStore, *, one_batch: bool
) -> None:
    """All kinds of commands in every order, with three tokens, in one transaction or three."""
    model = StorageModel()
    kinds = len(every_command("", tokens=(1, 2, 3), keys=("k",)))
    sequences = [
        [every_command(f"r{number}", tokens=(1, 2, 3), keys=("k",))[choice] for choice in choices]
        for number, choices in enumerate(itertools.product(range(kinds), repeat=3))
    ]
    flat = [command for sequence in sequences for command in sequence]
    # The n-th commands of all sequences make the n-th batch: their resources are their own.
    batches = [flat] if one_batch else [list(batch) for batch in zip(*sequences, strict=True)]
    for batch in batches:
        outcomes = [comparable(outcome) for outcome in store.transact(batch)]
        assert outcomes == [model.carry_out(command) for command in batch]


@pytest.mark.parametrize("seed", range(5))
def test_long_random_walks_in_batches_with_reopenings_do_what_the_model_does(path: Path, seed: int) -> None:
    choose, model = random.Random(seed), StorageModel()
    commands = [
        command
        for name in ("a", "b")
        for command in every_command(name, tokens=(*range(1, 8), 2**53 - 1), keys=("k", "ä", "z"))
    ]
    for _ in range(5):
        store = SqliteStore.open(path)
        for _ in range(10):
            batch = choose.choices(commands, k=choose.randrange(1, 12))
            outcomes = [comparable(outcome) for outcome in store.transact(batch)]
            assert outcomes == [model.carry_out(command) for command in batch]
        store.close()


def test_keys_are_listed_in_byte_order_whole_and_without_end_only_where_more_follow(
    store: SqliteStore,
) -> None:
    keys = ["b", "a", "aa", "ä", "Z", "\U0001f512", "豆"]
    store.transact([Put(resource=NAME, token=1, key=key, value=b"") for key in keys])
    in_order = sorted(keys, key=str.encode)
    for keys_max in range(1, 9):
        listed: list[str] = []
        after_key, more = "", True
        while more:
            (page,) = store.transact(
                [ListKeys(resource=NAME, after_key=after_key, keys_max=keys_max, bytes_max=1_000)]
            )
            assert isinstance(page, KeyPage)
            assert len(page.keys) <= keys_max
            listed += page.keys
            after_key, more = page.keys[-1], page.more
        assert listed == in_order


def test_a_page_of_long_keys_ends_early_but_never_empty(store: SqliteStore) -> None:
    store.transact([Put(resource=NAME, token=1, key=letter * 10, value=b"") for letter in "abc"])
    for bytes_max, count in ((1, 1), (19, 1), (20, 2), (29, 2), (30, 3)):
        (page,) = store.transact([ListKeys(resource=NAME, after_key="", keys_max=10, bytes_max=bytes_max)])
        assert isinstance(page, KeyPage)
        assert (len(page.keys), page.more) == (count, count < 3)


def test_a_batch_that_does_not_fit_on_the_disk_fails_whole_and_the_store_goes_on(store: SqliteStore) -> None:
    store.transact([Put(resource=NAME, token=1, key="k", value=b"first")])
    with full_disk(after_bytes=32_768), pytest.raises(StorageFailed):
        store.transact(
            [
                Fence(resource=NAME, token=5),
                Put(resource=NAME, token=5, key="k", value=b"x" * 32_768),
                Put(resource=NAME, token=4, key="k", value=b"stale"),
            ]
        )
    assert store.transact(
        [Get(resource=NAME, token=None, key="k"), Put(resource=NAME, token=2, key="k", value=b"second")]
    ) == [Reading(StoredValue(b"first", 1), 1), Accepted(2)]


def test_a_defect_in_the_middle_of_a_batch_undoes_the_commands_before_it(store: SqliteStore) -> None:
    with pytest.raises(UnicodeEncodeError):
        store.transact([Put(resource=NAME, token=5, key="k", value=b"v"), Fence(resource="\ud800", token=1)])
    assert store.transact([Get(resource=NAME, token=None, key="k")]) == [Reading(None, 0)]
