"""`redfence serve`: run a lock server over existing nodes."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from redfence_server import config
from redfence_server.api.serving import stop_signal
from redfence_server.commands import startup
from redfence_server.composition import drain_at, lock_server

HELP = "run a lock server over existing nodes"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.epilog = (
        "Every flag is also an environment variable (--node-timeout-ms is REDFENCE_NODE_TIMEOUT_MS, "
        "--node is REDFENCE_NODES) and a key of the TOML file. A flag wins over the environment, and the "
        "environment over the file."
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="a TOML file with settings")
    config.add_arguments(parser)


@startup.explain_refusal
def run(arguments: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT; return 0 after a drain, 2 if the server could not start."""
    asyncio.run(_serve(startup.settings_of(arguments)))
    return 0


async def _serve(settings: config.ServeConfig) -> None:
    async with lock_server(settings) as running:
        stop = stop_signal()
        startup.relax_garbage_collector()
        host = settings.listen.rpartition(":")[0]
        print(f"redfence serving on {host}:{running.port} ({len(settings.nodes)} nodes)", flush=True)
        await drain_at(stop, running, grace_ms=settings.drain_grace_ms)
