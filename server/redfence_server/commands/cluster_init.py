"""`redfence cluster init`: give new nodes their identity, once."""

from __future__ import annotations

import argparse
import asyncio

from redfence_proto import bounds
from redfence_server.clock import SystemClock
from redfence_server.commands import startup
from redfence_server.commands.cluster_audit import audited
from redfence_server.nodes.cluster import check_urls
from redfence_server.operations.floors import WALL_US_MIN, floor_of
from redfence_server.operations.forming import form
from redfence_server.randomness import SystemRandomness

HELP = "form a cluster on empty nodes; harmless to repeat"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    startup.add_node_flags(parser, also={"audit_log"})
    startup.add_max_ttl_flag(
        parser,
        default_ms=bounds.TTL_MS_MAX_DEFAULT,
        purpose="the greatest ttl of a lease, e.g. 5m or 1500ms; a node that forgot stays out for longer "
        "(default: 5m)",
    )
    startup.add_floor_flag(
        parser,
        required=False,
        purpose="tokens begin above it, for storages that have seen tokens of another cluster (default: 0):",
    )


@startup.explain_refusal
def run(arguments: argparse.Namespace) -> int:
    """Form the cluster; return 0 if it is formed, 2 if it cannot be."""
    settings = startup.settings_of(arguments)
    ttl_ms_max = startup.ttl_ms_max_of(arguments)
    assert ttl_ms_max is not None, "it has a default"
    floor, least_token = _floor_of(arguments)
    nodes = check_urls(settings.nodes, settings.node_tls)
    with audited(settings, "cluster_init", nodes) as change:
        change.floor = floor
        change.cluster_id = asyncio.run(
            form(
                nodes,
                keys=settings.keyspace,
                ttl_ms_max=ttl_ms_max,
                randomness=SystemRandomness(),
                dial_timeout_ms=settings.dial_timeout_ms,
                floor=floor,
                least_token=least_token,
            )
        )
    print(f"cluster {change.cluster_id}: formed, {len(settings.nodes)} nodes")
    return 0


def _floor_of(arguments: argparse.Namespace) -> tuple[int, int]:
    """Return the floor of a new cluster, and the least token of one that was formed before.

    The clock goes on, so a repeated command with `auto` accepts any floor that came from a clock.
    """
    if not hasattr(arguments, "floor"):
        return 0, 0
    floor = floor_of(arguments.floor, known=0, begun=0, wall_us=int(SystemClock().wall_ms() * 1000))
    return floor, floor if arguments.floor is not None else WALL_US_MIN
