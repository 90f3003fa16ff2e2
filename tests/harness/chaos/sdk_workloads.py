"""Workloads over the SDK, for asyncio and for threads; the SDK renews the leases."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from random import Random

from harness.chaos.recorder import Call, Recorder, now_s
from harness.chaos.workloads import TTL_S, Work, list_name
from harness.history.records import Kind
from harness.processes.servers import new_lease_id
from redfence import (
    AsyncClient,
    AsyncLease,
    Client,
    Lease,
    LeaseLostError,
    NotAcquiredError,
    OverloadedError,
    RedfenceError,
    UnavailableError,
)

_HELD = 2
_LOOK_S = 0.2
_LOOKS_MAX = 100
_LOOK_UNSURE_S = 0.0003
# The contract takes 1 % and 2 ms from a ttl.
_VALIDITY_S = TTL_S * 0.99 - 0.002
_REFUSED_S = 0.05


async def append_with_sdk(work: Work, client: AsyncClient) -> None:
    """Append to the shared lists in the body of `lock()`, which the SDK cancels if the lease is lost."""
    while not work.stopping():
        try:
            async with AsyncExitStack() as stack:
                await _append_once(work, client, stack)
        except LeaseLostError:
            continue


async def _append_once(work: Work, client: AsyncClient, stack: AsyncExitStack) -> None:
    resource, lease = list_name(work.random, work.began_s), new_lease_id()
    held = None
    with work.recorder.call(Kind.ACQUIRE, resource, lease, ttl_s=TTL_S) as call:
        try:
            held = await stack.enter_async_context(client.lock(resource, ttl=TTL_S, wait=TTL_S))
        except RedfenceError as error:
            _refused(call, error)
        else:
            _granted(call, held)
    if held is None:
        await asyncio.sleep(_REFUSED_S)
        return
    before = await work.storage.read(resource, lease, held.token)
    if before is not None:
        await asyncio.sleep(work.random.uniform(0.0, 0.04))
        await work.storage.append(resource, lease, held.token, before)
    # The end of `lock()` does not report whether a quorum released, so the outcome stays unknown.
    with work.recorder.call(Kind.RELEASE, resource, lease, token=held.token):
        await stack.aclose()


def hold_with_sdk(
    recorder: Recorder, client: Client, *, random: Random, stopping: Callable[[], bool]
) -> None:
    """Hold a lock in a thread for up to several ttls, and record the validity that the SDK reports."""
    while not stopping():
        resource, lease = f"held/{random.randrange(_HELD)}", new_lease_id()
        with recorder.call(Kind.ACQUIRE, resource, lease, ttl_s=TTL_S) as call:
            held: Lease | None = None
            try:
                held = client.acquire(resource, ttl=TTL_S, wait=2 * TTL_S)
            except RedfenceError as error:
                _refused(call, error)
            else:
                _granted(call, held)
        if held is None:
            time.sleep(_REFUSED_S)
            continue
        _count_on(recorder, held, resource, lease, ends_s=now_s() + random.uniform(0.05, 3.0) * TTL_S)
        with recorder.call(Kind.RELEASE, resource, lease, token=held.token) as call:
            try:
                if held.release():
                    call.ok()
                else:
                    # The SDK releases a lost lease in the background and reports nothing.
                    call.unknown("lost")
            except RedfenceError as error:
                call.unknown(type(error).__name__)


def _granted(call: Call, held: Lease | AsyncLease) -> None:
    until_s = _until_s(held)
    if until_s:
        call.ok(token=held.token, until_s=until_s)
    else:
        call.unknown(f"granted, and over before it was looked at, token {held.token}")


def _until_s(held: Lease | AsyncLease) -> float:
    """Return the end of the validity that the SDK reports, to less than a millisecond; 0 if it is over."""
    for _ in range(_LOOKS_MAX):
        before_s, remaining_s, after_s = now_s(), held.remaining(), now_s()
        if remaining_s <= 0.0:
            return 0.0
        # This process may have stalled between the two readings.
        if after_s - before_s < _LOOK_UNSURE_S:
            return after_s + remaining_s
    return 0.0


def _refused(call: Call, error: RedfenceError) -> None:
    nothing_granted = isinstance(error, NotAcquiredError | OverloadedError)
    if nothing_granted or (isinstance(error, UnavailableError) and error.error_reason):
        call.failed(
            error.error_reason or type(error).__name__,
            admission_refused=not isinstance(error, NotAcquiredError),
        )
    else:
        call.unknown(
            f"granted too late, token {error.token}"
            if isinstance(error, LeaseLostError)
            else type(error).__name__
        )


def _count_on(recorder: Recorder, held: Lease, resource: str, lease: str, *, ends_s: float) -> None:
    """Hold until `ends_s` or a loss, and record each renewal of the SDK."""
    known_s = _until_s(held)
    while now_s() < ends_s and not held.lost.wait(_LOOK_S):
        until_s = _until_s(held)
        if until_s > known_s + 0.01:
            known_s = until_s
            # The validity of a renewal counts from its request.
            sent_s = until_s - _VALIDITY_S
            with recorder.call(Kind.RENEW, resource, lease, token=held.token, invoked_s=sent_s) as call:
                call.ok(until_s=until_s)
