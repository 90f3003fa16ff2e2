"""The real algorithm over fake nodes: who is told what, and what is left behind."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable
from functools import partial

import pytest

from harness.doubles.fake_node import FakeNode, attempt, outcome_of
from harness.doubles.node_memory import ADMITTED, Counter
from harness.doubles.node_state import TOKENS_END
from harness.time.virtual_loop import LoopClock
from redfence_server.locking.attempt import Attempt, AttemptOutcome, TooLate
from redfence_server.locking.attempt import AttemptGranted as Grant
from redfence_server.locking.node import (
    REVALIDATION_MS_MAX,
    Command,
    Commit,
    Granted,
    Held,
    Inspect,
    Mint,
    Status,
    Undo,
)
from redfence_server.locking.quorum import ReleaseVerdict, TokenVerdict
from redfence_server.locking.redlock import Order, Redlock, Verdict, begun
from redfence_server.locking.tally import Failure, Refusal

pytestmark = pytest.mark.virtual_time

R = "orders/42"
A, B, C = "a" * 64, "b" * 64, "c" * 64
TTL_MS = 1_000
TTL_MS_MAX = 300_000


class Ids:
    def __init__(self, first: int = 0) -> None:
        self._ids = itertools.count(first)

    def hex_id(self) -> str:
        return f"nonce-{next(self._ids)}"

    def uniform(self, low: float, high: float) -> float:
        return high


def fake_nodes(count: int = 3) -> list[FakeNode]:
    return [FakeNode(index, now_ms=LoopClock().now_ms) for index in range(count)]


def redlock(nodes: list[FakeNode], *, first_id: int = 0) -> Redlock:
    return Redlock(nodes, clock=LoopClock(), randomness=Ids(first_id))


async def acquire(lock: Redlock, lease: str = A) -> AttemptOutcome:
    return await attempt(lock, Order(R, lease, TTL_MS, "h"))


async def settle(nodes: list[FakeNode]) -> None:
    """Let everything arrive that is still under way, and what is sent because of it."""
    for _ in range(5):
        for node in nodes:
            node.settle()
        await asyncio.sleep(0.001)


def give(node: FakeNode, lease: str, *, nonce: str = "") -> None:
    reply = node.state.apply(Mint(R, lease, nonce or f"of {lease[0]}", "", TTL_MS), LoopClock().now_ms())
    assert isinstance(reply, Granted)


def give_a(nodes: Iterable[FakeNode]) -> None:
    for node in nodes:
        give(node, A)


async def held_by_a() -> tuple[list[FakeNode], Redlock]:
    nodes = fake_nodes()
    lock = redlock(nodes)
    await acquire(lock, A)
    return nodes, lock


def every(nodes: Iterable[FakeNode], **settings: bool) -> None:
    for node in nodes:
        for name, value in settings.items():
            setattr(node, name, value)


def tell(nodes: Iterable[FakeNode], deed: Callable[[FakeNode], None]) -> None:
    for node in nodes:
        deed(node)


def hand_over(lock: Redlock) -> tuple[Attempt, asyncio.Future[Verdict[ReleaseVerdict]]]:
    released: asyncio.Future[Verdict[ReleaseVerdict]] = asyncio.get_running_loop().create_future()
    order = Order(R, B, TTL_MS, "h")
    attempt = lock.hand_over(order, release_first=A, ttl_ms_max=TTL_MS_MAX, on_verdict=released.set_result)
    return attempt, released


def release(lock: Redlock) -> asyncio.Future[Verdict[ReleaseVerdict]]:
    return begun(partial(lock.release, R, A, ttl_ms_max=TTL_MS_MAX))


def held_on(nodes: list[FakeNode]) -> list[int]:
    looks = [node.state.apply(Inspect(R), LoopClock().now_ms()) for node in nodes]
    return [index for index, look in enumerate(looks) if isinstance(look, Held)]


def sent(node: FakeNode, kind: type[Command]) -> list[Command]:
    return [command for command in node.sent if isinstance(command, kind)]


def raise_counter(node: FakeNode, value: int) -> None:
    """Bring a node's counter on, as attempts did that reached only this one."""
    for number in range(value):
        assert node.state.apply(Mint(R, B, f"earlier-{number}", "", TTL_MS), 0.0)
        assert node.state.apply(Undo(R, f"earlier-{number}", 0), 0.0) is Status.UNDONE


async def test_a_steady_grant_takes_one_round_trip() -> None:
    nodes = fake_nodes()
    assert await acquire(redlock(nodes)) == Grant(1, 0.0)
    await settle(nodes)
    assert [len(node.sent) for node in nodes] == [1, 1, 1]


async def test_a_slow_node_delays_nobody_and_is_aligned_when_it_answers() -> None:
    """A commit raises the late mint to the grant, so the next attempt needs no commit."""
    nodes = fake_nodes()
    for node in nodes[:2]:
        raise_counter(node, 4)
    nodes[2].hold_requests = True
    assert await acquire(redlock(nodes)) == Grant(5, 0.0)
    await settle(nodes)
    assert sent(nodes[2], Commit) == [Commit(R, A, "nonce-0", 5, ADMITTED)]
    assert [node.state.holds[R].token for node in nodes] == [5, 5, 5]


async def test_nodes_that_disagree_commit_the_greatest() -> None:
    """The usual recipe fails here: the counters are (2, 0, 0), and the first two nodes answer."""
    nodes = fake_nodes()
    raise_counter(nodes[0], 2)
    nodes[2].unreachable = True
    assert await acquire(redlock(nodes)) == Grant(3, 0.0)
    await settle(nodes)
    assert nodes[1].state.holds[R].token == 3


async def test_after_a_failure_every_node_that_may_hold_is_undone_and_no_other() -> None:
    """No undo is sent where the mint never went: the server would keep it, and drop more useful ones."""
    nodes = fake_nodes(7)
    for node in nodes[:4]:
        give(node, B)
    nodes[5].hold_requests = True
    nodes[6].unreachable = True
    outcome = await acquire(redlock(nodes))
    assert isinstance(outcome, Refusal)
    assert outcome.failure is Failure.HELD
    await settle(nodes)
    assert [len(sent(node, Undo)) for node in nodes] == [0, 0, 0, 0, 1, 1, 0]
    assert held_on(nodes) == [0, 1, 2, 3]


@pytest.mark.parametrize("turns", range(8))
async def test_a_cancelled_acquire_leaves_nothing_wherever_it_was(turns: int) -> None:
    for held_back in itertools.product((False, True), repeat=3):
        nodes = fake_nodes()
        raise_counter(nodes[0], 2)  # so that there is a commit to be cancelled in
        for node, back in zip(nodes, held_back, strict=True):
            node.hold_requests = back
        task = asyncio.ensure_future(acquire(redlock(nodes)))
        for _ in range(turns):
            await asyncio.sleep(0)
        told_of_a_grant = task.done()
        task.cancel()
        await asyncio.wait([task])
        await settle(nodes)
        assert bool(held_on(nodes)) == told_of_a_grant


async def test_a_grant_in_the_very_turn_of_a_cancellation_is_undone() -> None:
    nodes = fake_nodes()
    every(nodes, hold_replies=True)
    task = asyncio.ensure_future(acquire(redlock(nodes)))
    await asyncio.sleep(0.001)
    assert held_on(nodes) == [0, 1, 2]
    tell(nodes, FakeNode.answer)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await settle(nodes)
    assert held_on(nodes) == []


async def test_validity_counts_from_before_the_send_and_a_grant_too_late_is_undone() -> None:
    for late_ms, is_granted in ((980, True), (990, False), (5_000, False)):
        nodes = fake_nodes()
        every(nodes, hold_replies=True)
        began_at_ms = LoopClock().now_ms()
        task = asyncio.ensure_future(acquire(redlock(nodes)))
        await asyncio.sleep(late_ms / 1000)
        tell(nodes, FakeNode.answer)
        outcome = await task
        await settle(nodes)
        if is_granted:
            assert isinstance(outcome, Grant)
            assert outcome.minted_at_ms == began_at_ms
        else:
            assert isinstance(outcome, TooLate)
            assert outcome.elapsed_ms == pytest.approx(late_ms, abs=1)
            assert held_on(nodes) == []


async def test_a_retry_gets_the_same_token_also_where_a_node_was_ahead() -> None:
    nodes = fake_nodes()
    raise_counter(nodes[2], 4)
    nodes[2].hold_requests = True
    assert await acquire(redlock(nodes)) == Grant(1, 0.0)
    await settle(nodes)
    nodes[0].hold_requests = True
    retry = asyncio.ensure_future(acquire(redlock(nodes, first_id=100)))
    await asyncio.sleep(0.001)
    await settle(nodes)
    retried = await retry
    assert isinstance(retried, Grant)
    assert retried.token == 1
    assert all(node.state.holds[R].shared for node in nodes)


async def test_a_failed_retry_does_not_end_the_grant_that_it_repeats() -> None:
    """The retry undoes its own nonce only."""
    nodes = fake_nodes()
    await acquire(redlock(nodes))
    nodes[0].unreachable = nodes[1].unreachable = True
    outcome = await acquire(redlock(nodes, first_id=100))
    assert isinstance(outcome, Refusal)
    assert (outcome.failure, [node for node, _ in outcome.silent]) == (Failure.NO_QUORUM, [0, 1])
    nodes[0].unreachable = nodes[1].unreachable = False
    await settle(nodes)
    assert held_on(nodes) == [0, 1, 2]


# --- nodes that have to be examined again


async def test_answers_from_before_and_after_an_examination_are_never_combined() -> None:
    """A lease that was on node 0 before and is on node 1 after has no quorum."""
    nodes = fake_nodes()
    give_a(nodes[:2])
    nodes[1].state.admission = nodes[2].state.admission = "another"
    asked = begun(partial(redlock(nodes).check_token, R, 1))
    await asyncio.sleep(0.001)
    nodes[0].state.expire(R)
    nodes[0].hold_replies = True
    nodes[1].state.admission = nodes[2].state.admission = ADMITTED
    await asyncio.sleep(0.02)
    nodes[0].settle()
    assert (await asked).verdict.verdict is TokenVerdict.NOT_LIVE
    assert [len(node.sent) for node in nodes] == [2, 2, 2]


async def test_nodes_that_decide_alone_do_not_wait_for_one_that_has_to_be_examined() -> None:
    nodes = fake_nodes()
    give_a(nodes)
    nodes[2].state.admission = "another"
    released = await release(redlock(nodes))
    assert released.verdict is ReleaseVerdict.RELEASED
    assert LoopClock().now_ms() < 1
    await asyncio.sleep(1)
    assert [len(node.sent) for node in nodes] == [1, 1, 2]


async def test_a_release_is_remembered_over_rounds_also_where_it_was_heard_late() -> None:
    """In the next round the node that released it does not hold it any more."""
    for late in (False, True):
        nodes = fake_nodes()
        give(nodes[0], A)
        for node in nodes[1:]:
            node.state.admission = "another"
        nodes[0].hold_replies = late
        asked = release(redlock(nodes))
        await asyncio.sleep(0.001)
        for node in nodes[1:]:
            node.state.admission = ADMITTED
        nodes[0].settle()
        assert (await asked).verdict is ReleaseVerdict.RELEASED


@pytest.mark.parametrize(
    ("other_holder", "verdict"),
    [("comes back", ReleaseVerdict.RELEASED), ("stays away", ReleaseVerdict.NO_QUORUM)],
)
async def test_a_release_whose_answer_was_lost_is_never_told_as_not_held(
    other_holder: str, verdict: ReleaseVerdict
) -> None:
    """In the next round that node does not hold the lease, because the release ran there."""
    nodes = fake_nodes()
    give_a(nodes[:2])
    nodes[1].state.admission = "another"
    nodes[0].hold_replies = True
    asked = release(redlock(nodes))
    await asyncio.sleep(0.001)
    nodes[0].break_connection()
    nodes[0].hold_replies = False
    await asyncio.sleep(0.1)
    if other_holder == "comes back":
        nodes[1].state.admission = ADMITTED
    assert (await asked).verdict is verdict


async def test_a_poll_gives_up_on_nodes_that_stay_away() -> None:
    nodes = fake_nodes()
    for node in nodes:
        node.state.admission = "another"
    began_ms = LoopClock().now_ms()
    released = await release(redlock(nodes))
    assert released.verdict is ReleaseVerdict.NO_QUORUM
    assert REVALIDATION_MS_MAX <= LoopClock().now_ms() - began_ms < REVALIDATION_MS_MAX + 100
    assert 10 < len(nodes[0].sent) < 20


# --- handover


async def test_a_handover_releases_and_grants_in_one_round_trip() -> None:
    nodes, lock = await held_by_a()
    handover, released = hand_over(lock)
    assert await outcome_of(handover) == Grant(2, 0.0)
    assert (await released).verdict is ReleaseVerdict.RELEASED
    await settle(nodes)
    assert [len(node.sent) for node in nodes] == [2, 2, 2]
    assert {node.state.holds[R].digest for node in nodes} == {B}


async def test_a_handover_is_a_release_also_on_a_node_that_cannot_mint_and_answers_last() -> None:
    nodes, lock = await held_by_a()
    nodes[2].state.counters[R] = Counter(TOKENS_END - 1, float("inf"))
    nodes[2].hold_requests = True
    handover, released = hand_over(lock)
    assert (await released).verdict is ReleaseVerdict.RELEASED
    handover.give_up()
    await settle(nodes)
    assert R not in nodes[2].state.holds


def world_of(states: tuple[str, ...]) -> list[FakeNode]:
    """Return nodes in these states: held by A, by A and its retry (a), by B or C, free (-) or away (!)."""
    nodes = fake_nodes()
    for number, (node, state) in enumerate(zip(nodes, states, strict=True)):
        raise_counter(node, number)
        node.unreachable = state == "!"
        if state in "AaBC":
            give(node, {"A": A, "a": A, "B": B, "C": C}[state])
        if state == "a":
            give(node, A, nonce="retry")
    return nodes


async def test_a_handover_comes_to_what_a_release_and_then_an_attempt_come_to() -> None:
    """Six states of each of three nodes: both ways give the same verdicts, outcomes and holds."""
    for states in itertools.product("AaBC-!", repeat=3):
        nodes, twins = world_of(states), world_of(states)
        handover, released = hand_over(redlock(nodes))
        at_once = await outcome_of(handover)
        open_release = await release(redlock(twins))
        await settle(twins)
        then = await acquire(redlock(twins), B)
        await settle(nodes)
        await settle(twins)
        assert (await released).verdict is open_release.verdict, states
        assert _gist(at_once) == _gist(then), states
        assert [_hold(node) for node in nodes] == [_hold(node) for node in twins], states


def _gist(outcome: AttemptOutcome) -> object:
    match outcome:
        case Refusal(failure):
            return failure
        case Grant(token):
            return token
    return outcome


def _hold(node: FakeNode) -> object:
    hold = node.state.holds.get(R)
    return None if hold is None else (hold.digest, hold.nonce, hold.shared, hold.token)


@pytest.mark.parametrize("turns", range(8))
async def test_a_handover_that_is_given_up_is_a_release_and_leaves_nothing(turns: int) -> None:
    for held_back in itertools.product((False, True), repeat=3):
        nodes = fake_nodes()
        raise_counter(nodes[0], 2)  # so that there is a commit
        for node, back in zip(nodes, held_back, strict=True):
            give(node, A)
            node.hold_requests = back
        handover, released = hand_over(redlock(nodes))
        for _ in range(turns):
            await asyncio.sleep(0)
        handover.give_up()
        await settle(nodes)
        assert (await released).verdict is ReleaseVerdict.RELEASED
        assert held_on(nodes) == []


@pytest.mark.parametrize(
    ("flaw", "gist", "verdict"),
    [
        ("no numbers", Failure.NO_QUORUM, ReleaseVerdict.RELEASED),
        ("no answers", Failure.NO_QUORUM, ReleaseVerdict.NO_QUORUM),
        ("late answers", TooLate, ReleaseVerdict.RELEASED),
    ],
)
async def test_a_handover_that_grants_nothing_still_ends_the_lease(
    flaw: str, gist: object, verdict: ReleaseVerdict
) -> None:
    """Commands without an answer are carried out late, and the attempt's undo follows them."""
    nodes, lock = await held_by_a()
    await settle(nodes)
    if flaw == "no numbers":
        for node in nodes[:2]:
            node.state.counters[R] = Counter(TOKENS_END - 1, float("inf"))
    every(nodes[:2], hold_requests=flaw == "no answers", hold_replies=flaw == "late answers")
    handover, released = hand_over(lock)
    await asyncio.sleep(0.99 if flaw == "late answers" else 0.001)
    tell(nodes[:2], FakeNode.time_out if flaw == "no answers" else FakeNode.answer)
    outcome = await outcome_of(handover)
    assert gist in {_gist(outcome), type(outcome)}
    assert (await released).verdict is verdict
    await settle(nodes)
    assert held_on(nodes) == []
