"""`redfence cluster replace`: prepare a node to take an index in the cluster."""

from __future__ import annotations

import argparse
import asyncio

from redfence_server.commands import startup
from redfence_server.commands.cluster_audit import audited
from redfence_server.errors import ConfigError, StartupError
from redfence_server.membership.admin import AdminSettings
from redfence_server.membership.fence import wait_ms
from redfence_server.nodes.cluster import check_urls
from redfence_server.operations.replacement import Newcomer, Plan, replace_node
from redfence_server.randomness import SystemRandomness
from redfence_server.redis_io.dial import NodeUrl

HELP = "prepare a node to replace another, or to vote again after it was wiped"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    startup.add_node_flags(parser, also={"assume_durable", "audit_log"})
    parser.epilog = (
        f"{startup.EPILOG} Give them as the lock servers have them. Repeating the command is harmless. "
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


@startup.explain_refusal
def run(arguments: argparse.Namespace) -> int:
    """Prepare the node and print the remaining steps; return 0 if it is done, 2 if not."""
    settings = startup.settings_of(arguments)
    nodes = check_urls(settings.nodes, settings.node_tls)
    if not 0 <= (index := arguments.node_index) < len(nodes):
        raise ConfigError(f"node: there is no node {index}; they are 0 to {len(nodes) - 1}")
    old = nodes[index]
    try:
        new = old if arguments.url is None else NodeUrl(arguments.url, tls=settings.node_tls)
    except ValueError as error:
        raise ConfigError(f"URL: {error}") from None

    def confirm(planned: Plan) -> None:
        if planned.ends_vote and not arguments.yes:
            raise StartupError(f"{as_cost(planned, old)}; nothing was changed; add --yes to do it")

    with audited(settings, "cluster_replace", (*nodes[:index], new, *nodes[index + 1 :])) as change:
        carried_out = asyncio.run(
            replace_node(
                index,
                new,
                nodes,
                admin=AdminSettings(settings.keyspace, settings.dial_timeout_ms),
                assume_durable=settings.assume_durable,
                randomness=SystemRandomness(),
                confirm=confirm,
            )
        )
        change.cluster_id = carried_out.assignment.cluster_id
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
