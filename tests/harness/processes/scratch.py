"""Where tests keep their files: in memory where there is room.

A node that writes its log stalls with the disk, and a shared disk can stall for seconds. A kill -9 loses
nothing that was written, also in memory.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

_MEMORY: Final = Path("/dev/shm")
_ROOM_BYTES_MIN: Final = 2 * 1024**3


def memory_folder() -> Path | None:
    """Return a folder in memory; None without such a folder, room, or the right to run programs in it."""
    if not os.access(_MEMORY, os.W_OK | os.X_OK):
        return None
    found = os.statvfs(_MEMORY)
    roomy = found.f_bavail * found.f_frsize >= _ROOM_BYTES_MIN
    return _MEMORY if roomy and not found.f_flag & os.ST_NOEXEC else None
