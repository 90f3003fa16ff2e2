"""The page of promises and the track record name checks that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = (REPOSITORY / "docs/guarantees.md").read_text()
RECORD = (REPOSITORY / "tests/track_record.md").read_text()
NAMED = re.findall(r"`([^`\n]+)`", PAGE + RECORD)
TESTS = "".join(path.read_text() for path in (REPOSITORY / "tests").rglob("test_*.py"))


@pytest.mark.parametrize("name", sorted({name for name in NAMED if re.fullmatch(r"test_\w+…?", name)}))
def test_a_test_that_a_promise_names_exists(name: str) -> None:
    """An ellipsis stands for the rest of the name."""
    pattern = name.replace("…", r"\w*")
    assert re.search(rf"^(async )?def {pattern}\(", TESTS, re.MULTILINE), name


@pytest.mark.parametrize("name", sorted({name for name in NAMED if name.startswith(("tests/", "docs/"))}))
def test_a_file_that_a_promise_names_exists(name: str) -> None:
    """The same."""
    assert (REPOSITORY / name).exists(), name


def test_every_promise_names_a_check() -> None:
    """Each row of the tables: what is promised, what it assumes, and what checks it."""
    rows = [line for line in PAGE.splitlines() if line.startswith("| **")]
    assert len(rows) > 15
    for row in rows:
        promise, _, checks = row.strip("|").split("|")
        assert "`" in checks, promise
