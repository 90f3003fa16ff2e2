"""The comparison's figures: what counts as one, and what is divided by what."""

from bench import figures
from bench.figures import Measurement, Spread


def _measured(
    target: str,
    *,
    pairs: int = 1000,
    hand_overs: int = 0,
    p50_ms: float = 1.0,
    number: int = 0,
    workload: str = "64",
) -> Measurement:
    result = {"seconds": 2.0, "pairs": pairs, "hand_overs": hand_overs, "pair": {"p50_ms": p50_ms}}
    return Measurement(target, workload, number, result, {"server": 0.5, "client": 0.1})


def test_a_contended_lock_counts_hand_overs_and_not_pairs() -> None:
    assert _measured("x", pairs=900, hand_overs=40).rate == 450
    assert _measured("x", pairs=900, hand_overs=40, workload="one").rate == 20


def test_cpu_time_is_told_for_each_pair_and_only_of_roles_that_exist() -> None:
    measured = _measured("x", pairs=1000)
    assert measured.cpu_us_per_pair("server") == 500
    assert measured.cpu_us_per_pair("node") is None


def test_a_ratio_compares_within_a_round_and_is_above_one_in_our_favour() -> None:
    """The second round was slow for all. Ratios of medians would not be 2."""
    measurements = [
        _measured("ours", pairs=2000, p50_ms=1, number=0),
        _measured("ours", pairs=200, p50_ms=10, number=1),
        _measured("ours", pairs=9000, p50_ms=1, number=2),
        _measured("theirs", pairs=1000, p50_ms=3, number=0),
        _measured("theirs", pairs=100, p50_ms=30, number=1),
    ]
    ours, theirs = (figures.by_round(measurements, target=name, workload="64") for name in ("ours", "theirs"))
    assert figures.ratio(ours, theirs) == 2
    assert figures.ratio(ours, theirs, of_latency=True) == 3
    assert figures.ratio(ours, {}) is None


def test_a_spread_has_the_median_and_the_extremes() -> None:
    assert Spread.over([5, 1, 2]) == Spread(median=2, low=1, high=5)


def test_the_maximum_is_the_best_median_of_workers_with_their_own_resources() -> None:
    measurements = [
        *(_measured("x", pairs=pairs, workload="64", number=pairs) for pairs in (1000, 1200, 9000)),
        _measured("x", pairs=800, workload="1"),
        _measured("x", hand_overs=99_000, workload="one"),
        _measured("other", pairs=99_000),
    ]
    assert figures.maximum(measurements, target="x") == 600
    assert figures.maximum(measurements, target="y") is None


def test_kept_leases_count_renewals_and_the_cores_they_keep_busy() -> None:
    result = {"seconds": 20.0, "renewals": 5000}
    measured = Measurement("x", "leases-50000", 0, result, {"server": 5.0})
    assert figures.lease_count("leases-50000") == 50_000
    assert [figures.lease_count(other) for other in ("64", "one", "leases", "leases-x")] == [None] * 4
    assert measured.rate == 250
    assert measured.cores("server") == 0.25
