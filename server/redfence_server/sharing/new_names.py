"""Bound how many new names of resources each peer uses, because every node keeps a counter for each name."""

from __future__ import annotations

from typing import Final

from redfence_server.clock import Clock
from redfence_server.errors import TooManyNewResourcesError

# A server remembers at most twice as many names: 30 MB if each is as long as a name may be.
_RECENT_MAX: Final = 50_000
# A peer may use the new names of so many seconds at once. Higher: they delay others longer.
_BURST_S: Final = 2.0
_PEERS_MAX: Final = 10_000


class NewNames:
    """Allows each peer `per_second` new names, and twice as many at once; 0 allows any number.

    A name is new if no peer has used it lately at this server.

    Attributes:
        recent: names that need no check. It is public because each acquire looks here first.
        per_second: how many each peer may use; 0 for any number.
        refusals: how many times a peer asked for more.
    """

    def __init__(self, per_second: int, clock: Clock) -> None:
        self.recent: set[str] = set()
        self._before: set[str] = set()
        self.per_second = per_second
        self.refusals = 0
        self._clock = clock
        # By peer: how many names it may still use, and since when. The longest idle peer comes first.
        self._left: dict[str, tuple[float, float]] = {}

    def check(self, peer: str, name: str) -> None:
        """Return if the peer may use a name that is not in `recent`, and remember the name.

        Raises:
            TooManyNewResourcesError: the peer has used too many new names.
        """
        if self.per_second and name not in self._before and not self._spend(peer):
            self.refusals += 1
            raise TooManyNewResourcesError(self.per_second)
        if len(self.recent) >= _RECENT_MAX:
            self._before, self.recent = self.recent, set()
        self.recent.add(name)

    def _spend(self, peer: str) -> bool:
        now_ms, most = self._clock.now_ms(), self.per_second * _BURST_S
        left, since_ms = self._left.pop(peer, (most, now_ms))
        left = min(most, left + (now_ms - since_ms) / 1000 * self.per_second)
        self._left[peer] = (left - 1 if left >= 1 else left, now_ms)
        if len(self._left) > _PEERS_MAX:
            del self._left[next(iter(self._left))]
        return left >= 1
