"""`redfence cluster replace`: prepare a node to take an index in the cluster."""

from __future__ import annotations

import argparse
import asyncio
import sys
from typing import TYPE_CHECKING

from redfence_server.commands import cluster_flags
from redfence_server.errors import ConfigError, StartupError

if TYPE_CHECKING:
    from redfence_server.operations.replacement import Plan
    from redfence_server.redis_io.dial import NodeUrl

HELP = "prepare a node to replace another, or to vote again after it was wiped"
EXIT_NOT_DONE = 2


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    cluster_flags.add_node_flags(parser, also={"assume_durable"})
    parser.epilog = (
        f"{cluster_flags.EPILOG} Give them as the lock servers have them. Repeating the command is harmless. "
        "exit status: 0 done, 2 not done: refused, or --yes is missing"
    )
    parser.add_argument("node_index", metavar="NODE", type=int, help="the index of the node, from 0")
    parser.add_argument(
        "url",
        metavar="URL",
        nargs="?",
        help="the new node: an empty one, or one that was there before (default: the one at that index in "
        "the list, if it was wiped, or if the list names the new node already; no password is needed here)",
    )
    parser.add_argument(
        "--yes", action="store_true", help="replace a node that votes now, which loses its vote at once"
    )


def run(arguments: argparse.Namespace) -> int:
    """Prepare the node and print the remaining steps; return 0 if it is done, 2 if not."""
    from redfence_server import composition
    from redfence_server.membership.admin import AdminSettings
    from redfence_server.nodes.cluster import check_urls
    from redfence_server.operations.replacement import replace_node
    from redfence_server.randomness import SystemRandomness
    from redfence_server.redis_io.dial import NodeUrl

    def confirm(planned: Plan) -> bool:
        if planned.ends_vote and not arguments.yes:
            sys.stderr.write(
                f"redfence cluster replace: {as_cost(planned, old)}; "
                "nothing was changed; add --yes to do it\n"
            )
            return False
        return True

    try:
        settings = cluster_flags.settings_of(arguments)
        nodes = check_urls(settings.nodes)
        if not 0 <= (index := arguments.node_index) < len(nodes):
            raise ConfigError(f"node: there is no node {index}; they are 0 to {len(nodes) - 1}")
        old = nodes[index]
        try:
            new = old if arguments.url is None else NodeUrl(arguments.url)
        except ValueError as error:
            raise ConfigError(f"URL: {error}") from None
        carried_out = asyncio.run(
            replace_node(
                index,
                new,
                nodes,
                admin=AdminSettings(composition.keyspace(settings), settings.dial_timeout_ms),
                assume_durable=settings.assume_durable,
                randomness=SystemRandomness(),
                confirm=confirm,
            )
        )
    except StartupError as error:
        sys.stderr.write(f"redfence cluster replace: {error}\n")
        return EXIT_NOT_DONE
    if carried_out is None:
        return EXIT_NOT_DONE
    print(as_text(carried_out, old, new))
    return 0


def as_cost(planned: Plan, old: NodeUrl) -> str:
    """Return the cost of ending the old node's vote."""
    spare = "no other node" if planned.spare == 0 else f"at most {planned.spare} of the other nodes"
    return (
        f"node {planned.assignment.index} ({old.address}) votes now and would lose its vote at once; "
        f"until the new node votes, {spare} may be lost"
    )


def as_text(planned: Plan, old: NodeUrl, new: NodeUrl) -> str:
    """Return the report of a replacement, with the remaining steps."""
    from redfence_server.membership.fence import wait_ms
    from redfence_server.operations.replacement import Newcomer

    name = f"node {planned.assignment.index} ({new.address})"
    lines = []
    if new.address != old.address:
        lines.append(
            f"node {planned.assignment.index} ({old.address}) votes no more, whether it could be reached "
            "or not; switch it off, or wipe it"
        )
    if planned.newcomer is Newcomer.VOTES:
        return "\n".join([*lines, f"{name} has its place already"])
    wait = f"{wait_ms(planned.assignment.ttl_ms_max) / 1000:.1f} s"
    lines.append(
        f"{name} is prepared: it is in quarantine, and votes about {wait} after a lock server has seen it"
    )
    if new.address != old.address:
        lines += [
            "left to do:",
            f"  1. in the list of every lock server, put {new.address} in the place of {old.address}",
            "  2. restart the servers, one after another",
        ]
    return "\n".join(lines)
