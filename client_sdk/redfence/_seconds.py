"""Defines how callers give a length of time: in seconds. The SDK computes in whole milliseconds. Pure."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import TypeAlias

from redfence._errors import InvalidArgumentError

Seconds: TypeAlias = float | int | timedelta
"""A length of time: a number of seconds, or a timedelta. It is rounded to whole milliseconds."""

# google.protobuf.Duration holds about 10,000 years; a longer one cannot be sent.
_DURATION_MS_MAX = 315_576_000_000 * 1000


def milliseconds(name: str, length: Seconds) -> int:
    """Return a length of time in whole milliseconds, or raise InvalidArgumentError for an invalid one."""
    if isinstance(length, timedelta):
        length = length.total_seconds()
    if isinstance(length, bool) or not isinstance(length, int | float):
        raise _invalid(name, f"must be seconds (a number) or a timedelta, not {type(length).__name__}")
    if isinstance(length, float) and not math.isfinite(length):
        hint = " (None waits for ever)" if name == "wait" else ""
        raise _invalid(name, f"must be finite, not {length!r}{hint}")
    if length < 0:
        raise _invalid(name, f"must not be negative, but is {length!r}")
    if length > _DURATION_MS_MAX // 1000:
        raise _invalid(name, f"must be at most {_DURATION_MS_MAX // 1000} seconds, but is {length!r}")
    return round(length * 1000)


def _invalid(name: str, problem: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"{name} {problem}", metadata={"field": name})
