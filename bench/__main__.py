"""Runs the benchmarks for `make bench`: the comparison with its peers, or those named as arguments.

A benchmark prints its figures and never fails on a number.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import sys
from collections.abc import Sequence

from bench import compare, page

# Each measures one property of redfence alone. The last one takes many minutes.
BENCHMARKS = ("hand_off", "waiters", "slow_node", "storage_puts", "capacity", "idle_counters")


def main(arguments: Sequence[str]) -> int:
    """Run the comparison, or the named benchmarks; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m bench", description="Without a command: compare, with its defaults."
    )
    commands = parser.add_subparsers(dest="command")
    compare.add_arguments(commands.add_parser("compare", help="redfence and its peers, interleaved"))
    page.add_arguments(commands.add_parser("page", help=(page.__doc__ or "").strip()))
    for name in BENCHMARKS:
        commands.add_parser(
            name, help=(importlib.import_module(f"bench.{name}").__doc__ or "").splitlines()[0]
        )
    options = parser.parse_args(list(arguments) or ["compare"])
    if options.command == "compare":
        return compare.run(options)
    if options.command == "page":
        return page.run(options)
    asyncio.run(importlib.import_module(f"bench.{options.command}").main())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
