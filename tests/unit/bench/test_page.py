"""The page with the figures: written from the saved comparison, and nothing else of it changes."""

from pathlib import Path

import pytest

from bench import page, report
from bench.comparison import Comparison
from bench.figures import Measurement, Target


def _comparison() -> Comparison:
    targets = [Target("redfence session N=3", "session", "redfence", 3), Target("etcd", "etcd", "", 0)]
    latency = {"p50_ms": 1.0, "p99_ms": 2.0, "p99_9_ms": 3.0}
    result = {"seconds": 2.0, "pairs": 4000, "hand_overs": 0, "pair": latency}
    kept = {"seconds": 60.0, "renewals": 60_000, "lost": 0, "at_risk": 2, "renewal": latency}
    cpu_s = {"server": 0.4, "node": 0.6, "client": 0.2}
    measurements = [
        Measurement("redfence session N=3", "64", 0, result, cpu_s),
        Measurement("etcd", "64", 0, result | {"pairs": 1000}, {"server": 0.5, "client": 0.1}),
        Measurement("redfence session N=3", "leases-10000", 0, kept, cpu_s),
    ]
    return Comparison(targets, ["64", "leases-10000"], measurements, {"sdk": "reason"}, rounds=5, seconds=2.0)


def test_a_saved_comparison_reads_back_as_the_same_tables(tmp_path: Path) -> None:
    comparison = _comparison()
    comparison.save(tmp_path / "new" / "comparison.json")
    loaded = Comparison.load(tmp_path / "new" / "comparison.json")
    assert loaded == comparison
    tables = report.markdown(loaded)
    assert "| redfence session N=3 | 2,000 (2,000 to 2,000) | 4.00 |" in tables
    assert "| 100 | 50 | 50 | 300 |" in tables, "microseconds of server, one node, client and all"
    assert "| redfence session N=3 | 0 | 1,000 | 2 |" in tables, "leases: lost, renewals/s, without effect"
    assert tables.endswith("Absent: sdk: reason")


def test_figures_replace_only_what_is_between_the_marks() -> None:
    text = "# Head\n\n<!-- figures: begin -->\nold\n<!-- figures: end -->\n\ntail\n"
    once = page.with_figures(text, _comparison())
    assert once.startswith("# Head\n\n<!-- figures: begin -->\n\nMeasured on ")
    assert once.endswith("\n\n<!-- figures: end -->\n\ntail\n")
    assert "old" not in once
    assert page.with_figures(once, _comparison()) == once
    with pytest.raises(ValueError, match="0 pairs of `figures` marks"):
        page.with_figures("# Head\n", _comparison())
