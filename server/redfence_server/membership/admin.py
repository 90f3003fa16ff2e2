"""Examine one node over a separate connection, and take the steps that change its identity.

Lock servers and operators' commands take the same steps: take the vote away, reserve a floor, raise a floor,
restore the vote. No step lets a server in; membership/admission.py decides whether a node may vote.
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
    """The last findings of the node at one index; `problem` and `error` say why its examination failed.

    `error` is None if this machine is the cause.
    """

    index: int
    address: str
    found: Findings | None
    problem: str = ""
    error: DialError | None = None

    @property
    def name(self) -> str:
        """The node's name in messages."""
        return f"node {self.index} ({self.address})"

    def refuse_strangers(self) -> None:
        """Refuse a node without an identity that holds keys: another program may have written them.

        Raises:
            NodeRejectedError: this is such a node.
        """
        if self.found is not None and self.found.identity is None and self.found.key_count:
            raise NodeRejectedError(
                f"{self.name}: it has no cluster identity and yet holds {self.found.key_count} keys: "
                "if no program needs them, empty it (FLUSHALL), and repeat"
            )


@dataclass(frozen=True, slots=True)
class NodeAssignment:
    """The index of a node in a cluster, as its new identity will show it."""

    cluster_id: str
    index: int
    node_count: int
    ttl_ms_max: int


@dataclass(frozen=True, slots=True)
class AdminSettings:
    """The admin connections of one command or server share these; `dial_timeout_ms` bounds each command."""

    keys: scripts.Keyspace
    dial_timeout_ms: int
    clock: Clock = field(default_factory=SystemClock)
    dial: Dial = dial


class AdminConnection:
    """Changes the identity of one node; the connection `node` is None if the first examination failed."""

    def __init__(self, snapshot: NodeSnapshot, node: DialledNode | None, settings: AdminSettings) -> None:
        self.snapshot = snapshot
        self.node = node
        self._settings = settings

    @property
    def identity(self) -> Identity:
        """The identity in the last findings; the node must have one."""
        assert self.snapshot.found is not None, "only a node that was examined shows an identity"
        assert self.snapshot.found.identity is not None, "only a node that was formed has an identity"
        return self.snapshot.found.identity

    async def refresh(self) -> None:
        """Examine the node again.

        Cancellation: nothing is changed.
        """
        if self.node is None:
            return
        try:
            found = await node_examination.examine(self.node, self._settings.keys, self._settings.clock)
        except DialError as error:
            self.snapshot = replace(self.snapshot, found=None, problem=str(error), error=error)
        else:
            self.snapshot = replace(self.snapshot, found=found)

    async def step(self, script: str, *arguments: str | int) -> str:
        """Run a script that changes the node's identity, and return the first word of its answer.

        Cancellation: it may have taken effect.

        Raises:
            NodeRejectedError: the connection broke, or the node refused; the script may have taken effect.
        """
        assert self.node is not None, "only a node that was examined can be changed"
        keys = self._settings.keys
        try:
            answer = await self.node.command(
                "EVAL", scripts.load(script), 2, keys.node, keys.high, *arguments
            )
        except DialError as error:
            raise NodeRejectedError(f"{self.snapshot.name}: {error}") from error
        return str(answer[0].decode())

    async def take_vote(
        self, assigned: NodeAssignment, *, phase: Phase, quarantine: str, floor: int = 0
    ) -> None:
        """Take the node out of every quorum, under a random id, if it has not changed since its examination.

        `floor` is the least that other nodes know for its index. Cancellation: as of `step`.

        Raises:
            NodeRejectedError: as of `step`; or the node has changed, and stays as it is.
        """
        found = self.snapshot.found
        assert found is not None, "only a node that was examined can be changed"
        before = found.identity
        answer = await self.step(
            "quarantine",
            *((before.admission, before.run_id) if before else ("", "")),
            *(quarantine, phase.value),
            *(assigned.cluster_id, assigned.index, assigned.node_count, assigned.ttl_ms_max),
            *(found.run_id, floor, "0" if found.durability_gap else "1"),
        )
        if answer != "quarantined":
            raise NodeRejectedError(
                f"{self.snapshot.name}: an operator or server changed it meanwhile; run the command again"
            )

    async def reserve_floor(self, floor: int) -> bool:
        """Reserve a floor in the node's quarantine, and tell whether no other driver was faster.

        Cancellation, Raises: as of `step`.
        """
        return await self.step("reserve_floor", self.identity.admission, floor) == "reserved"

    async def raise_floor(self, process: AdminConnection, floor: int, *, admission: str) -> bool:
        """Raise the floor of another index to the reserved floor of its process; tell whether it worked.

        This node takes the new `admission` id, if its present one is still the one in its snapshot.

        Cancellation, Raises: as of `step`.
        """
        fence = (process.snapshot.index, floor, process.identity.admission)
        return await self.step("raise_floor", self.identity.admission, admission, *fence) == "raised"

    async def restore_vote(
        self,
        *,
        quarantine: str,
        admission: str,
        floor: int,
        floors: Sequence[int],
        fence_ids: Sequence[str] = (),
    ) -> bool:
        """Give the node its vote, and write the least floor of each node index to it.

        Return whether it was still in that quarantine, with that floor reserved.

        Cancellation, Raises: as of `step`.
        """
        found = self.snapshot.found
        assert found is not None, "only a node that was examined can be changed"
        durable = "0" if found.durability_gap else "1"
        process = (found.run_id, durable, found.evicted)
        answer = await self.step(
            "restore_vote",
            quarantine,
            admission,
            floor,
            *process,
            *floors,
            *(fence_ids or [""] * len(floors)),
        )
        return answer == "restored"


async def connect(
    index: int, url: NodeUrl, stack: AsyncExitStack, settings: AdminSettings
) -> AdminConnection:
    """Connect to one node and examine it; its snapshot says why that failed. The stack ends the connection.

    Cancellation: only connections on the stack stay open.
    """
    try:
        node = await settings.dial(url, timeout_ms=settings.dial_timeout_ms)
        stack.push_async_callback(node.close)
        found = await node_examination.examine(node, settings.keys, settings.clock)
    except DialError as error:
        return AdminConnection(NodeSnapshot(index, url.address, None, str(error), error), None, settings)
    except OSError as error:  # this machine refuses another file
        return AdminConnection(NodeSnapshot(index, url.address, None, str(error)), None, settings)
    return AdminConnection(NodeSnapshot(index, url.address, found), node, settings)


@asynccontextmanager
async def connect_all(
    urls: Sequence[NodeUrl], settings: AdminSettings, *, but: int | None = None
) -> AsyncIterator[Sequence[AdminConnection]]:
    """Connect to every node except index `but`, all at once; the connections end with `async with`.

    Cancellation: nothing stays open.
    """
    async with AsyncExitStack() as stack:
        yield await asyncio.gather(
            *(connect(index, url, stack, settings) for index, url in enumerate(urls) if index != but)
        )
