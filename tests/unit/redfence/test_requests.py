"""Misuse is told at once, in words that help, and never sent."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest

from redfence import ClientOptions, FencingToken, InvalidArgumentError
from redfence._messages.requests import AcquireOrder, acquire_order, check_resource
from redfence._seconds import milliseconds


def _order(*, ttl: float = 1, wait: Any = None, holder: Any = "") -> AcquireOrder:
    return acquire_order("r", ttl=ttl, wait=wait, holder=holder, max_hold=None)


@pytest.mark.parametrize(
    ("length", "expected_ms"),
    [(10, 10_000), (0.1, 100), (0.1 + 0.2, 300), (timedelta(minutes=2), 120_000), (0, 0), (1e-9, 0)],
)
def test_seconds_become_whole_milliseconds(length: Any, expected_ms: int) -> None:
    assert milliseconds("ttl", length) == expected_ms


@pytest.mark.parametrize(
    ("wait", "problem"),
    [
        (-1, "must not be negative, but is -1"),
        (-1e-9, "must not be negative, but is -1e-09"),
        (timedelta(seconds=-2), "must not be negative, but is -2.0"),
        (math.nan, "must be finite, not nan"),
        (-math.inf, "must be finite, not -inf"),
        (10**400, "must be at most 315576000000 seconds"),
        (True, "must be seconds (a number) or a timedelta, not bool"),
        ("5", "must be seconds (a number) or a timedelta, not str"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_wait_that_is_none_is_refused_by_name(wait: Any, problem: str) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        _order(wait=wait)
    assert str(refused.value).startswith(f"wait {problem}")
    assert refused.value.field == "wait"


def test_infinite_waits_are_pointed_to_none() -> None:
    with pytest.raises(InvalidArgumentError, match=r"None waits for ever"):
        _order(wait=math.inf)


_NO_LENGTHS = ["10", None, True, -1, math.inf, math.nan, 1e300, 1e306, timedelta(days=-1), b"1", [1]]
_NO_NAMES = ["", "a{b", "a}b", "a\nb", "x" * 257, "é" * 129, "\ud800", 7, None, b"r"]
_REFUSED: dict[str, tuple[Callable[[Any], object], list[Any]]] = {
    "ttl": (partial(milliseconds, "ttl"), _NO_LENGTHS),
    "resource": (check_resource, _NO_NAMES),
    "holder": (lambda holder: _order(holder=holder), ["x" * 257, "a\x00", "\ud800", 7]),
    "token": (partial(FencingToken, "r"), [0, -1, 2**53, 1.0, "1", True, None]),
}


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, (_, values) in _REFUSED.items() for value in values]
)
def test_what_is_no_value_of_a_field_is_refused_by_the_fields_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=f"^{field} ") as refused:
        _REFUSED[field][0](value)
    assert refused.value.field == field


def test_a_ttl_below_the_contracts_least_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"^ttl .*at least"):
        _order(ttl=0.099)
    assert _order(ttl=86_400).ttl_ms == 86_400_000


@pytest.mark.parametrize("value", [0, 0.0004, -1, float("inf"), "5", None, True])
def test_options_out_of_bounds_are_refused(value: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"^rpc_timeout must") as refused:
        ClientOptions(rpc_timeout=value)
    assert refused.value.field == "rpc_timeout"
    with pytest.raises(InvalidArgumentError, match=r"reconnect"):
        ClientOptions(reconnect_backoff_min=timedelta(seconds=2))
