"""A world on a loop of its own, lived through to its end."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, MutableMapping
from typing import Any, NoReturn, Protocol, TypeVar

import structlog

from harness.simulation.history import History
from harness.simulation.processes import ProcessLoop


class Living(Protocol):
    """A world that can be lived through."""

    history: History

    async def run(self) -> None: ...


W = TypeVar("W", bound=Living)


def live(make: Callable[[], W], *, hang_s: float) -> W:
    """Make a world on a loop of its own and live through it; defects of the product are in its history."""
    loop = ProcessLoop()
    asyncio.set_event_loop(loop)
    defects: list[str] = []
    loop.set_exception_handler(lambda _, about: defects.append(f"defect: {about.get('exception') or about}"))

    def note_defect(_: Any, __: str, event: MutableMapping[str, Any]) -> NoReturn:
        if event["event"] == "internal_error":
            defects.append(f"defect: {event}")
        raise structlog.DropEvent

    async def run() -> W:
        world = make()
        try:
            async with asyncio.timeout(hang_s):
                await world.run()
        except TimeoutError:
            world.history.problem("P: something hangs")
        return world

    structlog.configure(processors=[note_defect], cache_logger_on_first_use=False)
    # The collection at the end looks at this world only, and not at every module.
    gc.disable()
    gc.freeze()
    try:
        world = loop.run_until_complete(run())
    finally:
        loop.bury()
        loop.close()
        asyncio.set_event_loop(None)
        # A world is large, and most of it is in reference cycles.
        gc.collect()
        gc.unfreeze()
        gc.enable()
        structlog.reset_defaults()
    world.history.problems += defects
    return world
