"""Write where a release comes from: an in-toto statement with an SLSA v1 provenance, for `make release`.

The statement has no time and no signature, so one commit always gives the same bytes. Whoever publishes the
release signs it. Format: https://slsa.dev/spec/v1.0/provenance
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

PROJECT = "https://pypi.org/project/redfence"
# The packages that build the wheel, and those in the list of parts.
LOCKS = (Path("locks/build.txt"), Path("locks/server.txt"))


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], check=True, capture_output=True, text=True).stdout.strip()


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def statement(sums: str) -> dict[str, Any]:
    """Return the statement for the files of SHA256SUMS, built from the present commit."""
    commit, tags = _git("rev-parse", "HEAD"), _git("tag", "--points-at", "HEAD", "v*").split()
    if _git("status", "--porcelain", "--untracked-files=no"):
        raise SystemExit("provenance: the checkout has changes that are not committed; commit them first")
    files = [line.split() for line in sums.splitlines()]
    build = {
        "buildType": f"{PROJECT}#make-release",
        "externalParameters": {"target": "release", "tags": tags},
        "resolvedDependencies": [
            {"name": "source", "digest": {"gitCommit": commit}},
            *({"name": lock.as_posix(), "digest": {"sha256": _sha256(lock)}} for lock in LOCKS),
        ],
    }
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": name, "digest": {"sha256": digest}} for digest, name in files],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {"buildDefinition": build, "runDetails": {"builder": {"id": f"{PROJECT}#makefile"}}},
    }


if __name__ == "__main__":
    dist = Path(sys.argv[1])
    text = json.dumps(statement((dist / "SHA256SUMS").read_text()), indent=2)
    (dist / "redfence.provenance.json").write_text(text + "\n")
