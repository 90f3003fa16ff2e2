"""A visit to one node over a connection of its own: what is seen there, and each step that changes the node's identity.

Lock servers and operators' commands take the same steps: take the vote away, reserve a floor, raise a floor, restore the
vote. A visit admits no server; membership/admission.py decides whether a node may vote.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace

from redfence_server.clock import Clock, SystemClock
from redfence_server.errors import NodeRejectedError
from redfence_server.membership import examination as node_examination
from redfence_server.membership.examination import Findings, Identity, Phase
from redfence_server.redis_io import scripts
from redfence_server.redis_io.dial import Dial, DialError, DialledNode, NodeUrl, dial


@dataclass(frozen=True, slots=True)
class NodeSnapshot:
    """What was seen of the node at one index; `problem` and `error` say why it could not be examined.

    `error` is None if this machine is the cause.
    """

    index: int
    address: str
    found: Findings | None
    problem: str = ""
    error: DialError | None = None

    @property
    def name(self) -> str:
        """How messages call it."""
        return f"node {self.index} ({self.address})"

    def refuse_strangers(self) -> None:
        """Refuse a node without an identity that holds keys: another program may have written them.

        Raises:
            NodeRejectedError: this is such a node.
        """
        if self.found is not None and self.found.identity is None and self.found.key_count:
            raise NodeRejectedError(
                f"{self.name}: it has no cluster identity and yet holds {self.found.key_count} keys: if they are of no use to anybody, "
                "empty it (FLUSHALL), and repeat"
            )


@dataclass(frozen=True, slots=True)
class NodeAssignment:
    """What a node is told that it is: one of the nodes of a cluster."""

    cluster_id: str
    index: int
    node_count: int
    ttl_ms_max: int


@dataclass(frozen=True, slots=True)
class AdminSettings:
    """What the visits of one command, or of one server, share. `dial_timeout_ms` bounds each step and each command."""

    keys: scripts.Keyspace
    dial_timeout_ms: int
    clock: Clock = field(default_factory=SystemClock)
    dial: Dial = dial


class AdminConnection:
    """One node, the last look at it, and the connection; that is None if the first examination failed."""

    def __init__(self, look: NodeSnapshot, node: DialledNode | None, visiting: AdminSettings) -> None:
        self.look = look
        self.node = node
        self._visiting = visiting

    @property
    def identity(self) -> Identity:
        """The identity that was found; to be asked only of a node that has one."""
        assert self.look.found is not None, "only a node that was examined shows an identity"
        assert self.look.found.identity is not None, "only a node that was formed has an identity"
        return self.look.found.identity

    async def look_again(self) -> None:
        """Examine the node anew.

        Cancellation: nothing is changed.
        """
        if self.node is None:
            return
        try:
            found = await node_examination.examine(self.node, self._visiting.keys, self._visiting.clock)
        except DialError as error:
            self.look = replace(self.look, found=None, problem=str(error), error=error)
        else:
            self.look = replace(self.look, found=found)

    async def step(self, script: str, *arguments: str | int) -> str:
        """Carry out a script that changes the node's identity, and return the first word of its answer.

        Cancellation: it may or may not have been carried out.

        Raises:
            NodeRejectedError: the connection broke, or the node refused; it may or may not have been carried out.
        """
        assert self.node is not None, "only a node that was examined can be changed"
        keys = self._visiting.keys
        try:
            answer = await self.node.command(
                "EVAL", scripts.load(script), 2, keys.node, keys.high, *arguments
            )
        except DialError as error:
            raise NodeRejectedError(f"{self.look.name}: {error}") from error
        return str(answer[0].decode())

    async def take_vote(self, seat: NodeAssignment, *, phase: Phase, quarantine: str, floor: int = 0) -> None:
        """Take the node out of every quorum, under a random id, if it still is what was seen.

        `floor` is the least that other nodes know for its index.

        Cancellation: as of `step`.

        Raises:
            NodeRejectedError: as of `step`; or the node is not what was seen any more, and is left as it is.
        """
        found = self.look.found
        assert found is not None, "only a node that was examined can be changed"
        before = found.identity
        answer = await self.step(
            "quarantine",
            *((before.admission, before.run_id) if before else ("", "")),
            *(quarantine, phase.value),
            *(seat.cluster_id, seat.index, seat.node_count, seat.ttl_ms_max),
            *(found.run_id, floor, "0" if found.durability_gap else "1"),
        )
        if answer != "quarantined":
            raise NodeRejectedError(
                f"{self.look.name}: a server or another operator has changed it meanwhile; look, and repeat"
            )

    async def reserve_floor(self, floor: int) -> bool:
        """Reserve a floor in the quarantine that was seen; tell whether no other driver was faster.

        Cancellation, Raises: as of `step`.
        """
        return await self.step("reserve_floor", self.identity.admission, floor) == "reserved"

    async def raise_floor(self, process: AdminConnection, floor: int, *, admission: str) -> bool:
        """Raise the floor of another index to the one that the process there has reserved; tell whether this node did.

        This node takes the new `admission` id, if it still has the one that was seen.

        Cancellation, Raises: as of `step`.
        """
        fence = (process.look.index, floor, process.identity.admission)
        return await self.step("raise_floor", self.identity.admission, admission, *fence) == "raised"

    async def restore_vote(
        self, *, quarantine: str, admission: str, floor: int, floors: Sequence[int], lives: Sequence[str] = ()
    ) -> bool:
        """Give the node its vote, and tell it the least floor of each node index.

        Return whether it was still in that quarantine, with that floor reserved.

        Cancellation, Raises: as of `step`.
        """
        found = self.look.found
        assert found is not None, "only a node that was examined can be changed"
        durable = "0" if found.durability_gap else "1"
        process = (found.run_id, durable, found.evicted)
        answer = await self.step(
            "restore_vote", quarantine, admission, floor, *process, *floors, *(lives or [""] * len(floors))
        )
        return answer == "restored"


async def visit(index: int, url: NodeUrl, stack: AsyncExitStack, visiting: AdminSettings) -> AdminConnection:
    """Examine one node; the look tells if it could not be examined. The connection ends with the stack.

    Cancellation: nothing stays open but what is on the stack.
    """
    try:
        node = await visiting.dial(url, timeout_ms=visiting.dial_timeout_ms)
        stack.push_async_callback(node.close)
        found = await node_examination.examine(node, visiting.keys, visiting.clock)
    except DialError as error:
        return AdminConnection(NodeSnapshot(index, url.address, None, str(error), error), None, visiting)
    except OSError as error:  # this machine refuses another file
        return AdminConnection(NodeSnapshot(index, url.address, None, str(error)), None, visiting)
    return AdminConnection(NodeSnapshot(index, url.address, found), node, visiting)


@asynccontextmanager
async def visits(
    urls: Sequence[NodeUrl], visiting: AdminSettings, *, but: int | None = None
) -> AsyncIterator[Sequence[AdminConnection]]:
    """Examine every node at once, but for one index, and keep the connections within `async with`.

    Cancellation: nothing stays open.
    """
    async with AsyncExitStack() as stack:
        yield await asyncio.gather(
            *(visit(index, url, stack, visiting) for index, url in enumerate(urls) if index != but)
        )
