"""A visit to one node without a server between: what an operator's command sees of it, and how it changes its identity.

A visit admits nobody: whether the node may vote is decided by every lock server for itself (node_admission.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace

from redfence_server import node_examination, scripts
from redfence_server.errors import NodeRejectedError
from redfence_server.node_examination import Findings, Identity, Phase
from redfence_server.redis_dial import DialError, DialledNode, NodeUrl, dial


@dataclass(frozen=True, slots=True)
class Look:
    """What was seen of the node at one place.

    Attributes:
        index: the place.
        found: None if the node could not be looked at.
        problem: why not.
        known: what it told before any of the nodes was judged. What it knows of the others is then no newer than what they show.
    """

    index: int
    address: str
    found: Findings | None
    problem: str = ""
    known: Identity | None = None

    @property
    def name(self) -> str:
        """How messages call it."""
        return f"node {self.index} ({self.address})"

    def refuse_strangers(self) -> None:
        """Refuse a node without an identity that holds keys: they may be anybody's.

        Raises:
            NodeRejectedError: it is one.
        """
        if self.found is not None and self.found.identity is None and self.found.key_count:
            raise NodeRejectedError(
                f"{self.name}: it has no cluster identity and yet holds {self.found.key_count} keys: if they are of no use to anybody, "
                "empty it (FLUSHALL), and repeat"
            )


@dataclass(frozen=True, slots=True)
class Seat:
    """What a node is told that it is: one of the nodes of a cluster."""

    cluster_id: str
    index: int
    node_count: int
    ttl_ms_max: int


@dataclass(frozen=True, slots=True)
class Visiting:
    """What the visits of one command have in common.

    Attributes:
        keys: the names of the keys on the nodes.
        dial_timeout_ms: how long each step of connecting, and each command, may take.
    """

    keys: scripts.Keyspace
    dial_timeout_ms: int


class Visit:
    """One node, looked at, and the connection to it if there is one."""

    def __init__(self, look: Look, node: DialledNode | None, keys: scripts.Keyspace) -> None:
        self.look = look
        self._node = node
        self._keys = keys

    async def look_again(self) -> None:
        """See what the node shows now; what it knew at the first look stays, unless it cannot be looked at any more.

        Cancellation: nothing is changed.
        """
        if self._node is None:
            return
        try:
            found = await node_examination.examine(self._node, self._keys)
        except DialError as error:
            self.look = replace(self.look, found=None, problem=_reason(error), known=None)
        else:
            self.look = replace(self.look, found=found)

    async def step(self, script: str, *arguments: str | int) -> str:
        """Carry out a script that changes the node's identity, and return the first word of its answer.

        Cancellation: it may or may not have been carried out.

        Raises:
            NodeRejectedError: the connection broke, or the node refused; it may or may not have been carried out.
        """
        assert self._node is not None, "only a node that was looked at can be changed"
        try:
            answer = await self._node.command(
                "EVAL", scripts.load(script), 2, self._keys.node, self._keys.high, *arguments
            )
        except DialError as error:
            raise NodeRejectedError(f"{self.look.name}: {_reason(error)}") from error
        return str(answer[0].decode())

    async def take_vote(self, seat: Seat, *, phase: Phase, quarantine: str, floor: int = 0) -> None:
        """Take the node out of every quorum, if it still is what was seen.

        Args:
            seat: what it is from now on, as before or for the first time.
            phase: the state to take.
            quarantine: random id under which it is out.
            floor: the least that the others were told of it.

        Cancellation: as of `step`.

        Raises:
            NodeRejectedError: as of `step`; or it is not what was seen any more, and is left as it is.
        """
        assert self.look.found is not None, "only a node that was looked at can be changed"
        before = self.look.found.identity
        answer = await self.step(
            "quarantine",
            *((before.admission, before.run_id) if before else ("", "")),
            *(quarantine, phase.value),
            *(seat.cluster_id, seat.index, seat.node_count, seat.ttl_ms_max),
            *(self.look.found.run_id, floor),
        )
        if answer != "quarantined":
            raise NodeRejectedError(
                f"{self.look.name}: it was changed by somebody else meanwhile, a server or another operator; look, and repeat"
            )


async def visit(index: int, url: NodeUrl, stack: AsyncExitStack, visiting: Visiting) -> Visit:
    """Look at one node; one that cannot be looked at is told in the look. The connection ends with the stack.

    Cancellation: nothing stays open but what is on the stack.
    """
    try:
        node = await dial(url, timeout_ms=visiting.dial_timeout_ms)
        stack.push_async_callback(node.close)
        found = await node_examination.examine(node, visiting.keys)
    except DialError as error:
        return Visit(Look(index, url.address, None, _reason(error)), None, visiting.keys)
    return Visit(Look(index, url.address, found, known=found.identity), node, visiting.keys)


@asynccontextmanager
async def visits(urls: Sequence[NodeUrl], visiting: Visiting) -> AsyncIterator[Sequence[Visit]]:
    """Look at every node at once, and keep the connections within `async with`.

    Cancellation: nothing stays open.
    """
    async with AsyncExitStack() as stack:
        visited = await asyncio.gather(
            *(visit(index, url, stack, visiting) for index, url in enumerate(urls))
        )
        # Under load a node shows more from one moment to the next, and another one knows of it at once.
        await asyncio.gather(*(each.look_again() for each in visited))
        yield visited


def _reason(error: DialError) -> str:
    # Some time-outs of the system have no text.
    return str(error) or "no answer in time"
