"""What this process still has open or running: what must be gone when the work is done."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path


def open_files() -> Counter[str]:
    """Return what this process has open, by kind."""
    kinds: Counter[str] = Counter()
    for link in Path("/proc/self/fd").iterdir():
        try:
            kinds[str(link.readlink()).partition(":")[0]] += 1
        except FileNotFoundError:
            continue  # that of the look itself
    return kinds


def running_tasks() -> Counter[str]:
    """Return every other task of this event loop, by the name of its code."""
    return Counter(
        getattr(task.get_coro(), "__qualname__", repr(task))
        for task in asyncio.all_tasks()
        if task is not asyncio.current_task()
    )
