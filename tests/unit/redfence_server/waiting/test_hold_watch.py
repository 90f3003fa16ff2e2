"""When another try is worth its while: decided from refusals, grants and notices, without any I/O."""

from __future__ import annotations

import itertools

import pytest

from redfence_server.locking.node import Held, NoReply, Notice
from redfence_server.locking.quorum import majority
from redfence_server.locking.tally import Failure, Refusal
from redfence_server.waiting.hold_watch import HoldWatch

A, B = "a" * 64, "b" * 64


def hold(token: int = 5, remaining_ms: int = 900, *, digest: str = A) -> Held:
    return Held(digest, token, f"holder {digest[:1]}", remaining_ms)


def refused(*held: tuple[int, Held], silent: tuple[int, ...] = ()) -> Refusal:
    return Refusal(Failure.HELD, held, tuple((node, NoReply.TIMED_OUT) for node in silent))


def watch_after(refusal: Refusal, *, nodes: int = 3, now_ms: float = 100.0) -> HoldWatch:
    watch = HoldWatch(nodes)
    watch.refused(refusal, now_ms)
    return watch


def test_in_the_beginning_a_try_is_worth_its_while() -> None:
    watch = HoldWatch(3)
    assert watch.may_be_free
    assert watch.current(0) is None


@pytest.mark.parametrize("nodes", [1, 3, 5, 7])
def test_after_a_refusal_by_all_a_quorum_has_to_tell_of_the_end(nodes: int) -> None:
    """The notices come in any order."""
    quorum = majority(nodes)
    for order in itertools.islice(itertools.permutations(range(nodes)), 200):
        watch = watch_after(refused(*((node, hold(5)) for node in range(nodes))), nodes=nodes)
        for told, node in enumerate(order, 1):
            assert watch.may_be_free == (told > quorum)
            watch.ended(Notice(node, "r", 5))
            assert watch.may_be_free == (told >= quorum)


def test_a_node_that_has_not_answered_may_be_free_and_a_silent_one_is_not() -> None:
    for silent, expected in (((), True), ((2,), False)):
        watch = watch_after(refused((0, hold()), (1, hold()), silent=silent))
        assert not watch.may_be_free
        watch.ended(Notice(0, "r", 5))
        assert watch.may_be_free is expected


def test_a_notice_of_an_older_hold_is_not_of_this_one() -> None:
    watch = watch_after(refused((0, hold(5)), (1, hold(5)), (2, hold(5))))
    for node in range(3):
        watch.ended(Notice(node, "r", 4))
    assert not watch.may_be_free


def test_a_notice_that_came_before_the_refusal_was_told_counts() -> None:
    """The hold ended between the node's answer and the end of the attempt."""
    watch = HoldWatch(3)
    for node in (0, 1):
        watch.ended(Notice(node, "r", 5))
    watch.refused(refused((0, hold(5)), (1, hold(5)), (2, hold(5))), 0)
    assert watch.may_be_free


def test_a_try_is_worth_its_while_when_the_time_of_enough_holds_is_up() -> None:
    three = refused((0, hold(remaining_ms=300)), (1, hold(remaining_ms=100)), (2, hold(remaining_ms=200)))
    assert watch_after(three, now_ms=1_000).try_at_ms == 1_000 + 200 + 2
    two = refused((0, hold(remaining_ms=300)), (2, hold(remaining_ms=200)))
    assert watch_after(two, now_ms=1_000).try_at_ms == 1_000 + 200 + 2
    with_a_silent_one = refused((0, hold(remaining_ms=300)), (2, hold(remaining_ms=200)), silent=(1,))
    assert watch_after(with_a_silent_one, now_ms=1_000).try_at_ms == 1_000 + 300 + 2


def test_nodes_that_end_a_hold_some_milliseconds_apart_are_waited_for_together() -> None:
    """The last node would refuse a try in between."""
    together = refused((0, hold(remaining_ms=230)), (1, hold(remaining_ms=180)), (2, hold(remaining_ms=200)))
    assert watch_after(together, now_ms=1_000).try_at_ms == 1_000 + 230 + 2


def test_a_refusal_without_a_hold_in_the_way_can_be_tried_again_at_once() -> None:
    watch = watch_after(Refusal(Failure.EXPIRED, (), ()), now_ms=1_000)
    assert watch.try_at_ms == 1_002
    assert watch.digest == ""


def test_the_holder_is_told_as_last_seen() -> None:
    watch = watch_after(refused((0, hold(5)), (1, hold(5)), (2, hold(6, digest=B))), now_ms=100)
    assert watch.digest == A
    assert watch.current(400) == Held(A, 5, "holder a", 600)
    watch.granted(digest=B, holder="me", token=7, ends_at_ms=2_000)
    assert (watch.digest, watch.try_at_ms) == (B, 2_002)
    assert watch.current(1_500) == Held(B, 7, "me", 500)
    assert watch.current(9_000) == Held(B, 7, "me", 0)


def test_the_end_of_a_granted_lease_is_told_by_a_quorum() -> None:
    watch = HoldWatch(3)
    watch.granted(digest=B, holder="me", token=7, ends_at_ms=2_000)
    for node, free in ((0, False), (2, True)):
        watch.ended(Notice(node, "r", 7))
        assert watch.may_be_free is free
