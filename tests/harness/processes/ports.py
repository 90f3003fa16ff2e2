"""Ports of the loopback that stay free while the process that had one is down."""

from __future__ import annotations

import os
import random
import socket
from pathlib import Path

HOST = "127.0.0.1"
_LOWEST = 12_000
_TRIES_MAX = 200
# Tests that run in parallel share no port: each worker of pytest-xdist takes its own.
_worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
_given_out: set[int] = set()
_random = random.SystemRandom()


def free_port() -> int:
    """Return a free port that this process was not given before.

    It lies below the ports that the kernel gives to outgoing connections. Otherwise a connection could get
    the port of a stopped node. A connection to that node would then reach itself, and keep the node down.
    """
    end = _first_ephemeral_port()
    for _ in range(_TRIES_MAX):
        # A range that leaves too little room below it must do without.
        port = _random.randrange(_LOWEST + _worker, end, _workers) if end > _LOWEST + 1_000 else 0
        with socket.socket() as probe:
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
            port = int(probe.getsockname()[1])
        if port not in _given_out:
            _given_out.add(port)
            return port
    raise AssertionError(f"no free port in {_TRIES_MAX} tries")


def _first_ephemeral_port() -> int:
    file = Path("/proc/sys/net/ipv4/ip_local_port_range")
    # 49152 is where other systems begin.
    return int(file.read_text().split()[0]) if file.exists() else 49_152
