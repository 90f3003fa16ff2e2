"""A node in memory: the scripts of lua/ as a state machine, and a `LockNode` with a network of the test.

`FakeNodeState` has no clock, I/O or chance; tests/contract compares it with real nodes, script by script.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

from harness.doubles.joining_commands import (
    DistrustClock,
    Formation,
    JoiningAnswer,
    JoiningCommand,
    Quarantine,
    RaiseFloor,
    ReadIdentity,
    ReserveFloor,
    RestoreVote,
    Sight,
    Step,
)
from redfence_server.locking.node import (
    Command,
    Commit,
    Granted,
    Held,
    Inspect,
    Mint,
    NodeReport,
    NodeState,
    NoReply,
    Notice,
    Release,
    Renew,
    Renewed,
    Reply,
    Status,
    Undo,
)
from redfence_server.membership.examination import Identity, Phase
from redfence_server.redis_io.scripts import Keyspace

TOKENS_END = 2**53
"""The first number that no node mints."""
ADMITTED = "ad" * 16
"""The admission id of a node that nobody has disturbed."""
ALONE = Formation("cluster", index=0, node_count=1, max_ttl_ms=300_000)


@dataclass(frozen=True, slots=True)
class Hold:
    """What the `lock` key of one resource says; it is gone once the clock has passed `expires_at_ms`."""

    digest: str
    nonce: str
    shared: bool
    token: int
    holder: str
    ttl_ms: int
    expires_at_ms: float
    notify: tuple[str, ...] = ()


NOTIFY_MAX = 64
"""How many other servers are told of the end of one hold."""


@dataclass(frozen=True, slots=True)
class Counter:
    """What the `counter` key of one resource says, and when it is dropped as idle."""

    value: int
    expires_at_ms: float


class FakeNodeState:
    """The memory of one node. Keys end by the time of each call, or by `expire` and `drop_counter`.

    Attributes:
        admission: empty if there is no identity.
        published: the notices of the scripts: channel, resource and token. The deliverer empties the list.
        connections: every `FakeNode` over this memory.
    """

    def __init__(
        self,
        *,
        admission: str = ADMITTED,
        counter_idle_ms: float = float("inf"),
        formation: Formation = ALONE,
        run_id: str = "run",
        durable: bool = False,
    ) -> None:
        """Begin as a node that was just formed."""
        self.admission = admission
        self.counter_idle_ms = counter_idle_ms
        self.formation = formation
        self.phase = Phase.READY
        self.run_id = run_id
        self.durable = durable
        self.evicted = 0
        self.high: int | None = 0
        self.floor = self.voted_floor = self.reserved = self.waited_floor = 0
        self.distrusted_until_ms = 0
        self.known_floors: dict[int, int] = {}
        self.known_fences: dict[int, str] = {}
        self.holds: dict[str, Hold] = {}
        self.counters: dict[str, Counter] = {}
        self.published: list[tuple[str, str, int]] = []
        self.connections: list[FakeNode] = []

    def copy(self) -> Self:
        """Return a node with the same memory and a life of its own."""
        # Searches make millions of them, so nothing is set twice.
        twin = object.__new__(type(self))
        twin.counter_idle_ms = self.counter_idle_ms
        twin.published, twin.connections = [], []
        twin.restore(self)
        return twin

    # --- what the world does to it

    def expire(self, resource: str) -> None:
        self.holds.pop(resource, None)

    def drop_counter(self, resource: str) -> None:
        self.counters.pop(resource, None)

    def wipe(self) -> None:
        """Forget everything, the identity as well: nobody is admitted any more."""
        self.admission = self.run_id = ""
        self.high = None
        self.floor = self.voted_floor = self.reserved = self.waited_floor = 0
        self.evicted = self.distrusted_until_ms = 0
        for memory in (self.holds, self.counters, self.known_floors, self.known_fences):
            memory.clear()

    def save(self) -> Self:
        return self.copy()

    def restore(self, older: Self) -> None:
        """Remember what another node, or this one in an older state, does, and nothing else."""
        self.admission, self.formation, self.phase = older.admission, older.formation, older.phase
        self.run_id, self.durable, self.evicted = older.run_id, older.durable, older.evicted
        self.distrusted_until_ms = older.distrusted_until_ms
        self.high, self.floor, self.voted_floor = older.high, older.floor, older.voted_floor
        self.reserved, self.waited_floor = older.reserved, older.waited_floor
        self.known_floors, self.known_fences = older.known_floors.copy(), older.known_fences.copy()
        self.holds = older.holds.copy()
        self.counters = older.counters.copy()

    # --- what the scripts do that a visit runs

    def join(self, command: JoiningCommand, now_ms: float = 0.0) -> JoiningAnswer:
        """Carry out one script over a connection that admits nobody."""
        match command:
            case ReadIdentity():
                numbers = (self.high, self.distrusted_until_ms, self.waited_floor)
                return Sight(self._identity(), self._key_count(), *numbers)
            case Quarantine():
                return self._quarantine(command)
            case ReserveFloor():
                return self._reserve_floor(command)
            case RaiseFloor():
                return self._raise_floor(command)
            case RestoreVote():
                return self._restore_vote(command)
            case DistrustClock():
                return self._distrust_clock(command, now_ms)

    def _identity(self) -> Identity | None:
        if not self.admission:
            return None
        place = self.formation
        return Identity(
            *(place.cluster_id, place.index, place.node_count, place.max_ttl_ms),
            *(self.admission, self.run_id, self.durable, self.phase),
            *(self.floor, self.voted_floor, self.reserved, self.evicted),
            known_floors=self.known_floors.copy(),
            known_fences=self.known_fences.copy(),
        )

    def _key_count(self) -> int:
        return len(self.holds) + len(self.counters) + (self.high is not None) + (self.admission != "")

    def _is_without_vote(self, quarantine: str) -> bool:
        return self.admission != "" and self.admission == quarantine and self.phase is not Phase.READY

    def _quarantine(self, quarantine: Quarantine) -> Step:
        if (self.admission, self.run_id) != (quarantine.known.admission, quarantine.known.run_id):
            return Step.CHANGED
        if not self.admission and self._key_count():
            return Step.NOT_EMPTY
        if self.run_id != quarantine.run_id:
            self.evicted = 0
        self.formation, self.phase = quarantine.formation, quarantine.phase
        self.admission, self.run_id = quarantine.quarantine, quarantine.run_id
        self.durable, self.reserved = quarantine.durable, 0
        self.floor = max(self.floor, quarantine.floor)
        return Step.DONE

    def _reserve_floor(self, reserve: ReserveFloor) -> Step:
        if not self._is_without_vote(reserve.quarantine) or reserve.floor <= self.floor:
            return Step.CHANGED
        self.floor = self.reserved = reserve.floor
        return Step.DONE

    def _raise_floor(self, fence: RaiseFloor) -> Step:
        has_forgotten = self.high is None and self.phase is Phase.READY
        if not self.admission or self.admission != fence.known or has_forgotten:
            return Step.NOT_ADMITTED
        if (self.high or 0) >= fence.floor:
            return Step.GREATER
        self.high = self.known_floors[fence.index] = fence.floor
        self.known_fences[fence.index] = fence.quarantine
        if self.phase is Phase.READY:
            self.admission = fence.admission
        return Step.DONE

    def _restore_vote(self, restore: RestoreVote) -> Step:
        is_reserved = self.reserved != 0 and self.reserved == restore.floor
        if not self._is_without_vote(restore.quarantine) or not is_reserved:
            return Step.CHANGED
        if self.phase is not Phase.RESTARTED:
            self.waited_floor = restore.floor
        self.high, self.reserved = max(self.high or 0, restore.floor), 0
        self.voted_floor = restore.floor
        for index, (floor, fence_id) in enumerate(zip(restore.floors, restore.fence_ids, strict=True)):
            if floor > self.known_floors.get(index, 0):
                self.known_floors[index], self.known_fences[index] = floor, fence_id
                if not fence_id:
                    del self.known_fences[index]
        self.admission, self.phase = restore.admission, Phase.READY
        self.run_id, self.durable, self.evicted = restore.run_id, restore.durable, restore.evicted
        return Step.DONE

    def _distrust_clock(self, distrust: DistrustClock, now_ms: float) -> Step:
        if not self.admission or self.admission != distrust.known:
            return Step.NOT_ADMITTED
        left_ms = self.distrusted_until_ms - int(now_ms)
        if not distrust.left_ms <= left_ms <= distrust.most_ms:
            self.distrusted_until_ms = int(now_ms) + distrust.left_ms
        return Step.DONE

    # --- what the scripts do

    def apply(  # noqa: PLR0911  (one return per script)
        self, command: Command, now_ms: float, *, admission: str = ADMITTED, channel: str = "here"
    ) -> Reply:
        """Carry out one script at one instant, for a server with this admission id and channel."""
        if admission != self.admission:
            return NoReply.NOT_ADMITTED
        if self.high is None and isinstance(command, Mint | Commit):
            return NoReply.NOT_ADMITTED
        hold = self._hold(command.resource, now_ms)
        match command:
            case Mint():
                return self._mint(command, hold, now_ms, channel)
            case Commit():
                return self._commit(command, hold, now_ms)
            case Undo():
                return self._undo(command, hold)
            case Renew(resource, digest):
                if hold is None or hold.digest != digest or hold.token <= self.waited_floor:
                    return Status.NOT_HELD
                self.holds[resource] = replace(hold, expires_at_ms=now_ms + hold.ttl_ms)
                return Renewed(hold.token, hold.ttl_ms)
            case Release(resource, digest):
                if hold is None or hold.digest != digest:
                    return Status.NOT_HELD
                self._end(resource, hold)
                return Status.RELEASED
            case Inspect():
                is_free = hold is None or hold.token <= self.waited_floor
                return Status.FREE if hold is None or is_free else _held(hold, now_ms)

    def _mint(self, mint: Mint, hold: Hold | None, now_ms: float, channel: str) -> Reply:
        if hold is not None and hold.token <= self.waited_floor:
            hold = None
        is_older = hold is not None and hold.digest == mint.digest and hold.token <= self.floor
        handed_over = (
            hold is not None and mint.release_first is not None and hold.digest == mint.release_first.digest
        )
        others = tuple(each for each in hold.notify if each != channel) if hold else ()
        if hold is not None and not handed_over and hold.digest != mint.digest:
            if mint.watch_blocking_hold and channel not in hold.notify and len(others) < NOTIFY_MAX:
                self.holds[mint.resource] = replace(hold, notify=(*hold.notify, channel))
            return _held(hold, now_ms)
        expires_at_ms = now_ms + mint.ttl_ms
        if hold is not None and not handed_over and not is_older:
            notify = (*others, channel) if mint.watch_own_hold else hold.notify
            self.holds[mint.resource] = replace(
                hold, shared=True, ttl_ms=mint.ttl_ms, expires_at_ms=expires_at_ms, notify=notify
            )
            return Granted(hold.nonce, hold.token, contended=bool(others), admission_id=self.admission)
        assert self.high is not None, "an admitted node has a high"
        token = max(self._counted(mint.resource, now_ms), self.floor) + 1
        if token >= TOKENS_END:
            return NoReply.REFUSED
        if handed_over and hold is not None and hold.expires_at_ms > expires_at_ms:
            self.published += [(each, mint.resource, hold.token) for each in others]
        self._count(mint.resource, token, now_ms)
        notify = (*others, channel) if mint.watch_own_hold else others
        self.holds[mint.resource] = Hold(
            mint.digest, mint.nonce, is_older, token, mint.holder, mint.ttl_ms, expires_at_ms, notify
        )
        contended = bool(others)
        return Granted(mint.nonce, token, contended, released=handed_over, admission_id=self.admission)

    def _commit(self, commit: Commit, hold: Hold | None, now_ms: float) -> Reply:
        if hold is None or (hold.digest, hold.nonce) != (commit.digest, commit.nonce):
            return Status.LOST
        if hold.token < commit.token:
            self.holds[commit.resource] = replace(hold, token=commit.token)
        if self._counted(commit.resource, now_ms) < commit.token:
            self._count(commit.resource, commit.token, now_ms)
        return Status.COMMITTED

    def _undo(self, undo: Undo, hold: Hold | None) -> Reply:
        if hold is None or hold.nonce != undo.nonce or hold.shared:
            return Status.KEPT
        self._end(undo.resource, hold)
        return Status.UNDONE

    def _end(self, resource: str, hold: Hold) -> None:
        del self.holds[resource]
        self.published += [(channel, resource, hold.token) for channel in hold.notify]

    def _hold(self, resource: str, now_ms: float) -> Hold | None:
        hold = self.holds.get(resource)
        return None if hold is None or now_ms > hold.expires_at_ms else hold

    def _counted(self, resource: str, now_ms: float) -> int:
        assert self.high is not None, "an admitted node has a high"
        counter = self.counters.get(resource)
        return self.high if counter is None or now_ms > counter.expires_at_ms else counter.value

    def _count(self, resource: str, token: int, now_ms: float) -> None:
        assert self.high is not None, "an admitted node has a high"
        self.counters[resource] = Counter(token, now_ms + self.counter_idle_ms)
        self.high = max(self.high, token)

    # --- what it keeps

    def keys(self) -> dict[str, dict[str, str]]:
        """Return every key but the identity, each value as text, as a node would have them."""
        names = Keyspace()
        kept: dict[str, dict[str, str]] = {}
        for resource, hold in self.holds.items():
            kept[names.lock(resource)] = {
                "digest": hold.digest,
                "nonce": hold.nonce,
                "shared": str(int(hold.shared)),
                "token": str(hold.token),
                "holder": hold.holder,
                "ttl_ms": str(hold.ttl_ms),
                "notify": " ".join(hold.notify),
            }
        for resource, counter in self.counters.items():
            kept[names.counter(resource)] = {"": str(counter.value)}
        if self.high is not None:
            kept[names.high] = {"": str(self.high)}
        return kept


def _held(hold: Hold, now_ms: float) -> Held:
    return Held(hold.digest, hold.token, hold.holder, max(0, int(hold.expires_at_ms - now_ms)))


# --- the LockNode


class _Call:
    """One command on its way to the node and back; its sender is told once."""

    __slots__ = ("command", "on_reply", "reply")

    def __init__(self, command: Command, on_reply: Callable[[Reply], None] | None) -> None:
        self.command = command
        self.on_reply = on_reply
        self.reply: Reply | None = None

    def tell(self, reply: Reply) -> None:
        on_reply, self.on_reply = self.on_reply, None
        if on_reply is not None:
            on_reply(reply)


class _Push:
    """A notice on its way to a server, among the replies."""

    __slots__ = ("_notice", "_tell", "reply")

    def __init__(self, notice: Notice, tell: Callable[[Notice], None]) -> None:
        self._notice = notice
        self._tell = tell
        self.reply: Reply | None = Status.KEPT

    def tell(self, reply: Reply) -> None:
        if not isinstance(reply, NoReply):
            self._tell(self._notice)


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
        self.state.connections.append(self)
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
        for channel, resource, token in published:
            for each in self.state.connections:
                if each.channel == channel and not each.unreachable:
                    each._send_back(_Push(Notice(each.index, resource, token), each._notify))

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
