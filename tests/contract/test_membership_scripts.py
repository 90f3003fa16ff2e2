"""The scripts that take a vote, fence an index and restore the vote, on fake and real nodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace

import hiredis
import pytest

from harness.doubles.joining_commands import (
    DistrustClock,
    Formation,
    JoiningCommand,
    Known,
    Quarantine,
    RaiseFloor,
    ReadIdentity,
    ReserveFloor,
    RestoreVote,
    Sight,
    Step,
)
from harness.doubles.lua_node import Database, LuaNode
from harness.doubles.node_memory import ADMITTED
from harness.doubles.node_state import FakeNodeState
from harness.processes.fixture_types import FlushedNodes, FreshNodes
from harness.processes.redis_nodes import RedisNode
from redfence_server.embedded.binary import RedisBinary
from redfence_server.locking.node import (
    Command,
    Commit,
    Granted,
    Held,
    Inspect,
    Mint,
    NoReply,
    Release,
    Renew,
    Renewed,
    Reply,
    Status,
    Undo,
)
from redfence_server.membership.examination import Identity, Phase
from redfence_server.redis_io import scripts

R = "orders/42"
A, B = "a" * 64, "b" * 64
TTL_MS = 300_000
KEYS = scripts.Keyspace()
FORMED, NOBODY = Known(ADMITTED, "run"), Known()
PLACE = Formation("cluster", index=0, node_count=3, max_ttl_ms=TTL_MS)
Q, NEW, OTHER = "0a" * 16, "0b" * 16, "0c" * 16
VOTING = Identity("cluster", 0, 3, TTL_MS, ADMITTED, "run", durable=False, phase=Phase.READY)
OUT = Quarantine(FORMED, Q, PLACE, "run-2")
RESERVE = ReserveFloor(Q, 1_000)
RESTORE = RestoreVote(Q, NEW, 1_000, "run-3", (1_000, 70, 0), ("", OTHER[:16], ""), durable=True, evicted=3)
FENCE = RaiseFloor(ADMITTED, NEW, 2, 1_000, Q)

Node = FakeNodeState | LuaNode


@contextmanager
def formed(redis: RedisNode) -> Iterator[LuaNode]:
    with closing(Database(redis.url)) as database:
        yield LuaNode(database).load().form(formation=PLACE)


@pytest.fixture
def node(contract_node: RedisNode | None) -> Iterator[Node]:
    """Yield a fake node and a real one of each engine, just formed as the first of three."""
    if contract_node is None:
        yield FakeNodeState(formation=PLACE)
        return
    with formed(contract_node) as real:
        yield real


def ask(node: Node, command: Command, admission: str = ADMITTED) -> Reply:
    return node.apply(command, 0.0, admission=admission)


def read(node: Node) -> Sight:
    sight = node.join(ReadIdentity())
    assert isinstance(sight, Sight)
    return sight


def identity(node: Node) -> Identity:
    found = read(node).identity
    assert found is not None
    return found


def everything(node: Node) -> tuple[Sight, Mapping[str, Mapping[str, str]]]:
    return read(node), node.keys()


def mint(lease: str = A, nonce: str = "n1", resource: str = R) -> Mint:
    return Mint(resource, lease, nonce, "h", TTL_MS)


EVERY_COMMAND = (
    *(mint(B, "n2", "other"), mint(A, "n2"), Commit(R, A, "n1", 9), Undo(R, "n2", 0)),
    *(Renew(R, A), Release(R, B, 0), Inspect(R), replace(mint(B, "n2"), release_first=Release(R, A, 0))),
)


def carry_out(node: Node, *commands: JoiningCommand) -> None:
    for command in commands:
        assert node.join(command) is Step.DONE


def refuse(node: Node, *commands: JoiningCommand, step: Step = Step.CHANGED) -> None:
    before = everything(node)
    for command in commands:
        assert node.join(command) is step
    assert everything(node) == before


def take_out(node: Node, phase: Phase = Phase.QUARANTINED) -> None:
    """Take the vote of a node, in a new run of its process."""
    found = identity(node)
    carry_out(node, replace(OUT, known=Known(found.admission, found.run_id), phase=phase))


def come_back(node: Node, phase: Phase = Phase.QUARANTINED) -> None:
    """Take the vote of a node and restore it with 1,000 as its floor."""
    take_out(node, phase)
    carry_out(node, RESERVE, RESTORE)


def lose(node: Node, key: str) -> None:
    """Take one key away and leave the rest."""
    if not isinstance(node, FakeNodeState):
        node.restore({name: value for name, value in node.save().items() if name != key.encode()})
    elif key == KEYS.high:
        node.high = None
    else:
        node.admission = node.run_id = ""


async def test_the_identity_is_shown_with_the_number_of_keys_and_the_greatest_token(node: Node) -> None:
    assert read(node) == Sight(VOTING, 2, 0)
    ask(node, mint())
    assert read(node) == Sight(VOTING, 4, 1)
    node.wipe()
    assert read(node) == Sight(None, 0, None)


# --- the floor


@pytest.mark.parametrize("is_dropped", [False, True], ids=["counter kept", "counter dropped"])
async def test_a_mint_after_the_return_is_above_the_floor(node: Node, *, is_dropped: bool) -> None:
    ask(node, mint())
    come_back(node)
    node.expire(R)
    if is_dropped:
        node.drop_counter(R)
    assert ask(node, mint(B, "n2"), NEW) == Granted("n2", 1_001)
    assert (node.keys()[KEYS.counter(R)], read(node).high) == ({"": "1001"}, 1_001)


@pytest.mark.parametrize("lease", [A, B], ids=["its lease", "another lease"])
async def test_a_hold_that_has_outlived_a_wait_counts_as_ended(node: Node, lease: str) -> None:
    """The clock was set back. A retry gets a new token."""
    ask(node, mint())
    come_back(node)
    assert ask(node, Renew(R, A), NEW) is Status.NOT_HELD
    assert ask(node, Inspect(R), NEW) is Status.FREE
    assert ask(node, mint(lease, "n2"), NEW) == Granted("n2", 1_001)
    assert ask(node, mint(lease, "n3"), NEW) == Granted("n2", 1_001), "this hold is new"


async def test_a_hold_outlives_a_restart_with_proof(node: Node) -> None:
    ask(node, mint())
    come_back(node, Phase.RESTARTED)
    assert ask(node, Renew(R, A), NEW) == Renewed(1, TTL_MS)
    for command in (Inspect(R), mint(B, "n2")):
        held = ask(node, command, NEW)
        assert isinstance(held, Held)
        assert (held.digest, held.token) == (A, 1)
    assert ask(node, mint(A, "n3"), NEW) == Granted("n3", 1_001)
    assert ask(node, Undo(R, "n3", 0), NEW) is Status.KEPT
    assert ask(node, Release(R, A, 0), NEW) is Status.RELEASED


async def test_without_its_greatest_token_a_node_mints_commits_and_fences_nothing(node: Node) -> None:
    """The node would start its numbers again. A release still works."""
    ask(node, mint())
    lose(node, KEYS.high)
    before = everything(node)
    assert ask(node, mint(B, "n2", "other")) is NoReply.NOT_ADMITTED
    assert ask(node, Commit(R, A, "n1", 9)) is NoReply.NOT_ADMITTED
    assert everything(node) == before
    refuse(node, FENCE, step=Step.NOT_ADMITTED)
    assert ask(node, Release(R, A, 0)) is Status.RELEASED


# --- quarantine


@pytest.mark.parametrize("phase", [Phase.QUARANTINED, Phase.RESTARTED])
async def test_a_quarantine_takes_the_vote_and_keeps_the_data(node: Node, phase: Phase) -> None:
    ask(node, mint())
    keys = node.keys()
    take_out(node, phase)
    out = Sight(replace(VOTING, admission=Q, run_id="run-2", phase=phase), 4, 1)
    for command in (*EVERY_COMMAND, Undo(R, "n1", 0), Release(R, A, 0)):
        assert ask(node, command) is NoReply.NOT_ADMITTED
    assert everything(node) == (out, keys)


async def test_an_empty_node_is_quarantined_and_a_strangers_data_is_left_alone(node: Node) -> None:
    ask(node, mint())
    lose(node, KEYS.node)
    command = replace(OUT, known=NOBODY, durable=True)
    refuse(node, command, step=Step.NOT_EMPTY)
    node.wipe()
    carry_out(node, command)
    out = replace(VOTING, admission=Q, run_id="run-2", durable=True, phase=Phase.QUARANTINED)
    assert read(node) == Sight(out, 1, None)


@pytest.mark.parametrize(
    "known", [NOBODY, Known(ADMITTED, "run-2"), Known(NEW, "run")], ids=["nobody", "run", "admission"]
)
async def test_a_node_that_is_not_what_was_judged_is_left_as_it_is(node: Node, known: Known) -> None:
    refuse(node, replace(OUT, known=known))
    node.wipe()
    refuse(node, OUT)


@pytest.mark.parametrize(("known", "kept"), [(0, 1_000), (999, 1_000), (1_001, 1_001)])
async def test_a_quarantine_raises_the_floor_and_voids_a_reservation(
    node: Node, known: int, kept: int
) -> None:
    """The floor tells a node that forgot from one that was replaced."""
    take_out(node)
    carry_out(node, RESERVE, Quarantine(Known(Q, "run-2"), OTHER, PLACE, "run-4", floor=known))
    found = identity(node)
    assert (found.floor, found.reserved, found.evicted) == (kept, 0, 0)
    refuse(node, replace(RESTORE, quarantine=OTHER))


# --- reserve


async def test_a_reservation_gives_no_vote_and_only_a_greater_one_replaces_it(node: Node) -> None:
    """A second driver begins anew, and cannot restore the vote with the lesser floor."""
    take_out(node)
    before = identity(node)
    carry_out(node, RESERVE)
    assert identity(node) == replace(before, floor=1_000, reserved=1_000)
    refuse(node, ReserveFloor(Q, 999), ReserveFloor(Q, 1_000))
    carry_out(node, ReserveFloor(Q, 1_001))
    refuse(node, RESTORE)
    assert identity(node) == replace(before, floor=1_001, reserved=1_001)


@pytest.mark.parametrize("quarantine", [ADMITTED, Q, ""])
async def test_a_node_that_votes_or_was_wiped_reserves_nothing(node: Node, quarantine: str) -> None:
    commands = (replace(RESERVE, quarantine=quarantine), replace(RESTORE, quarantine=quarantine))
    refuse(node, *commands)
    node.wipe()
    refuse(node, *commands)


async def test_a_node_that_leaves_its_cluster_names_it_and_keeps_its_numbers(
    node: Node,
) -> None:
    """It keeps its tokens and its own floor, and names the cluster that it left last."""
    come_back(node)
    before = identity(node)
    assert before.known_floors
    assert before.voted_floor == 1_000
    later = Formation("later", index=4, node_count=5, max_ttl_ms=TTL_MS)
    retire = replace(OUT, known=Known(NEW, "run-3"), quarantine=OTHER, phase=Phase.RETIRED)
    carry_out(node, replace(retire, formation=replace(PLACE, cluster_id="later")))
    retired = identity(node)
    assert retired == replace(
        before,
        cluster_id="later",
        predecessor="cluster",
        phase=Phase.RETIRED,
        admission=OTHER,
        run_id="run-2",
        durable=False,
        voted_floor=0,
        evicted=0,
    )
    assert read(node).high == 1_000
    moved = replace(retire, known=Known(OTHER, "run-2"), quarantine=Q, phase=Phase.QUARANTINED)
    carry_out(node, replace(moved, formation=later))
    found = identity(node)
    assert (found.cluster_id, found.index, found.node_count) == ("later", 4, 5)
    assert (found.phase, found.predecessor) == (Phase.QUARANTINED, "cluster")


# --- the fence


async def test_a_fence_raises_the_greatest_token_and_renews_the_admission_id(node: Node) -> None:
    ask(node, mint())
    keys = node.keys()
    carry_out(node, FENCE)
    after = replace(VOTING, admission=NEW, known_floors={2: 1_000}, known_fences={2: Q})
    assert everything(node) == (Sight(after, 4, 1_000), {**keys, KEYS.high: {"": "1000"}})
    for command in EVERY_COMMAND:
        assert ask(node, command) is NoReply.NOT_ADMITTED
        assert ask(node, command, NEW) is not NoReply.NOT_ADMITTED
    refuse(node, replace(FENCE, floor=2_000_000), step=Step.NOT_ADMITTED)


async def test_a_fence_that_is_not_above_every_token_here_changes_nothing(node: Node) -> None:
    ask(node, mint())
    ask(node, Commit(R, A, "n1", 5))
    refuse(node, replace(FENCE, floor=4), replace(FENCE, floor=5), step=Step.GREATER)
    carry_out(node, replace(FENCE, floor=6))


async def test_a_later_fence_replaces_the_earlier_one_of_its_index_alone(node: Node) -> None:
    last = 2**53 - 1
    carry_out(node, FENCE, RaiseFloor(NEW, OTHER, 1, 2_000, Q), RaiseFloor(OTHER, NEW, 2, last, OTHER))
    found = identity(node)
    assert (dict(found.known_floors), dict(found.known_fences)) == ({1: 2_000, 2: last}, {1: Q, 2: OTHER})
    assert read(node).high == last


@pytest.mark.parametrize("phase", [Phase.RESTARTED, Phase.QUARANTINED])
async def test_a_node_without_a_vote_is_fenced_and_keeps_its_id(node: Node, phase: Phase) -> None:
    take_out(node, phase)
    if phase is Phase.QUARANTINED:
        lose(node, KEYS.high)
    carry_out(node, replace(FENCE, known=Q))
    found = identity(node)
    assert (found.admission, found.phase, dict(found.known_floors)) == (Q, phase, {2: 1_000})
    assert read(node).high == 1_000


async def test_a_node_without_memory_left_shows_its_identity_and_is_not_fenced(
    fresh_nodes: FreshNodes, engine: RedisBinary
) -> None:
    (redis,) = await fresh_nodes(1, binary=engine)
    with formed(redis) as node:
        before = everything(node)
        node.database.call("CONFIG", "SET", "maxmemory", "1")
        with pytest.raises(hiredis.ReplyError, match="OOM"):
            node.join(FENCE)
        assert read(node) == before[0]
        node.database.call("CONFIG", "SET", "maxmemory", "0")
        assert everything(node) == before


# --- restore


async def test_a_vote_is_restored_with_its_floor_and_the_floors_of_other_indices(node: Node) -> None:
    carry_out(node, RaiseFloor(ADMITTED, OTHER, 1, 60, OTHER), RaiseFloor(OTHER, ADMITTED, 2, 90, OTHER))
    keys = node.keys()
    come_back(node)
    present = replace(
        VOTING, admission=NEW, run_id="run-3", durable=True, floor=1_000, voted_floor=1_000, evicted=3
    )
    known_floors, known_fences = {0: 1_000, 1: 70, 2: 90}, {1: OTHER[:16], 2: OTHER}
    voting = replace(present, known_floors=known_floors, known_fences=known_fences)
    assert read(node) == Sight(voting, 2, 1_000, waited_floor=1_000)
    assert node.keys() == {**keys, KEYS.high: {"": "1000"}}
    refuse(node, replace(RESTORE, floor=2_000))


@pytest.mark.parametrize(
    "command", [replace(RESTORE, quarantine=OTHER), replace(RESTORE, floor=1_001), replace(RESTORE, floor=0)]
)
async def test_a_vote_is_restored_only_in_the_very_quarantine_with_the_reserved_floor(
    node: Node, command: RestoreVote
) -> None:
    take_out(node)
    refuse(node, RESTORE)
    carry_out(node, RESERVE)
    refuse(node, command)


async def test_a_restored_vote_never_lowers_the_greatest_token(node: Node) -> None:
    """A node may have gone past the floor before an operator took it out."""
    carry_out(node, replace(FENCE, admission=ADMITTED, floor=5_000))
    come_back(node)
    assert ask(node, mint(), NEW) == Granted("n1", 5_001)


# --- the clock


async def test_that_the_clock_was_set_is_noted_until_the_latest_end(node: Node) -> None:
    def note(left_ms: int, most_ms: int = 400_000) -> int:
        carry_out(node, DistrustClock(ADMITTED, left_ms, most_ms))
        return read(node).distrusted_until_ms

    until_ms = note(300_000)
    assert note(5_000) == until_ms
    assert until_ms < note(390_000)
    assert note(20_000, most_ms=100_000) < until_ms
    refuse(node, DistrustClock(NEW, 300_000, 400_000), step=Step.NOT_ADMITTED)


async def test_grants_and_the_identity_tell_the_nodes_clock_in_us(
    flushed_nodes: FlushedNodes, engine: RedisBinary
) -> None:
    (redis,) = await flushed_nodes(1, binary=engine)
    # An engine reads its clock once in a ms or at each command; a script has its start time.
    lag_us = 1_000
    with formed(redis) as node:

        def clock_us() -> int:
            seconds, us = (int(each) for each in node.database.call("TIME"))
            return seconds * 1_000_000 + us

        for command in (
            mint(),
            mint(nonce="n2"),
            replace(mint(B, "n3"), release_first=Release(R, A, 0)),
            None,
        ):
            before_us = clock_us()
            if command is None:
                read(node)
            else:
                ask(node, command)
            assert before_us - lag_us <= node.raw[3 if command is None else 5] <= clock_us() + lag_us
