"""The popular recipe, "INCR on a majority and take the greatest", gives equal and falling tokens."""

from __future__ import annotations

import itertools


def _naive_grants(counters: tuple[int, ...], steps: tuple[tuple[str, int], ...]) -> dict[str, int]:
    """Return the token of each acquirer: it increments nodes in this order, and needs two of three."""
    present = list(counters)
    numbers: dict[str, list[int]] = {}
    for acquirer, node in steps:
        present[node] += 1
        numbers.setdefault(acquirer, []).append(present[node])
    return {acquirer: max(got) for acquirer, got in numbers.items() if len(got) >= 2}


def test_a_later_acquirer_gets_the_smaller_number_from_the_naive_recipe() -> None:
    """From (2, 0, 0), left by two aborted attempts, A gets 3 and then B gets 2."""
    assert _naive_grants((2, 0, 0), (("A", 0), ("A", 1), ("B", 1), ("B", 2))) == {"A": 3, "B": 2}


def test_two_racing_acquirers_get_one_number_from_the_naive_recipe() -> None:
    """From (0, 0, 0), A and B can both get 2."""
    assert _naive_grants((0, 0, 0), (("A", 0), ("B", 1), ("B", 0), ("A", 1))) == {"A": 2, "B": 2}


def test_a_search_finds_such_cases_in_plenty() -> None:
    """No luck is needed: of all orders in which two acquirers take two nodes each, many end badly."""
    bad = 0
    for mine, others in itertools.product(itertools.permutations(range(3), 2), repeat=2):
        own, rival = [("A", node) for node in mine], [("B", node) for node in others]
        for places in itertools.combinations(range(4), 2):
            first, second = iter(own), iter(rival)
            steps = tuple(next(first) if place in places else next(second) for place in range(4))
            grants = _naive_grants((0, 0, 0), steps)
            bad += grants["A"] == grants["B"]
    assert bad > 20
