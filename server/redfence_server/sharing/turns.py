"""Let commands begin in small parts and in fair turns, so that a peer with thousands delays no other one."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

COMMANDS_PER_PART: Final = 16
"""A stream asks for a turn for so many commands at once."""
# How many commands may begin in one turn of the event loop, and at how many unanswered ones at a quorum of
# nodes no more begin. A command takes about 0.1 ms. Higher: a burst of one peer delays the others. Lower: the
# server writes more and smaller messages; 256 workers on 4 machines lose 15 % of their rate (`fast`: 40 %).
_USUAL: Final = (256, 512)
_BESIDE_A_BURST: Final = (16, 48)
# A peer with so many commands unanswered or waiting sends a burst.
_BURST: Final = 512
# For so long after a command of another peer beside a burst the second pair counts.
_BURST_S: Final = 1.0
# So many more may begin in a turn for peers that do not wait yet.
_NEWCOMERS_PER_TURN: Final = 64
# How long to wait if the nodes have no room: they answer a command in about that time.
_RETRY_S: Final = 0.001


def _always(_: int) -> bool:
    return True


def _none_of(_: str) -> int:
    return 0


class Turns:
    """Lets few commands begin in one turn of the event loop, and none while the nodes have no room.

    The others follow: peer by peer, a part of each, and for each peer in the order in which they came. A peer
    without waiting commands begins at once, once in a turn, so that it does not notice the others.

    Args:
        has_room: tells whether a quorum of nodes has fewer unanswered commands than this.
        unanswered_of: returns how many commands of a peer are unanswered.
    """

    def __init__(
        self, has_room: Callable[[int], bool] = _always, unanswered_of: Callable[[str], int] = _none_of
    ) -> None:
        self._has_room = has_room
        self._unanswered_of = unanswered_of
        self._per_turn, self._unanswered_max = _USUAL
        self._left = self._per_turn
        self._last_peer = ""
        self._burst_until = 0.0
        # In the order of the peers' next turns.
        self._waiting: dict[str, deque[tuple[asyncio.Future[None], int]]] = {}
        self._loop = asyncio.get_running_loop()
        self._begun: set[str] = set()
        self._counts = False

    async def begin(self, peer: str, count: int = 1) -> None:
        """Return when the peer may begin so many commands, at most `COMMANDS_PER_PART`.

        Cancellation: the commands give up their place.
        """
        if peer != self._last_peer:
            self._note_other(peer)
        if not self._counts:
            self._counts = True
            self._loop.call_soon(self._next)
        if self._left > 0 and not self._waiting and self._has_room(self._unanswered_max):
            self._left -= count
            return
        if peer not in self._waiting and peer not in self._begun and self._left > -_NEWCOMERS_PER_TURN:
            self._begun.add(peer)
            self._left -= count
            return
        place: asyncio.Future[None] = self._loop.create_future()
        self._waiting.setdefault(peer, deque()).append((place, count))
        await place

    def _note_other(self, peer: str) -> None:
        if self._sends_burst(self._last_peer) or self._sends_burst(peer):
            self._burst_until = self._loop.time() + _BURST_S
            self._per_turn, self._unanswered_max = _BESIDE_A_BURST
            self._left = min(self._left, self._per_turn)
        self._last_peer = peer

    def _sends_burst(self, peer: str) -> bool:
        return len(self._waiting.get(peer, ())) >= _BURST or self._unanswered_of(peer) >= _BURST

    def _next(self) -> None:
        if self._per_turn < _USUAL[0] and self._loop.time() >= self._burst_until:
            self._per_turn, self._unanswered_max = _USUAL
        self._left = self._per_turn
        self._begun.clear()
        while self._waiting and self._left > 0 and self._has_room(self._unanswered_max):
            peer = next(iter(self._waiting))
            places = self._waiting.pop(peer)
            self._begun.add(peer)
            part = COMMANDS_PER_PART
            while places and part > 0:
                place, count = places.popleft()
                if not place.done():
                    place.set_result(None)
                    part -= count
            self._left -= COMMANDS_PER_PART - part
            if places:
                self._waiting[peer] = places
        self._counts = bool(self._waiting)
        if self._left == self._per_turn and self._counts:
            self._loop.call_later(_RETRY_S, self._next)
        elif self._counts:
            self._loop.call_soon(self._next)
