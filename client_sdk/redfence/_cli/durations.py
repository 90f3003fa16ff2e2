"""Durations as people type them: `10`, `10s`, `500ms`, `2m`, `1h`. Pure."""

from __future__ import annotations

import argparse
import re

_PATTERN = re.compile(r"(\d+(?:\.\d+)?|\.\d+)(ms|s|m|h|)")
_SECONDS = {"ms": 0.001, "s": 1.0, "": 1.0, "m": 60.0, "h": 3600.0}


def seconds(text: str) -> float:
    """Return a duration in seconds; a bare number is seconds.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    match = _PATTERN.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no duration; write e.g. 10, 10s, 500ms or 2m")
    return float(match[1]) * _SECONDS[match[2]]
