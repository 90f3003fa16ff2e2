"""Estimate when a quorum of nodes may be free, so that a waiter's next try can succeed. Pure.

A refused attempt shows which nodes hold the lock, with which token and for how long. A notice shows that a
hold has ended on a node. A node may be free if it granted, has not answered, has sent a notice, or if the ttl
of its hold is over. All of this is only a hint: the next mint decides. So a wrong hint costs one try too
many, or a wait until the ttl ends.

A notice counts only for the hold with its token or an older one, because tokens only grow on a node.
"""

from __future__ import annotations

from dataclasses import replace

from redfence_server.locking import quorum
from redfence_server.locking.node import Held, NoReply, Notice
from redfence_server.locking.tally import Refusal

# A node counts in whole milliseconds, and ends a key in the millisecond after its last.
_ROUNDING_MS = 2
# The watch waits for all nodes if their holds end within this time. Some nodes would refuse a try in between;
# if a node that could decide it is silent, the try costs a node timeout.
_SPREAD_MS = 50


class HoldWatch:
    """Tracks what one server knows of the hold of one resource; before it knows anything, a try is due."""

    def __init__(self, node_count: int) -> None:
        self._node_count = node_count
        self._blocking_tokens: dict[int, int] = {}  # token of the blocking hold, by node
        self._ended_tokens: dict[int, int] = {}  # token of the last hold for which a notice came, by node
        self._silent_count = 0
        self._granted: set[int] = set()  # nodes that granted the last try that they answered
        self._hold: Held | None = None
        self._is_lost = False  # the lock delay of that lease keeps the lock closed
        self.try_at_ms = 0.0
        """When ttl and lock delay of the hold are over on a quorum, so that a try is due at the latest."""

    def refused(self, refusal: Refusal, now_ms: float) -> None:
        """Take the holds from an attempt that was refused just now."""
        holds = [hold for _, hold in refusal.held]
        self._blocking_tokens = {node: hold.token for node, hold in refusal.held}
        self._silent_count = len(refusal.silent)
        self._granted.difference_update(self._blocking_tokens, (node for node, _ in refusal.silent))
        self._granted.update(refusal.granted)
        # A node whose clock was set has granted too, but its vote did not count.
        self._granted.update(node for node, reason in refusal.silent if reason is NoReply.CLOCK_SET)
        majority = quorum.majority(self._node_count)
        self._hold = quorum.present_hold(holds, quorum=majority)
        self._is_lost = self._hold is not None and self._hold.closed
        missing = majority - (self._node_count - self._silent_count - len(holds))
        remaining = sorted(hold.remaining_ms for hold in holds)
        # No hold blocks a quorum if the holds ended between mint and commit.
        wait_ms = remaining[min(missing, len(remaining)) - 1] if missing > 0 and remaining else 0
        if remaining and remaining[-1] - wait_ms <= _SPREAD_MS:
            wait_ms = remaining[-1]
        self.try_at_ms = now_ms + wait_ms + _ROUNDING_MS

    def granted(
        self, *, digest: str, holder: str, token: int, ends_at_ms: float, lock_delay_ms: int = 0
    ) -> None:
        """Take the hold from a lease that this server granted; its ttl is over at `ends_at_ms`."""
        self._blocking_tokens = dict.fromkeys(range(self._node_count), token)
        self._silent_count = 0
        self._granted.clear()
        self._hold, self._is_lost = Held(digest, token, holder, 0, lock_delay_ms), False
        self.try_at_ms = ends_at_ms + lock_delay_ms + _ROUNDING_MS

    def answered_late(self, node: int, *, granted: bool) -> None:
        """Note the answer of a node to a try that the other nodes had refused before."""
        (self._granted.add if granted else self._granted.discard)(node)

    def renewed(self, digest: str, ends_at_ms: float) -> None:
        """Move the end of the hold if this server renewed its lease."""
        if self._hold is not None and digest == self._hold.digest:
            self.try_at_ms = max(self.try_at_ms, ends_at_ms + self._hold.lock_delay_ms + _ROUNDING_MS)

    def ended(self, notice: Notice) -> None:
        """Note that a hold has ended on a node."""
        self._ended_tokens[notice.node] = notice.token

    def is_news(self, notice: Notice) -> bool:
        """Return False if the node granted the last try that it answered: the undo of that try sent it.

        A node answers a try before it sends the notice of its undo.
        """
        return notice.node not in self._granted

    @property
    def may_be_free(self) -> bool:
        """Tell whether a quorum of nodes may be free before the ttl of the hold is over."""
        blocking = sum(
            self._ended_tokens.get(node, 0) < token for node, token in self._blocking_tokens.items()
        )
        return self._node_count - self._silent_count - blocking >= quorum.majority(self._node_count)

    @property
    def digest(self) -> str:
        """The digest of the lease that last held the lock; empty if none is known, or if it was lost."""
        return "" if self._hold is None or self._is_lost else self._hold.digest

    def current(self, now_ms: float) -> Held | None:
        """Return the hold as last seen, with the ttl that remains."""
        if self._hold is None:
            return None
        return replace(self._hold, remaining_ms=max(0, int(self.try_at_ms - _ROUNDING_MS - now_ms)))
