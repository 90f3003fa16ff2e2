"""A `LockNode` in memory, whose network the test holds in its hand."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from harness.doubles.node_memory import Published
from harness.doubles.node_state import FakeNodeState
from redfence_server.locking.attempt import Attempt, AttemptOutcome
from redfence_server.locking.node import Command, NodeReport, NodeState, NoReply, Notice, Reply, Status
from redfence_server.locking.redlock import Order, Redlock, begun


async def attempt(lock: Redlock, order: Order) -> AttemptOutcome:
    """Try once to grant a lease; cancelled, give the attempt up."""
    return await outcome_of(lock.begin(order))


async def outcome_of(attempt: Attempt) -> AttemptOutcome:
    """Return the outcome of an attempt under way; cancelled, give it up."""
    if attempt.outcome is None:
        try:
            await begun(lambda tell: setattr(attempt, "on_outcome", tell))
        except asyncio.CancelledError:
            attempt.give_up()
            raise
    assert attempt.outcome is not None
    return attempt.outcome


@dataclass(slots=True)
class _Call:
    """One command on its way to the node and back; its sender is told once."""

    command: Command
    on_reply: Callable[[Reply], None] | None
    reply: Reply | None = None

    def tell(self, reply: Reply) -> None:
        on_reply, self.on_reply = self.on_reply, None
        if on_reply is not None:
            on_reply(reply)


@dataclass(slots=True)
class _Push:
    """A notice on its way to a server, among the replies."""

    notice: Notice
    on_notice: Callable[[Notice], None]
    reply: Reply | None = Status.KEPT

    def tell(self, reply: Reply) -> None:
        if not isinstance(reply, NoReply):
            self.on_notice(self.notice)


class FakeNode:
    """One server's `LockNode` in memory; several servers may share one state.

    It applies and answers every command in the next turns of the loop. `hold_requests` and
    `hold_replies` keep messages back until `deliver` and `answer`; both ways keep the order.

    Attributes:
        sent: every command it was given, in order, also those that were lost.
    """

    def __init__(
        self,
        index: int,
        *,
        now_ms: Callable[[], float],
        state: FakeNodeState | None = None,
        channel: str = "here",
    ) -> None:
        self.index = index
        self.state = state if state is not None else FakeNodeState()
        self.state.subscribers.append(self._hear)
        self.channel = channel
        self._listeners: list[Callable[[Notice], None]] = []
        self.sent: list[Command] = []
        self.unreachable = False
        self.hold_requests = False
        self.hold_replies = False
        self._now_ms = now_ms
        self._requests: deque[_Call] = deque()
        self._replies: deque[_Call | _Push] = deque()

    # --- LockNode

    def send(self, command: Command, on_reply: Callable[[Reply], None] | None = None) -> bool:
        """Carry out `command`; see `LockNode`."""
        self.sent.append(command)
        call = _Call(command, on_reply)
        loop = asyncio.get_running_loop()
        if self.unreachable:
            loop.call_soon(call.tell, NoReply.UNREACHABLE)
            return False
        self._requests.append(call)
        if not self.hold_requests:
            loop.call_soon(self.deliver)
        return True

    def listen(self, on_notice: Callable[[Notice], None]) -> None:
        """Pass on the notices; see `LockNode`. Several servers may share one fake; each is told."""
        self._listeners.append(on_notice)

    def report(self) -> NodeReport:
        state = NodeState.UNREACHABLE if self.unreachable else NodeState.READY
        return NodeReport(f"fake:{self.index}", state, "", "run", None, 0.0)

    # --- the network

    def deliver(self, count: int = 1) -> None:
        for _ in range(min(count, len(self._requests))):
            call = self._requests.popleft()
            call.reply = self.state.apply(call.command, self._now_ms(), channel=self.channel)
            self._send_back(call)
            self._publish()

    def _publish(self) -> None:
        published, self.state.published = self.state.published, []
        for notice in published:
            for tell in self.state.subscribers:
                tell(notice)

    def _hear(self, published: Published) -> None:
        channel, resource, token = published
        if channel == self.channel and not self.unreachable:
            self._send_back(_Push(Notice(self.index, resource, token), self._notify))

    def _notify(self, notice: Notice) -> None:
        for listener in self._listeners:
            listener(notice)

    def _send_back(self, message: _Call | _Push) -> None:
        self._replies.append(message)
        if not self.hold_replies:
            asyncio.get_running_loop().call_soon(self.answer)

    def answer(self, count: int = 1) -> None:
        for _ in range(min(count, len(self._replies))):
            call = self._replies.popleft()
            assert call.reply is not None
            call.tell(call.reply)

    def time_out(self) -> None:
        """Tell every sender that nothing came in time. The commands go on and may be applied later."""
        for call in (*self._replies, *self._requests):
            call.tell(NoReply.TIMED_OUT)

    def break_connection(self) -> None:
        """Lose everything that is under way, either way, and tell the senders."""
        lost = (*self._replies, *self._requests)
        self._replies.clear()
        self._requests.clear()
        for call in lost:
            call.tell(NoReply.DISCONNECTED)

    def settle(self) -> None:
        """Heal the network: what was kept back arrives now, in order, and nothing is kept back any more."""
        self.hold_requests = self.hold_replies = False
        while self._requests or self._replies:
            self.deliver(len(self._requests))
            self.answer(len(self._replies))
