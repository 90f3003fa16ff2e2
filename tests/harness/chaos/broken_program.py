"""Runs `redfence` with a defect for the checker: `python -m harness.chaos.broken_program DEFECT …`."""

from __future__ import annotations

import sys

from redfence._cli.main import main
from redfence_server.locking import quorum
from redfence_storage import sqlite_store


def _admit(token: int, *, resource: str, highest_token: int) -> int:
    """Accept every token."""
    del resource
    return max(token, highest_token)


def _minority(node_count: int) -> int:
    """Return one node less than a majority."""
    return node_count // 2


if __name__ == "__main__":
    match sys.argv.pop(1):
        case "unfenced":
            setattr(sqlite_store, "admit", _admit)  # noqa: B010  (it inserts a defect)
        case "minority":
            setattr(quorum, "majority", _minority)  # noqa: B010  (it inserts a defect)
    sys.exit(main())
