"""`make deploy-check` fails in CI if a tool of the system is missing, and passes with a word elsewhere."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
# The programs that the recipe itself runs.
SHELL_TOOLS = ("make", "sh", "grep", "mktemp", "cp", "rm")
CHECKERS = {"systemd-analyze": "systemd", "promtool": "prometheus"}


@pytest.mark.parametrize("missing", CHECKERS)
def test_a_missing_checker_fails_in_ci_only(tmp_path: Path, missing: str) -> None:
    for tool in (*SHELL_TOOLS, *CHECKERS):
        # A machine without the other checker proves the same.
        if tool != missing and (program := shutil.which(tool)):
            (tmp_path / tool).symlink_to(program)
    environment = {"PATH": str(tmp_path)}
    command = ("make", "deploy-check-host")

    def run(**more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, cwd=REPOSITORY, env=environment | more, capture_output=True, text=True, check=False
        )

    told = f"deploy-check: no {missing} on this machine; the package {CHECKERS[missing]} has it"
    elsewhere, in_ci = run(), run(CI="true")
    assert elsewhere.returncode == 0, elsewhere.stderr
    assert told in elsewhere.stderr
    assert in_ci.returncode != 0
    assert "deploy-check: no " in in_ci.stderr
