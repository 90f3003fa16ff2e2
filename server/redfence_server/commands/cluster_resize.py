"""`redfence cluster resize`: let a cluster go on, with its tokens, on another list of nodes."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from redfence_server import config
from redfence_server.commands import startup
from redfence_server.commands.cluster_audit import DONE, PARTLY_DONE, audited
from redfence_server.config import ServeConfig
from redfence_server.errors import StartupError
from redfence_server.membership.admin import AdminSettings, NodeSnapshot, connect_all
from redfence_server.membership.fence import wait_ms
from redfence_server.nodes.cluster import check_urls
from redfence_server.operations.resize_plan import Resize, plan
from redfence_server.operations.resizing import ClusterResize
from redfence_server.randomness import SystemRandomness
from redfence_server.redis_io.dial import NodeUrl

HELP = "change the number of nodes, or all of them; tokens go on rising"
EXIT_NODES_LEFT_OUT = 1

_BREAK = (
    "redfence cluster resize: broken off: nodes that it has taken out stay out until it is carried out to "
    "the end; repeat it with the same two lists\n"
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    startup.add_node_flags(parser, also={"assume_durable", "audit_log"})
    parser.epilog = (
        f"{startup.EPILOG} Give the present nodes by --node, as the lock servers have them. The service "
        "stops for the greatest ttl of the cluster and a little more, and no lease is renewed. Give every "
        "lock server the new list while the command waits, or afterwards. Repeat the command if broken off. "
        "exit status: 0 done, 1 done except for the named nodes, "
        "2 not done: refused, broken off, or --yes is missing; 130 broken off by Ctrl-C"
    )
    new = parser.add_mutually_exclusive_group(required=True)
    new.add_argument(
        "--to",
        action="append",
        metavar="URL",
        help="a node of the new list, in its order (repeat it): one of the present nodes, or an empty one",
    )
    new.add_argument(
        "--to-config",
        type=Path,
        metavar="FILE",
        help="the TOML file of `serve` whose nodes are the new list, which keeps passwords out of the "
        "process list",
    )
    parser.add_argument(
        "--yes", action="store_true", help="carry out the resize; without this flag, only print the plan"
    )


@startup.explain_refusal
def run(arguments: argparse.Namespace) -> int:
    """Print the plan, and with --yes resize the cluster; see the epilog for the exit status."""
    settings = startup.settings_of(arguments)
    new = check_urls(arguments.to or config.nodes_in(arguments.to_config), settings.node_tls)
    return asyncio.run(_resize(settings, new, confirmed=arguments.yes))


async def _resize(settings: ServeConfig, new_urls: Sequence[NodeUrl], *, confirmed: bool) -> int:
    urls = check_urls(settings.nodes, settings.node_tls)
    admin = AdminSettings(settings.keyspace, settings.dial_timeout_ms)
    async with connect_all(urls, admin) as old, connect_all(new_urls, admin) as new:
        snapshots = [node.snapshot for node in new]
        planned = plan([node.snapshot for node in old], snapshots, assume_durable=settings.assume_durable)
        if planned.is_done:
            _say(f"cluster {planned.successor_id}: it has these {len(new)} nodes already, and votes")
            return 0
        _say(as_steps([node.snapshot for node in old], snapshots, planned))
        if not confirmed:
            raise StartupError("nothing was changed; add --yes to do it")
        resize = ClusterResize(planned, new_urls, admin=admin, randomness=SystemRandomness())
        with audited(settings, "cluster_resize", new_urls) as change:
            try:
                await resize.take_out(old, new)
                pause_s = wait_ms(planned.ttl_ms_max) / 1000
                _say(f"taken out; waiting {pause_s:.1f} s ...")
                await asyncio.sleep(pause_s)
                await resize.give_back()
            except BaseException:
                sys.stderr.write(_BREAK)
                raise
            finally:
                change.cluster_id, change.floor = planned.successor_id, resize.floor
            change.outcome = PARTLY_DONE if resize.left_out or planned.away else DONE
    _say(as_result(planned, resize, len(new_urls)))
    return 0 if change.outcome == DONE else EXIT_NODES_LEFT_OUT


def _say(text: str) -> None:
    print(text, flush=True)


def as_steps(old: Sequence[NodeSnapshot], new: Sequence[NodeSnapshot], planned: Resize) -> str:
    """Return the plan, step by step."""
    addresses = {snapshot.address for snapshot in new}
    wait = f"{wait_ms(planned.ttl_ms_max) / 1000:.1f} s"
    retired = ", ".join(old[index].name for index in planned.to_retire)
    steps = [
        f"take {retired} out of cluster {planned.cluster_id} for ever: it grants nothing from then on"
        if retired
        else f"cluster {planned.cluster_id} has ended already",
        f"give these {len(new)} nodes their places: {', '.join(snapshot.address for snapshot in new)}",
        f"wait {wait}, the greatest ttl and a little more: holders may count on earlier leases until then",
        f"give them their votes as cluster {planned.successor_id}; tokens go on above all earlier ones",
    ]
    lines = ["to be done:", *(f"  {number}. {step}" for number, step in enumerate(steps, 1))]
    lines.append("every lock server then needs the new list and a restart")
    removed = [snapshot.name for snapshot in old if snapshot.address not in addresses]
    if removed:
        lines.append(f"to be switched off after that: {', '.join(removed)}")
    return "\n".join(lines)


def as_result(planned: Resize, resize: ClusterResize, node_count: int) -> str:
    """Return the report of a resize."""
    lines = [
        f"{name} is still out: {reason}; `redfence cluster status` says what brings it back"
        for name, reason in resize.left_out.items()
    ]
    lines += [
        f"node {index} of the new list could not be reached: wipe it, or put an empty node at its URL, then "
        f"run `redfence cluster replace {index}`; no server starts while it still shows the old cluster"
        for index in planned.away
    ]
    lines.append(
        f"done; cluster {planned.successor_id} has {node_count} nodes, and its tokens go on above "
        f"{resize.floor}; give every lock server the new list, and restart it"
    )
    return "\n".join(lines)
