"""Guard the data directory of embedded nodes: one server at a time, always the same number of nodes."""

from __future__ import annotations

import asyncio
import fcntl
import os
from pathlib import Path
from typing import Self

from redfence_server.errors import StartupError

LOCK_NAME = "lock"
COUNT_NAME = "node-count"
# The nodes of a killed server hold the lock until the kernel has ended them.
_LOCK_TIMEOUT_S = 1.0
_LOCK_RETRY_INTERVAL_S = 0.02


class DataDirectoryError(StartupError):
    """The directory cannot be used; the message says why, and the fix."""


class DataDirectory:
    """A directory that this process alone uses until `close`."""

    def __init__(self, path: Path, lock_fd: int) -> None:
        self._path = path
        # Nodes inherit it: the lock lasts until the last of them is gone, even if this process dies first.
        self.lock_fd = lock_fd

    @classmethod
    async def open(cls, path: Path, *, count: int) -> Self:
        """Take a directory into use; create it if it is missing.

        Cancellation: nothing stays locked.

        Raises:
            DataDirectoryError: it cannot be written, is in use, or was made for another number of nodes.
        """
        try:
            lock_fd = _lock_file(path)
            try:
                await _lock(lock_fd, path)
                _check_count(path, count)
            except BaseException:
                os.close(lock_fd)
                raise
        except OSError as error:
            raise DataDirectoryError(f"the data directory {path} cannot be used: {error}") from error
        return cls(path, lock_fd)

    def node_folder(self, index: int) -> Path:
        """Return the folder of the node with this index."""
        return self._path / f"node-{index}"

    def close(self) -> None:
        """Give up the lock."""
        os.close(self.lock_fd)


def _lock_file(path: Path) -> int:
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return os.open(path / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o600)


async def _lock(lock_fd: int, path: Path) -> None:
    try:
        async with asyncio.timeout(_LOCK_TIMEOUT_S):
            while not _try_lock(lock_fd):  # noqa: ASYNC110  (a lock of the kernel's sets no event)
                await asyncio.sleep(_LOCK_RETRY_INTERVAL_S)
    except TimeoutError:
        user = os.pread(lock_fd, 32, 0).decode(errors="replace").strip() or "unknown"
        raise DataDirectoryError(
            f"the data directory {path} is in use by another server (process {user}): "
            "stop it, or choose another directory"
        ) from None
    os.ftruncate(lock_fd, 0)
    os.pwrite(lock_fd, f"{os.getpid()}\n".encode(), 0)


def _try_lock(lock_fd: int) -> bool:
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _check_count(path: Path, count: int) -> None:
    file = path / COUNT_NAME
    if not file.exists():
        # The file is complete or absent, even if this process is killed here.
        draft = file.with_suffix(".new")
        draft.write_text(f"{count}\n", encoding="ascii")
        draft.replace(file)
    formed = file.read_text(encoding="ascii", errors="replace").strip()
    if formed != str(count):
        raise DataDirectoryError(
            f"the data directory {path} was made for {formed} nodes, not {count}: "
            f"a cluster keeps its size; start with {formed} nodes, or choose another directory"
        )
