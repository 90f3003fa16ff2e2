"""`python -m harness.chaos` injects faults for some minutes and judges what clients were told.

It exits with 0 if every promise held, with 1 if one was broken, and with 2 if the run proves nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import re
import secrets
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import get_args

from harness.chaos.cluster import Aof, Plan
from harness.chaos.faults import FAULTS, possible
from harness.chaos.limit_faults import CLOCK_STEPPED, SERVER_CLOCK
from harness.chaos.memory_faults import DISK_FULL
from harness.chaos.node_disk import can_mount
from harness.chaos.report import BROKEN, INVALID, PASSED, Report, report_of, write_report
from harness.chaos.run import Run, Schedule, run
from harness.chaos.services import harness_program
from harness.history.checker import check
from harness.history.records import Kind, Outcome, line
from harness.time.moved_clock import NoCompilerError, compile_clock_shim
from redfence_server import log_setup
from redfence_server.embedded.process import AppendFsync

_EXIT_STATUSES: Mapping[str, int] = {PASSED: 0, BROKEN: 1, INVALID: 2}
_SHOWN_MAX = 20
# In this time every fault begins at least once. A longer run without one of them is invalid.
_ALL_MINUTES = 10.0
_AOFS: Sequence[Aof] = (*get_args(AppendFsync), "off")


def main() -> int:
    """Run and judge, once for each number of nodes; with --each, also once for each fault."""
    parser = argparse.ArgumentParser(prog="python -m harness.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0, help="for how long faults come, in all")
    parser.add_argument("--seed", type=int, help="of clients and faults; a random one if not given")
    parser.add_argument("--nodes", choices=("3", "5", "both"), default="both")
    parser.add_argument("--only", action="append", choices=sorted(FAULTS), metavar="FAULT", default=[])
    parser.add_argument("--each", action="store_true", help="each fault alone, one after another")
    parser.add_argument("--without", action="append", choices=sorted(FAULTS), metavar="FAULT", default=[])
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--aof", choices=_AOFS, help="how nodes write; drawn by the seed if not given")
    parser.add_argument(
        "--report", type=Path, metavar="FILE", help="where to write the JSON report; the page lies beside it"
    )
    parser.add_argument(
        "--no-fencing", action="store_true", help="the control: a storage that takes any token"
    )
    parser.add_argument("--list", action="store_true", help="list the faults")
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(FAULTS))
        return 0
    if arguments.seed is None:
        arguments.seed = secrets.randbelow(1_000_000)
    # It logs every write to a connection that a proxy broke on purpose.
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    log_setup.configure(log_format=log_setup.LogFormat.CONSOLE, level=log_setup.LogLevel.ERROR)
    verdicts = []
    for series in _series(arguments):
        _say(f"seed {series.seed}; again: {_command(series)}")
        verdicts += [_run_once(series, count) for count in _counts(series)]
    # A violation counts even if another run proves nothing.
    worst = next((verdict for verdict in (BROKEN, INVALID) if verdict in verdicts), PASSED)
    return _EXIT_STATUSES[worst]


def _series(arguments: argparse.Namespace) -> Sequence[argparse.Namespace]:
    """Return the runs: one with all faults mixed, or one for each fault in its share of the time."""
    if not arguments.each:
        return [arguments]
    names = [name for name in arguments.only or FAULTS if name not in arguments.without]
    if not names:
        _say("INVALID no fault is left to inject")
        sys.exit(_EXIT_STATUSES[INVALID])
    runs = []
    for name in names:
        run_alone = copy(arguments)
        run_alone.only, run_alone.minutes = [name], arguments.minutes / len(names)
        # Some faults need nodes with a log.
        run_alone.aof = arguments.aof or "always"
        run_alone.report = arguments.report and _named(arguments.report, re.sub(r"\W+", "-", name))
        runs.append(run_alone)
    return runs


def _named(path: Path, what: str) -> Path:
    return path.with_name(f"{path.stem}-{what}{path.suffix}")


def _run_once(arguments: argparse.Namespace, count: int) -> str:
    counts = _counts(arguments)
    with tempfile.TemporaryDirectory(prefix="redfence-chaos-") as name:
        folder = Path(name)
        plan = _plan(arguments, count, folder)
        names = possible(
            clocks=plan.clock_shim is not None,
            small_disk=plan.small_disk,
            logs=plan.aof != "off",
            only=arguments.only,
            without=arguments.without,
        )
        if not names:
            _say("INVALID no requested fault is possible on this machine")
            return INVALID
        schedule = Schedule(
            seed=arguments.seed,
            lasts_s=arguments.minutes * 60 / len(counts),
            faults=names,
            asked=names if arguments.only or arguments.minutes / len(counts) >= _ALL_MINUTES else (),
            client_count=arguments.clients,
        )
        ran = asyncio.run(run(plan, schedule, folder=folder, say=_say))
        report = report_of(plan, schedule, ran, check(ran.history))
        if arguments.report is not None:
            path = _named(arguments.report, f"{count}-nodes") if len(counts) > 1 else arguments.report
            path.parent.mkdir(parents=True, exist_ok=True)
            _say(f"report: {path} and {write_report(report, path)}")
            if report["verdict"] != PASSED:
                _keep(ran, path)
    _say_what_came_of_it(report)
    return str(report["verdict"])


def _plan(arguments: argparse.Namespace, count: int, folder: Path) -> Plan:
    """Return what to start, and report the faults that are impossible on this machine."""
    # Mostly as operations.md requires. The promises also cover nodes that may forget.
    choices: Sequence[Aof] = ("always", *_AOFS)
    plan = Plan(node_count=count, aof=arguments.aof or choices[(arguments.seed + count) % len(choices)])
    if arguments.no_fencing:
        plan = replace(plan, storage_program=harness_program("harness.chaos.broken_program", "unfenced"))
    try:
        plan = replace(plan, clock_shim=compile_clock_shim(folder))
    except NoCompilerError as error:
        _say(f"left out: {CLOCK_STEPPED}, {SERVER_CLOCK}: {error}")
    if problem := can_mount(folder / "probe"):
        _say(f"left out: {DISK_FULL}: {problem}")
        return plan
    return replace(plan, small_disk=True)


def _say_what_came_of_it(report: Report) -> None:
    violations, counts, faults = report["violations"], report["counts"], report["faults"]
    for violation in violations[:_SHOWN_MAX]:
        _say(f"VIOLATION {violation['invariant']} of {violation['resource']}: {violation['words']}")
    if len(violations) > _SHOWN_MAX:
        _say(f"… and {len(violations) - _SHOWN_MAX} more")
    for reason in report["invalid"]:
        _say(f"INVALID {reason}")
    for defect in report["defects"]:
        _say(f"DEFECT {defect}")
    began_s = min((fault["began_s"] for fault in faults), default=0.0)
    minutes = max(max((fault["ended_s"] for fault in faults), default=0.0) - began_s, 1.0) / 60
    stale_writes = counts["stale_writes_refused"]
    _say(
        f"{report['plan']['node_count']} nodes: {counts['calls']} calls, "
        f"{counts['operations'][Kind.ACQUIRE][Outcome.OK]} grants, "
        f"{counts['throughput_per_s']:.0f} op/s before the first fault; "
        f"{len(faults)} faults of {len(counts['faults'])} kinds ({len(faults) / minutes:.1f} a minute), "
        f"{stale_writes} stale writes refused ({stale_writes / minutes:.1f} a minute), "
        f"longest time without a grant {counts['longest_gap_s']:.1f} s, "
        f"proxies late by at most {report['late_s']:.2f} s; {len(violations)} violations"
    )
    _say(f"verdict: {report['verdict']}")


def _counts(arguments: argparse.Namespace) -> Sequence[int]:
    return (3, 5) if arguments.nodes == "both" else (int(arguments.nodes),)


def _keep(ran: Run, report: Path) -> None:
    """Write every record and the warnings of the servers to files beside the report."""
    records, log = report.with_suffix(".jsonl"), report.with_suffix(".log")
    with records.open("w", encoding="utf-8") as file:
        file.writelines(map(line, ran.history.operations))
        file.writelines(map(line, ran.history.faults))
    log.write_text("".join(f"{each}\n" for each in ran.logged), "utf-8")
    _say(f"records: {records}; warnings of the servers: {log}")


def _command(arguments: argparse.Namespace) -> str:
    """Return the command line that repeats a run."""
    words = ["python", "-m", "harness.chaos"]
    for name, value in vars(arguments).items():
        if value and name not in ("each", "list", "report"):
            for each in value if isinstance(value, list) else [value]:
                words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(each)])]
    return shlex.join(words)


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
