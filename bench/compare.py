"""Measures redfence and its peers side by side: in each round every target has its turn.

So other load on the machine hits all targets alike, and a ratio compares neighbours in time.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench import cluster, figures, report, services
from bench.cluster import ServiceError
from bench.comparison import Comparison
from bench.figures import Measurement, Target
from bench.processes import run_load
from bench.services import Start, Variant

_CONTENDERS = 16  # workers of the workload `one`
# Resources of the open loop: so many that the last pair on a resource has ended.
_OPEN_RESOURCES = 4096
_LEASES_MAX = 1_000_000
# A server that grants fewer leases per second cannot keep them alive.
_GRANTS_PER_S_MIN = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `python -m bench compare`."""
    kinds = ",".join((*services.CLIENTS, *services.PEERS))
    parser.add_argument("--targets", type=_list, default=_list(kinds), help=f"what to measure: {kinds}")
    parser.add_argument(
        "--workloads",
        type=_list,
        default=_list("1,64,one,open"),
        help="numbers of workers, each on its own resource; `one`: 16 workers on one; `open`: pairs begin at "
        "half of the target's maximum rate among the numbers; `leases-N`: sessions keep N leases "
        "alive, in one turn (default: 1,64,one,open)",
    )
    parser.add_argument("--nodes", type=_list, default=_list("3"), help="quorum sizes, e.g. 3,5 (default: 3)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each target (default: 3)")
    parser.add_argument("--seconds", type=float, default=2, help="the measured time of a turn (default: 2)")
    parser.add_argument(
        "--lease-seconds", type=float, default=60, help="the measured time of `leases-N` (default: 60)"
    )
    parser.add_argument("--warm-up", type=float, default=1, help="the time before it (default: 1)")
    parser.add_argument(
        "--server",
        action="append",
        default=[],
        metavar="NAME=PROGRAM [ARGUMENT…]",
        help="a redfence program to measure, with arguments for `serve`; repeat it to compare checkouts; "
        "the program `redfence` is the one of this checkout (default: redfence=redfence)",
    )
    parser.add_argument("--server-args", default="", help="arguments for `serve` of every server")
    parser.add_argument(
        "--connections", type=int, default=1, help="connections of the Go client to redfence (default: 1)"
    )
    parser.add_argument(
        "--json", type=Path, default=cluster.FOLDER / "comparison.json", help="where to save the figures"
    )


def _list(text: str) -> list[str]:
    return [each.strip() for each in text.split(",") if each.strip()]


async def main(options: argparse.Namespace) -> int:
    """Measure, print the tables and save the figures; return the exit status: 2 for wrong options."""
    try:
        variants = _checked(options)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    starts = services.targets(
        kinds=options.targets,
        node_counts=[int(count) for count in options.nodes],
        variants=variants,
        connections=options.connections,
    )
    absent: dict[str, str] = {}
    measurements = await _measure(starts, options, absent)
    comparison = Comparison(
        [*starts], options.workloads, measurements, absent, rounds=options.rounds, seconds=options.seconds
    )
    comparison.save(options.json)
    print(report.markdown(comparison))
    print(f"\nEvery figure is in {options.json}.")
    return 0


def _checked(options: argparse.Namespace) -> list[Variant]:
    """Return the servers to compare.

    Raises:
        ValueError: an option has a value that cannot be measured.
    """
    known = (*services.CLIENTS, *services.PEERS)
    if unknown := set(options.targets) - set(known):
        raise ValueError(f"--targets: unknown: {', '.join(sorted(unknown))}; choose from {', '.join(known)}")
    _check_workloads(options.workloads)
    if unknown := set(options.nodes) - {"1", "3", "5", "7"}:
        raise ValueError(f"--nodes: {', '.join(sorted(unknown))}; a quorum has 1, 3, 5 or 7 nodes")
    for name in ("rounds", "seconds", "lease_seconds", "warm_up", "connections"):
        if (value := getattr(options, name)) <= 0:
            raise ValueError(f"--{name.replace('_', '-')}: {value} must be greater than 0")
    arguments = shlex.split(options.server_args)
    texts = options.server or ["redfence=redfence"]
    variants = [Variant.parse(text, shared_arguments=arguments) for text in texts]
    if len({each.name for each in variants}) < len(variants):
        raise ValueError("--server: two servers have the same name; give each its own")
    return variants


def _check_workloads(workloads: Sequence[str]) -> None:
    for each in workloads:
        leases = figures.lease_count(each)
        if leases is not None and not 1 <= leases <= _LEASES_MAX:
            raise ValueError(f"--workloads: {each!r}: a session keeps 1 to {_LEASES_MAX} leases")
        known = leases is not None or each in {"one", "open"}
        if not known and not (each.isdecimal() and 1 <= int(each) <= 10_000):
            raise ValueError(
                f"--workloads: {each!r} is not `one`, `open`, `leases-N` or a number from 1 to 10000"
            )
    before_open = workloads[: workloads.index("open")] if "open" in workloads else ["1"]
    if not any(each.isdecimal() for each in before_open):
        raise ValueError("--workloads: `open` needs the maximum; name a number before it, e.g. 64,open")


async def _measure(
    starts: Mapping[Target, Start], options: argparse.Namespace, absent: dict[str, str]
) -> list[Measurement]:
    """Give every target its turn in each round, each time with another one first.

    A target that fails has no further turn; `absent` gets the reason.
    """
    measurements: list[Measurement] = []
    for workload in options.workloads:
        leases = figures.lease_count(workload)
        able = [each for each in starts if _can_run(each, workload)]
        for number in range(options.rounds if leases is None else 1):
            for target in _rotated(able, number):
                if target.name in absent:
                    continue
                turn = f"{workload:>4} round {number + 1}: {target.name}"
                maximum = figures.maximum(measurements, target=target.name)
                try:
                    measured = await _turn(target, starts[target], workload, number, options, maximum=maximum)
                except ServiceError as error:
                    absent[target.name] = str(error)
                    print(f"{turn} failed: {error}", file=sys.stderr)
                else:
                    measurements.append(measured)
                    print(f"{turn} {measured.rate:,.0f}/s", file=sys.stderr)
    return measurements


def _can_run(target: Target, workload: str) -> bool:
    if figures.lease_count(workload) is not None:
        return target.kind in services.LEASES
    return workload != "open" or target.kind in services.OPEN_LOOP


def _rotated(targets: Sequence[Target], number: int) -> list[Target]:
    first = number % len(targets) if targets else 0
    return [*targets[first:], *targets[:first]]


async def _turn(
    target: Target,
    start: Start,
    workload: str,
    number: int,
    options: argparse.Namespace,
    *,
    maximum: float | None,
) -> Measurement:
    """Measure one target once.

    Raises:
        ServiceError: the service or the load program could not be run.
    """
    load: dict[str, object] = {"--seconds": options.seconds, "--warm-up": options.warm_up}
    timeout_s = options.warm_up + options.seconds
    if (leases := figures.lease_count(workload)) is not None:
        load = {"--seconds": options.lease_seconds, "--leases": leases}
        timeout_s = options.lease_seconds + leases / _GRANTS_PER_S_MIN
    elif workload == "one":
        load |= {"--workers": _CONTENDERS, "--resource": "one"}
    elif workload == "open":
        assert maximum is not None, "an earlier workload has it"
        load |= {"--workers": _OPEN_RESOURCES, "--rate": maximum / 2}
    else:
        load |= {"--workers": int(workload)}
    arguments = [str(each) for option in load.items() for each in option]
    async with start() as running:
        outcome = await run_load(
            [*running.command, *arguments],
            processes=running.processes,
            timeout_s=timeout_s,
        )
    return Measurement(target.name, workload, number, outcome.result, outcome.cpu_s)


def run(options: argparse.Namespace) -> int:
    """Run `main` to its end."""
    return asyncio.run(main(options))
