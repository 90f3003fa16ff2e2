"""Carry out the use cases of the lock server, in checked values and domain errors, without gRPC or Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

import structlog

from redfence_server.clock import Clock
from redfence_server.errors import DrainingError, NoQuorumError
from redfence_server.locking import quorum
from redfence_server.locking.node import Held, NodeState
from redfence_server.locking.quorum import (
    ReleaseVerdict,
    Renewal,
    RenewVerdict,
    Replies,
    TokenJudgement,
    TokenVerdict,
)
from redfence_server.locking.redlock import Redlock, Verdict, begun, settle
from redfence_server.model import AcquireCall, Lease, LeaseId
from redfence_server.randomness import Randomness
from redfence_server.waiting.acquiring import AcquireEnd, Acquirer, Acquisition, NotGranted, order
from redfence_server.waiting.line import QueueView
from redfence_server.waiting.queues import WaitingView, WaitQueues
from redfence_server.waiting.waiter_limiter import WaiterLimits

_EMPTY_QUEUE: Final = QueueView(0, (), 0)


@dataclass(frozen=True, slots=True)
class RenewOutcome:
    """The outcome of a renewal; `validity_ms` counts from the instant at which the caller sent it."""

    verdict: RenewVerdict
    token: int
    validity_ms: int


@dataclass(frozen=True, slots=True)
class LockView:
    """The present hold of a resource, each node's reply by index, and the waiters at this server."""

    current: Held | None
    queue: QueueView
    nodes: Replies


class LockCalls(Protocol):
    """The use cases that calls need; `LockService` has them, and so has a caller's guarded view of it."""

    @property
    def ttl_ms_max(self) -> int:
        """The greatest ttl that the cluster allows."""

    async def acquire(self, call: AcquireCall) -> Lease | NotGranted:
        """Grant the lease, or return the hold that blocks it."""

    def begin_acquire(self, call: AcquireCall, on_end: Callable[[AcquireEnd], None]) -> Acquisition:
        """Begin an Acquire."""

    def undo_grant(self, call: AcquireCall, lease: Lease) -> None:
        """Undo a grant that certainly did not reach its caller."""

    def begin_renew(self, resource: str, lease_id: LeaseId, on_end: Callable[[RenewOutcome], None]) -> None:
        """Send a renewal to every node."""

    async def release(self, resource: str, lease_id: LeaseId) -> bool:
        """End the lease; return whether it was held."""

    def begin_release(
        self, resource: str, lease_id: LeaseId, on_end: Callable[[bool | NoQuorumError], None]
    ) -> None:
        """Send a release to every node, or hand the lock over."""

    async def get_lock(self, resource: str, *, digest: str = "") -> LockView:
        """Return the hold of a resource, and its waiters."""

    async def check_token(self, resource: str, token: int) -> TokenJudgement:
        """Tell whether the lease with this token holds the resource."""


@dataclass(frozen=True, slots=True)
class ForcedRelease:
    """Whether a forced release ended the lease with the token; if not, the hold of another token, if any.

    Attributes:
        digest: of the lease that was ended; empty if none was.
    """

    was_held: bool
    current: Held | None = None
    digest: str = ""


class LockService:
    """Carries out the use cases; it has no state but unfinished calls, because leases live on the nodes."""

    def __init__(
        self,
        redlock: Redlock,
        *,
        clock: Clock,
        randomness: Randomness,
        ttl_ms_max: Callable[[], int],
        limits: WaiterLimits,
        quorum_may_return: Callable[[], bool] = lambda: False,
    ) -> None:
        self._redlock = redlock
        self._clock = clock
        self._ttl_ms_max = ttl_ms_max
        self._queues = WaitQueues(
            node_count=len(redlock.nodes), clock=clock, randomness=randomness, limits=limits
        )
        self._acquirer = Acquirer(
            redlock, self._queues, clock=clock, randomness=randomness, quorum_may_return=quorum_may_return
        )
        for node in redlock.nodes:
            node.listen(self._queues.on_notice)

    @property
    def ttl_ms_max(self) -> int:
        """The greatest ttl that the cluster allows."""
        return self._ttl_ms_max()

    def set_limits(self, limits: WaiterLimits) -> None:
        """Limit the acquires that begin to wait from now on."""
        self._queues.limiter.limits = limits

    def drain(self) -> None:
        """Refuse new acquires, and end every wait with `DrainingError`."""
        self._queues.drain()

    def quorum_lost(self) -> None:
        """End every wait, because without a quorum no lease can be granted."""
        reports = ((node.index, node.report().state) for node in self._redlock.nodes)
        away = [(index, state) for index, state in reports if state is not NodeState.READY]
        self._queues.fail(partial(NoQuorumError.naming, away))

    def waiting(self) -> WaitingView:
        """Return how many acquires wait at this server."""
        return self._queues.view()

    async def acquire(self, call: AcquireCall) -> Lease | NotGranted:
        """Grant the lease, or return the hold that blocks it.

        Raises:
            NoQuorumError, ValidityExhaustedError, DrainingError: see errors.py; every mint is being undone.
            TooManyWaitersError: too many acquires wait here.

        Cancellation: every mint is being undone.
        """
        ended: asyncio.Future[AcquireEnd] = asyncio.get_running_loop().create_future()
        acquisition = self.begin_acquire(call, partial(settle, ended))
        try:
            end = await ended
        except asyncio.CancelledError:
            acquisition.cancel()
            if isinstance(acquisition.end, Lease):
                # The grant came in this turn of the loop, and the caller will never see it.
                self.undo_grant(call, acquisition.end)
            raise
        if isinstance(end, Exception):
            try:
                raise end
            finally:
                del end, ended, acquisition  # the traceback refers to this frame: a cycle
        return end

    def begin_acquire(self, call: AcquireCall, on_end: Callable[[AcquireEnd], None]) -> Acquisition:
        """Begin an Acquire; its mints are on their way on return, unless it waits behind another one.

        `on_end` is called once with what `acquire` returns or raises, perhaps before this method returns.

        Raises:
            DrainingError: the server takes no more acquires.
        """
        if self._queues.limiter.closed:
            raise DrainingError
        return self._acquirer.begin(call, on_end)

    def undo_grant(self, call: AcquireCall, lease: Lease) -> None:
        """Undo a grant that certainly did not reach its caller; see `Redlock.undo_grant`."""
        self._redlock.undo_grant(resource=call.resource, nonce=lease.nonce, hold_ms=self.ttl_ms_max)

    async def renew(self, resource: str, lease_id: LeaseId) -> RenewOutcome:
        """Restart the lease's ttl; a renewal that leaves no validity is AT_RISK."""
        return await begun(partial(self.begin_renew, resource, lease_id))

    def begin_renew(self, resource: str, lease_id: LeaseId, on_end: Callable[[RenewOutcome], None]) -> None:
        """Send a renewal to every node, and call `on_end` once with its outcome."""
        sent_at_ms = self._clock.now_ms()

        def on_verdict(verdict: Verdict[Renewal]) -> None:
            on_end(self._renewed(resource, lease_id, sent_at_ms, verdict.verdict))

        self._redlock.renew(resource, lease_id.digest, on_verdict)

    def _renewed(self, resource: str, lease_id: LeaseId, sent_at_ms: float, renewal: Renewal) -> RenewOutcome:
        if renewal.verdict is not RenewVerdict.ACTIVE:
            return RenewOutcome(renewal.verdict, 0, 0)
        if (queue := self._queues.find(resource)) is not None:
            queue.renewed(lease_id.digest, sent_at_ms + renewal.ttl_ms)
        elapsed_ms = self._clock.now_ms() - sent_at_ms
        if quorum.validity_left_ms(renewal.ttl_ms, elapsed_ms) <= 0:
            return RenewOutcome(RenewVerdict.AT_RISK, 0, 0)
        return RenewOutcome(
            RenewVerdict.ACTIVE, renewal.token, int(quorum.validity_left_ms(renewal.ttl_ms, 0))
        )

    async def release(self, resource: str, lease_id: LeaseId) -> bool:
        """End the lease; return whether it was held.

        Raises:
            NoQuorumError: too few nodes answered to decide.
        """
        end: bool | NoQuorumError = await begun(partial(self.begin_release, resource, lease_id))
        if isinstance(end, NoQuorumError):
            try:
                raise end
            finally:
                del end  # the traceback refers to this frame: a cycle
        return end

    def begin_release(
        self, resource: str, lease_id: LeaseId, on_end: Callable[[bool | NoQuorumError], None]
    ) -> None:
        """Hand the lock over to the first waiter at this server, or release it openly.

        The release is on its way to every node on return. `on_end` is called once with whether the lease was
        held, or with the error that too few nodes answered to decide it.
        """
        digest = lease_id.digest
        queue = self._queues.find(resource)
        successor = None if queue is None else queue.released(digest)
        on_verdict = partial(_tell_release, on_end)
        if queue is None or successor is None:
            self._redlock.release(resource, digest, on_verdict, ttl_ms_max=self.ttl_ms_max)
            return
        wanted = order(successor.call, watch_own_hold=queue.wants_notice(successor))
        attempt = self._redlock.hand_over(
            wanted, release_first=digest, ttl_ms_max=self.ttl_ms_max, on_verdict=on_verdict
        )
        self._queues.handovers += 1
        queue.hand_over(successor, attempt)

    async def get_lock(self, resource: str, *, digest: str = "") -> LockView:
        """Return the hold of a resource, its waiters, and the position of the waiter with this digest.

        Raises:
            NoQuorumError: too few nodes answered.
        """
        replies = (await begun(partial(self._redlock.inspect, resource))).replies
        silent = quorum.silent_nodes(replies)
        if len(replies) - len(silent) < self._redlock.quorum:
            raise NoQuorumError.naming(silent)
        queue = self._queues.find(resource)
        return LockView(
            current=quorum.hold_of_a_quorum(replies),
            queue=_EMPTY_QUEUE if queue is None else queue.line.view(digest, self._clock.now_ms()),
            nodes=replies,
        )

    async def check_token(self, resource: str, token: int) -> TokenJudgement:
        """Tell whether the lease with this token holds the resource: LIVE or NOT_LIVE.

        Raises:
            NoQuorumError: the nodes that answered cannot decide it.
        """
        outcome: Verdict[TokenJudgement] = await begun(partial(self._redlock.check_token, resource, token))
        if outcome.verdict.verdict is TokenVerdict.NO_QUORUM:
            raise _undecided(outcome.replies)
        return outcome.verdict

    async def force_release(self, resource: str, token: int, *, reason: str) -> ForcedRelease:
        """End the lease that holds the resource with exactly this token, for an operator.

        Raises:
            NoQuorumError: the nodes that answered cannot decide; the lease may or may not have ended.

        Cancellation: a release that was sent goes on.
        """
        replies = (await begun(partial(self._redlock.inspect, resource))).replies
        judged = quorum.judge_token(replies, token)
        if judged is None or judged.verdict is TokenVerdict.NO_QUORUM:
            raise _undecided(replies)
        current = quorum.hold_of_a_quorum(replies)
        if judged.verdict is TokenVerdict.NOT_LIVE or current is None:
            is_held = current is not None and not current.closed
            return ForcedRelease(was_held=False, current=current if is_held else None)
        log = structlog.get_logger().bind(resource=resource, token=token)
        log.warning("force_release", holder=current.holder, reason=reason)
        released: Verdict[ReleaseVerdict] = await begun(
            partial(self._redlock.force_release, resource, current.digest, token, ttl_ms_max=self.ttl_ms_max)
        )
        if released.verdict is ReleaseVerdict.NO_QUORUM:
            raise _release_undecided(released.replies)
        was_held = released.verdict is ReleaseVerdict.RELEASED
        return ForcedRelease(was_held=was_held, digest=current.digest if was_held else "")


def _tell_release(on_end: Callable[[bool | NoQuorumError], None], released: Verdict[ReleaseVerdict]) -> None:
    if released.verdict is ReleaseVerdict.NO_QUORUM:
        on_end(_release_undecided(released.replies))
    else:
        on_end(released.verdict is ReleaseVerdict.RELEASED)


def _release_undecided(replies: Replies) -> NoQuorumError:
    silent = quorum.silent_nodes(replies)
    return NoQuorumError.naming(silent, also="; the lease may be held there until its ttl ends")


def _undecided(replies: Replies) -> NoQuorumError:
    silent = quorum.silent_nodes(replies)
    return NoQuorumError.naming(silent, also="; the other nodes cannot decide whether the token is live")
