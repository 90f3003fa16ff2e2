"""Measures the cost of a silent node: five nodes, in turns all healthy and with one that never answers."""

from __future__ import annotations

import asyncio
import os
import signal
import statistics

import redfence
from bench import cluster, load

CALLERS = 16
SECONDS = 2.0
ROUNDS = 4


async def main() -> None:
    """Measure and print."""
    async with (
        cluster.formed_nodes(5) as nodes,
        cluster.served(nodes) as address,
        redfence.AsyncClient(address) as client,
    ):
        await load.pairs(client, callers=CALLERS, seconds=1.0)
        healthy_p99, silent_p99 = [], []
        for _ in range(ROUNDS):
            healthy = await load.pairs(client, callers=CALLERS, seconds=SECONDS)
            healthy_p99.append(healthy.percentile(99))
            # A stopped process keeps its sockets open, so its peers get neither an answer nor a reset.
            os.kill(nodes.pids[0], signal.SIGSTOP)
            try:
                silent = await load.pairs(client, callers=CALLERS, seconds=SECONDS)
            finally:
                os.kill(nodes.pids[0], signal.SIGCONT)
            silent_p99.append(silent.percentile(99))
            await asyncio.sleep(1.0)
        ratios = [silent / healthy for silent, healthy in zip(silent_p99, healthy_p99, strict=True)]
        print(
            f"slow_node      N=5  {CALLERS} callers  acquire p99: "
            f"healthy {statistics.median(healthy_p99):.2f} ms, "
            f"one node silent {statistics.median(silent_p99):.2f} ms, ratio {statistics.median(ratios):.2f} "
            f"({min(ratios):.2f} to {max(ratios):.2f} over {ROUNDS} rounds)"
        )
