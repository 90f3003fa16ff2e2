"""The simulated node, and so the fake one, answers as real nodes do."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import hiredis
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.doubles.joining_commands import (
    Formation,
    JoiningCommand,
    Known,
    Quarantine,
    RaiseFloor,
    ReadIdentity,
    ReserveFloor,
    RestoreVote,
    Step,
)
from harness.doubles.lua_node import Database, LuaNode
from harness.doubles.node_memory import ADMITTED
from harness.doubles.node_state import FakeNodeState
from harness.processes.fixture_types import FlushedNodes, FreshNodes
from harness.simulation.redis import SimulatedRedis
from redfence_proto.bounds import FENCING_TOKEN_MAX
from redfence_server.embedded.binary import RedisBinary
from redfence_server.locking.node import (
    Command,
    Commit,
    ForceRelease,
    Inspect,
    Mint,
    Release,
    Renew,
    Undo,
)
from redfence_server.membership.examination import Phase
from redfence_server.redis_io.scripts import Keyspace

TTL_MS = 300_000
PLACE = Formation("cluster", index=0, node_count=3, max_ttl_ms=TTL_MS)
Q, NEW = "0a" * 16, "0b" * 16


class SimulatedDatabase(Database):
    """What `LuaNode` talks to, without a socket."""

    def __init__(self, node: SimulatedRedis) -> None:
        self._received: list[bytes] = []
        self._client = node.connect(self._received.append)

    def close(self) -> None:
        """See `Database`."""

    def exchange(self, packed: bytes, count: int) -> list[Any]:
        self._client.feed(packed)
        reader = hiredis.Reader()
        reader.feed(b"".join(self._received))
        self._received.clear()
        return [reader.gets() for _ in range(count)]


def simulated_redis() -> SimulatedRedis:
    simulated = SimulatedRedis(clock_ms=lambda: 0.0, appendfsync="always", name="node")
    simulated.state.restore(FakeNodeState(formation=PLACE))
    return simulated


async def test_settings_are_a_map_and_info_is_a_text_in_resp3(
    flushed_nodes: FlushedNodes, engine: RedisBinary
) -> None:
    (redis,) = await flushed_nodes(1, binary=engine)
    shapes = []
    for database in (Database(redis.url), SimulatedDatabase(simulated_redis())):
        before = [database.call("CONFIG", "GET", "appendfsync"), database.call("INFO")]
        database.call("HELLO", "3")
        after = [database.call("CONFIG", "GET", "appendfsync"), database.call("INFO")]
        shapes.append([type(each) for each in (*before, *after)])
        database.close()
    assert shapes[0] == shapes[1] == [list, bytes, dict, bytes]


_ids = st.sampled_from([ADMITTED, Q, NEW])
_runs = st.sampled_from(["run", "run-2"])
_known = st.builds(Known, _ids, _runs) | st.just(Known())
_numbers = st.integers(0, 30)
# Added to all numbers of a walk. The last one brings it to the end of the numbers, where Lua would round.
_bases = st.sampled_from([0, 0, 0, FENCING_TOKEN_MAX - 30])
_threes = st.tuples(_numbers, _numbers, _numbers)
_lease = st.sampled_from(["a" * 64, "b" * 64])
_nonce = st.sampled_from(["n1", "n2"])
_name = st.sampled_from("xxxy")
_flag = st.booleans()
# Each of two servers writes its channel as the holder. All channels have one length (mint.lua).
_channels = st.sampled_from(["here", "away"])
_ttls_ms = st.sampled_from([TTL_MS, 2 * TTL_MS])
_delays_ms = st.sampled_from([0, 0, 0, TTL_MS])
_phases = st.sampled_from([Phase.QUARANTINED, Phase.RESTARTED])
_ends = st.none() | st.builds(Release, st.just("x"), _lease, st.just(0.0))

_commands: st.SearchStrategy[Command] = st.one_of(
    st.builds(Mint, _name, _lease, _nonce, _channels, _ttls_ms, st.none(), _flag, _flag, _delays_ms),
    *[st.builds(Mint, st.just("x"), _lease, _nonce, _channels, _ttls_ms, _ends, _flag, _flag, _delays_ms)]
    * 3,
    st.builds(Commit, _name, _lease, _nonce, _numbers),
    st.builds(Undo, _name, _nonce, st.just(0.0)),
    st.builds(Renew, st.just("x"), _lease),
    st.builds(Release, _name, _lease, st.just(0.0)),
    st.builds(Inspect, _name),
)
_lives = st.tuples(*[st.sampled_from(["", Q[:16]])] * 3)
_joining: st.SearchStrategy[JoiningCommand] = st.one_of(
    st.just(ReadIdentity()),
    st.builds(Quarantine, _known, _ids, st.just(PLACE), _runs, _phases, _numbers, _flag),
    st.builds(ReserveFloor, _ids, st.integers(20, 60)),
    st.builds(RaiseFloor, _ids, _ids, st.integers(0, 2), _numbers, _ids),
    st.builds(RestoreVote, _ids, _ids, _numbers, _runs, _threes, _lives, _flag, _numbers),
)
# Commands come under the node's present id, mostly; a command that changes the identity names it, mostly.
_NOW = "now"
_under = st.sampled_from([_NOW] * 8 + [ADMITTED, Q])
_worlds = st.sampled_from(["expire", "lapse", "drop_counter", "wipe", "save", "restore", "restore"])
# A whole way back to the vote.
_RETURN = "return"
_WAY_BACK = (
    Quarantine(Known(), Q, PLACE, "run-2", Phase.RESTARTED),
    ReserveFloor(Q, 5),
    RestoreVote(Q, NEW, 0, "run-2", (9, 9, 9)),
)
# A lease that an operator ends, with its token and with the one before.
_FORCE = "force"
_FORCED = (
    *(Mint("x", "a" * 64, "n1", "here", TTL_MS), Commit("x", "a" * 64, "n1", 30)),
    *(ForceRelease("x", "a" * 64, 0.0, 29), ForceRelease("x", "a" * 64, 0.0, 30), Renew("x", "a" * 64)),
)
# The same with a lock delay: nobody gets the lock, until the holder releases it.
_CLOSE = "close"
_DELAYED = Mint("x", "a" * 64, "n1", "here", TTL_MS, lock_delay_ms=TTL_MS)
_CLOSED = (
    *(_DELAYED, Commit("x", "a" * 64, "n1", 30), ForceRelease("x", "a" * 64, 0.0, 30), Renew("x", "a" * 64)),
    *(Inspect("x"), replace(_DELAYED, digest="b" * 64), _DELAYED, Release("x", "a" * 64, 0.0), Inspect("x")),
)
# A handover while another server waits.
_HAND_OVER = "hand over"
_MINT = Mint("x", "a" * 64, "n1", "here", TTL_MS)
_HANDED_OVER = (
    *(_MINT, replace(_MINT, digest="b" * 64, holder="away", watch_blocking_hold=True)),
    replace(_MINT, digest="b" * 64, nonce="n2", release_first=Release("x", "a" * 64, 0.0)),
)
_WAYS: Mapping[str, Sequence[Command | JoiningCommand]] = {
    _RETURN: _WAY_BACK,
    _FORCE: _FORCED,
    _CLOSE: _CLOSED,
    _HAND_OVER: _HANDED_OVER,
}
Event = tuple[str, Command | JoiningCommand] | str
_events: st.SearchStrategy[Event] = st.one_of(
    *[st.tuples(_under, _commands)] * 3,
    *[st.tuples(_under, _joining)] * 2,
    _worlds,
    st.sampled_from([_RETURN, _FORCE, _CLOSE, _HAND_OVER]),
)


class Played:
    """A node, the answers that it gave, and what it remembered when it was saved last."""

    def __init__(self, node: LuaNode, memory: Any) -> None:
        self.node = node
        self._memory = memory
        self._saved = memory.save()

    def play(self, event: Event) -> object:
        """Let it happen, and return the answer without what a clock says."""
        match event:
            case (under, command):
                if isinstance(command, JoiningCommand):
                    return self.node.join(command)
                channel = command.holder if isinstance(command, Mint) else "here"
                self.node.apply(command, 0.0, admission=under, channel=channel)
                return _timeless(self.node.raw)
            case "save":
                self._saved = self._memory.save()
            case "restore":
                self._memory.restore(self._saved)
            case "wipe":
                self._memory.wipe()
            case str():
                getattr(self._memory, event)("x")
        return None


def _timeless(raw: Sequence[Any]) -> Sequence[Any]:
    match raw:
        case [b"granted", *rest]:
            return [b"granted", *rest[:-1]]
        case [b"held", digest, token, holder, left_ms, *delay]:
            return [b"held", digest, token, holder, *delay, *[left_ms <= each for each in delay]]
    return raw


def _above(command: Command | JoiningCommand, base: int) -> Command | JoiningCommand:
    """Return the command with its number above the base."""
    if isinstance(command, Commit | ForceRelease):
        return replace(command, token=command.token + base)
    return (
        replace(command, floor=command.floor + base)
        if isinstance(command, Quarantine | RaiseFloor)
        else command
    )


def _as_now(event: Event, state: FakeNodeState, base: int) -> Event:
    """Return the event above the base, with the node's present id and reservation where those are meant."""
    if isinstance(event, str):
        return event
    under, command = event[0], _above(event[1], base)
    now = state.admission or ADMITTED
    if under == _NOW:
        under = now
        match command:
            case Quarantine():
                command = replace(command, known=Known(state.admission, state.run_id))
            case RaiseFloor():
                command = replace(command, known=now)
            case ReserveFloor():
                command = replace(command, quarantine=now, floor=command.floor + state.floor)
            case RestoreVote():
                command = replace(command, quarantine=now, floor=state.reserved)
    return under, command


@pytest.mark.slow
async def test_every_script_is_answered_alike(fresh_nodes: FreshNodes) -> None:
    """Random commands under any id, dropped keys and older states give the same answers and data."""
    (redis,) = await fresh_nodes(1, appendfsync="no")
    database = Database(redis.url)
    real = LuaNode(database).load()
    words: set[object] = set()

    @settings(max_examples=250, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
    @given(events=st.lists(_events, min_size=30, max_size=50), base=_bases)
    def check(events: list[Event], base: int) -> None:
        simulated = simulated_redis()
        formed = real.form(formation=PLACE)
        database.call("SET", Keyspace().high, base)
        simulated.state.high = base
        twins = [Played(formed, formed), Played(LuaNode(SimulatedDatabase(simulated)), simulated.state)]
        single = [
            [(_NOW, step) for step in _WAYS[each]] if isinstance(each, str) and each in _WAYS else [each]
            for each in events
        ]
        for event in chain.from_iterable(single):
            answers = [twin.play(_as_now(event, simulated.state, base)) for twin in twins]
            assert answers[0] == answers[1], event
            match event, answers[0]:
                case (_, command), Step() as step:
                    words.add((type(command), step))
                case _, [b"granted", _, _, contended, released]:
                    words.update({b"granted", (contended, released)})
                case _, [b"held", *_, bool() as closed]:
                    words.update({b"held", ("closed", closed)})
                case _, [word, *_]:
                    words.add(word)
        assert twins[0].node.join(ReadIdentity()) == twins[1].node.join(ReadIdentity())
        assert simulated.state.keys() == real.keys()

    await asyncio.to_thread(check)
    database.close()
    # It would prove nothing if one of these had never come.
    assert words >= {
        *(b"granted", b"held", b"committed", b"lost", b"undone", b"kept", b"renewed", b"released"),
        *(b"not_held", b"forced", b"free", b"not_admitted", b"exhausted"),
        *((contended, released) for contended in (0, 1) for released in (0, 1)),
        *(("closed", closed) for closed in (False, True)),
        *((kind, Step.DONE) for kind in (Quarantine, ReserveFloor, RaiseFloor, RestoreVote)),
        *((kind, Step.CHANGED) for kind in (Quarantine, ReserveFloor, RestoreVote)),
        *((RaiseFloor, step) for step in (Step.GREATER, Step.NOT_ADMITTED)),
    }, words
