"""Steps of a node's clock, judged from samples of clocks whose every move is known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from redfence_server.locking.quorum import DRIFT_FIXED_MS, DRIFT_RATIO
from redfence_server.membership.node_clock import ClockWitnesses, NodeClock, Step

DISTRUST_MS = 300_000 * (1 + DRIFT_RATIO) + DRIFT_FIXED_MS
# Above what whole µs and the digits of a float can take, below anything that matters.
TOLERANCE_MS = 0.05
DAY_MS = 86_400_000.0


@dataclass(frozen=True)
class Sample:
    """What a request brings back."""

    sent_ms: float
    received_ms: float
    node_ms: float


class World:
    """A node's clock of which everything is known, and a network with round trips of any length."""

    def __init__(self, *, ours_ms: float = 5e8, theirs_ms: float = 1.79e12) -> None:
        self.ours_ms = ours_ms
        self.theirs_ms = theirs_ms

    def run(self, ms: float, *, rate: float = 0.0, step_ms: float = 0.0) -> None:
        self.ours_ms += ms
        self.theirs_ms += ms * (1 + rate) + step_ms

    def sample(self, *, there_ms: float = 0.1, back_ms: float = 0.1, wobble_ms: float = 0.0) -> Sample:
        node_ms = int((self.theirs_ms + wobble_ms) * 1000) / 1000
        return Sample(self.ours_ms - there_ms, self.ours_ms + back_ms, node_ms)


def note(clock: NodeClock, sample: Sample) -> Step | None:
    return clock.note(sent_ms=sample.sent_ms, received_ms=sample.received_ms, node_ms=sample.node_ms)


def check(clock: NodeClock, sample: Sample) -> Step | None:
    """Give what a command's reply tells."""
    return clock.check(received_ms=sample.received_ms, node_ms=sample.node_ms)


Judge = Callable[[NodeClock, Sample], Step | None]


def up_to(greatest_ms: float) -> st.SearchStrategy[float]:
    """Return durations in whole µs, short ones often."""
    whole = st.one_of(st.integers(0, 5_000), st.integers(0, int(greatest_ms * 1000)))
    return whole.map(lambda us: us / 1000)


# --- no false alarm


@given(
    st.lists(
        st.tuples(
            up_to(DAY_MS),
            st.floats(-DRIFT_RATIO, DRIFT_RATIO),
            up_to(60_000),
            up_to(60_000),
            st.floats(0, DRIFT_FIXED_MS),
            st.sampled_from([note, check]),
        ),
        max_size=40,
    ),
    st.floats(0, 3e11),
    st.floats(1.5e12, 4e12),
)
@example([(DAY_MS, DRIFT_RATIO, 0, 0, 0, note), (DAY_MS, DRIFT_RATIO, 0, 0, 2, note)], 0, 4e12)
@example([(DAY_MS, -DRIFT_RATIO, 0, 0, 2, note), (DAY_MS, -DRIFT_RATIO, 0, 0, 0, note)], 3e11, 4e12)
# The last one is at the limit where whole µs decide.
@example([(0, 0, 0, 0, 0, note), (0.05, DRIFT_RATIO, 0, 0, 2, note)], 0, 1.5e12 + 2**-11)
def test_a_clock_within_the_allowance_never_steps(
    moves: list[tuple[float, float, float, float, float, Judge]], ours_ms: float, theirs_ms: float
) -> None:
    world, clock = World(ours_ms=ours_ms, theirs_ms=theirs_ms), NodeClock(distrust_ms=DISTRUST_MS)
    for gap_ms, rate, there_ms, back_ms, wobble_ms, judge in moves:
        world.run(gap_ms, rate=rate)
        sample = world.sample(there_ms=there_ms, back_ms=back_ms, wobble_ms=wobble_ms)
        assert judge(clock, sample) is None
        assert clock.trusted(sample.received_ms)
    assert clock.steps == 0


def test_nothing_is_judged_before_the_first_full_sample() -> None:
    world, clock = World(), NodeClock(distrust_ms=DISTRUST_MS)
    assert check(clock, world.sample()) is None
    world.run(1_000, step_ms=30_000)
    assert check(clock, world.sample()) is None
    assert clock.offset_ms is None
    assert clock.trusted(world.ours_ms)


# --- no step missed

TRIPS = st.tuples(up_to(5_000), up_to(5_000))


@pytest.mark.parametrize("way", [(1, note), (1, check), (-1, note)])
@given(up_to(DAY_MS), TRIPS, TRIPS, up_to(40_000))
def test_a_step_is_told_exactly_from_allowance_and_round_trip_on(
    way: tuple[int, Judge],
    gap_ms: float,
    trip_1: tuple[float, float],
    trip_2: tuple[float, float],
    beyond_ms: float,
) -> None:
    """A reply to a command, of which only the receipt is known, shows steps forward alone."""
    sign, judge = way
    unsure_ms = trip_1[0] + trip_2[1] if sign > 0 else trip_1[1] + trip_2[0]
    least_ms = unsure_ms + DRIFT_RATIO * (gap_ms + sign * unsure_ms) + DRIFT_FIXED_MS
    for step_ms in (least_ms - TOLERANCE_MS, least_ms + TOLERANCE_MS + beyond_ms):
        world, clock = World(), NodeClock(distrust_ms=DISTRUST_MS)
        assert note(clock, world.sample(there_ms=trip_1[0], back_ms=trip_1[1])) is None
        world.run(gap_ms, step_ms=sign * step_ms)
        sample = world.sample(there_ms=trip_2[0], back_ms=trip_2[1])
        assert sign > 0 or check(clock, sample) is None
        step = judge(clock, sample)
        if step_ms < least_ms:
            assert step is None
        else:
            assert step is not None
            assert step.by_ms == pytest.approx(sign * (beyond_ms + TOLERANCE_MS), abs=TOLERANCE_MS)


@pytest.mark.slow
@given(
    st.lists(
        st.tuples(
            up_to(10_000),
            st.one_of(st.just(0.0), st.floats(-0.05, 0.05)),
            st.one_of(st.just(0.0), st.floats(-100, 100)),
            up_to(1_000),
            up_to(1_000),
        ),
        max_size=30,
    )
)
def test_whatever_two_samples_prove_is_told(moves: list[tuple[float, float, float, float, float]]) -> None:
    world, clock = World(), NodeClock(distrust_ms=DISTRUST_MS)
    before_forward: list[Sample] = []
    before_backward: list[Sample] = []
    for gap_ms, rate, step_ms, there_ms, back_ms in moves:
        world.run(gap_ms, rate=rate, step_ms=step_ms)
        now = world.sample(there_ms=there_ms, back_ms=back_ms)
        gained = [
            (now.node_ms - now.received_ms)
            - (then.node_ms - then.sent_ms)
            - DRIFT_RATIO * (now.received_ms - then.sent_ms)
            - DRIFT_FIXED_MS
            for then in before_forward
        ]
        lost = [
            (then.node_ms - then.received_ms)
            - (now.node_ms - now.sent_ms)
            - DRIFT_RATIO * (now.sent_ms - then.received_ms)
            - DRIFT_FIXED_MS
            for then in before_backward
        ]
        forward, backward = max(gained, default=-1.0), max(lost, default=-1.0)
        step = note(clock, now)
        if forward > TOLERANCE_MS:
            assert step is not None
            assert step.by_ms == pytest.approx(forward, abs=TOLERANCE_MS)
        elif backward > TOLERANCE_MS:
            assert step is not None
            assert step.by_ms == pytest.approx(-backward, abs=TOLERANCE_MS)
        elif max(forward, backward) < 0:
            assert step is None
        if step is not None:
            (before_forward if step.by_ms > 0 else before_backward).clear()
        before_forward.append(now)
        before_backward.append(now)


@pytest.mark.parametrize("judge", [note, check])
@given(st.integers(2, 50), st.floats(1.05, 1.5), up_to(1.0))
def test_many_small_steps_that_add_up_to_more_than_drift_are_told(
    judge: Judge, step_count: int, excess: float, trip_ms: float
) -> None:
    ttl_ms, world, clock = 10_000.0, World(), NodeClock(distrust_ms=DISTRUST_MS)
    note(clock, world.sample(there_ms=trip_ms, back_ms=trip_ms))
    total_ms = excess * (ttl_ms * DRIFT_RATIO) + DRIFT_FIXED_MS + 3 * trip_ms
    told = []
    for _ in range(step_count):
        world.run(ttl_ms / step_count, step_ms=total_ms / step_count)
        told.append(judge(clock, world.sample(there_ms=trip_ms, back_ms=trip_ms)))
    assert any(told)


@pytest.mark.slow
@given(
    st.lists(st.tuples(up_to(5_000), st.floats(0, 50), TRIPS, st.sampled_from([note, check])), max_size=30)
)
def test_never_more_is_told_than_there_was(
    moves: list[tuple[float, float, tuple[float, float], Judge]],
) -> None:
    world, clock = World(), NodeClock(distrust_ms=DISTRUST_MS)
    stepped_ms, told_ms = 0.0, 0.0
    for gap_ms, step_ms, (there_ms, back_ms), judge in moves:
        world.run(gap_ms, step_ms=step_ms)
        stepped_ms += step_ms
        step = judge(clock, world.sample(there_ms=there_ms, back_ms=back_ms))
        told_ms += step.by_ms if step else 0.0
        assert told_ms <= stepped_ms + TOLERANCE_MS


# --- distrust


@pytest.mark.parametrize("step_ms", [30_000.0, -30_000.0])
def test_after_a_step_the_votes_do_not_count_until_every_lease_before_it_has_ended(step_ms: float) -> None:
    world, clock = World(), NodeClock(distrust_ms=DISTRUST_MS)
    note(clock, world.sample())
    world.run(1_000, step_ms=step_ms)
    sample = world.sample()
    assert note(clock, sample) is not None
    until_ms = sample.received_ms + DISTRUST_MS
    assert not clock.trusted(sample.received_ms)
    assert clock.distrusted_for_ms(sample.received_ms) == pytest.approx(DISTRUST_MS)
    assert not clock.trusted(until_ms - 1)
    assert clock.trusted(until_ms)
    assert clock.distrusted_for_ms(until_ms + 5) == 0
    for _ in range(5):
        world.run(1_000)
        assert note(clock, world.sample()) is None
        assert check(clock, world.sample()) is None
    assert clock.steps == 1
    assert clock.trusted(until_ms)


def test_a_further_step_extends_the_distrust() -> None:
    world, clock = World(), NodeClock(distrust_ms=DISTRUST_MS)
    note(clock, world.sample())
    for judge in (note, note, check):
        world.run(DISTRUST_MS / 2, step_ms=30_000)
        sample = world.sample()
        assert judge(clock, sample) is not None
        assert clock.distrusted_for_ms(sample.received_ms) == pytest.approx(DISTRUST_MS)
    assert clock.steps == 3


def test_a_step_hidden_behind_another_is_distrusted_as_well() -> None:
    world, clock = World(), NodeClock(distrust_ms=DISTRUST_MS)
    note(clock, world.sample())
    world.run(500, step_ms=30_000)
    assert check(clock, world.sample()) is not None
    world.run(400, step_ms=30_000)
    assert check(clock, world.sample()) is None
    world.run(100)
    sample = world.sample()
    assert note(clock, sample) is None  # nothing is certain
    assert clock.distrusted_for_ms(sample.received_ms) == pytest.approx(DISTRUST_MS)
    # From then on it is measured again.
    world.run(1_000)
    assert note(clock, world.sample()) is None
    assert clock.distrusted_for_ms(sample.received_ms) == pytest.approx(DISTRUST_MS)
    world.run(1_000, step_ms=100)
    assert check(clock, world.sample()) is not None
    assert clock.steps == 2


def test_distrust_that_is_told_from_elsewhere_is_never_brought_forward() -> None:
    clock = NodeClock(distrust_ms=DISTRUST_MS)
    clock.distrust_until(1_000)
    clock.distrust_until(400)
    assert clock.distrusted_for_ms(0) == 1_000
    clock.distrust_until(1_500)
    assert clock.distrusted_for_ms(0) == 1_500
    assert clock.steps == 0


# --- offset


@given(TRIPS, TRIPS, up_to(60_000))
def test_the_offset_is_as_near_as_is_known(
    trip_1: tuple[float, float], trip_2: tuple[float, float], gap_ms: float
) -> None:
    world, clock = World(), NodeClock(distrust_ms=DISTRUST_MS)
    offset_ms = world.theirs_ms - world.ours_ms
    note(clock, world.sample(there_ms=trip_1[0], back_ms=trip_1[1]))
    assert clock.offset_ms == pytest.approx(offset_ms, rel=0, abs=sum(trip_1) / 2 + TOLERANCE_MS)
    world.run(gap_ms)
    note(clock, world.sample(there_ms=trip_2[0], back_ms=trip_2[1]))
    from_first_ms = sum(trip_1) + 2 * (DRIFT_RATIO * (gap_ms + sum(trip_1) + sum(trip_2)) + DRIFT_FIXED_MS)
    best_ms = min(sum(trip_2), from_first_ms)
    assert clock.offset_ms == pytest.approx(offset_ms, rel=0, abs=best_ms / 2 + TOLERANCE_MS)


# --- witnesses: whose clock was it


class Cluster:
    """A server that samples the clocks of several nodes; `told` has the nodes with a confirmed step."""

    def __init__(self, node_count: int) -> None:
        self.worlds = [World(theirs_ms=1.79e12 + 1_000 * index) for index in range(node_count)]
        self.clocks = [NodeClock(distrust_ms=DISTRUST_MS) for _ in range(node_count)]
        self.witnesses = ClockWitnesses(node_count)
        self.told: set[int] = set()
        for index in [*range(node_count), *range(node_count)]:
            self.sample(index)
            self.run(100)

    def run(self, ms: float) -> None:
        for world in self.worlds:
            world.run(ms)

    def stand_still(self, ms: float) -> None:
        """Let time pass for all nodes, and not for the server."""
        for world in self.worlds:
            world.run(0, step_ms=ms)

    def sample(self, index: int, *, there_ms: float = 0.1, back_ms: float = 0.1) -> None:
        sample, clock = self.worlds[index].sample(there_ms=there_ms, back_ms=back_ms), self.clocks[index]
        step = note(clock, sample)
        self._note(index, step, sample)
        self.witnesses.note_sample(index, clock, sent_ms=sample.sent_ms, received_ms=sample.received_ms)
        self.told |= {each for each in range(len(self.worlds)) if self.witnesses.confirm(each)}

    def reply(self, index: int) -> None:
        sample = self.worlds[index].sample()
        self._note(index, check(self.clocks[index], sample), sample)

    def _note(self, index: int, step: Step | None, sample: Sample) -> None:
        if step is not None:
            self.witnesses.note_step(index, step, seen_at_ms=sample.received_ms)


LOOKS = st.lists(
    st.tuples(
        st.integers(0, 4), st.sampled_from(["sample", "reply"]), up_to(600), st.tuples(up_to(400), up_to(400))
    ),
    min_size=10,
    max_size=20,
)


def look_on(cluster: Cluster, looks: list[tuple[int, str, float, tuple[float, float]]]) -> None:
    """Look at the nodes, in any order and by any round trips."""
    for number, how, gap_ms, (there_ms, back_ms) in looks:
        index = number % len(cluster.worlds)
        cluster.run(1 + gap_ms)
        if how == "reply":
            cluster.reply(index)
        else:
            cluster.sample(index, there_ms=there_ms, back_ms=back_ms)


@pytest.mark.slow
@settings(max_examples=50)
@given(
    st.sampled_from([3, 5]), LOOKS, st.floats(5, 60_000).flatmap(lambda ms: st.sampled_from([ms, -ms])), LOOKS
)
def test_a_server_clock_that_stands_still_or_jumps_confirms_no_step(
    node_count: int,
    before: list[tuple[int, str, float, tuple[float, float]]],
    stall_ms: float,
    after: list[tuple[int, str, float, tuple[float, float]]],
) -> None:
    cluster = Cluster(node_count)
    look_on(cluster, before)
    cluster.stand_still(stall_ms)
    look_on(cluster, after)
    assert cluster.told == set()


@pytest.mark.parametrize("step_ms", [30_000.0, 20.0, -30_000.0])
@pytest.mark.parametrize("node_count", [3, 5, 7])
def test_a_step_of_f_nodes_is_confirmed_by_the_others_and_told_once(node_count: int, step_ms: float) -> None:
    needed = (node_count - 1) // 2
    stepped = set(range(needed))
    for stalls in (False, True):
        cluster = Cluster(node_count)
        if stalls:
            cluster.stand_still(500)
            for index in range(node_count):
                cluster.sample(index)
        for _ in range(3):
            cluster.run(500)
            for index in range(node_count):
                cluster.sample(index)
        for index in stepped:
            cluster.worlds[index].run(0, step_ms=step_ms)
            cluster.sample(index)
        for index in range(needed, 2 * needed):
            assert cluster.told == set()
            cluster.run(1)
            cluster.sample(index)
        assert cluster.told == stepped
        assert not any(cluster.witnesses.confirm(index) for index in range(node_count))


@pytest.mark.parametrize("step_ms", [100.0, -100.0])
def test_a_slow_sample_contradicts_no_step(step_ms: float) -> None:
    cluster = Cluster(3)
    cluster.run(500)
    cluster.worlds[0].run(0, step_ms=step_ms)
    cluster.sample(0)
    cluster.sample(1, there_ms=1.0)
    cluster.run(300)
    cluster.sample(1, there_ms=120, back_ms=120)
    assert cluster.told == set()
    cluster.sample(2)
    assert cluster.told == {0}


@pytest.mark.parametrize("rate", [0.013, 0.05, 0.5, -0.013, -0.05, -0.5])
def test_a_server_clock_that_runs_wrong_confirms_no_step(rate: float) -> None:
    cluster = Cluster(3)
    for number in range(300):
        for world in cluster.worlds:
            world.run(100, rate=rate)
        cluster.sample(number % 3)
    assert all(clock.steps for clock in cluster.clocks)
    assert cluster.told == set()


def test_a_node_that_was_away_while_the_servers_clock_stood_still_is_not_told_of() -> None:
    cluster = Cluster(3)
    cluster.stand_still(500)
    for _ in range(60):
        for index in (1, 2):
            cluster.sample(index)
            cluster.run(250)
    for index in (0, 1, 2):
        cluster.sample(index)
        cluster.run(1)
    assert cluster.clocks[0].steps == 1
    assert cluster.told == set()


def test_a_slow_answer_that_hid_the_servers_stop_from_one_node_confirms_no_step() -> None:
    cluster = Cluster(3)
    cluster.stand_still(500)
    for index, back_ms in ((1, 0.1), (2, 0.1), (0, 600), (0, 0.1), (1, 0.1), (2, 0.1)):
        cluster.sample(index, back_ms=back_ms)
        cluster.run(1)
    assert [clock.steps for clock in cluster.clocks] == [1, 1, 1]
    assert cluster.told == set()


def test_a_step_is_confirmed_although_the_first_sample_of_all_bounds_it_best() -> None:
    cluster = Cluster(3)
    cluster.clocks = [NodeClock(distrust_ms=DISTRUST_MS) for _ in range(3)]
    cluster.witnesses = ClockWitnesses(3)
    cluster.sample(0)
    for index in (1, 2, 0, 1, 2, 0):
        cluster.run(50)
        cluster.sample(index, there_ms=40)
    cluster.worlds[0].run(0, step_ms=1_000)
    cluster.sample(0)
    cluster.run(1)
    cluster.sample(1)
    assert cluster.told == {0}


def test_a_single_node_has_no_witness() -> None:
    cluster = Cluster(1)
    for _ in range(3):
        cluster.run(500)
        cluster.worlds[0].run(0, step_ms=10_000)
        cluster.sample(0)
    assert cluster.clocks[0].steps == 3
    assert cluster.told == set()
