"""`redfence serve`: run a lock server over existing nodes."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from redfence_server import config, log_setup
from redfence_server.errors import StartupError

HELP = "run a lock server over existing nodes"
EXIT_CANNOT_START = 2


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.epilog = (
        "Every flag is also an environment variable (--node-timeout-ms is REDFENCE_NODE_TIMEOUT_MS, "
        "--node is REDFENCE_NODES) and a key of the TOML file. A flag wins over the environment, and the "
        "environment over the file."
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="a TOML file with settings")
    config.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT; return 0 after a drain, 2 if the server could not start."""
    from redfence_server.composition import RunningServer, serve_until_signal

    def announce(running: RunningServer) -> None:
        host = settings.listen.rpartition(":")[0]
        print(f"redfence serving on {host}:{running.port} ({len(settings.nodes)} nodes)", flush=True)

    try:
        settings = config.load(config.given_flags(arguments), config_file=arguments.config)
        log_setup.configure(log_format=settings.log_format, level=settings.log_level)
        asyncio.run(serve_until_signal(settings, on_ready=announce))
    except StartupError as error:
        sys.stderr.write(f"redfence serve: {error}\n")
        return EXIT_CANNOT_START
    return 0
