"""Tells a holder's callbacks of the changes of its lease, outside the session. Pure.

The session calls `LeaseWatch` after each change. The watch only schedules the callback, so a slow or
failing callback cannot stop the renewals. At most one call per lease is pending; a newer change
replaces it.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeAlias, TypeVar

from redfence._core.functions import check_function
from redfence._core.lease import LeaseCore, LeaseState
from redfence._errors import InvalidArgumentError

_log = logging.getLogger("redfence")

LeaseT = TypeVar("LeaseT")
Callback: TypeAlias = Callable[[LeaseT], object] | None


@dataclass(frozen=True, slots=True)
class Callbacks(Generic[LeaseT]):
    """Holds the callbacks of one acquire.

    Attributes:
        on_at_risk: is called with the lease each time it becomes AT_RISK.
        on_lost: is called with the lease when it is LOST.

    Raises:
        InvalidArgumentError: a callback is not callable, or it is an async function or a generator.
    """

    on_at_risk: Callback[LeaseT] = None
    on_lost: Callback[LeaseT] = None

    def __post_init__(self) -> None:
        for name, callback in (("on_at_risk", self.on_at_risk), ("on_lost", self.on_lost)):
            if callback is None:
                continue
            try:
                check_function(callback, is_async=False)
            except TypeError:
                raise InvalidArgumentError(
                    f"{name} must be a plain function that takes the lease, not {callback!r}",
                    metadata={"field": name},
                ) from None

    def __bool__(self) -> bool:
        """Return whether there is a callback."""
        return self.on_at_risk is not None or self.on_lost is not None

    def call(self, lease: LeaseT, state: LeaseState, *, passes: tuple[type[BaseException], ...] = ()) -> None:
        """Call the callback of a state, if it has one; log what it raises, except for errors of `passes`."""
        callback = {LeaseState.AT_RISK: self.on_at_risk, LeaseState.LOST: self.on_lost}.get(state)
        if callback is None:
            return
        try:
            callback(lease)
        except passes:
            raise
        except BaseException as error:  # noqa: BLE001  (it must not stop the callbacks of other leases)
            _log.error("callback_failed lease=%r state=%s", lease, state.value, exc_info=error)


class LeaseWatch:
    """Schedules a call for each change of one lease to AT_RISK or LOST.

    Args:
        core: the lease.
        tell: a method of the holder's lease object. The watch refers to it weakly until a call is
            scheduled, so that the program can drop the lease.
        schedule: runs a function soon, and functions of one lease one after another; it must not keep the
            session alive.
    """

    __slots__ = ("_changes", "_core", "_latest", "_schedule", "_scheduled", "_tell", "_told")

    def __init__(
        self,
        core: LeaseCore,
        tell: Callable[[LeaseState], None],
        schedule: Callable[[Callable[[], None]], object],
    ) -> None:
        self._core = core
        self._tell = weakref.WeakMethod(tell)
        self._schedule = schedule
        self._scheduled = False
        self._changes = 0
        self._latest = self._told = (0, LeaseState.ACTIVE)

    def start(self) -> None:
        """Watch from now on; called where the session changes the lease."""
        self._core.watchers.append(self._changed)
        self._changed()  # the lease may have changed since the grant

    def _changed(self) -> None:
        state, tell = self._core.state, self._tell()
        if tell is None or state not in {LeaseState.AT_RISK, LeaseState.LOST}:
            return
        self._changes += 1
        self._latest = (self._changes, state)
        if not self._scheduled:
            self._scheduled = True
            self._schedule(partial(self._deliver, tell))

    def _deliver(self, tell: Callable[[LeaseState], None]) -> None:
        # This order matters: the session may change the lease meanwhile, in another thread.
        self._scheduled = False
        latest = self._latest
        if latest != self._told and self._core.state is not LeaseState.RELEASED:
            self._told = latest
            tell(latest[1])
