"""Durations on a command line."""

from __future__ import annotations

import argparse

import pytest

from redfence_proto import durations


@pytest.mark.parametrize(
    ("text", "expected_ms"),
    [
        *(("10", 10_000), ("10s", 10_000), ("500ms", 500), ("2m", 120_000), ("1h", 3_600_000), ("0", 0)),
        *(("1.5s", 1_500), (".25", 250), (" 3s ", 3_000), ("1.001", 1_001), ("0.1m", 6_000)),
    ],
)
def test_durations_are_read_as_people_write_them(text: str, expected_ms: int) -> None:
    assert durations.milliseconds(text) == expected_ms
    assert durations.seconds(text) == pytest.approx(expected_ms / 1000)


@pytest.mark.parametrize(
    "text", ["", "s", "-1", "10 s", "1d", "1e3", "ten", "5sec", "nan", "\N{ARABIC-INDIC DIGIT ONE}s"]
)
def test_what_is_no_duration_is_refused_with_examples(text: str) -> None:
    for read in (durations.seconds, durations.milliseconds):
        with pytest.raises(argparse.ArgumentTypeError, match="500ms"):
            read(text)


def test_parts_of_a_millisecond_are_refused_where_whole_ones_are_needed() -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"'0\.0005' is not a whole number of milliseconds"):
        durations.milliseconds("0.0005")
    assert durations.seconds("0.0005") == 0.0005


def test_a_duration_that_no_float_can_count_is_still_a_number() -> None:
    assert durations.milliseconds("9" * 400) > 10**400
