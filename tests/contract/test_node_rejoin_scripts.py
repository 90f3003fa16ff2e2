"""What a node keeps so that it cannot forget unnoticed, and the scripts that take its vote and give it back: fake and real nodes alike."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from math import ceil
from typing import Any, Protocol

import hiredis
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.fake_node import ADMITTED, FakeNodeState
from harness.fixture_types import FlushedNodes, FreshNodes
from harness.joining_commands import (
    Claim,
    Formation,
    JoiningAnswer,
    JoiningCommand,
    Known,
    Look,
    NoteRun,
    Quarantine,
    Readmit,
    Sight,
    Step,
)
from harness.lua_node import Database, LuaNode
from harness.redis_nodes import ENGINES, engine_binary
from redfence_server import scripts
from redfence_server.lock_node import (
    Command,
    Commit,
    Granted,
    Held,
    Inspect,
    Mint,
    Plain,
    Pulse,
    Pulsed,
    Release,
    Renew,
    Renewed,
    Reply,
    Silence,
    Undo,
    Vouch,
)
from redfence_server.node_examination import Identity, Phase
from redfence_server.redis_binary import RedisBinary

R = "orders/42"
A, B = "a" * 64, "b" * 64
TTL_MS = 300_000
KEYS = scripts.Keyspace()
FORMED = Known(ADMITTED, "run")
NOBODY = Known()
# Of three places this is the first.
PLACE = Formation("cluster", index=0, node_count=3, max_ttl_ms=TTL_MS)
Q, NEW = "0a" * 16, "0b" * 16


class Memory(Protocol):
    """A node of either kind: scripts, one at a time and in a moment."""

    changes: int

    def apply(
        self, command: Command, now_ms: float, *, admission: str = ..., channel: str = ...
    ) -> Reply: ...
    def join(self, command: JoiningCommand) -> JoiningAnswer: ...
    def keys(self) -> Mapping[str, Mapping[str, str]]: ...
    def expire(self, resource: str) -> None: ...
    def drop_counter(self, resource: str) -> None: ...
    def wipe(self) -> None: ...
    def save(self) -> Any: ...
    def restore(self, older: Any) -> None: ...


@pytest.fixture(params=("fake", *ENGINES))
async def node(request: pytest.FixtureRequest, flushed_nodes: FlushedNodes) -> AsyncIterator[Memory]:
    """A fake node and a real one of each engine, just formed as the first of three."""
    if request.param == "fake":
        yield FakeNodeState(formation=PLACE)
        return
    binary = engine_binary(request.param)
    if binary is None:
        assert os.environ.get("REDFENCE_REQUIRE_REDIS") != "1", f"no {request.param} on this machine"
        pytest.skip(f"no {request.param} on this machine")
    (redis,) = await flushed_nodes(1, binary=binary)
    database = Database(redis.url)
    yield LuaNode(database).load().form(formation=PLACE)
    database.close()


def ask(node: Memory, command: Command, admission: str = ADMITTED) -> Reply:
    """Carry out a command at an instant of no importance."""
    return node.apply(command, 0.0, admission=admission)


def look(node: Memory) -> Sight:
    """Return what a look shows."""
    sight = node.join(Look())
    assert isinstance(sight, Sight)
    return sight


def identity(node: Memory) -> Identity:
    """Return the node's identity."""
    found = look(node).identity
    assert found is not None
    return found


def pulse(node: Memory, *changes: int, admission: str = ADMITTED) -> Pulsed:
    """Return what a node tells, whatever its clock."""
    pulsed = ask(node, Pulse(changes or (0, 0, 0)), admission)
    assert isinstance(pulsed, Pulsed)
    return replace(pulsed, clock_ms=0.0)


def everything(node: Memory) -> tuple[Sight, Mapping[str, Mapping[str, str]]]:
    """Return all that a node keeps."""
    return look(node), node.keys()


def mint(lease: str = A, nonce: str = "n1", resource: str = R) -> Mint:
    """Return a mint."""
    return Mint(resource, lease, nonce, "h", TTL_MS)


def quarantine(known: Known = FORMED, *, phase: Phase = Phase.QUARANTINED) -> Quarantine:
    """Return a quarantine in a new run of the node's process."""
    return Quarantine(known, Q, PLACE, "run-2", phase)


def readmit(*, quarantine: str = Q, phase: Phase = Phase.QUARANTINED) -> Readmit:
    """Return the end of a quarantine."""
    return Readmit(
        *(quarantine, NEW, 1_000, 500, "run-3", (1_000, 70, 0)), durable=True, evicted=3, phase=phase
    )


# --- look ------------------------------------------------------------------------------------------------------------


async def test_a_look_shows_the_identity_how_many_keys_there_are_and_high(node: Memory) -> None:
    """Two keys, as formed; a grant adds a hold and a counter, and changes nothing of the identity but `changes`."""
    formed = Identity("cluster", 0, 3, TTL_MS, ADMITTED, "run", durable=False, phase=Phase.READY)
    assert look(node) == Sight(formed, 2, 0)
    ask(node, mint())
    assert look(node) == Sight(replace(formed, changes=1), 4, 1)


async def test_a_look_at_a_node_that_was_wiped_shows_nothing(node: Memory) -> None:
    """Neither an identity nor `high`; and a key of anybody's is counted."""
    node.wipe()
    assert look(node) == Sight(None, 0, None)


async def test_a_look_shows_what_the_node_knows_of_other_places(node: Memory) -> None:
    """From pulses and from vouching."""
    pulse(node, 0, 7, 0)
    ask(node, Vouch(NEW, 2, 50, 90))
    found = identity(node)
    assert (dict(found.known_changes), dict(found.known_floors)) == ({1: 7, 2: 90}, {2: 50})


# --- changes ---------------------------------------------------------------------------------------------------------


def told_changes(node: Memory) -> int:
    """Return the changes of the last answer, which the identity has as well."""
    assert node.changes == identity(node).changes
    return node.changes


async def test_grants_commits_renewals_and_vouches_are_counted_and_the_answer_tells_the_new_number(
    node: Memory,
) -> None:
    """A retried mint and a repeated commit as well: each has prolonged or promised something."""
    counted: tuple[tuple[Command, Reply], ...] = (
        (mint(), Granted("n1", 1)),
        (mint(nonce="n2"), Granted("n1", 1)),
        (Commit(R, A, "n1", 5), Plain.COMMITTED),
        (Commit(R, A, "n1", 5), Plain.COMMITTED),
        (Renew(R, A), Renewed(5, TTL_MS)),
        (replace(mint(B, "n3"), ends=Release(R, A, 0)), Granted("n3", 6, released=True)),
        (Vouch(ADMITTED, 1, 50, 90), Plain.VOUCHED),
    )
    for number, (command, reply) in enumerate(counted, start=1):
        assert ask(node, command) == reply
        assert told_changes(node) == number


async def test_what_promises_nothing_is_not_counted(node: Memory) -> None:
    """Refusals, ends, looks and pulses: if a node forgets one of them, nobody is harmed."""
    ask(node, mint())
    for command in (
        mint(B, "n2"),
        Commit(R, B, "n1", 5),
        Commit(R, A, "n2", 5),
        Renew(R, B),
        Inspect(R),
        Pulse((9, 9, 9)),
        Undo(R, "n2", 0),
        Release(R, B, 0),
        Release(R, A, 0),
        Renew(R, A),
    ):
        ask(node, command)
        assert told_changes(node) == 1, command


async def test_a_pulse_tells_how_many_changes_there_were(node: Memory) -> None:
    """So does every server's look."""
    ask(node, mint())
    ask(node, Renew(R, A))
    assert pulse(node).changes == 2 == identity(node).changes


# --- floor -----------------------------------------------------------------------------------------------------------


def back_with_floor(node: Memory) -> None:
    """Let the node forget, with a hold and a counter of 1 left, and come back with 1,000 as its floor."""
    ask(node, mint())
    node.join(quarantine())
    assert node.join(readmit()) is Step.DONE
    node.expire(R)


async def test_a_counter_that_the_node_has_kept_from_before_it_forgot_does_no_harm(node: Memory) -> None:
    """It says 1; but up to the floor every number may have been granted."""
    back_with_floor(node)
    assert node.keys()[KEYS.counter(R)] == {"": "1"}
    assert ask(node, mint(B, "n2"), NEW) == Granted("n2", 1_001)
    assert node.keys()[KEYS.counter(R)] == {"": "1001"}
    node.expire(R)
    assert ask(node, mint(A, "n3"), NEW) == Granted("n3", 1_002)


async def test_a_mint_without_a_counter_starts_above_the_floor_as_well(node: Memory) -> None:
    """`high` is no less than the floor, ever."""
    back_with_floor(node)
    node.drop_counter(R)
    assert ask(node, mint(B, "n2"), NEW) == Granted("n2", 1_001)
    assert look(node).high == 1_001
    ask(node, Commit(R, B, "n2", 5_000), NEW)
    node.expire(R)
    node.drop_counter(R)
    assert ask(node, mint(A, "n3"), NEW) == Granted("n3", 5_001)


@pytest.mark.parametrize("lease", [A, B])
async def test_a_hold_that_has_outlived_the_quarantine_counts_as_ended(node: Memory, lease: str) -> None:
    """A clock went back. A retry of its lease that was told its number would be granted less than others were meanwhile."""
    ask(node, mint())
    node.join(quarantine())
    node.join(readmit())
    assert ask(node, mint(lease, "n2"), NEW) == Granted("n2", 1_001)
    assert ask(node, mint(lease, "n3"), NEW) == Granted("n2", 1_001), "this one is of now"


async def test_a_hold_that_has_outlived_the_quarantine_is_not_renewed_or_shown_either(node: Memory) -> None:
    """Or its holder could count on it beside the one who is granted the lock next."""
    ask(node, mint())
    node.join(quarantine())
    node.join(readmit())
    assert ask(node, Renew(R, A), NEW) is Plain.NOT_HELD
    assert ask(node, Inspect(R), NEW) is Plain.FREE
    ask(node, mint(nonce="n2"), NEW)
    assert ask(node, Renew(R, A), NEW) == Renewed(1_001, TTL_MS)


# --- pulse -----------------------------------------------------------------------------------------------------------


async def test_a_pulse_keeps_the_greatest_it_is_told_of_each_place_and_answers_it(node: Memory) -> None:
    """A server that knows less learns it from the node."""
    ask(node, mint())
    nothing = (0, 0, 0)
    assert pulse(node, 0, 7, 3) == Pulsed(0.0, 1, 1, (0, 7, 3), nothing)
    assert pulse(node, 0, 5, 4) == Pulsed(0.0, 1, 1, (0, 7, 4), nothing)
    assert pulse(node) == Pulsed(0.0, 1, 1, (0, 7, 4), nothing)
    assert dict(identity(node).known_changes) == {1: 7, 2: 4}


async def test_a_pulse_answers_which_floors_the_node_knows(node: Memory) -> None:
    """That is how a server hears of a rejoin that another one has driven."""
    ask(node, Vouch(NEW, 1, 50, 90))
    assert pulse(node, admission=NEW) == Pulsed(0.0, 1, 50, (0, 90, 0), (0, 50, 0))


async def test_numbers_are_exact_up_to_2_to_the_53(node: Memory) -> None:
    """Also those that come and go as text."""
    last = 2**53 - 1
    ask(node, Vouch(NEW, 1, last, last))
    assert pulse(node, admission=NEW) == Pulsed(0.0, 1, last, (0, last, 0), (0, last, 0))
    assert pulse(node, 0, 0, last - 1, admission=NEW).known_changes == (0, last, last - 1)
    assert look(node).high == last


@pytest.mark.parametrize("command", [Pulse((0, 7, 0)), Vouch(NEW, 1, 50, 90)], ids=["pulse", "vouch"])
@pytest.mark.parametrize("lost", ["admission", "high"])
async def test_what_a_rejoin_reads_and_writes_is_refused_by_a_node_that_has_forgotten_itself(
    node: Memory, command: Command, lost: str
) -> None:
    """A node under another id may be in quarantine; one without `high` has nothing to tell. Nothing is changed."""
    ask(node, mint())
    if lost == "high":
        lose_high(node)
    before = everything(node)
    assert ask(node, command, ADMITTED if lost == "high" else NEW) is Silence.NOT_ADMITTED
    assert everything(node) == before


def lose_high(node: Memory) -> None:
    """Take `high` away and leave the rest."""
    if isinstance(node, FakeNodeState):
        node.high = None
    else:
        memory = node.save()
        node.restore({name: value for name, value in memory.items() if name != KEYS.high.encode()})


async def test_without_high_a_node_mints_and_commits_nothing(node: Memory) -> None:
    """Its numbers would start again; what ends a hold works all the same."""
    ask(node, mint())
    lose_high(node)
    assert ask(node, mint(B, "n2", "other")) is Silence.NOT_ADMITTED
    assert ask(node, Commit(R, A, "n1", 9)) is Silence.NOT_ADMITTED
    assert look(node).high is None
    assert ask(node, Release(R, A, 0)) is Plain.RELEASED


async def test_a_node_without_memory_left_still_tells_what_it_knows(
    fresh_nodes: FreshNodes, engine: RedisBinary
) -> None:
    """And what it was told. It does not vouch, which it could not keep."""
    (redis,) = await fresh_nodes(1, binary=engine)
    database = Database(redis.url)
    node = LuaNode(database).load().form(formation=PLACE)
    ask(node, mint())
    pulse(node, 0, 3, 0)
    database.call("CONFIG", "SET", "maxmemory", "1")
    before = everything(node)
    assert pulse(node, 0, 7, 0) == Pulsed(0.0, 1, 1, (0, 7, 0), (0, 0, 0))
    for refused in (Vouch(NEW, 1, 50, 90), mint(B, "n2", "other")):
        with pytest.raises(hiredis.ReplyError, match="OOM"):
            ask(node, refused)
    assert everything(node) == before
    database.call("CONFIG", "SET", "maxmemory", "0")
    pulse(node, 0, 7, 0)
    assert dict(identity(node).known_changes) == {1: 7}
    database.close()


# --- vouch -----------------------------------------------------------------------------------------------------------


async def test_a_vouch_raises_high_notes_the_place_and_takes_a_new_admission_id(node: Memory) -> None:
    """Nothing else: holds and counters go on."""
    ask(node, mint())
    before = node.keys()
    assert ask(node, Vouch(NEW, 2, 1_000, 500)) is Plain.VOUCHED
    assert node.keys() == {**before, KEYS.high: {"": "1000"}}
    found = identity(node)
    assert (found.admission, found.phase, found.floor, found.changes) == (NEW, Phase.READY, 0, 2)
    assert (dict(found.known_floors), dict(found.known_changes)) == ({2: 1_000}, {2: 500})
    assert ask(node, mint(B, "n2", "other"), NEW) == Granted("n2", 1_001)


@pytest.mark.parametrize("floor", [4, 5])
async def test_a_vouch_for_a_floor_that_is_not_above_every_number_here_changes_nothing(
    node: Memory, floor: int
) -> None:
    """A number was minted since the node was read; the id stays what it was."""
    ask(node, mint())
    ask(node, Commit(R, A, "n1", 5))
    before = everything(node)
    assert ask(node, Vouch(NEW, 2, floor, 500)) is Plain.TOO_LOW
    assert everything(node) == before
    assert ask(node, Vouch(NEW, 2, 6, 500)) is Plain.VOUCHED


@pytest.mark.parametrize(
    "command",
    [
        mint(B, "n2", "other"),
        mint(A, "n2"),
        Commit(R, A, "n1", 9),
        Undo(R, "n1", 0),
        Renew(R, A),
        Release(R, A, 0),
        Inspect(R),
        Pulse((0, 0, 0)),
        Vouch("0c" * 16, 1, 2_000, 0),
    ],
    ids=lambda command: type(command).__name__,
)
async def test_after_a_vouch_everybody_has_to_look_at_the_node_again(node: Memory, command: Command) -> None:
    """What was under way when it vouched is refused, the vouch of a second server as well, and changes nothing."""
    ask(node, mint())
    ask(node, Vouch(NEW, 2, 1_000, 500))
    before = everything(node)
    assert ask(node, command) is Silence.NOT_ADMITTED
    assert everything(node) == before
    assert ask(node, command, NEW) is not Silence.NOT_ADMITTED


async def test_a_later_vouch_for_a_place_takes_the_place_of_the_earlier(node: Memory) -> None:
    """Its floor is greater, for it is above `high`; what is known of the others stays."""
    ask(node, Vouch(NEW, 2, 1_000, 500))
    ask(node, Vouch(Q, 1, 2_000, 600), NEW)
    ask(node, Vouch(ADMITTED, 2, 3_000, 700), Q)
    found = identity(node)
    assert dict(found.known_floors) == {1: 2_000, 2: 3_000}
    assert dict(found.known_changes) == {1: 600, 2: 700}


# --- quarantine ------------------------------------------------------------------------------------------------------


async def test_a_quarantine_takes_the_vote_and_keeps_what_is_left(node: Memory) -> None:
    """Numbers, holds and counters stay; the identity says which quarantine it is, and in which run of its process."""
    ask(node, mint())
    pulse(node, 0, 7, 0)
    before, keys = identity(node), node.keys()
    assert node.join(quarantine()) is Step.DONE
    after = replace(before, admission=Q, run_id="run-2", phase=Phase.QUARANTINED)
    assert everything(node) == (Sight(after, 4, 1), keys)


async def test_a_quarantined_node_takes_no_command_of_those_who_were_admitted(node: Memory) -> None:
    """Its id is random, so nobody else's is the same; and nobody is admitted under it."""
    ask(node, mint())
    node.join(quarantine())
    before = everything(node)
    for command in (
        mint(B, "n2", "other"),
        mint(A, "n2"),
        Commit(R, A, "n1", 9),
        Undo(R, "n1", 0),
        Renew(R, A),
        Release(R, A, 0),
        Inspect(R),
        Pulse((0, 9, 0)),
        Vouch(NEW, 1, 2_000, 0),
    ):
        assert ask(node, command) is Silence.NOT_ADMITTED
    assert everything(node) == before


async def test_an_operator_can_take_the_vote_in_other_words(node: Memory) -> None:
    """For a recovery, and for a node that was replaced."""
    for phase in (Phase.RECOVERING, Phase.RETIRED):
        now = identity(node)
        assert node.join(quarantine(Known(now.admission, now.run_id), phase=phase)) is Step.DONE
        assert identity(node).phase is phase


async def test_an_empty_node_is_quarantined_with_the_place_that_it_is_to_have(node: Memory) -> None:
    """A wiped node, or a new one in the place of another; it has no number to tell."""
    node.wipe()
    assert node.join(quarantine(NOBODY)) is Step.DONE
    place = Identity("cluster", 0, 3, TTL_MS, Q, "run-2", durable=False, phase=Phase.QUARANTINED)
    assert look(node) == Sight(place, 1, None)


async def test_a_node_that_is_not_empty_and_has_no_identity_is_left_alone(node: Memory) -> None:
    """Its keys may be anybody's."""
    ask(node, mint())
    lose_identity(node)
    before = everything(node)
    assert node.join(quarantine(NOBODY)) is Step.NOT_EMPTY
    assert everything(node) == before


def lose_identity(node: Memory) -> None:
    """Take the identity away and leave the rest."""
    if isinstance(node, FakeNodeState):
        keys = (node.holds.copy(), node.counters.copy(), node.high)
        node.wipe()
        node.holds, node.counters, node.high = keys
    else:
        memory = node.save()
        node.restore({name: value for name, value in memory.items() if name != KEYS.node.encode()})


@pytest.mark.parametrize(
    "known", [NOBODY, Known(ADMITTED, "run-2"), Known(NEW, "run")], ids=["nobody", "run", "admission"]
)
@pytest.mark.parametrize("script", ["quarantine", "note_run"])
async def test_a_node_that_is_not_any_more_what_was_judged_is_left_as_it_is(
    node: Memory, known: Known, script: str
) -> None:
    """Another server was faster: it has admitted, quarantined or brought back the node, or it was wiped."""
    ask(node, mint())
    before = everything(node)
    command = quarantine(known) if script == "quarantine" else NoteRun(known, "run-3", durable=True)
    assert node.join(command) is Step.CHANGED
    assert everything(node) == before
    node.wipe()
    assert node.join(replace(command, known=FORMED)) is Step.CHANGED
    assert look(node) == Sight(None, 0, None)


async def test_of_two_servers_that_quarantine_a_node_one_does(node: Memory) -> None:
    """So there is one quarantine to wait for, with one id."""
    assert node.join(quarantine()) is Step.DONE
    assert node.join(replace(quarantine(), quarantine=NEW)) is Step.CHANGED
    assert identity(node).admission == Q


async def test_a_new_run_is_noted_and_nothing_else_changes(node: Memory) -> None:
    """How it writes to disk, and that this run has evicted nothing yet."""
    ask(node, mint())
    before, keys = identity(node), node.keys()
    assert node.join(NoteRun(FORMED, "run-2", durable=True)) is Step.DONE
    assert everything(node) == (Sight(replace(before, run_id="run-2", durable=True), 4, 1), keys)


@pytest.mark.parametrize(("known", "kept"), [(0, 1_000), (999, 1_000), (1_001, 1_001)])
async def test_a_quarantine_notes_the_least_floor_that_is_known_to_be_needed(
    node: Memory, known: int, kept: int
) -> None:
    """It tells a node that forgot from one that was replaced; never less than the node knew itself."""
    back_with_floor(node)
    node.join(replace(quarantine(Known(NEW, "run-3")), floor=known))
    assert identity(node).floor == kept


# --- claim -----------------------------------------------------------------------------------------------------------

CLAIM = Claim(Q, 1_000, 500)


async def test_a_claim_is_kept_by_the_node_and_gives_it_no_vote(node: Memory) -> None:
    """Whoever looks next sees it."""
    ask(node, mint())
    node.join(quarantine())
    before, (_, keys) = identity(node), everything(node)
    assert node.join(CLAIM) is Step.DONE
    assert everything(node) == (Sight(replace(before, floor=1_000, changes=500), 4, 1), keys)
    assert ask(node, mint()) is Silence.NOT_ADMITTED


@pytest.mark.parametrize("floor", [999, 1_000])
async def test_of_two_claims_only_a_greater_one_counts_after_the_first(node: Memory, floor: int) -> None:
    """Of two servers that bring a node back at once, with one floor even, one has to start over."""
    node.join(quarantine())
    node.join(CLAIM)
    before = everything(node)
    assert node.join(replace(CLAIM, floor=floor, changes=900)) is Step.CHANGED
    assert everything(node) == before
    assert node.join(replace(CLAIM, floor=1_001, changes=900)) is Step.DONE
    assert (identity(node).floor, identity(node).changes) == (1_001, 900)


async def test_only_in_the_very_quarantine_that_was_found_a_floor_can_be_claimed(node: Memory) -> None:
    """Not of a node that votes, was lost once more, was wiped or is being recovered."""
    for taken in (None, Phase.RECOVERING):
        if taken is not None:
            node.join(quarantine(phase=taken))
        before = everything(node)
        for command in (CLAIM, replace(CLAIM, quarantine=ADMITTED), replace(CLAIM, quarantine="")):
            assert node.join(command) is Step.CHANGED
        assert everything(node) == before
    node.wipe()
    assert node.join(CLAIM) is Step.CHANGED
    assert look(node) == Sight(None, 0, None)


async def test_a_server_whose_claim_was_outdone_cannot_end_the_quarantine(node: Memory) -> None:
    """Or the others would know of a greater floor than the node has, and take it for one that was replaced."""
    node.join(quarantine())
    node.join(CLAIM)
    node.join(replace(CLAIM, floor=1_001))
    before = everything(node)
    assert node.join(readmit()) is Step.CHANGED
    assert everything(node) == before
    assert node.join(replace(readmit(), floor=1_001)) is Step.DONE


# --- readmit ---------------------------------------------------------------------------------------------------------


async def test_a_node_votes_again_with_its_floor_and_with_what_the_others_know(node: Memory) -> None:
    """High and floor are those that the others were told; what it must know of other places is given back; holds stay."""
    ask(node, mint())
    pulse(node, 0, 7, 0)
    node.join(quarantine())
    keys = node.keys()
    assert node.join(readmit()) is Step.DONE
    assert everything(node) == (
        Sight(
            Identity(
                *("cluster", 0, 3, TTL_MS, NEW, "run-3"),
                durable=True,
                phase=Phase.READY,
                floor=1_000,
                changes=500,
                evicted=3,
                known_floors={0: 1_000, 1: 70},
                known_changes={0: 0, 1: 0},
            ),
            4,
            1_000,
        ),
        {**keys, KEYS.high: {"": "1000"}},
    )
    assert ask(node, mint(B, "n2", "other"), NEW) == Granted("n2", 1_001)
    assert told_changes(node) == 501


@pytest.mark.parametrize(
    "command",
    [
        readmit(quarantine=NEW),
        readmit(quarantine=ADMITTED),
        readmit(quarantine=""),
        readmit(phase=Phase.RECOVERING),
    ],
    ids=["another quarantine", "voted before", "no quarantine", "another state"],
)
async def test_only_the_very_quarantine_that_was_found_can_be_ended(node: Memory, command: Readmit) -> None:
    """A node that was lost once more, or that another server has brought back, is not touched."""
    ask(node, mint())
    node.join(quarantine())
    before = everything(node)
    assert node.join(command) is Step.CHANGED
    assert everything(node) == before


async def test_a_recovery_is_ended_as_a_quarantine_is(node: Memory) -> None:
    """By who names its state."""
    node.join(quarantine(phase=Phase.RECOVERING))
    assert node.join(readmit()) is Step.CHANGED
    assert node.join(readmit(phase=Phase.RECOVERING)) is Step.DONE


async def test_a_readmission_never_lowers_the_greatest_number(node: Memory) -> None:
    """A node that an operator recovers may have gone on past the floor before it was taken out."""
    ask(node, Vouch(ADMITTED, 2, 5_000, 0))
    node.join(quarantine(phase=Phase.RECOVERING))
    assert node.join(readmit(phase=Phase.RECOVERING)) is Step.DONE
    assert look(node).high == 5_000
    assert ask(node, mint(), NEW) == Granted("n1", 5_001)


async def test_a_node_that_votes_or_was_wiped_cannot_be_readmitted(node: Memory) -> None:
    """Its second loss, or a second driver, comes between."""
    before = everything(node)
    assert node.join(readmit(quarantine=ADMITTED)) is Step.CHANGED
    assert everything(node) == before
    node.join(quarantine())
    node.wipe()
    assert node.join(readmit()) is Step.CHANGED
    assert look(node) == Sight(None, 0, None)


async def test_of_two_servers_that_end_a_quarantine_one_does(node: Memory) -> None:
    """Or the node would get a second floor after it has minted above the first."""
    node.join(quarantine())
    assert node.join(readmit()) is Step.DONE
    before = everything(node)
    assert node.join(replace(readmit(), floor=2_000)) is Step.CHANGED
    assert everything(node) == before


# --- the clock -------------------------------------------------------------------------------------------------------


async def test_grants_and_pulses_tell_the_nodes_clock_in_us(
    flushed_nodes: FlushedNodes, engine: RedisBinary
) -> None:
    """Whole µs, for a double holds them; between what the node tells before and after, but for its own granularity."""
    (redis,) = await flushed_nodes(1, binary=engine)
    database = Database(redis.url)
    node = LuaNode(database).load().form()

    def clock_ms() -> float:
        seconds, us = (int(each) for each in database.call("TIME"))
        return seconds * 1e3 + us / 1e3

    # The engines look at the clock once in a ms or at each command, and a script has the time of its beginning.
    lag_ms = 1.0
    for command in (mint(), mint(nonce="n2"), replace(mint(B, "n3"), ends=Release(R, A, 0)), Pulse((0,))):
        before_ms = clock_ms()
        reply = ask(node, command)
        told_ms = reply.clock_ms if isinstance(reply, Pulsed) else scripts.read_clock_ms(node.raw)
        assert before_ms - lag_ms <= told_ms <= clock_ms() + lag_ms
    assert isinstance(node.raw[1], int)
    database.close()


# --- the twin is honest ----------------------------------------------------------------------------------------------

_ids = st.sampled_from([ADMITTED, Q, NEW])
_runs = st.sampled_from(["run", "run-2"])
_phases = st.sampled_from([Phase.QUARANTINED] * 3 + [Phase.RECOVERING])
_known = st.builds(Known, _ids, _runs) | st.just(NOBODY)
_numbers = st.integers(0, 30)
_threes = st.tuples(_numbers, _numbers, _numbers)
_resources = st.sampled_from("xxy")
_leases = st.sampled_from([A, B])
_nonces = st.sampled_from(["n1", "n2"])

_commands: st.SearchStrategy[Command] = st.one_of(
    st.builds(Mint, _resources, _leases, _nonces, st.just("h"), st.just(TTL_MS)),
    st.builds(Mint, _resources, _leases, _nonces, st.just("h"), st.just(TTL_MS)),
    st.builds(Commit, _resources, _leases, _nonces, _numbers),
    st.builds(Renew, _resources, _leases),
    st.builds(Release, _resources, _leases, st.just(0.0)),
    st.builds(Pulse, _threes),
    st.builds(Vouch, _ids, st.integers(0, 2), _numbers, _numbers),
)
_joining: st.SearchStrategy[JoiningCommand] = st.one_of(
    st.builds(NoteRun, _known, _runs, st.booleans()),
    st.builds(Quarantine, _known, _ids, st.just(PLACE), _runs, _phases, _numbers),
    st.builds(Claim, _ids, _numbers, _numbers),
    st.builds(Readmit, _ids, _ids, _numbers, _numbers, _runs, _threes, st.booleans(), _numbers, _phases),
)
_worlds = st.sampled_from(
    ["expire", "drop_counter", "wipe", "save", "save", "restore", "restore", "lose identity", "lose high"]
)
# A command for a server that was admitted under this id, or as the node is now.
_NOW = "now"
Event = tuple[str, Command] | JoiningCommand | str
_events: st.SearchStrategy[Event] = st.one_of(
    st.tuples(st.just(_NOW), _commands), st.tuples(_ids, _commands), _joining, _worlds
)


class Played:
    """A node, what it remembered when it was saved last, and one more event."""

    def __init__(self, node: Memory) -> None:
        self.node = node
        self._saved = node.save()

    def play(self, event: Event) -> object:
        """Let it happen and return what was answered, whatever the time."""
        match event:
            case (str() as admission, command):
                reply = self.node.apply(command, 0.0, admission=admission)
                if isinstance(reply, Pulsed):
                    return replace(reply, clock_ms=0.0)
                return replace(reply, remaining_ms=0) if isinstance(reply, Held) else reply
            case "wipe":
                self.node.wipe()
            case "save":
                self._saved = self.node.save()
            case "restore":
                self.node.restore(self._saved)
            case "lose identity":
                lose_identity(self.node)
            case "lose high":
                lose_high(self.node)
            case str():
                getattr(self.node, event)("x")
            case _:
                return self.node.join(event)
        return None


@pytest.mark.slow
async def test_a_fake_and_a_real_node_forget_and_come_back_alike(fresh_nodes: FreshNodes) -> None:
    """Random commands under any admission id, identities taken and given, older states put back: the same answers, and the same is kept."""
    (redis,) = await fresh_nodes(1, appendfsync="no")
    database = Database(redis.url)
    real = LuaNode(database).load()
    answered: set[object] = set()

    @settings(max_examples=300, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
    @given(events=st.lists(_events, min_size=30, max_size=40))
    def check(events: list[Event]) -> None:
        fake = FakeNodeState(formation=PLACE)
        twins = [Played(fake), Played(real.form(formation=PLACE))]
        for event in events:
            if isinstance(event, tuple) and event[0] == _NOW:
                event = (fake.admission or ADMITTED, event[1])  # noqa: PLW2901  (what is meant by it)
            answers = [twin.play(event) for twin in twins]
            assert answers[0] == answers[1], event
            if isinstance(answers[0], Step | Plain | Silence):
                answered.add((type(event).__name__, answers[0]))
        assert everything(fake) == everything(real)

    await asyncio.to_thread(check)
    database.close()
    # It would prove nothing if one of these had never come.
    assert answered >= {
        ("tuple", Plain.VOUCHED),
        ("tuple", Plain.TOO_LOW),
        ("tuple", Plain.COMMITTED),
        ("Quarantine", Step.DONE),
        ("Quarantine", Step.NOT_EMPTY),
        ("Claim", Step.DONE),
        ("Claim", Step.CHANGED),
        ("Readmit", Step.DONE),
        ("Readmit", Step.CHANGED),
        ("NoteRun", Step.DONE),
    }, answered


# --- a clock that was set -----------------------------------------------------------------------------------------------


def left_ms(node: Memory, told_ms: int = 0) -> int:
    """Return for how long its votes do not count as the node says, when it is told something itself."""
    pulsed = ask(node, Pulse((0, 0, 0), told_ms))
    assert isinstance(pulsed, Pulsed)
    return pulsed.distrusted_ms


async def test_that_the_clock_was_set_is_passed_on_to_every_server(node: Memory) -> None:
    """The longest that anybody told counts; whoever knows nothing hears of it."""
    assert left_ms(node) == 0
    assert left_ms(node, 40_000) == 40_000
    for told_ms in (0, 5_000):
        assert 30_000 < left_ms(node, told_ms) <= 40_000
    assert left_ms(node, 45_000) == 45_000
    assert 35_000 < left_ms(node) <= 45_000


async def test_a_clock_that_is_set_back_does_not_make_it_last(node: Memory) -> None:
    """The node counts by that very clock: it never says more than one step costs, and that only once."""
    most_ms = ceil(TTL_MS * 1.01) + 2
    assert left_ms(node, 3_600_000) == 3_600_000, "told by a server; what is noted is judged at the next look"
    for _ in range(2):
        assert most_ms - 10_000 < left_ms(node) <= most_ms
