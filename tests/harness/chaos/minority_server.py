"""A lock server for which a minority is a quorum, for a control: `python -m harness.chaos.minority_server serve --node …`."""

from __future__ import annotations

import sys

from redfence._cli.main import main
from redfence_server.locking import quorum


def _minority(node_count: int) -> int:
    """Return one too few."""
    return node_count // 2


if __name__ == "__main__":
    setattr(quorum, "majority", _minority)  # noqa: B010  (a defect is put in)
    sys.exit(main())
