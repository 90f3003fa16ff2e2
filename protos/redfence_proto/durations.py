"""Parses the durations of all commands: `10`, `10s`, `500ms`, `2m`, `1h`. Pure."""

from __future__ import annotations

import argparse
import re
from decimal import Decimal

_PATTERN = re.compile(r"(\d+(?:\.\d+)?|\.\d+)(ms|s|m|h|)", re.ASCII)
_MILLISECONDS = {"ms": 1, "s": 1_000, "": 1_000, "m": 60_000, "h": 3_600_000}


def seconds(text: str) -> float:
    """Return a duration in seconds; a number without a unit means seconds.

    Raises:
        argparse.ArgumentTypeError: the text is not a duration.
    """
    return float(_milliseconds(text) / 1000)


def milliseconds(text: str) -> int:
    """Return a duration in whole milliseconds; a number without a unit means seconds.

    Raises:
        argparse.ArgumentTypeError: the text is not a duration, or not a whole number of milliseconds.
    """
    length = _milliseconds(text)
    if length != int(length):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of milliseconds; write e.g. 500ms")
    return int(length)


def _milliseconds(text: str) -> Decimal:
    match = _PATTERN.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a duration; write e.g. 10, 10s, 500ms or 2m")
    return Decimal(match[1]) * _MILLISECONDS[match[2]]
