"""Spend little on memory: collect garbage rarely, and give freed memory back to the system."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import resource
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

_STATM: Final = Path("/proc/self/statm")
_RETURN_INTERVAL_S: Final = 5.0
# A try takes up to 0.1 s of CPU. The pause after it is at least so many times as long.
_PAUSE_RATIO: Final = 100
# A process that has not grown by so much since its start keeps what it has.
_KEPT_BYTES: Final = 16 * 1024 * 1024


def relax_garbage_collector() -> None:
    """Make the garbage collector run rarely; call it once everything that lasts has been made.

    Commands make no reference cycles, so counting references frees them. By default the collector would run
    after every few commands, and now and then over all that was imported: an eighth of the server's CPU.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


@asynccontextmanager
async def freed_memory_returned(
    *, interval_s: float = _RETURN_INTERVAL_S, kept_bytes: int = _KEPT_BYTES
) -> AsyncIterator[None]:
    """Give freed memory back while the process is larger than now by `kept_bytes`.

    The C library keeps what a burst of calls has freed between memory in use: 690 MB after 20,000 calls with
    large metadata on grpcio, and 220 MB once it is asked for it. Asking takes at most 1 % of a core. Does
    nothing without glibc on Linux.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is None or not _STATM.exists():
        yield
        return
    returning = asyncio.create_task(_return_freed(trim, interval_s, _resident_bytes() + kept_bytes))
    try:
        yield
    finally:
        returning.cancel()
        await asyncio.wait([returning])


async def _return_freed(trim: Callable[[int], int], interval_s: float, usual_bytes: int) -> None:
    loop, wait_s = asyncio.get_running_loop(), interval_s
    while True:
        await asyncio.sleep(wait_s)
        wait_s = interval_s
        if _resident_bytes() > usual_bytes:
            began_s = loop.time()
            # ctypes holds no lock of the interpreter meanwhile.
            await asyncio.to_thread(trim, 0)
            wait_s = max(interval_s, _PAUSE_RATIO * (loop.time() - began_s))


def _resident_bytes() -> int:
    return int(_STATM.read_text().split()[1]) * resource.getpagesize()
