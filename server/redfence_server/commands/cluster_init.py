"""`redfence cluster init`: give new nodes their identity, once."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from redfence_proto import bounds
from redfence_server import config
from redfence_server.errors import ConfigError, StartupError

HELP = "form a cluster on empty nodes; harmless to repeat"
EXIT_CANNOT_FORM = 2


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.epilog = (
        "The nodes may also be given by $REDFENCE_NODES or the file, which keeps passwords out of the process list. Their order "
        "is their index in the cluster."
    )
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="a TOML file with settings, as of `serve`"
    )
    config.add_arguments(parser, names={"nodes", "key_prefix", "dial_timeout_ms"})
    parser.add_argument(
        "--max-ttl-ms",
        type=int,
        default=bounds.TTL_MS_MAX_DEFAULT,
        metavar="MS",
        help="the greatest ttl a lease may have; a node that forgot stays out for longer than this (default: %(default)s)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Form the cluster; 0 if it is formed, 2 if it cannot be."""
    from redfence_server import composition, log_setup
    from redfence_server.cluster_forming import form
    from redfence_server.node_cluster import check_urls
    from redfence_server.randomness import SystemRandomness

    try:
        settings = config.load(config.given_flags(arguments), config_file=arguments.config)
        log_setup.configure(log_format=settings.log_format, level=settings.log_level)
        if arguments.max_ttl_ms < bounds.TTL_MS_MIN:
            raise ConfigError(f"max_ttl_ms: {arguments.max_ttl_ms} is less than {bounds.TTL_MS_MIN}")
        cluster_id = asyncio.run(
            form(
                check_urls(settings.nodes),
                keys=composition.keyspace(settings),
                ttl_ms_max=arguments.max_ttl_ms,
                randomness=SystemRandomness(),
                dial_timeout_ms=settings.dial_timeout_ms,
            )
        )
    except StartupError as error:
        sys.stderr.write(f"redfence cluster init: {error}\n")
        return EXIT_CANNOT_FORM
    print(f"cluster {cluster_id}: {len(settings.nodes)} nodes ready")
    return 0
