"""The fence: what is read, reserved and raised, and when it is complete. The nodes are in memory.

tests/contract holds the scripts behind each step to real nodes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from harness.doubles.findings import look
from harness.doubles.joining_commands import Formation, RaiseFloor, ReadIdentity, ReserveFloor, Sight, Step
from harness.doubles.node_state import FakeNodeState
from redfence_proto import bounds
from redfence_server.clock import SystemClock
from redfence_server.errors import NodeRejectedError
from redfence_server.membership.admin import AdminConnection, AdminSettings, NodeSnapshot
from redfence_server.membership.examination import Phase
from redfence_server.membership.fence import (
    TOKENS_JUMP,
    FenceError,
    TooFewPeersError,
    fence_size,
    raise_fence,
)
from redfence_server.randomness import SystemRandomness
from redfence_server.redis_io.scripts import Keyspace

INDEX = 2


_DONE = {"reserve_floor": "reserved", "raise_floor": "raised"}


class MemoryNode(AdminConnection):
    """A visit to a fake node.

    Attributes:
        journal: the steps of all nodes, in order.
        fails_before, fails_after: the connection breaks before or after the next step.
    """

    def __init__(self, state: FakeNodeState, journal: list[str]) -> None:
        self.state = state
        self.journal = journal
        self.fails_before = self.fails_after = False
        super().__init__(self._look(), None, AdminSettings(Keyspace(), 1_000, SystemClock()))

    def _look(self) -> NodeSnapshot:
        sight = self.state.join(ReadIdentity())
        assert isinstance(sight, Sight)
        index = self.state.formation.index
        return look(index, sight.identity, run_id=self.state.run_id, max_token=sight.high)

    async def refresh(self) -> None:
        self.snapshot = self._look()

    async def step(self, script: str, *arguments: str | int) -> str:
        await asyncio.sleep(0)
        if self.fails_before:
            raise NodeRejectedError("the connection broke")
        command: Any = ReserveFloor if script == "reserve_floor" else RaiseFloor
        answer = self.state.join(command(*arguments))
        assert isinstance(answer, Step)
        word = _DONE[script] if answer is Step.DONE else answer.name.lower()
        self.journal.append(f"{script} {self.snapshot.index}: {word}")
        if self.fails_after:
            raise NodeRejectedError("the connection broke")
        return word


class Nodes:
    def __init__(self, node_count: int = 3, *, highs: Sequence[int] = (), high: int = 0) -> None:
        self.journal: list[str] = []
        self._count = node_count
        self.process = self.another(f"{INDEX}" * 32, high=high)
        indices = [index for index in range(node_count) if index != INDEX]
        self.peers = [
            self._node(index, f"{index}" * 32, Phase.READY, each)
            for index, each in zip(indices, highs or [0] * len(indices), strict=True)
        ]

    def another(self, quarantine: str, *, phase: Phase = Phase.QUARANTINED, high: int = 0) -> MemoryNode:
        return self._node(INDEX, quarantine, phase, high)

    def _node(self, index: int, admission: str, phase: Phase, high: int) -> MemoryNode:
        formation = Formation("c", index=index, node_count=self._count, max_ttl_ms=9_000)
        state = FakeNodeState(admission=admission, formation=formation, run_id=f"run-{index}", durable=True)
        state.phase, state.high = phase, high
        return MemoryNode(state, self.journal)

    async def fence(
        self,
        process: MemoryNode | None = None,
        *,
        token_seen: int = 0,
        trusted: Sequence[MemoryNode] | None = None,
    ) -> int:
        process = process or self.process
        trusted = self.peers if trusted is None else trusted
        for node in (process, *trusted):
            await node.refresh()
        return await raise_fence(process, trusted, token_seen=token_seen, randomness=SystemRandomness())

    def raised_to(self, floor: int) -> int:
        """Return how many peers show that floor."""
        return [peer.state.known_floors.get(INDEX) for peer in self.peers].count(floor)


@pytest.mark.parametrize("greatest", ["peer 0", "peer 1", "process", "floor", "seen"])
async def test_the_floor_is_a_jump_above_everything_that_is_known(greatest: str) -> None:
    values = dict.fromkeys(("peer 0", "peer 1", "process", "floor", "seen"), 7) | {greatest: 1_000}
    nodes = Nodes(highs=(values["peer 0"], values["peer 1"]), high=values["process"])
    nodes.process.state.floor = values["floor"]
    assert await nodes.fence(token_seen=values["seen"]) == 1_000 + TOKENS_JUMP


async def test_the_process_reserves_the_floor_before_any_peer_is_told() -> None:
    nodes = Nodes()
    before = [peer.state.admission for peer in nodes.peers]
    floor = await nodes.fence()
    assert nodes.journal == ["reserve_floor 2: reserved", "raise_floor 0: raised", "raise_floor 1: raised"]
    assert (nodes.process.state.reserved, nodes.raised_to(floor)) == (floor, 2)
    after = [peer.state.admission for peer in nodes.peers]
    assert len({*before, *after}) == 4


@pytest.mark.parametrize("node_count", [3, 5, 7])
async def test_f_plus_one_peers_are_needed_to_read_and_to_raise(node_count: int) -> None:
    needed = node_count // 2 + 1
    assert fence_size(node_count) == needed
    nodes = Nodes(node_count)
    with pytest.raises(
        TooFewPeersError, match=f"needs {needed} other nodes that vote, and found {needed - 1}"
    ):
        await nodes.fence(trusted=nodes.peers[: needed - 1])
    assert nodes.journal == []
    for taken in range(node_count - 1):
        nodes = Nodes(node_count)
        for peer in nodes.peers[taken:]:
            peer.fails_before = True
        if taken >= needed:
            assert nodes.raised_to(await nodes.fence()) == taken
            continue
        with pytest.raises(FenceError, match=f"needed on {needed} other nodes, and {taken} took it"):
            await nodes.fence()
        for peer in nodes.peers:
            peer.fails_before = False
        incomplete = nodes.process.state.reserved
        has_minted = taken % 2 == 1
        if has_minted:
            nodes.peers[-1].state.high = incomplete
        floor = await nodes.fence()
        assert (floor > incomplete) == has_minted
        assert nodes.raised_to(floor) == node_count - 1


async def test_a_complete_fence_is_found_and_not_raised_again() -> None:
    nodes = Nodes()
    nodes.peers[0].fails_after = True
    with pytest.raises(FenceError):
        await nodes.fence()
    nodes.peers[0].fails_after = False
    nodes.journal.clear()
    complete = nodes.process.state.reserved
    assert await nodes.fence() == complete
    assert nodes.journal == []
    # One peer has forgotten the floor since.
    nodes.peers[0].state.known_floors = {}
    assert await nodes.fence() > complete


async def test_drivers_at_once_overtake_each_other_and_one_fence_is_complete() -> None:
    nodes = Nodes()
    with pytest.raises(FenceError, match="another server is giving it its vote"):
        await asyncio.gather(nodes.fence(), nodes.fence())
    floor = await nodes.fence()
    assert (nodes.process.state.reserved, nodes.raised_to(floor)) == (floor, 2)


async def test_a_process_that_was_superseded_raises_no_fence() -> None:
    for peer in range(2):
        nodes = Nodes()
        nodes.peers[peer].state.known_floors = {INDEX: 5}
        with pytest.raises(FenceError, match="another process was given its index"):
            await nodes.fence()
        assert nodes.journal == []


async def test_a_process_that_left_its_quarantine_reserves_nothing() -> None:
    for phase, admission in ((Phase.READY, f"{INDEX}" * 32), (Phase.QUARANTINED, "f" * 32)):
        nodes = Nodes()
        nodes.process.state.phase, nodes.process.state.admission = phase, admission
        with pytest.raises(FenceError, match="another server"):
            await raise_fence(nodes.process, nodes.peers, token_seen=0, randomness=SystemRandomness())
        assert nodes.raised_to(0) == 0


async def test_a_fence_that_would_use_up_the_tokens_is_not_raised() -> None:
    nodes = Nodes(highs=(bounds.FENCING_TOKEN_MAX - TOKENS_JUMP, 0))
    with pytest.raises(FenceError, match="used up"):
        await nodes.fence()
    assert nodes.journal == []


async def test_a_single_node_comes_back_with_proof_alone() -> None:
    nodes = Nodes(1)
    with pytest.raises(TooFewPeersError):
        await nodes.fence(trusted=[])
    assert nodes.journal == []
    proven = nodes.another("a" * 32, phase=Phase.RESTARTED, high=5)
    assert await nodes.fence(proven, trusted=[]) == 5 + TOKENS_JUMP
    assert await nodes.fence(proven, trusted=[]) == 5 + TOKENS_JUMP


class Far(MemoryNode):
    """Another driver's visit to the same node; its steps take longer."""

    async def step(self, script: str, *arguments: str | int) -> str:
        for _ in range(5):
            await asyncio.sleep(0)
        return await super().step(script, *arguments)


async def test_two_processes_at_one_index_never_both_have_a_complete_fence() -> None:
    nodes = Nodes()
    one, two = nodes.peers
    rivals = [nodes.another("a" * 32), nodes.another("b" * 32)]
    ways = [(one, Far(two.state, two.journal)), (Far(one.state, one.journal), two)]
    tries = [nodes.fence(process, trusted=way) for process, way in zip(rivals, ways, strict=True)]
    assert all(isinstance(each, FenceError) for each in await asyncio.gather(*tries, return_exceptions=True))
    floors = []
    for process in rivals:
        try:
            floors.append(await nodes.fence(process))
        except FenceError:
            floors.append(0)
    complete = [floor for floor in floors if floor and nodes.raised_to(floor) == 2]
    assert len(complete) == 1, nodes.journal
