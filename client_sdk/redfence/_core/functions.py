"""Checks that a function can run under a lock. Pure."""

from __future__ import annotations

import inspect


def check_function(function: object, *, is_async: bool) -> None:
    """Refuse a function whose body would run outside the lock, or that this client cannot call.

    Raises:
        TypeError: the function is a generator, not callable, or of the other client's kind.
    """
    if not callable(function):
        raise TypeError(f"cannot run {function!r} under a lock, because it is not callable")
    name = getattr(function, "__qualname__", repr(function))
    forms = (function, type(function).__call__)
    if any(inspect.isgeneratorfunction(each) or inspect.isasyncgenfunction(each) for each in forms):
        raise TypeError(
            f"{name} is a generator, and its body would run after the release; enter the lock inside it"
        )
    is_coroutine_function = any(inspect.iscoroutinefunction(each) for each in forms)
    if is_coroutine_function and not is_async:
        raise TypeError(f"{name} is an async function, which Client cannot await; use AsyncClient")
    if is_async and not is_coroutine_function:
        raise TypeError(f"{name} is not an async function, and would block the event loop; use Client")
