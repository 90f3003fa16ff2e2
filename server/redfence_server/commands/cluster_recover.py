"""`redfence cluster recover`: start a cluster again after more than a minority of its nodes forgot."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Mapping, Sequence

from redfence_server.clock import SystemClock
from redfence_server.commands import startup
from redfence_server.commands.cluster_audit import DONE, PARTLY_DONE, audited
from redfence_server.config import ServeConfig
from redfence_server.errors import StartupError
from redfence_server.membership.admin import AdminSettings, NodeSnapshot, connect_all
from redfence_server.membership.admission import Judgement
from redfence_server.membership.cluster_judgement import ClusterJudgement
from redfence_server.membership.fence import wait_ms
from redfence_server.nodes.cluster import check_urls
from redfence_server.operations.recovery import ClusterRecovery
from redfence_server.operations.recovery_plan import Recovery, Request, plan, state_of
from redfence_server.randomness import SystemRandomness

HELP = "start a cluster again when more than a minority of its nodes have forgotten"
EXIT_NODES_LEFT_OUT = 1

_BREAK = (
    "redfence cluster recover: broken off: nodes that it has taken out stay out until it is carried out to "
    "the end; repeat it\n"
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    startup.add_node_flags(parser, also={"assume_durable", "audit_log"})
    parser.epilog = (
        f"{startup.EPILOG} It takes out every node that it can reach. After the greatest ttl all "
        "leases have ended, and the nodes begin anew with tokens above the floor. Repeat it if broken off. "
        "exit status: 0 done, 1 done except for the named nodes, 2 not done: refused, broken off, or --yes "
        "is missing; 130 broken off by Ctrl-C"
    )
    startup.add_floor_flag(parser, required=True, purpose="tokens go on above it:")
    startup.add_max_ttl_flag(
        parser,
        default_ms=None,
        purpose="the greatest ttl of the cluster, if no node remembers it; no less than it was",
    )
    parser.add_argument(
        "--yes", action="store_true", help="carry out the recovery; without this flag, only print the plan"
    )


@startup.explain_refusal
def run(arguments: argparse.Namespace) -> int:
    """Print the plan, and with --yes recover; see the epilog for the exit status."""
    settings = startup.settings_of(arguments)
    request = Request(
        floor=arguments.floor,
        ttl_ms_max=startup.ttl_ms_max_of(arguments),
        assume_durable=settings.assume_durable,
    )
    return asyncio.run(_recover(settings, request, confirmed=arguments.yes))


async def _recover(settings: ServeConfig, request: Request, *, confirmed: bool) -> int:
    urls = check_urls(settings.nodes, settings.node_tls)
    admin = AdminSettings(settings.keyspace, settings.dial_timeout_ms)
    randomness = SystemRandomness()
    async with connect_all(urls, admin) as nodes:
        snapshots = [each.snapshot for each in nodes]
        _say(as_table(snapshots, assume_durable=request.assume_durable))
        wall_us = int(SystemClock().wall_ms() * 1000)
        planned = plan(snapshots, request, wall_us=wall_us, new_cluster_id=randomness.hex_id())
        _say(as_steps(snapshots, planned))
        if not confirmed:
            raise StartupError("nothing was changed; add --yes to do it")
        recovery = ClusterRecovery(planned, urls, admin=admin, randomness=randomness)
        with audited(settings, "cluster_recover", urls) as change:
            try:
                await recovery.take_out(nodes)
                pause_s = wait_ms(planned.ttl_ms_max) / 1000
                _say(f"taken out; waiting {pause_s:.1f} s ...")
                await asyncio.sleep(pause_s)
                await recovery.give_back()
            except BaseException:
                sys.stderr.write(_BREAK)
                raise
            finally:
                change.cluster_id, change.floor = planned.cluster_id, recovery.floor
            change.outcome = PARTLY_DONE if recovery.left_out else DONE
    _say(as_result(recovery.left_out, recovery.floor))
    return EXIT_NODES_LEFT_OUT if recovery.left_out else 0


def _say(text: str) -> None:
    print(text, flush=True)


def as_table(snapshots: Sequence[NodeSnapshot], *, assume_durable: bool) -> str:
    """Return a line for each node, with its problem below it."""
    shown = [snapshot.found for snapshot in snapshots]
    judged = ClusterJudgement(shown, assume_durable=assume_durable, previously_admitted=True)
    judgements = [judged.judge(snapshot.index, snapshot.found) for snapshot in snapshots]
    rows = [_COLUMNS, *map(_row, snapshots, judgements)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    heading, *lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    table = [heading]
    for snapshot, judgement, line in zip(snapshots, judgements, lines, strict=True):
        table.append(line)
        if detail := snapshot.problem or getattr(judgement, "detail", ""):
            table.append(f"{'':{widths[0]}}  {detail}")
    votes = f"{len(judged.voting())} of {len(snapshots)} nodes can vote (quorum {judged.quorum})"
    return "\n".join([*table, f"cluster {judged.cluster_id or '(unknown)'}: {votes}"])


_COLUMNS = ("NODE", "STATE", "HIGH", "FLOOR", "ADDRESS")


def _row(snapshot: NodeSnapshot, judgement: Judgement | None) -> tuple[str, ...]:
    found = snapshot.found
    high = "-" if found is None or found.max_token is None else str(found.max_token)
    floor = "-" if found is None or found.identity is None else str(found.identity.floor)
    return (str(snapshot.index), state_of(judgement), high, floor, snapshot.address)


def as_steps(snapshots: Sequence[NodeSnapshot], planned: Recovery) -> str:
    """Return the plan, step by step."""
    names = ", ".join(snapshots[index].name for index in planned.nodes)
    wait = f"{wait_ms(planned.ttl_ms_max) / 1000:.1f} s"
    steps = [
        f"take out {names}: from then on nothing is granted or renewed anywhere",
        f"wait {wait}, the greatest ttl and a little more: holders may count on earlier leases until then",
        f"give them their votes back; tokens go on above {planned.floor}",
    ]
    lines = ["to be done:", *(f"  {number}. {step}" for number, step in enumerate(steps, 1))]
    lines += [
        f"{snapshots[index].name} cannot be reached: it will not vote when it is back, until you run "
        f"`redfence cluster replace {index} URL`, with its own URL or that of a new node"
        for index in planned.away
    ]
    if planned.is_avoidable:
        lines.append("if what cannot be reached comes back and has forgotten nothing, none of this is needed")
    if planned.is_new:
        lines.append(
            f"no node remembers the cluster: it becomes {planned.cluster_id}, "
            "and every lock server must be restarted"
        )
    return "\n".join(lines)


def as_result(left_out: Mapping[str, str], floor: int) -> str:
    """Return the report of a recovery."""
    lines = [
        f"{name} is still out: {reason}; `redfence cluster status` says what brings it back"
        for name, reason in left_out.items()
    ]
    above = f"tokens go on above {floor}; " if floor else ""
    return "\n".join([*lines, f"done; {above}`redfence cluster status` shows how the nodes come back"])
