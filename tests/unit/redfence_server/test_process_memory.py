"""A process gives back what it does not need any more."""

from __future__ import annotations

import subprocess
import sys

# In a process of its own: what this one has freed already would be given back as well.
_PROGRAM = """
import asyncio
from redfence_server import process_memory

MIB = 1024 * 1024

async def main():
    async with process_memory.freed_memory_returned(interval_s=0.05, kept_bytes=16 * MIB):
        blocks = [bytes(2_000) for _ in range(50_000)]
        full = process_memory._resident_bytes()
        # Every fiftieth stays in use, so no large piece becomes free.
        blocks = blocks[::50]
        for _ in range(100):
            await asyncio.sleep(0.05)
            left = process_memory._resident_bytes()
            if full - left > 50 * MIB:
                break
        print((full - left) // MIB)

asyncio.run(main())
"""


def test_memory_that_was_freed_between_memory_in_use_is_given_back() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _PROGRAM], check=True, capture_output=True, text=True, timeout=60
    )
    assert int(ended.stdout) > 50
