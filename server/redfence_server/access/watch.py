"""End a stream when the credentials of its caller are not valid any more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, Self

from redfence_server.access.guard import Caller, Guard, ignore
from redfence_server.errors import UnauthenticatedError

# The clock may be set, and the loop takes no timer of a year.
_LOOK_AGAIN_MS: Final = 3_600_000.0


class CredentialWatch:
    """Within `with`, calls `end` once the caller's credentials expire, or a reload makes them invalid.

    If the clock is set, the next command of the stream finds it out.
    """

    def __init__(self, guard: Guard, caller: Caller, *, end: Callable[[UnauthenticatedError], None]) -> None:
        self._guard = guard
        self._caller = caller
        self._end = end
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> Self:
        """Begin to watch."""
        self._caller.on_invalid = self._end
        self._guard.watched.add(self._caller)
        self._set_timer()
        return self

    def __exit__(self, *_: object) -> None:
        """Watch no more."""
        self._guard.watched.discard(self._caller)
        # Otherwise the caller and the stream would refer to each other: a cycle.
        self._caller.on_invalid = self._end = ignore
        if self._timer is not None:
            self._timer.cancel()

    def _set_timer(self) -> None:
        delay_ms = min(max(self._caller.valid_for_ms, 0.0), _LOOK_AGAIN_MS)
        self._timer = asyncio.get_running_loop().call_later(delay_ms / 1000, self._on_timer)

    def _on_timer(self) -> None:
        self._caller.end_if_invalid()
        if self._caller.valid_for_ms > 0:
            self._set_timer()
