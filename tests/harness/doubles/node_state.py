"""Simulates a node in memory: the scripts of lua/ as a state machine, without clock, I/O or chance.

tests/contract compares it with real nodes, script by script.
"""

from __future__ import annotations

from dataclasses import replace

from harness.doubles import membership_scripts
from harness.doubles.joining_commands import JoiningAnswer, JoiningCommand
from harness.doubles.node_memory import ADMITTED, Counter, Hold, NodeMemory
from redfence_server.locking.node import (
    Command,
    Commit,
    ForceRelease,
    Granted,
    Held,
    Inspect,
    Mint,
    NoReply,
    Release,
    Renew,
    Renewed,
    Reply,
    Status,
    Undo,
)

TOKENS_END = 2**53
"""The first number that no node mints."""
NOTIFY_MAX = 64
"""The greatest number of other servers that a node tells of the end of one hold."""


class FakeNodeState(NodeMemory):
    """The memory of one node, and the scripts that change it."""

    def join(self, command: JoiningCommand, now_ms: float = 0.0) -> JoiningAnswer:
        """Carry out one script over a connection that admits no server."""
        return membership_scripts.join(self, command, now_ms)

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
                hold = _live(hold, digest, now_ms)
                if hold is None or hold.token <= self.waited_floor:
                    _, until_ms = self.forced.get(digest, (0, -1.0))
                    return Status.FORCED if now_ms <= until_ms else Status.NOT_HELD
                life_ms = hold.ttl_ms + hold.lock_delay_ms
                self.holds[resource] = replace(hold, expires_at_ms=now_ms + life_ms)
                return Renewed(hold.token, hold.ttl_ms)
            case ForceRelease(resource, digest, _, token):
                hold = _live(hold, digest, now_ms)
                if hold is None or hold.token > token:
                    return Status.NOT_HELD
                self.forced[digest] = token, now_ms + hold.ttl_ms
                self._force(resource, hold, now_ms)
                return Status.RELEASED
            case Release(resource, digest):
                if hold is None or hold.digest != digest:
                    return Status.NOT_HELD
                self._end(resource, hold)
                return Status.NOT_HELD if hold.is_closed(now_ms) else Status.RELEASED
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
        is_closed = hold is not None and hold.is_closed(now_ms)
        if hold is not None and not handed_over and (hold.digest != mint.digest or is_closed):
            if mint.watch_blocking_hold and channel not in hold.notify and len(others) < NOTIFY_MAX:
                self.holds[mint.resource] = replace(hold, notify=(*hold.notify, channel))
            return _held(hold, now_ms)
        expires_at_ms = now_ms + mint.ttl_ms + mint.lock_delay_ms
        if hold is not None and not handed_over and not is_older:
            notify = (*others, channel) if mint.watch_own_hold else hold.notify
            self.holds[mint.resource] = replace(
                hold,
                shared=True,
                ttl_ms=mint.ttl_ms,
                expires_at_ms=expires_at_ms,
                notify=notify,
                lock_delay_ms=mint.lock_delay_ms,
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
            *(mint.digest, mint.nonce, is_older, token, mint.holder, mint.ttl_ms, expires_at_ms, notify),
            mint.lock_delay_ms,
        )
        contended, released = bool(others), handed_over and not is_closed
        return Granted(mint.nonce, token, contended, released=released, admission_id=self.admission)

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

    def _force(self, resource: str, hold: Hold, now_ms: float) -> None:
        if not hold.lock_delay_ms:
            self._end(resource, hold)
            return
        self.holds[resource] = replace(hold, expires_at_ms=now_ms + hold.lock_delay_ms)
        self.published += [(channel, resource, 0) for channel in hold.notify]

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


def _live(hold: Hold | None, digest: str, now_ms: float) -> Hold | None:
    return hold if hold is not None and hold.digest == digest and not hold.is_closed(now_ms) else None


def _held(hold: Hold, now_ms: float) -> Held:
    left_ms = max(0, int(hold.expires_at_ms - now_ms))
    return Held(hold.digest, hold.token, hold.holder, left_ms, hold.lock_delay_ms)
