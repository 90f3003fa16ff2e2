"""The simulated node answers as real ones do, byte for byte as far as the product reads them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import hiredis
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.fake_node import ADMITTED, FakeNodeState
from harness.fixture_types import FreshNodes
from harness.joining_commands import (
    Claim,
    Formation,
    JoiningCommand,
    Known,
    Look,
    NoteRun,
    Quarantine,
    Readmit,
)
from harness.lua_node import Database, LuaNode
from harness.simulated.redis import SimulatedRedis
from redfence_server.lock_node import (
    Command,
    Commit,
    Inspect,
    Mint,
    Pulse,
    Release,
    Renew,
    Undo,
    Vouch,
)
from redfence_server.node_examination import Phase

TTL_MS = 300_000
PLACE = Formation("cluster", index=0, node_count=3, max_ttl_ms=TTL_MS)
Q, NEW = "0a" * 16, "0b" * 16


class SimulatedDatabase(Database):
    """What `LuaNode` talks to, without a socket."""

    def __init__(self, node: SimulatedRedis) -> None:
        self._received: list[bytes] = []
        self._client = node.connect(self._received.append)

    def call(self, *command: str | int | bytes) -> Any:
        """See `Database`."""
        return self.exchange(hiredis.pack_command(command), 1)[0]  # type: ignore[arg-type]  # its stub says: a tuple of one

    def exchange(self, packed: bytes, count: int) -> list[Any]:
        """See `Database`."""
        self._client.feed(packed)
        reader = hiredis.Reader()
        reader.feed(b"".join(self._received))
        self._received.clear()
        return [reader.gets() for _ in range(count)]


_ids = st.sampled_from([ADMITTED, Q, NEW])
_known = st.builds(Known, _ids, st.sampled_from(["run", "run-2"])) | st.just(Known())
_numbers = st.integers(0, 30)
_threes = st.tuples(_numbers, _numbers, _numbers)
_lease = st.sampled_from(["a" * 64, "b" * 64])
_nonce = st.sampled_from(["n1", "n2"])
_name = st.sampled_from("xxxy")
_flag = st.booleans()
_ends = st.none() | st.builds(Release, st.just("x"), _lease, st.just(0.0))
_commands: st.SearchStrategy[Command] = st.one_of(
    st.builds(Mint, _name, _lease, _nonce, st.just("h"), st.just(TTL_MS), st.none(), _flag, _flag),
    st.builds(Mint, st.just("x"), _lease, _nonce, st.just("h"), st.just(TTL_MS), _ends, _flag, _flag),
    st.builds(Commit, _name, _lease, _nonce, _numbers),
    st.builds(Undo, _name, _nonce, st.just(0.0)),
    st.builds(Renew, _name, _lease),
    st.builds(Release, _name, _lease, st.just(0.0), _flag),
    st.builds(Inspect, _name),
    st.builds(Pulse, _threes, st.just(0)),
    st.builds(Vouch, _ids, st.integers(0, 2), _numbers, _numbers),
)
_joining: st.SearchStrategy[JoiningCommand] = st.one_of(
    st.just(Look()),
    st.builds(NoteRun, _known, st.sampled_from(["run", "run-2"]), _flag),
    st.builds(Quarantine, _known, _ids, st.just(PLACE), st.just("run-2"), st.just(Phase.QUARANTINED)),
    st.builds(Claim, _ids, _numbers, _numbers),
    st.builds(Readmit, _ids, _ids, _numbers, _numbers, st.just("run-2"), _threes, _flag, _numbers),
)
_events = st.lists(
    st.tuples(st.sampled_from(["now"] * 8 + [ADMITTED, Q]), _commands | _commands | _joining),
    min_size=20,
    max_size=40,
)


def _timeless(raw: Sequence[Any]) -> Sequence[Any]:
    """Leave the clock out of an answer."""
    match raw:
        case [b"granted", *rest]:
            return rest[:-1]
        case [b"pulse", _, *rest]:
            return rest
        case [b"held", digest, token, holder, _]:
            return [digest, token, holder]
        case [b"found", identity, *rest]:
            return [dict(zip(identity[::2], identity[1::2], strict=True)), *rest]
    return raw


@pytest.mark.slow
async def test_every_script_is_answered_alike(fresh_nodes: FreshNodes) -> None:
    """Random commands for any admission id; what is pushed is not looked at here."""
    (redis,) = await fresh_nodes(1, appendfsync="no")
    database = Database(redis.url)
    real = LuaNode(database).load()
    words: set[object] = set()

    @settings(max_examples=300, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
    @given(events=_events)
    def check(events: list[tuple[str, Command | JoiningCommand]]) -> None:
        simulated = SimulatedRedis(clock_ms=lambda: 0.0, appendfsync="always", name="node")
        simulated.state.restore(FakeNodeState(formation=PLACE))
        twins = [real.form(formation=PLACE), LuaNode(SimulatedDatabase(simulated))]
        for admission, command in events:
            answers: list[object] = []
            for twin in twins:
                if isinstance(command, JoiningCommand):
                    answers.append(twin.join(command))
                    continue
                under = (simulated.state.admission or ADMITTED) if admission == "now" else admission
                twin.apply(command, 0.0, admission=under)
                answers.append(_timeless(twin.raw))
                words.add(twin.raw[0])
            assert answers[0] == answers[1], command

    await asyncio.to_thread(check)
    database.close()
    assert words >= {
        b"granted",
        b"held",
        b"committed",
        b"lost",
        b"undone",
        b"kept",
        b"renewed",
        b"released",
        b"not_held",
    }
    assert words >= {b"free", b"pulse", b"vouched", b"greater", b"not_admitted"}
