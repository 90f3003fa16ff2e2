"""What a node refused because it is to be looked at anew, and what came meanwhile: sent after the look, if it means the same then."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

from redfence_server.clock import Clock
from redfence_server.kept_commands import KeptCommands
from redfence_server.lock_node import LOOK_MS_MAX, Command, Inspect, Release, Renew, Reply, Silence, Undo

Repeatable: TypeAlias = Undo | Release | Renew | Inspect
"""What was minted, committed or vouched before a look must not count beside what comes after it (rejoin.py); these may be sent again."""
# Beyond it nothing more is deferred; whoever asks is told so at once.
_DEFERRED_MAX: Final = 10_000


@dataclass(slots=True, eq=False)
class Asked:
    """A command, and who waits for the answer.

    Attributes:
        on_reply: is told the answer exactly once.
        under: the admission id under which it was sent.
        changes_known: how many changes the node was known to have made when it was sent.
        until_ms: once it was deferred, when it is given up, however often it is deferred again.
    """

    command: Command
    on_reply: Callable[[Reply], None] | None
    under: str = ""
    changes_known: int = 0
    until_ms: float | None = None


class DeferredCommands:
    """Of one node. A look may take `LOOK_MS_MAX`; who has waited for so long is told NOT_ADMITTED."""

    def __init__(self, kept: KeptCommands, *, clock: Clock) -> None:
        """Begin without a look.

        Args:
            kept: takes what ends a hold and nobody waits for any longer.
            clock: the server's.
        """
        self._kept = kept
        self._clock = clock
        self._look_until_ms = 0.0
        self._timers: dict[Asked, asyncio.TimerHandle] = {}

    @property
    def is_looking(self) -> bool:
        """Whether a look is due or under way, and not for too long."""
        return self._clock.now_ms() < self._look_until_ms

    def begin_look(self) -> None:
        """Note that the node is to be looked at anew."""
        self._look_until_ms = self._clock.now_ms() + LOOK_MS_MAX

    def fail_look(self, why: Silence) -> None:
        """Give up whatever waits: the node does not take commands for now."""
        for asked in self.end_look():
            self._give_up(asked, why)

    def end_look(self) -> list[Asked]:
        """Return what waits, in its order, and keep it no longer."""
        self._look_until_ms = 0.0
        timers, self._timers = self._timers, {}
        for timer in timers.values():
            timer.cancel()
        return list(timers)

    def defer(self, asked: Asked) -> None:
        """Keep until the look has ended what can be sent then; of the rest, tell that it does not count."""
        loop = asyncio.get_running_loop()
        if not isinstance(asked.command, Repeatable) or len(self._timers) >= _DEFERRED_MAX:
            loop.call_soon(self._give_up, asked)
        elif asked.on_reply is None:
            self._kept.keep(asked.command)
        else:
            now_ms = self._clock.now_ms()
            if asked.until_ms is None:
                asked.until_ms = now_ms + LOOK_MS_MAX
            left_s = max(0.0, min(asked.until_ms, self._look_until_ms) - now_ms) / 1000
            self._timers[asked] = loop.call_later(left_s, self._give_up, asked)

    def _give_up(self, asked: Asked, why: Silence = Silence.NOT_ADMITTED) -> None:
        self._timers.pop(asked, None)
        if isinstance(asked.command, Repeatable):
            self._kept.keep(asked.command)
        if asked.on_reply is not None:
            asked.on_reply(why)
