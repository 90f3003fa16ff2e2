"""A small disk for one node, which can be full."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Self

# A log grows to 64 MB before a node rewrites it, and needs room for the new one.
_BYTES = 160 * 1024 * 1024
_CHUNK_BYTES = 256 * 1024
_MOUNT_TIMEOUT_S = 10.0


class NoDiskError(Exception):
    """This machine does not let us mount; the message says why."""


@dataclass(frozen=True, slots=True)
class NodeDisk:
    """A tmpfs at one folder."""

    folder: Path

    @classmethod
    def mount(cls, folder: Path) -> Self:
        """Return an empty disk.

        Raises:
            NoDiskError: this machine does not let us.
        """
        if sys.platform != "linux":
            raise NoDiskError("a small tmpfs needs Linux")
        folder.mkdir(parents=True, exist_ok=True)
        command = ("mount", "-t", "tmpfs", "-o", f"size={_BYTES},mode=0700", "tmpfs", str(folder))
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=_MOUNT_TIMEOUT_S)
        except FileNotFoundError:
            raise NoDiskError("there is no `mount` here") from None
        except subprocess.CalledProcessError as error:
            raise NoDiskError(f"a small tmpfs cannot be mounted: {error.stderr.strip()}") from error
        return cls(folder)

    def unmount(self) -> None:
        """Give the disk back. Every process that uses it must have ended."""
        subprocess.run(("umount", str(self.folder)), check=True, timeout=_MOUNT_TIMEOUT_S)

    @property
    def _filler(self) -> Path:
        return self.folder / "filler"

    def fill(self) -> None:
        """Leave no room."""
        with self._filler.open("wb", buffering=0) as file:
            for size in (_CHUNK_BYTES, 4096, 1):
                try:
                    for _ in range(_BYTES // _CHUNK_BYTES + 1):
                        if file.write(bytes(size)) < size:
                            break
                except OSError:
                    continue  # no room for so much at once

    def clear(self) -> None:
        """Give the room back; harmless to repeat."""
        self._filler.unlink(missing_ok=True)


def can_mount(folder: Path) -> str:
    """Return why no disk can be mounted on this machine; nothing if one can."""
    try:
        NodeDisk.mount(folder).unmount()
    except NoDiskError as error:
        return str(error)
    return ""
