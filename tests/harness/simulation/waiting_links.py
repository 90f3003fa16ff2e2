"""The parts of a waiting world: seeded chance, and connections that it delays, breaks and silences."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from harness.doubles.fake_node import FakeNode, FakeNodeState, _Call, _Push
from harness.time.virtual_loop import LoopClock
from redfence_server.locking.node import Command, Mint, NoReply, Reply
from redfence_server.nodes.replay_queue import ReplayQueue

NODE_TIMEOUT_S = 0.1
LATENCIES_S = (0.0002, 0.0005, 0.002)


def now_ms() -> float:
    """Return the present virtual instant."""
    return LoopClock().now_ms()


class Chance(random.Random):
    """Seeded randomness, the product's as well."""

    def hex_id(self) -> str:
        """Return 128 seeded bits as 32 lower-case hex digits."""
        return f"{self.getrandbits(128):032x}"


class Link(FakeNode):
    """One server's connection to one node, with latency and a node timeout. It replays as a `NodeLink` does.

    Both ways keep their order, as a connection does.
    """

    def __init__(
        self,
        index: int,
        *,
        state: FakeNodeState,
        channel: str,
        chance: Chance,
        on_mint: Callable[[str], None],
    ) -> None:
        """Connect.

        Args:
            index: of the node.
            state: the node's memory, which other servers share.
            channel: where the server listens.
            chance: decides on each latency.
            on_mint: is told the digest of each mint as it is sent.
        """
        super().__init__(index, now_ms=now_ms, state=state, channel=channel)
        self.hold_requests = self.hold_replies = True  # until their time comes
        self._chance = chance
        self._on_mint = on_mint
        self._silent = False
        self._kept = ReplayQueue()
        self._there_at_s = 0.0
        self._back_at_s = 0.0

    # --- LockNode ---------------------------------------------------------------------------------

    def send(self, command: Command, on_reply: Callable[[Reply], None] | None = None) -> bool:
        """Carry out `command` after a latency, and tell its sender no later than the node timeout."""
        if isinstance(command, Mint):
            self._on_mint(command.digest)

        def tell(reply: Reply) -> None:
            if isinstance(reply, NoReply):
                self._kept.keep(command)
            if on_reply is not None:
                on_reply(reply)

        sent = super().send(command, tell)
        if sent:
            loop = asyncio.get_running_loop()
            loop.call_later(NODE_TIMEOUT_S, self._requests[-1].tell, NoReply.TIMED_OUT)
            self._there_at_s = self._after(self._there_at_s)
            loop.call_at(self._there_at_s, self._arrive)
        return sent

    def _arrive(self) -> None:
        if not self._silent:
            self.deliver()

    def _send_back(self, message: _Call | _Push) -> None:
        super()._send_back(message)
        self._back_at_s = self._after(self._back_at_s)
        asyncio.get_running_loop().call_at(self._back_at_s, self.answer)

    def _after(self, last_s: float) -> float:
        return max(last_s + 1e-7, asyncio.get_running_loop().time() + self._chance.choice(LATENCIES_S))

    # --- the network ------------------------------------------------------------------------------

    def cut(self) -> None:
        """Lose the connection and whatever is under way."""
        self.unreachable = True
        self.break_connection()

    def fall_silent(self) -> None:
        """Deliver nothing for now; what was applied is still answered."""
        self._silent = True

    def lose_all_notices(self) -> None:
        """Let no notice arrive for now."""
        self.lose_notices = True

    def heal(self) -> None:
        """End every fault: what was held up arrives, and after a cut what was kept for the node is sent."""
        self.lose_notices = False
        if self._silent:
            self._silent = False
            self.deliver(len(self._requests))
        if self.unreachable:
            self.unreachable = False
            for command in self._kept.take(now_ms=now_ms()):
                self.send(command)
