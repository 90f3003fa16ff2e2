"""The pages that promise something name checks that exist: guarantees, track record, table of mutants."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from harness.model import mutants as adversary_mutants
from harness.simulation import mutants as simulated_mutants

REPOSITORY = Path(__file__).resolve().parents[2]
TESTS = REPOSITORY / "tests"
PAGE = (REPOSITORY / "docs/guarantees.md").read_text()
NAMED = re.findall(r"`([^`\n]+)`", PAGE + (TESTS / "track_record.md").read_text())
_TABLE = (TESTS / "README.md").read_text().partition("## Checks that can fail")[2].partition("\n## ")[0]
_PROMELA = (TESTS / "model/test_promela.py").read_text()
_SCRIPTS = (TESTS / "contract/test_membership_scripts.py").read_text()
_CHAOS = (TESTS / "chaos/test_chaos.py").read_text()
KNOWN: tuple[Callable[[str], bool], ...] = (
    adversary_mutants.MUTANTS.__contains__,
    lambda name: f'"{name}"' in _PROMELA,
    lambda name: f"def {name}(" in _SCRIPTS,
    simulated_mutants.DIRECTED.__contains__,
    simulated_mutants.MUTANTS.__contains__,
    lambda name: f"def {name}(" in _CHAOS,
)


def test_a_test_that_a_promise_names_exists() -> None:
    """An ellipsis stands for the rest of the name."""
    tests = "".join(path.read_text() for path in TESTS.rglob("test_*.py"))
    names = {name for name in NAMED if re.fullmatch(r"test_\w+…?", name)}
    patterns = {name: name.replace("…", r"\w*") for name in names}
    assert len(names) > 50
    assert not [
        name
        for name, pattern in patterns.items()
        if not re.search(rf"^(async )?def {pattern}\(", tests, re.MULTILINE)
    ]


def test_a_file_that_a_promise_names_exists() -> None:
    names = {name for name in NAMED if name.startswith(("tests/", "docs/"))}
    assert names
    assert not [name for name in names if not (REPOSITORY / name).exists()]


def test_every_promise_names_a_check() -> None:
    """Each row of the tables: what is promised, what it assumes, and what checks it."""
    rows = [line for line in PAGE.splitlines() if line.startswith("| **")]
    assert len(rows) > 15
    for row in rows:
        promise, _, checks = row.strip("|").split("|")
        assert "`" in checks, promise


def test_each_rule_that_is_left_out_is_missed_by_tests_that_exist() -> None:
    """At least one, and each under the name in the table of tests/README.md."""
    rows = [line.strip("|").split("|") for line in _TABLE.splitlines() if line.startswith("| ")][2:]
    assert len(rows) > 30
    for row in rows:
        found = [
            (knows, name)
            for cell, knows in zip(row[1:], KNOWN, strict=True)
            for name in re.findall(r"`([^`]+)`", cell)
        ]
        assert found, row
        assert not [name for knows, name in found if not knows(name)], row


def test_no_mutant_of_the_simulation_is_left_out_of_the_table() -> None:
    """Nor one of the standard, of which these are most."""
    mutants = simulated_mutants.MUTANTS | simulated_mutants.DIRECTED
    assert not [name for name in mutants if f"`{name}`" not in _TABLE]
