"""Spin searches the models in docs/model: they keep their invariants, and break one without any rule."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness.model import spin
from harness.model.spin import Search

REQUIRE_VARIABLE = "REDFENCE_REQUIRE_MODEL"

FOLDER = Path(__file__).resolve().parents[2] / "docs/model"
TOKENS = FOLDER / "redfence.pml"
EXCLUSION = FOLDER / "membership.pml"
DELAY = FOLDER / "delay.pml"

pytestmark = pytest.mark.slow


@dataclass(frozen=True, slots=True)
class Configuration:
    """A size of a model, within which every order of events is tried.

    Attributes:
        size: what is defined for the model.
        model: its file.
        leaves_out: a rule that is not needed at this size.
        mutants: rules that are.
        deep: those of the mutants that show only after many states.
        protects: the invariants of which one breaks without such a rule; `exclusive` of exclusion.
        seen: what must be possible here, or that nothing was found proves nothing.
        reached: goals that need a search of their own, because states must remember more.
    """

    size: dict[str, int]
    model: Path = TOKENS
    leaves_out: str = ""
    mutants: tuple[str, ...] = ()
    deep: frozenset[str] = frozenset()
    protects: frozenset[str] = frozenset({"unique", "ordered"})
    seen: tuple[str, ...] = ()
    reached: tuple[str, ...] = ()

    @property
    def tells(self) -> dict[str, str]:
        """What the whole search tells it has seen, by the symbol that the model has for it."""
        return dict(zip(SEEN, self.seen, strict=False))

    def search(self, folder: Path, *, without: str = "", goal: str = "") -> Search:
        """Search it, or a mutant of it, or for a goal."""
        defines: dict[str, str | int] = dict(self.size)
        defines |= {rule: 1 for rule in (self.leaves_out, without) if rule}
        if goal:
            defines["GOAL"] = goal
        is_whole = not without and not goal
        defines |= self.tells if is_whole else {}
        return spin.search(
            self.model,
            defines,
            folder,
            is_large=is_whole or without in self.deep,
            # Where there are mutants, they check the bounds of the same steps.
            checks_bounds=not is_whole or not self.mutants,
        )


SEEN = ("SEEN_1", "SEEN_2", "SEEN_3")

CONFIGURATIONS = {
    "rivals": Configuration(
        {"ATTEMPTS": 3, "AHEAD": 1, "EVICTION": 1},
        mutants=("MAX_WITHOUT_COMMIT", "UNCONDITIONAL_COMMIT", "COUNTER_FROM_ZERO"),
        seen=("FAST_PATH", "COMMITTED", "AFTER_ANOTHER"),
    ),
    "a retried lease": Configuration(
        {"ATTEMPTS": 3, "RETRIES": 1},
        mutants=("COMMIT_WITHOUT_NONCE",),
        seen=("SAME_TOKEN_AGAIN",),
    ),
    "a retried lease, given up": Configuration(
        {"RETRIES": 1, "UNDO": 1, "AHEAD": 2},
        mutants=("UNDO_BY_LEASE", "UNDO_OF_A_SHARED_HOLD"),
        protects=frozenset({"kept"}),
        seen=("SAME_TOKEN_AGAIN",),
    ),
    "two losses": Configuration(
        {"WIPES": 2, "DRIVERS": 2},
        mutants=("VOTE_BEFORE_FENCE", "FENCE_READS_F", "RESTORE_IN_ANY_QUARANTINE"),
        seen=("ON_A_NODE_THAT_CAME_BACK",),
        reached=("AFTER_A_SECOND_RETURN",),
    ),
    "two losses, by the jump alone": Configuration(
        {"WIPES": 2, "DRIVERS": 2},
        leaves_out="FENCE_KEEPS_ADMISSIONS",
        mutants=("FENCE_KEEPS_HIGH",),
    ),
    "two losses, by the ids alone": Configuration({"WIPES": 2, "DRIVERS": 2, "JUMP": 1}),
    "nodes far apart, by the ids alone": Configuration(
        {"WIPES": 1, "DRIVERS": 1, "JUMP": 1, "AHEAD": 2},
        mutants=("COMMIT_UNDER_ANY_ADMISSION", "FENCE_BLINDLY"),
        seen=("ON_A_NODE_THAT_CAME_BACK",),
    ),
    "an older state": Configuration(
        {"REVERTS": 1, "RELICS": 1, "DRIVERS": 1, "AHEAD": 1, "EVICTION": 1},
        mutants=("MINT_WITHOUT_FLOOR", "FIND_RELICS"),
        seen=("ON_A_NODE_THAT_CAME_BACK",),
    ),
    "a replaced node lives on": Configuration(
        {"REPLACEMENT": 1, "WIPES": 1, "DRIVERS": 2, "JUMP": 1},
        mutants=("FENCE_UNDER_ANY_ADMISSION", "RESTORE_WITHOUT_KNOWN_FLOORS"),
        deep=frozenset({"FENCE_UNDER_ANY_ADMISSION"}),
        seen=("ON_THE_OLD_NODE", "ON_THE_NEW_NODE"),
    ),
    "a copy": Configuration(
        {"REPLACEMENT": 1, "COPY": 1, "DRIVERS": 2},
        # The jump alone does not suffice.
        mutants=("NO_FENCE_FOR_A_DURABLE_RESTART", "FENCE_KEEPS_ADMISSIONS"),
        seen=("ON_THE_OLD_NODE", "ON_THE_NEW_NODE"),
    ),
    "a copy, and a node that restarts": Configuration(
        {"REPLACEMENT": 1, "COPY": 1, "RESTARTS": 1, "DRIVERS": 2, "JUMP": 1},
        mutants=("RESTORER_DOES_NOT_LOOK",),
    ),
    "a copy, and a node that forgets": Configuration(
        {"REPLACEMENT": 1, "COPY": 1, "WIPES": 1, "DRIVERS": 1, "JUMP": 1, "AHEAD": 1},
        mutants=("FORGETFUL_READS_RESTARTED",),
        deep=frozenset({"FORGETFUL_READS_RESTARTED"}),
    ),
    "one trusted peer": Configuration(
        {"RELAXED": 1, "RESTARTS": 1, "WIPES": 1, "DRIVERS": 2, "JUMP": 1},
        mutants=("RESTORE_IN_ANY_QUARANTINE",),
        reached=("AFTER_A_FENCE_ON_THE_OUT",),
    ),
    "one trusted peer, and a copy": Configuration(
        {"RELAXED": 1, "REPLACEMENT": 1, "COPY": 1, "UNPROVEN": 1, "DRIVERS": 2, "JUMP": 1},
        mutants=("RELAXED_SPARES_THE_OUT", "RELAXED_WITH_AN_UNSEEN_PEER"),
        reached=("AFTER_A_FENCE_ON_THE_OUT",),
    ),
    "one trusted peer, a copy, and a loss": Configuration(
        {"RELAXED": 1, "REPLACEMENT": 1, "COPY": 1, "UNPROVEN": 1, "WIPES": 1, "DRIVERS": 3, "JUMP": 1},
        mutants=("TWO_FAULTS_AT_A_TIME",),
        deep=frozenset({"TWO_FAULTS_AT_A_TIME"}),
    ),
    "a power loss": Configuration({"POWER_LOSS": 1, "DRIVERS": 2}, seen=("ON_TWO_NODES_THAT_CAME_BACK",)),
    "an empty newcomer": Configuration(
        {"NEWCOMER": 1, "DRIVERS": 2},
        model=EXCLUSION,
        mutants=("WAIT_BEFORE_FENCE", "NO_WAIT", "FENCE_KEEPS_ADMISSIONS", "FENCE_ASKS_F", "POLL_MIXED"),
        seen=("ON_THE_DOUBLE", "RENEWED_ON_THE_OLD", "AFTER_ANOTHER"),
    ),
    "an empty newcomer, and a loss": Configuration(
        {"NEWCOMER": 1, "LOSSES": 1, "DRIVERS": 2},
        model=EXCLUSION,
        mutants=("RESTORE_IN_ANY_QUARANTINE",),
        deep=frozenset({"RESTORE_IN_ANY_QUARANTINE"}),
        seen=("ON_A_NODE_THAT_CAME_BACK",),
    ),
    "an empty newcomer, and the old process forgot": Configuration(
        {"NEWCOMER": 1, "OLD_IS_OUT": 1, "DRIVERS": 3},
        model=EXCLUSION,
        mutants=("ADOPT_ANY_FENCE",),
        deep=frozenset({"ADOPT_ANY_FENCE"}),
    ),
    "an empty newcomer, and a restart": Configuration(
        {"NEWCOMER": 1, "RESTARTS": 1, "DRIVERS": 2},
        model=EXCLUSION,
        mutants=("SUPERSEDED_DOES_NOT_WAIT",),
        deep=frozenset({"SUPERSEDED_DOES_NOT_WAIT"}),
        seen=("ON_THE_DOUBLE",),
    ),
    "an empty newcomer, and a reservation of the old process": Configuration(
        {"NEWCOMER": 1, "OLD_IS_OUT": 2, "DRIVERS": 2},
        model=EXCLUSION,
        mutants=("RESERVED_COUNTS_AS_VOTED",),
        seen=("ON_THE_DOUBLE",),
    ),
    "one trusted peer, and a lost one": Configuration(
        {"RELAXED": 1, "RESTARTS": 1, "LOSSES": 1, "DRIVERS": 2},
        model=EXCLUSION,
        seen=("ON_A_NODE_THAT_CAME_BACK",),
    ),
    "one trusted peer, and an empty newcomer": Configuration(
        {"RELAXED": 1, "NEWCOMER": 1, "RESTARTS": 1, "DRIVERS": 2},
        model=EXCLUSION,
        seen=("ON_THE_DOUBLE",),
    ),
    "restarts with proof": Configuration(
        {"RESTARTS": 2, "DRIVERS": 2},
        model=EXCLUSION,
        mutants=("RESTART_ENDS_HOLDS",),
        seen=("RENEWED_AFTER_A_RESTART",),
    ),
    "a lock delay": Configuration(
        {"LEASES": 2},
        model=DELAY,
        mutants=(
            *("MINT_IGNORES_THE_DELAY", "KEY_ENDS_WITH_THE_TTL", "FORCE_DELETES"),
            *("RENEWAL_REVIVES", "RELEASE_KEEPS_THE_DELAY"),
        ),
        protects=frozenset({"delayed", "final", "opened"}),
        seen=("AFTER_A_DELAY", "AFTER_A_RELEASE", "AFTER_A_FORCED_RELEASE"),
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
    """Spin reaches every state of this size, no assertion fails in any, and each goal is met."""
    configuration = CONFIGURATIONS[name]
    found = configuration.search(tmp_path)
    assert not found.violated, "\n".join(found.steps)
    # A model in which nothing happens breaks no invariant either.
    unseen = [goal for symbol, goal in configuration.tells.items() if symbol not in found.seen]
    assert not unseen, unseen


@pytest.mark.parametrize(("name", "mutant"), MUTANTS)
def test_a_mutant_is_caught(name: str, mutant: str, tmp_path: Path) -> None:
    """At the very size that the algorithm withstands: each of its rules is needed."""
    configuration = CONFIGURATIONS[name]
    found = configuration.search(tmp_path, without=mutant)
    assert found.violated in ({"exclusive"} if configuration.model == EXCLUSION else configuration.protects)
    # It can be read, and not only found.
    assert any("is granted" in step or "is renewed" in step or "undoes" in step for step in found.steps)


@pytest.mark.parametrize(("name", "goal"), GOALS)
def test_what_must_be_possible_is_reached(name: str, goal: str, tmp_path: Path) -> None:
    """A model in which nothing happens breaks no invariant either."""
    found = CONFIGURATIONS[name].search(tmp_path, goal=goal)
    assert found.violated.strip().startswith("!(")
    assert "is granted" in found.steps[-1] or "is renewed" in found.steps[-1]


@pytest.mark.parametrize("model", [TOKENS, EXCLUSION, DELAY], ids=lambda model: str(model.stem))
def test_every_mutant_of_a_model_is_tried(model: Path) -> None:
    """A rule that a model can leave out is a rule whose need is to be shown."""
    configurations = [each for each in CONFIGURATIONS.values() if each.model == model]
    sizes = {name for each in configurations for name in each.size} | {"GOAL", "FINDS", "LEASES", *SEEN}
    lines = model.read_text().splitlines()
    conditions = [line for line in lines if line.startswith(("#ifdef", "#ifndef", "#if", "#elif"))]
    words = {word.strip("()!") for line in conditions for word in line.replace("defined", "").split()[1:]}
    rules = {word for word in words if word.isupper() and word.isidentifier()} - sizes
    assert rules == {mutant for each in configurations for mutant in each.mutants}


def test_the_readme_names_every_size_and_mutant() -> None:
    """The page of the model says what Spin checks."""
    text = (FOLDER / "README.md").read_text()
    for name, configuration in CONFIGURATIONS.items():
        flags = " ".join(f"-D{symbol}={value}" for symbol, value in configuration.size.items())
        assert f"| {name} | `{flags}" in text
    for _, mutant in MUTANTS:
        assert f"`{mutant}`" in text
