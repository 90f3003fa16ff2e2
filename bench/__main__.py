"""`make bench`: run the benchmarks, or those named as arguments. They print; they never fail on a number.

A long one, of many minutes, is run only if it is named.
"""

from __future__ import annotations

import importlib
import sys

BENCHMARKS = ("session_pairs", "hand_off", "waiters", "slow_node", "storage_puts")
LONG = ("idle_counters",)


def main(names: list[str]) -> int:
    """Run the named benchmarks, all if none is named."""
    unknown = set(names) - {*BENCHMARKS, *LONG}
    if unknown:
        print(f"no such benchmark: {', '.join(sorted(unknown))}; there are {', '.join((*BENCHMARKS, *LONG))}")
        return 2
    for name in names or BENCHMARKS:
        importlib.import_module(f"bench.{name}").run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
