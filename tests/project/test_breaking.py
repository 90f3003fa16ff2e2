"""`make proto-breaking` and `make upgrade-check` compare with the last release, never with this commit."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from harness.chaos.upgrade import last_tag

REPOSITORY = Path(__file__).resolve().parents[2]
PROTO = "protos/redfence/v1/lock.proto"
# Tags of one second have no order.
_DATES = itertools.count(1_700_000_000)


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    """A git repository of its own with the contract in its first commit, and no tag."""
    (tmp_path / PROTO).parent.mkdir(parents=True)
    for name in (PROTO, "buf.yaml", "Makefile"):
        shutil.copy(REPOSITORY / name, tmp_path / name)
    _git(tmp_path, "init", "--quiet")
    _commit(tmp_path)
    return tmp_path


def _git(folder: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=test", "-c", "user.email=test@localhost", "-c", "commit.gpgsign=false")
    environment = {**os.environ, "GIT_COMMITTER_DATE": f"{next(_DATES)} +0000"}
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, env=environment)


def _commit(folder: Path) -> None:
    _git(folder, "add", "--all")
    _git(folder, "commit", "--quiet", "--allow-empty", "--message", "a change")


def _compare(folder: Path) -> tuple[bool, str]:
    """Return whether `make proto-breaking` passes, and what it prints."""
    tools = f"BIN={Path(sys.executable).parent}"
    done = subprocess.run(
        ["make", "proto-breaking", "READY=", tools], cwd=folder, capture_output=True, text=True, check=False
    )
    return done.returncode == 0, done.stdout + done.stderr


def _edit(folder: Path, old: str, new: str) -> None:
    text = (folder / PROTO).read_text()
    assert old in text
    (folder / PROTO).write_text(text.replace(old, new))


@pytest.mark.slow
def test_a_change_that_breaks_clients_of_the_last_release_fails(scratch: Path) -> None:
    """A new field is no break. Later commits, and tags of another kind or of this commit, hide no break."""
    passed, printed = _compare(scratch)
    assert passed
    assert "nothing compared, this clone has no v* tag" in printed

    _git(scratch, "tag", "v0.1.0")
    _commit(scratch)
    _edit(scratch, "string holder = 5;", "string holder = 5;\n  string region = 99;")
    passed, printed = _compare(scratch)
    assert passed, printed
    assert "comparing with v0.1.0" in printed

    _edit(scratch, "uint64 fencing_token = 3;", "")
    _edit(scratch, "string holder = 5;", "string holder = 98;")
    _edit(scratch, "CommandError", "Failure")
    _edit(scratch, "redfence/v1;redfencev1", "redfence/v2;redfencev2")
    for committed in (False, True):
        if committed:
            _commit(scratch)
            _git(scratch, "tag", "vendored")
            _commit(scratch)
            # The release that is being checked.
            _git(scratch, "tag", "v0.2.0")
        passed, printed = _compare(scratch)
        assert not passed
        for finding in ('field "3"', 'field "5"', 'message "CommandError"', "go_package"):
            assert finding in printed


def test_the_upgrade_begins_with_the_last_release_below_this_commit(scratch: Path) -> None:
    assert not last_tag(scratch)
    _git(scratch, "tag", "v0.1.0")
    assert not last_tag(scratch)
    _commit(scratch)
    assert last_tag(scratch) == "v0.1.0"
    _git(scratch, "tag", "v0.2.0")
    _git(scratch, "tag", "--annotate", "--message", "a release", "v0.2.1")
    assert last_tag(scratch) == "v0.1.0"
    _commit(scratch)
    assert last_tag(scratch) == "v0.2.1"
