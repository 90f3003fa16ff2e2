"""Runs the benchmarks for `make bench`: all short ones, or those named as arguments.

A benchmark prints its figures and never fails on a number. A benchmark that takes many minutes runs
only if it is named.
"""

from __future__ import annotations

import asyncio
import importlib
import sys

BENCHMARKS = ("session_pairs", "hand_off", "waiters", "slow_node", "storage_puts")
LONG = ("idle_counters",)


def main(names: list[str]) -> int:
    """Run the named benchmarks, or all short ones if none is named; return the exit status."""
    unknown = set(names) - {*BENCHMARKS, *LONG}
    if unknown:
        names_known = ", ".join((*BENCHMARKS, *LONG))
        print(f"unknown benchmark: {', '.join(sorted(unknown))}; choose from {names_known}")
        return 2
    for name in names or BENCHMARKS:
        asyncio.run(importlib.import_module(f"bench.{name}").main())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
