"""What a process has of the machine at this moment."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ProcessLook:
    """The figures of one instant.

    Attributes:
        rss_bytes: memory that is in use.
        fd_count: files, sockets and the like that are open.
    """

    rss_bytes: int
    fd_count: int


def look_at_process(pid: int) -> ProcessLook:
    """Return what the process has now.

    Raises:
        FileNotFoundError: there is no such process.
    """
    process = Path("/proc") / str(pid)
    try:
        for line in (process / "status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                rss_bytes = int(line.split()[1]) * 1024
                break
        else:
            raise FileNotFoundError(f"process {pid} has ended")
        return ProcessLook(rss_bytes, len(list((process / "fd").iterdir())))
    except ProcessLookupError as error:
        # It ended between the opening of a file and its reading.
        raise FileNotFoundError(f"process {pid} has ended") from error


def is_alive(pid: int) -> bool:
    """Tell whether a process runs; one that has ended and was not collected yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in {"Z", "X"}
    except (FileNotFoundError, ProcessLookupError):
        return False
