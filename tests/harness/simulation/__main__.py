"""`make sim`: simulate seeds, and say of each that is not well what is wrong and how to see it again."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor

from harness.simulation.mutants import MUTANTS
from harness.simulation.world import Report, replay_command, simulate

_PROBLEMS_SHOWN = 10
_TOLD_EVERY_S = 30.0


def _seeds(text: str) -> range:
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


def _run(seed: int, mutant: str) -> Report:
    return simulate(seed, MUTANTS[mutant] if mutant else None)


def _reports(seeds: Sequence[int], mutant: str, jobs: int) -> Iterator[Report]:
    if jobs == 1 or len(seeds) == 1:
        yield from (_run(seed, mutant) for seed in seeds)
        return
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(_run, seeds, [mutant] * len(seeds), chunksize=10)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; return 0 if every seed is well, and 1 otherwise."""
    parser = argparse.ArgumentParser(prog="make sim", description=__doc__)
    parser.add_argument("--seeds", type=_seeds, default=range(1), metavar="SEED[-LAST]", help="default: 0")
    parser.add_argument("--mutant", choices=MUTANTS, default="", help="the product with one rule removed")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count(), help="processes (default: one for each core)"
    )
    options = parser.parse_args(arguments)
    counts: Counter[str] = Counter()
    ailing = 0
    began_s = told_s = time.monotonic()
    for done, report in enumerate(_reports(options.seeds, options.mutant, options.jobs), 1):
        counts.update(report.counts)
        if report.problems:
            ailing += 1
            replay = replay_command(report.seed, options.mutant)
            print(f"seed {report.seed}: {len(report.problems)} problems; {replay}")
            for problem in report.problems[:_PROBLEMS_SHOWN]:
                print(f"  {problem}")
        if time.monotonic() - told_s > _TOLD_EVERY_S:
            told_s = time.monotonic()
            print(f"{done} of {len(options.seeds)} seeds, {ailing} not well", flush=True)
    if len(options.seeds) == 1:
        print(f"trace {report.trace_hash}")
    print(", ".join(f"{count} {what}" for what, count in sorted(counts.items())))
    print(f"{len(options.seeds)} seeds, {ailing} not well, {time.monotonic() - began_s:.0f} s")
    return 1 if ailing else 0


if __name__ == "__main__":
    sys.exit(main())
