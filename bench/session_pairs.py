"""Measures acquire and release pairs per second: 64 callers on one Session, with 3 and with 5 nodes.

The nodes sync every write. Everything runs on this machine.
"""

from __future__ import annotations

import redfence
from bench import cluster, load

CALLERS = 64
SECONDS = 5.0


async def main() -> None:
    """Measure and print."""
    for node_count in (3, 5):
        async with (
            cluster.formed_nodes(node_count) as nodes,
            cluster.served(nodes) as address,
            redfence.AsyncClient(address) as client,
        ):
            await load.pairs(client, callers=CALLERS, seconds=1.0)
            result = await load.pairs(client, callers=CALLERS, seconds=SECONDS)
            print(
                f"session_pairs  N={node_count}  {CALLERS} callers  {result.pairs_per_second:8,.0f} pairs/s  "
                f"acquire p50 {result.percentile(50):6.2f} ms  p99 {result.percentile(99):6.2f} ms"
            )
