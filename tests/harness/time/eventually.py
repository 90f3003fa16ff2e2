"""Waiting for a condition, with a deadline: what tests do instead of sleeping."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


async def eventually(
    condition: Callable[[], object], *, timeout_s: float = 5.0, interval_s: float = 0.0
) -> None:
    """Return as soon as the condition holds; fail if it does not in time.

    An interval of 0 looks once per turn of the loop; use more when the condition costs something.
    """
    try:
        async with asyncio.timeout(timeout_s):
            while not condition():  # noqa: ASYNC110  (conditions of other processes set no event)
                await asyncio.sleep(interval_s)
    except TimeoutError:
        raise AssertionError(f"did not come true in {timeout_s:g} s") from None


async def all_set(*events: asyncio.Event, timeout_s: float = 30.0) -> None:
    """Return once all events are set."""
    async with asyncio.timeout(timeout_s):
        for event in events:
            await event.wait()
