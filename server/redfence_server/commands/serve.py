"""`redfence serve`: run a lock server over existing nodes."""

from __future__ import annotations

import argparse
import asyncio
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

from redfence_server import config
from redfence_server.api.serving import stop_signal
from redfence_server.clock import SystemClock
from redfence_server.commands import flags, startup
from redfence_server.composition import LockServer
from redfence_server.process_memory import relax_garbage_collector
from redfence_server.supervision.supervisor import supervise

HELP = "run a lock server over existing nodes"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.epilog = (
        "Every flag but --config is also an environment variable (--node-timeout-ms is "
        "REDFENCE_NODE_TIMEOUT_MS, --node is REDFENCE_NODES) and a key of the TOML file. A flag wins over "
        "the environment, and the environment over the file. At SIGHUP the server reads log_level, "
        "commands_max, the limits of waiters (waiters_…), the limits of peers (commands_server_max, "
        "connections_max, buffered_bytes_max, new_resources_per_second) and the files of access again, and "
        "looks whether the files of TLS have changed."
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="a TOML file with settings")
    flags.add_flags(parser)


@startup.explain_refusal
def run(arguments: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT; return 0 after a drain, 2 if the server could not start.

    With several processes, return 1 if one of them did not drain in order.
    """
    settings = startup.settings_of(arguments)
    read_settings = partial(startup.settings_now, arguments, settings)
    serve = _serve if settings.processes == 1 else _supervise
    return asyncio.run(serve(settings, read_settings))


async def _serve(settings: config.ServeConfig, read_settings: Callable[[], config.ServeConfig | None]) -> int:
    async with LockServer(settings) as running:
        stop = stop_signal()
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, lambda: running.reload(read_settings()))
        if await running.quorum_before(stop):
            relax_garbage_collector()
            what = f"{len(settings.nodes)} nodes"
            if settings.admin_listen:
                what += f", admin service on {_address(settings.admin_listen, running.admin_port)}"
            _announce(settings, running.port, what)
        await running.serve_until(stop, grace_ms=settings.drain_grace_ms)
    return 0


async def _supervise(
    settings: config.ServeConfig, read_settings: Callable[[], config.ServeConfig | None]
) -> int:
    what = f"{len(settings.nodes)} nodes, {settings.processes} processes"
    return await supervise(
        settings,
        clock=SystemClock(),
        on_serving=lambda port: _announce(settings, port, what),
        read_settings=read_settings,
    )


def _announce(settings: config.ServeConfig, port: int, what: str) -> None:
    print(f"redfence serving on {_address(settings.listen, port)} ({what})", flush=True)


def _address(listen: str, port: int) -> str:
    return f"{listen.rpartition(':')[0]}:{port}"
