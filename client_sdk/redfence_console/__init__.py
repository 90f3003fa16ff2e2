"""Starts the console script `redfence` with gRPC's own log lines switched off.

gRPC reads its log level from the environment when it is imported, and `import redfence` imports it.
So this module is outside the package `redfence`. An operator who sets `GRPC_VERBOSITY` gets the lines.
"""

from __future__ import annotations

import os


def main() -> int:
    """Run the command line of this process and return its exit status."""
    if "GRPC_VERBOSITY" not in os.environ:
        # Only gRPC reads it there: the commands that `redfence lock` runs get `os.environ`.
        os.putenv("GRPC_VERBOSITY", "NONE")
    from redfence._cli.main import main as run  # noqa: PLC0415  (it imports gRPC)

    return run()
