"""Let one caller use the lock service: check its rights before each use case, and write the audit log.

Unary calls and the commands of streams pass through the same object, so that none is forgotten. Without a
policy and an audit log, calls reach the lock service directly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from redfence_server import model
from redfence_server.access.guard import Caller
from redfence_server.access.policy import Verb
from redfence_server.errors import NoQuorumError
from redfence_server.lock_service import LockService, LockView, RenewOutcome
from redfence_server.locking.quorum import TokenJudgement
from redfence_server.model import AcquireCall, Lease, LeaseId
from redfence_server.waiting.acquiring import AcquireEnd, Acquisition, NotGranted


class GuardedService:
    """The use cases of the lock service for one caller; see `LockService` for each.

    Each method raises UnauthenticatedError or PermissionDeniedError before it does anything for the resource.
    """

    def __init__(self, service: LockService, caller: Caller) -> None:
        self._service = service
        self._caller = caller

    @property
    def ttl_ms_max(self) -> int:
        """The greatest ttl that the cluster allows."""
        return self._service.ttl_ms_max

    async def acquire(self, call: AcquireCall) -> Lease | NotGranted:
        """Grant the lease, or return the hold that blocks it."""
        call = self._checked(call)
        end = await self._service.acquire(call)
        self._note_acquire(call, end)
        return end

    def begin_acquire(self, call: AcquireCall, on_end: Callable[[AcquireEnd], None]) -> Acquisition:
        """Begin an Acquire."""
        call = self._checked(call)

        def on_acquired(end: AcquireEnd) -> None:
            self._note_acquire(call, end)
            on_end(end)

        return self._service.begin_acquire(call, on_acquired)

    def undo_grant(self, call: AcquireCall, lease: Lease) -> None:
        """Undo a grant that did not reach the caller."""
        self._note_acquire(call, lease, outcome="undone")
        self._service.undo_grant(call, lease)

    def begin_renew(self, resource: str, lease_id: LeaseId, on_end: Callable[[RenewOutcome], None]) -> None:
        """Send a renewal; renewals are not audited."""
        self._caller.check(Verb.ACQUIRE, resource)
        self._service.begin_renew(resource, lease_id, on_end)

    async def release(self, resource: str, lease_id: LeaseId) -> bool:
        """End the lease."""
        self._caller.check(Verb.ACQUIRE, resource)
        try:
            was_held = await self._service.release(resource, lease_id)
        except NoQuorumError as error:
            self._note_release(resource, lease_id, error)
            raise
        self._note_release(resource, lease_id, was_held)
        return was_held

    def begin_release(
        self, resource: str, lease_id: LeaseId, on_end: Callable[[bool | NoQuorumError], None]
    ) -> None:
        """Begin to end the lease."""
        self._caller.check(Verb.ACQUIRE, resource)

        def on_released(end: bool | NoQuorumError) -> None:  # noqa: FBT001  (the outcome)
            self._note_release(resource, lease_id, end)
            on_end(end)

        self._service.begin_release(resource, lease_id, on_released)

    async def get_lock(self, resource: str, *, digest: str = "") -> LockView:
        """Return the hold of a resource and its waiters."""
        self._caller.check(Verb.INSPECT, resource)
        return await self._service.get_lock(resource, digest=digest)

    async def check_token(self, resource: str, token: int) -> TokenJudgement:
        """Tell whether the lease with this token holds the resource."""
        self._caller.check(Verb.INSPECT, resource)
        return await self._service.check_token(resource, token)

    def _checked(self, call: AcquireCall) -> AcquireCall:
        """Return the call, with the lock delay of the policy if that is longer than the caller's."""
        least_ms = self._caller.check(Verb.ACQUIRE, call.resource)
        if least_ms <= call.lock_delay_ms:
            return call
        ttl_ms, ttl_ms_max, setter = call.ttl_ms, self.ttl_ms_max, " by the server's policy"
        model.check_lock_delay_ms(least_ms, ttl_ms=ttl_ms, ttl_ms_max=ttl_ms_max, setter=setter)
        return replace(call, lock_delay_ms=least_ms)

    def _note_acquire(self, call: AcquireCall, end: AcquireEnd, *, outcome: str = "granted") -> None:
        if isinstance(end, Lease):
            self._caller.record(
                "acquire", outcome, resource=call.resource, token=end.token, digest=call.lease_id.digest
            )

    def _note_release(self, resource: str, lease_id: LeaseId, end: bool | NoQuorumError) -> None:  # noqa: FBT001
        outcomes = {True: "released", False: "not_held"}
        outcome = outcomes[end] if isinstance(end, bool) else "unknown"
        self._caller.record("release", outcome, resource=resource, digest=lease_id.digest)
