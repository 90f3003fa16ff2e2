"""`redfence cluster init`: give new nodes their identity, once."""

from __future__ import annotations

import argparse
import asyncio
import sys

from redfence_proto import bounds
from redfence_server.errors import StartupError

HELP = "form a cluster on empty nodes; harmless to repeat"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.add_argument(
        "--node",
        action="append",
        required=True,
        metavar="URL",
        help="a node's URL; repeat it, the order is the nodes' index",
    )
    parser.add_argument(
        "--max-ttl-ms",
        type=int,
        default=bounds.TTL_MS_MAX_DEFAULT,
        metavar="MS",
        help="the greatest ttl a lease may have; a restarted node stays out for longer than this (default: %(default)s)",
    )
    parser.add_argument("--key-prefix", default="redfence:", metavar="PREFIX", help="(default: %(default)s)")


def run(arguments: argparse.Namespace) -> int:
    """Form the cluster; 0 if it is formed, 2 if it cannot be."""
    from redfence_server.cluster_forming import form
    from redfence_server.node_cluster import check_urls
    from redfence_server.randomness import SystemRandomness
    from redfence_server.scripts import Keyspace

    if arguments.max_ttl_ms < bounds.TTL_MS_MIN:
        sys.stderr.write(f"redfence cluster init: --max-ttl-ms must be at least {bounds.TTL_MS_MIN}\n")
        return 2
    try:
        cluster_id = asyncio.run(
            form(
                check_urls(arguments.node),
                keys=Keyspace(prefix=arguments.key_prefix),
                ttl_ms_max=arguments.max_ttl_ms,
                randomness=SystemRandomness(),
            )
        )
    except StartupError as error:
        sys.stderr.write(f"redfence cluster init: {error}\n")
        return 2
    print(f"cluster {cluster_id}: {len(arguments.node)} nodes ready")
    return 0
