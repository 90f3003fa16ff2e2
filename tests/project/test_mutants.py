"""The table of rules that are left out, in tests/README.md, is true: every name in it is that of a test."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.model import mutants as adversary_mutants
from harness.simulation import mutants as simulated_mutants

TESTS = Path(__file__).resolve().parents[1]
_PROMELA = (TESTS / "model/test_promela.py").read_text("utf-8")
_SCRIPTS = (TESTS / "contract/test_membership_scripts.py").read_text("utf-8")
_CHAOS = (TESTS / "chaos/test_chaos.py").read_text("utf-8")
_TABLE = (
    (TESTS / "README.md").read_text("utf-8").partition("## Checks that can fail")[2].partition("\n## ")[0]
)
_ROWS = [line.strip("|").split("|") for line in _TABLE.splitlines() if line.startswith("| ")][2:]
KNOWN: tuple[Callable[[str], bool], ...] = (
    adversary_mutants.MUTANTS.__contains__,
    lambda name: f'"{name}"' in _PROMELA,
    lambda name: f"def {name}(" in _SCRIPTS,
    simulated_mutants.DIRECTED.__contains__,
    simulated_mutants.MUTANTS.__contains__,
    lambda name: f"def {name}(" in _CHAOS,
)


@pytest.mark.parametrize("row", _ROWS, ids=lambda row: row[0].strip())
def test_whoever_is_said_to_miss_a_rule_is_there(row: list[str]) -> None:
    """At least one, and each under the name in the table."""
    found = 0
    for cell, knows in zip(row[1:], KNOWN, strict=True):
        for name in re.findall(r"`([^`]+)`", cell):
            assert knows(name), name
            found += 1
    assert found


def test_no_mutant_of_the_simulation_is_left_out_of_the_table() -> None:
    """Nor one of the standard, of which these are most."""
    mutants = simulated_mutants.MUTANTS | simulated_mutants.DIRECTED
    assert not [name for name in mutants if f"`{name}`" not in _TABLE]
