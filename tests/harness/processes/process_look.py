"""What a process has of the machine at this moment."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

# As `/proc/net/tcp` writes them.
_ESTABLISHED = "01"
_LISTEN = "0A"


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


def connection_count(pid: int, *, port: int) -> int:
    """Return how many TCP connections to its port the process has; 0 if there is no such process."""
    inodes = _sockets(port, _ESTABLISHED)
    count = 0
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                count += str(file.readlink()) in inodes
    return count


def listener_count(*, port: int) -> int:
    """Return how many sockets of this machine listen on the port; processes may share it."""
    return len(_sockets(port, _LISTEN))


def _sockets(port: int, state: str) -> set[str]:
    """Return the sockets with this local port in this state, as links in `/proc/PID/fd` show them."""
    found = set()
    # gRPC serves IPv4 on sockets of IPv6.
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if (int(fields[1].rpartition(":")[2], 16), fields[3]) == (port, state):
                found.add(f"socket:[{fields[9]}]")
    return found


def is_alive(pid: int) -> bool:
    """Tell whether a process runs; one that has ended and was not collected yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in {"Z", "X"}
    except (FileNotFoundError, ProcessLookupError):
        return False
