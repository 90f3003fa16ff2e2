"""Finds the lease of the lock whose body is running, so that code deep inside gets the token."""

from __future__ import annotations

from typing import cast

from redfence._aio.lease import AsyncLease
from redfence._core import lease_stack
from redfence._threads.lease import Lease


def current_lease(resource: str | None = None) -> AsyncLease | Lease | None:
    """Return the lease of the innermost `with client.lock(…)` around this code, or the one of `resource`.

    Tasks, and threads of `asyncio.to_thread`, inherit it from the code that started them. So does a copy
    of the context (`contextvars.copy_context`). A plain thread does not, and `client.acquire` sets nothing.

    It returns a lease that was lost: its token is still the right one to send, and a storage that
    checks tokens refuses it after a later holder's access. Call `raise_if_lost` to stop earlier.

    If the innermost lease was released inside its body, it returns None and not an outer lease: an outer
    token belongs to another resource. Name the resource to get an outer lease. A child task that outlives
    the body gets None likewise.
    """
    return cast("AsyncLease | Lease | None", lease_stack.innermost(resource))
