"""Keeps the leases of the locks that each context has entered and not left, the innermost last.

A context holds its leases only weakly, so that a lock that the program drops is still released. The
stack is an immutable tuple: a child task inherits a copy, and its own locks do not show in its parent.
"""

from __future__ import annotations

import weakref
from contextvars import ContextVar
from typing import Protocol

from redfence._core.lease import LeaseCore, LeaseState


class StackedLease(Protocol):
    """A lease, as both clients define it."""

    _core: LeaseCore

    @property
    def resource(self) -> str:
        """The locked name."""
        ...


_Stack = tuple["weakref.ref[StackedLease]", ...]

_STACK: ContextVar[_Stack] = ContextVar("redfence_leases", default=())


def push(lease: StackedLease) -> None:
    """Make `lease` the innermost one of this context; drop those whose lock was left in another context."""
    _STACK.set((*filter(_unreleased, _STACK.get()), weakref.ref(lease)))


def remove(lease: StackedLease | None) -> None:
    """Remove `lease` from this context, if it is there: a lock may be left where it was not entered."""
    _STACK.set(tuple(each for each in _STACK.get() if each() is not lease))


def innermost(resource: str | None) -> StackedLease | None:
    """Return the innermost lease, or the one of `resource`; None if it was released."""
    stack = _STACK.get()
    if resource is None:
        # Not the next one: a task that outlives an inner lock must not get the token of another resource.
        return _unreleased(stack[-1]) if stack else None
    leases = (_unreleased(each) for each in reversed(stack))
    return next((lease for lease in leases if lease is not None and lease.resource == resource), None)


def _unreleased(reference: weakref.ref[StackedLease]) -> StackedLease | None:
    lease = reference()
    return None if lease is None or lease._core.state is LeaseState.RELEASED else lease  # noqa: SLF001
