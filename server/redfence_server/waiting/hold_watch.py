"""What the waiters of a resource know of the hold they wait for, and when another try is worth its while. Pure.

A refused attempt tells which nodes hold the lock, with which token and for how long. A notice tells that a node holds it no
more. A try makes sense as soon as a quorum of nodes may be free: each granted, has not answered yet, has told of the end, or
holds a lease whose time is up. All of this is a hint, and the next mint decides. So an error costs one try too many, or a
wait until the time is up.

A notice counts for the hold that was seen and not for an older one, because tokens only grow on a node.
"""

from __future__ import annotations

from dataclasses import replace

from redfence_server.locking import quorum
from redfence_server.locking.node import Held, Notice
from redfence_server.locking.tally import Refusal

# Nodes count in whole milliseconds and end a key in the one after its last.
_ROUNDING_MS = 2
# Nodes that end a hold within this are waited for together. A try in between is granted by some and refused by others; if a
# node that was to decide it is silent by then, it costs a node timeout.
_SPREAD_MS = 50


class HoldWatch:
    """What one server knows of the hold of one resource. In the beginning it knows nothing: a try is worth its while."""

    def __init__(self, node_count: int) -> None:
        self._node_count = node_count
        self._blocking_tokens: dict[int, int] = {}  # the token of the hold in the way, by node
        self._ended_tokens: dict[
            int, int
        ] = {}  # the token of the last hold of which a notice told the end, by node
        self._silent_count = 0
        self._hold: Held | None = None
        self.try_at_ms = 0.0
        """When a try is worth its while at the latest: the time of the hold is up."""

    def refused(self, refusal: Refusal, now_ms: float) -> None:
        """Learn from an attempt that was refused just now."""
        holds = [hold for _, hold in refusal.held]
        self._blocking_tokens = {node: hold.token for node, hold in refusal.held}
        self._silent_count = len(refusal.silent)
        majority = quorum.majority(self._node_count)
        self._hold = quorum.present_hold(holds, quorum=majority)
        missing = majority - (self._node_count - self._silent_count - len(holds))
        remaining = sorted(hold.remaining_ms for hold in holds)
        # Nothing is in the way of a quorum if the holds ended between mint and commit.
        wait_ms = remaining[min(missing, len(remaining)) - 1] if missing > 0 and remaining else 0
        if remaining and remaining[-1] - wait_ms <= _SPREAD_MS:
            wait_ms = remaining[-1]
        self.try_at_ms = now_ms + wait_ms + _ROUNDING_MS

    def granted(self, *, digest: str, holder: str, token: int, ends_at_ms: float) -> None:
        """Learn from a lease that this server granted."""
        self._blocking_tokens = dict.fromkeys(range(self._node_count), token)
        self._silent_count = 0
        self._hold = Held(digest, token, holder, 0)
        self.try_at_ms = ends_at_ms + _ROUNDING_MS

    def renewed(self, digest: str, ends_at_ms: float) -> None:
        """Learn from a lease that this server renewed."""
        if digest == self.digest:
            self.try_at_ms = max(self.try_at_ms, ends_at_ms + _ROUNDING_MS)

    def ended(self, notice: Notice) -> None:
        """Learn from a notice of an end."""
        self._ended_tokens[notice.node] = notice.token

    @property
    def may_be_free(self) -> bool:
        """Tell whether a quorum of nodes may be free although the time of the hold is not up."""
        blocking = sum(
            self._ended_tokens.get(node, 0) < token for node, token in self._blocking_tokens.items()
        )
        return self._node_count - self._silent_count - blocking >= quorum.majority(self._node_count)

    @property
    def digest(self) -> str:
        """Of the lease that holds the lock, as far as is known; empty if none is known."""
        return self._hold.digest if self._hold else ""

    def current(self, now_ms: float) -> Held | None:
        """Return the hold, as last seen."""
        if self._hold is None:
            return None
        return replace(self._hold, remaining_ms=max(0, int(self.try_at_ms - _ROUNDING_MS - now_ms)))
