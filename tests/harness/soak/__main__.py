"""`python -m harness.soak --minutes 30` loads a server for long and judges whether it grows.

It exits with 0 if memory and open files do not grow, with 1 if they do or the server logs a defect, and with
2 if the load did not keep its pace, because such a run proves nothing.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from harness.soak.judge import Wanted
from harness.soak.run import soak
from redfence_server.embedded.binary import find_redis_binary


def main(words: list[str]) -> int:
    """Run a soak, print its figures and its result, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m harness.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--pairs-per-second", type=float, default=1_000.0, help="of acquire and release")
    parser.add_argument("--streams", type=int, default=1_000, help="KeepAlive streams open at once")
    arguments = parser.parse_args(words)
    wanted = Wanted(arguments.pairs_per_second, arguments.streams, arguments.minutes * 60)
    with tempfile.TemporaryDirectory(prefix="redfence-soak-") as folder:
        judgement = soak(
            wanted, folder=Path(folder), binary=find_redis_binary(), say=lambda line: print(line, flush=True)
        )
    for sentence in judgement.sentences:
        print(sentence)
    print(judgement.status.name.lower())
    return judgement.status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
