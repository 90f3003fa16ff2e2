"""docs/model/redfence.pml, checked whole at small size: nothing breaks it, everything breaks it once a rule is left out."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness import spin
from harness.spin import Search

REQUIRE_VARIABLE = "REDFENCE_REQUIRE_MODEL"

FOLDER = Path(__file__).resolve().parents[2] / "docs/model"
MODEL = FOLDER / "redfence.pml"

pytestmark = pytest.mark.slow


@dataclass(frozen=True, slots=True)
class Configuration:
    """A size of the model, within which every order of events is tried.

    Attributes:
        size: what is defined for the model.
        leaves_out: a rule that is not needed at this size.
        mutants: rules that are.
        protects: the invariants of which one breaks without such a rule.
        reached: what must be possible here, or that nothing was found proves nothing.
    """

    size: dict[str, int]
    leaves_out: str = ""
    mutants: tuple[str, ...] = ()
    protects: frozenset[str] = frozenset({"unique", "ordered"})
    reached: tuple[str, ...] = ()

    def search(self, folder: Path, *, without: str = "", goal: str = "") -> Search:
        """Search it, or a mutant of it, or for a goal."""
        defines: dict[str, str | int] = dict(self.size)
        defines |= {rule: 1 for rule in (self.leaves_out, without) if rule}
        if goal:
            defines["GOAL"] = goal
        return spin.search(MODEL, defines, folder, is_large=not without and not goal)


CONFIGURATIONS = {
    "rivals": Configuration(
        {"ATTEMPTS": 3, "AHEAD": 1, "EVICTION": 1},
        mutants=("MAX_WITHOUT_COMMIT", "UNCONDITIONAL_COMMIT", "COUNTER_FROM_ZERO"),
        reached=("FAST_PATH", "COMMITTED", "AFTER_ANOTHER"),
    ),
    "a retried lease": Configuration(
        {"ATTEMPTS": 3, "RETRIES": 1},
        mutants=("COMMIT_WITHOUT_NONCE",),
        reached=("SAME_TOKEN_AGAIN", "AFTER_ANOTHER"),
    ),
    "a retried lease, given up": Configuration(
        {"RETRIES": 1, "UNDO": 1, "AHEAD": 2},
        mutants=("UNDO_BY_LEASE", "UNDO_OF_A_SHARED_HOLD"),
        protects=frozenset({"kept"}),
        reached=("SAME_TOKEN_AGAIN",),
    ),
    "two losses": Configuration(
        {"WIPES": 2, "DRIVERS": 2, "AHEAD": 1},
        mutants=("VOTE_BEFORE_REJOIN", "REJOIN_READS_F", "READMIT_IN_ANY_QUARANTINE"),
        reached=("ON_A_NODE_THAT_CAME_BACK", "AFTER_A_SECOND_RETURN"),
    ),
    "two losses, by the jump alone": Configuration(
        {"WIPES": 2, "DRIVERS": 2},
        leaves_out="VOUCH_WITHOUT_VOIDING",
        mutants=("VOUCH_WITHOUT_WRITE_BACK",),
        reached=("AFTER_A_SECOND_RETURN",),
    ),
    "two losses, by voiding alone": Configuration({"WIPES": 2, "DRIVERS": 2, "JUMP": 1}),
    "nodes far apart, by voiding alone": Configuration(
        {"WIPES": 1, "DRIVERS": 1, "JUMP": 1, "AHEAD": 2},
        # Without voiding there is neither of the two defences.
        mutants=("VOUCH_WITHOUT_VOIDING", "COMMIT_UNDER_ANY_ADMISSION", "VOUCH_BLINDLY"),
        reached=("ON_A_NODE_THAT_CAME_BACK",),
    ),
    "three drivers": Configuration({"WIPES": 1, "DRIVERS": 3}),
    "three attempts": Configuration({"ATTEMPTS": 3, "WIPES": 1, "DRIVERS": 1}),
    "an older state": Configuration(
        {"REVERTS": 1, "RELICS": 1, "DRIVERS": 1, "AHEAD": 1, "EVICTION": 1},
        mutants=("MINT_WITHOUT_FLOOR", "FIND_RELICS"),
        reached=("ON_A_NODE_THAT_CAME_BACK",),
    ),
    "a replaced node lives on": Configuration(
        {"REPLACEMENT": 1, "WIPES": 1, "DRIVERS": 2},
        mutants=("VOUCH_WITHOUT_VOIDING",),
        reached=("ON_THE_OLD_NODE", "ON_THE_NEW_NODE"),
    ),
    "a replaced node lives on, by voiding alone": Configuration(
        {"REPLACEMENT": 1, "WIPES": 1, "DRIVERS": 2, "JUMP": 1},
        mutants=("VOUCH_UNDER_ANY_ADMISSION", "READMIT_WITHOUT_KNOWN_FLOORS"),
    ),
}

MUTANTS = [(name, mutant) for name, each in CONFIGURATIONS.items() for mutant in each.mutants]
GOALS = [(name, goal) for name, each in CONFIGURATIONS.items() for goal in each.reached]


@pytest.fixture(autouse=True)
def checker() -> None:
    """Skip on a laptop without Spin; fail where everything must be there."""
    if not spin.is_spin_here():
        if os.environ.get(REQUIRE_VARIABLE) == "1":
            pytest.fail(spin.SPIN_MISSING)
        pytest.skip(spin.SPIN_MISSING)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_no_order_of_events_breaks_an_invariant(name: str, tmp_path: Path) -> None:
    """Every state that this size has is reached, and tokens are unique and ordered in all of them."""
    found = CONFIGURATIONS[name].search(tmp_path)
    assert not found.violated, "\n".join(found.steps)


@pytest.mark.parametrize(("name", "mutant"), MUTANTS)
def test_a_mutant_is_caught(name: str, mutant: str, tmp_path: Path) -> None:
    """At the very size that the algorithm withstands: each of its rules is needed."""
    configuration = CONFIGURATIONS[name]
    found = configuration.search(tmp_path, without=mutant)
    assert found.violated in configuration.protects
    # It can be read, and not only found.
    assert any("is granted" in step or "undoes" in step for step in found.steps)


@pytest.mark.parametrize(("name", "goal"), GOALS)
def test_what_must_be_possible_is_reached(name: str, goal: str, tmp_path: Path) -> None:
    """A model in which nothing happens breaks no invariant either."""
    found = CONFIGURATIONS[name].search(tmp_path, goal=goal)
    assert found.violated.strip().startswith("!(")
    assert "is granted" in found.steps[-1]


def test_every_mutant_of_the_model_is_tried() -> None:
    """A rule that can be left out is a rule that has to be proved needful."""
    sizes = {name for each in CONFIGURATIONS.values() for name in each.size} | {"GOAL"}
    lines = MODEL.read_text().splitlines()
    conditions = [line for line in lines if line.startswith(("#ifdef", "#ifndef", "#if", "#elif"))]
    words = {word.strip("()!") for line in conditions for word in line.replace("defined", "").split()[1:]}
    rules = {word for word in words if word.isupper() and word.isidentifier()} - sizes - {"FINDS"}
    assert rules == {mutant for _, mutant in MUTANTS}


def test_the_readme_names_every_size_and_mutant() -> None:
    """Whoever reads the model finds there what is checked."""
    text = (FOLDER / "README.md").read_text()
    for name, configuration in CONFIGURATIONS.items():
        flags = " ".join(f"-D{symbol}={value}" for symbol, value in configuration.size.items())
        assert f"| {name} | `{flags}" in text
    for _, mutant in MUTANTS:
        assert f"`{mutant}`" in text
