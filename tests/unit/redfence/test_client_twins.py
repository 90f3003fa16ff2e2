"""The two clients are one client in two colours."""

from __future__ import annotations

import inspect

import pytest

import redfence

_PAIRS = [
    (redfence.AsyncClient, redfence.Client),
    (redfence.AsyncLease, redfence.Lease),
    (redfence.AsyncLock, redfence.Lock),
    (redfence.AsyncLossEvent, redfence.LossEvent),
]
_SYNC_NAME = {"__aenter__": "__enter__", "__aexit__": "__exit__"}
# An asyncio wait is bounded from outside, a thread's only by a parameter. Awaiting and async iteration have
# no synchronous word.
_ALLOWED = {("AsyncLossEvent", "wait"), ("AsyncLossEvent", "__await__"), ("AsyncLease", "events")}


def _methods(kind: type) -> dict[str, object]:
    return {
        _SYNC_NAME.get(name, name): value
        for name, value in vars(kind).items()
        if (inspect.isfunction(value) or isinstance(value, property))
        and (not name.startswith("_") or name.startswith("__"))
        and (kind.__name__, name) not in _ALLOWED
    }


def _plain(value: object) -> object:
    if isinstance(value, property):
        return "property"
    assert inspect.isfunction(value)
    return [
        (each.name, each.kind, each.default, str(each.annotation).replace("Async", ""))
        for each in inspect.signature(value).parameters.values()
        if each.name not in {"connector", "session", "function"}
    ]


@pytest.mark.parametrize(("asynchronous", "synchronous"), _PAIRS, ids=lambda kind: str(kind.__name__))
def test_both_clients_have_the_same_methods_in_the_same_order(asynchronous: type, synchronous: type) -> None:
    ours, theirs = _methods(asynchronous), _methods(synchronous)
    theirs = {
        name: method for name, method in theirs.items() if (asynchronous.__name__, name) not in _ALLOWED
    }
    assert list(ours) == list(theirs)
    for name, method in ours.items():
        assert _plain(method) == _plain(theirs[name]), name


@pytest.mark.parametrize("kinds", _PAIRS, ids=lambda kinds: str(kinds[1].__name__))
def test_every_public_method_is_documented(kinds: tuple[type, type]) -> None:
    for kind in kinds:
        for name, method in vars(kind).items():
            if inspect.isfunction(method) and not name.startswith("_"):
                assert method.__doc__, f"{kind.__name__}.{name}"
    for name, method in vars(kinds[0]).items():
        if (
            inspect.iscoroutinefunction(method)
            and not name.startswith("_")
            and kinds[0] is not redfence.AsyncClient
        ):
            assert "Cancellation:" in (method.__doc__ or ""), name
