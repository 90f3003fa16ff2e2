"""Durations as people type them: `10`, `10s`, `500ms`, `2m`, `1h`; one way for every command. Pure."""

from __future__ import annotations

import argparse
import re
from decimal import Decimal

_PATTERN = re.compile(r"(\d+(?:\.\d+)?|\.\d+)(ms|s|m|h|)", re.ASCII)
_MILLISECONDS = {"ms": 1, "s": 1_000, "": 1_000, "m": 60_000, "h": 3_600_000}


def seconds(text: str) -> float:
    """Return a duration in seconds; a bare number is seconds.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    return float(_milliseconds(text) / 1000)


def milliseconds(text: str) -> int:
    """Return a duration in milliseconds, of which it must be a whole number; a bare number is seconds.

    Raises:
        argparse.ArgumentTypeError: it is none, or no whole number of them.
    """
    length = _milliseconds(text)
    if length != int(length):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of milliseconds")
    return int(length)


def _milliseconds(text: str) -> Decimal:
    match = _PATTERN.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no duration; write e.g. 10, 10s, 500ms or 2m")
    return Decimal(match[1]) * _MILLISECONDS[match[2]]
