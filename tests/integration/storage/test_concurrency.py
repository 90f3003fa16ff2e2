"""Many callers with many tokens at once: the storage never accepts one below what it accepted before."""

from __future__ import annotations

import asyncio
import itertools
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

from harness.doubles.storage_model import StorageModel, comparable
from harness.processes.storage_server import connected, serving
from redfence import NotFoundError, StaleTokenError
from redfence_storage.errors import StaleToken
from redfence_storage.group_commit import GroupCommit
from redfence_storage.sqlite_store import SqliteStore
from redfence_storage.store import Command

pytestmark = pytest.mark.slow

CALLERS = 32
OPERATIONS_OF_EACH = 25
RESOURCES = ("a", "b", "c")

ResultT = TypeVar("ResultT")


@dataclass(slots=True)
class Operation:
    """One call as its caller saw it; instants are numbers of one sequence."""

    resource: str
    token: int
    called_at: int
    answered_at: int = 0
    accepted: bool = False
    highest_told: int = 0


class RecordingCommit(GroupCommit):
    """A real group commit that notes its commands in the order of submission, with what came of them."""

    def __init__(self, store: SqliteStore) -> None:
        super().__init__(store)
        self.record: list[list[Any]] = []

    async def carry_out(self, command: Command[ResultT]) -> ResultT:
        entry: list[Any] = [command, None]
        self.record.append(entry)
        try:
            entry[1] = outcome = await super().carry_out(command)
        except StaleToken as stale:
            entry[1] = stale
            raise
        return outcome


@pytest.mark.parametrize("kind", ["async", "sync"])
@pytest.mark.parametrize("seed", range(3))
async def test_32_callers_with_mixed_tokens_never_get_a_lower_one_accepted_after_a_higher(
    tmp_path: Path, kind: str, seed: int
) -> None:
    """In the order of commits every outcome is the model's; callers never see a lower token follow."""
    choose, instants = random.Random(seed), itertools.count(1)
    commit = RecordingCommit(SqliteStore.open(tmp_path / "storage.db"))
    history: list[Operation] = []

    async with serving(commit) as target, connected(kind, target) as storage:

        async def caller() -> None:
            for round_number in range(OPERATIONS_OF_EACH):
                # Tokens drift upwards, so that both outcomes happen all the time.
                token = round_number + choose.randrange(1, 20)
                operation = Operation(choose.choice(RESOURCES), token, called_at=next(instants))
                call = choose.choice(("put", "get", "delete", "fence"))
                fields: dict[str, Any] = {} if call == "fence" else {"key": "k"}
                if call == "put":
                    fields["value"] = b"%d" % token
                try:
                    await getattr(storage, call)(operation.resource, **fields, token=token)
                    operation.accepted = True
                except NotFoundError:
                    operation.accepted = True
                except StaleTokenError as refusal:
                    operation.highest_told = refusal.highest_token
                operation.answered_at = next(instants)
                history.append(operation)

        await asyncio.gather(*(caller() for _ in range(CALLERS)))

    model = StorageModel()
    for command, outcome in commit.record:
        assert comparable(outcome) == model.carry_out(command)

    assert len(history) == CALLERS * OPERATIONS_OF_EACH
    assert {operation.accepted for operation in history} == {True, False}
    for name in RESOURCES:
        assert_fenced([operation for operation in history if operation.resource == name])


async def test_a_burst_of_900_writes_at_once_is_acknowledged_whole(tmp_path: Path) -> None:
    """The burst is below the server's bound on one connection's streams."""
    commit = GroupCommit(SqliteStore.open(tmp_path / "storage.db"))
    async with serving(commit) as target, connected("async", target, timeout_s=30) as storage:
        await asyncio.gather(
            *(storage.put("orders/42", key=f"{number:03}", value=b"v", token=1) for number in range(900))
        )
        assert len((await storage.list_keys("orders/42", page_size=1_000)).keys) == 900


def assert_fenced(history: list[Operation]) -> None:
    """Check one resource's history by its callers' instants alone."""
    for earlier, later in itertools.permutations(history, 2):
        if earlier.answered_at < later.called_at and earlier.accepted and later.accepted:
            assert later.token >= earlier.token
    for operation in history:
        if not operation.accepted:
            # Another caller presented the token that the refusal names, before the answer.
            assert operation.highest_told > operation.token
            assert any(
                other.token == operation.highest_told and other.called_at < operation.answered_at
                for other in history
                if other.accepted
            )


def test_the_check_of_histories_can_fail() -> None:
    """A lower token accepted after a higher one is found."""
    with pytest.raises(AssertionError):
        assert_fenced(
            [
                Operation("a", token=2, called_at=1, answered_at=2, accepted=True),
                Operation("a", token=1, called_at=3, answered_at=4, accepted=True),
            ]
        )
