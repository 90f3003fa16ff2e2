"""The replay queue keeps the newest releases and undos for an absent node, as long as they may matter."""

from __future__ import annotations

import pytest

from redfence_server.locking.node import Inspect, Mint, Release, Renew, Undo
from redfence_server.nodes import replay_queue
from redfence_server.nodes.replay_queue import ReplayQueue


def undo(number: int, *, expires_at_ms: float = 100.0) -> Undo:
    return Undo("r", f"nonce-{number}", expires_at_ms)


def test_only_what_ends_a_hold_is_kept_also_that_of_a_hand_over() -> None:
    kept = ReplayQueue()
    release = Release("r", "a", 100.0)
    for command in (
        undo(1),
        Renew("r", "a"),
        Inspect("r"),
        Mint("r", "b", "n", "", 10),
        Mint("r", "b", "n", "", 10, release_first=release),
    ):
        kept.keep(command)
    assert kept.take(now_ms=0.0) == [undo(1), release]
    assert kept.take(now_ms=0.0) == []


def test_a_command_is_kept_once_at_its_first_place_as_it_was_kept_last() -> None:
    kept = ReplayQueue()
    kept.keep(Release("r", "a", 100.0))
    kept.keep(undo(1))
    others: list[Undo | Release] = [Release("s", "a", 100.0), Release("r", "b", 100.0)]
    again: list[Undo | Release] = [Release("r", "a", 200.0), undo(1, expires_at_ms=150.0)]
    for command in (*others, *again):
        kept.keep(command)
    assert kept.take(now_ms=0.0) == [*again, *others]


def test_what_is_worthless_by_now_is_not_taken() -> None:
    kept = ReplayQueue()
    for number, until_ms in enumerate((10.0, 30.0, 20.0)):
        kept.keep(undo(number, expires_at_ms=until_ms))
    assert kept.take(now_ms=20.0) == [undo(1, expires_at_ms=30.0)]


def test_a_few_are_taken_at_a_time_the_oldest_first() -> None:
    kept = ReplayQueue()
    for number in range(5):
        kept.keep(undo(number, expires_at_ms=0.0 if number == 1 else 100.0))
    assert kept.take(now_ms=1.0, at_most=2) == [undo(0), undo(2)]
    assert kept.take(now_ms=1.0, at_most=0) == []
    assert kept.take(now_ms=1.0) == [undo(3), undo(4)]


def test_the_oldest_are_dropped_beyond_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_queue, "_KEPT_MAX", 3)
    kept = ReplayQueue()
    for number in range(5):
        kept.keep(undo(number))
    assert kept.take(now_ms=0.0) == [undo(2), undo(3), undo(4)]
