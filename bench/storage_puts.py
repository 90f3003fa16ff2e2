"""Measures the storage's acknowledged writes per second, and compares them with the limit of grpc.aio.

The limit ("floor") is the same call to a servicer that stores nothing and answers at once. Server
and load run in separate processes.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redfence_storage.client import AsyncStorageClient

CALLERS = 32
ROUNDS = 3
DURATION_S = 2.0
_WARM_UP_S = 0.5
_VALUE = b"x" * 100

_SERVE_STORAGE = [str(Path(sys.executable).with_name("redfence")), "storage"]
_SERVE_FLOOR = [sys.executable, "-c", "from bench.storage_puts import serve_floor; serve_floor()"]


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one run."""

    puts_per_s: float
    median_ms: float
    p99_ms: float


async def main(*, callers: int = CALLERS, rounds: int = ROUNDS, duration_s: float = DURATION_S) -> None:
    """Measure both servers in turn, so that other load affects both, and print the figures."""
    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        options = ["--db", str(Path(folder, "storage.db")), "--listen", "127.0.0.1:0"]
        with _server(_SERVE_FLOOR) as floor_target, _server([*_SERVE_STORAGE, *options]) as puts_target:
            for _ in range(rounds):
                floor = await _measured("floor", floor_target, callers=callers, duration_s=duration_s)
                puts = await _measured("puts", puts_target, callers=callers, duration_s=duration_s)
                ratios.append(puts.puts_per_s / floor.puts_per_s)
    print(f"puts / floor, median of {rounds}: {statistics.median(ratios):.2f}")


def run() -> None:
    """Run from `make bench`, with the default settings."""
    asyncio.run(main())


async def _measured(name: str, target: str, *, callers: int, duration_s: float) -> Figures:
    async with AsyncStorageClient(target) as storage:
        await _load(storage, callers=callers, duration_s=_WARM_UP_S)
        latencies_s = await _load(storage, callers=callers, duration_s=duration_s)
    latencies_s.sort()
    figures = Figures(
        puts_per_s=len(latencies_s) / duration_s,
        median_ms=latencies_s[len(latencies_s) // 2] * 1_000,
        p99_ms=latencies_s[len(latencies_s) * 99 // 100] * 1_000,
    )
    print(
        f"{name:6} {callers} callers: {figures.puts_per_s:6.0f}/s,"
        f" median {figures.median_ms:.1f} ms, p99 {figures.p99_ms:.1f} ms"
    )
    return figures


async def _load(storage: AsyncStorageClient, *, callers: int, duration_s: float) -> list[float]:
    latencies_s: list[float] = []
    end = time.perf_counter() + duration_s

    async def caller(number: int) -> None:
        while (sent_at := time.perf_counter()) < end:
            await storage.put(f"orders/{number}", key="state", value=_VALUE, token=1)
            latencies_s.append(time.perf_counter() - sent_at)

    await asyncio.gather(*(caller(number) for number in range(callers)))
    return latencies_s


@contextmanager
def _server(command: list[str]) -> Iterator[str]:
    """Run a server that prints a line with ` on HOST:PORT` when it is ready; yield that address."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().partition(" on ")[2].split()[0]
        finally:
            process.terminate()


def serve_floor() -> None:
    """Serve Put calls that store nothing, until SIGTERM."""
    asyncio.run(_serve_floor())


async def _serve_floor() -> None:
    from redfence_proto.storage.v1 import storage_pb2, storage_pb2_grpc
    from redfence_server.api import serving

    class Floor(storage_pb2_grpc.StorageServiceServicer):
        async def Put(self, request: storage_pb2.PutRequest, _: Any) -> storage_pb2.PutResponse:  # noqa: N802
            return storage_pb2.PutResponse(highest_token=request.fencing_token)

    server = serving.new_server()
    storage_pb2_grpc.add_StorageServiceServicer_to_server(Floor(), server)  # type: ignore[abstract]  # only Put is called
    port = serving.bind(server, "127.0.0.1:0")
    await server.start()
    print(f"floor ready on 127.0.0.1:{port}", flush=True)
    await server.wait_for_termination()
