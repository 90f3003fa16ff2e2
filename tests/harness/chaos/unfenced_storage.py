"""The storage with a rule that refuses nothing, for the control: `python -m harness.chaos.unfenced_storage storage --db …`."""

from __future__ import annotations

import sys

from redfence._cli.main import main
from redfence_storage import sqlite_store


def _admit(token: int, *, resource: str, highest_token: int) -> int:
    """Let everything pass."""
    del resource
    return max(token, highest_token)


if __name__ == "__main__":
    setattr(sqlite_store, "admit", _admit)  # noqa: B010  (a defect is put in)
    sys.exit(main())
