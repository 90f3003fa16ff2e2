"""Carry out the use cases of the lock server, in checked values and domain errors, without gRPC or Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from redfence_server.clock import Clock
from redfence_server.errors import DrainingError, NoQuorumError, ValidityExhaustedError
from redfence_server.locking import quorum
from redfence_server.locking.attempt import Attempt, AttemptGranted, AttemptOutcome, TooLate
from redfence_server.locking.backoff import pauses, revalidation_pauses
from redfence_server.locking.node import REVALIDATION_MS_MAX, Held, NodeState, NoReply
from redfence_server.locking.quorum import (
    ReleaseVerdict,
    Renewal,
    RenewVerdict,
    Replies,
    TokenJudgement,
    TokenVerdict,
)
from redfence_server.locking.redlock import Order, Redlock, Verdict
from redfence_server.locking.tally import Failure, Refusal
from redfence_server.model import AcquireCall, Lease, LeaseId
from redfence_server.randomness import Randomness
from redfence_server.waiting.line import QueueView, Turn, Waiter
from redfence_server.waiting.queue import WaitQueue
from redfence_server.waiting.queues import WaitQueues
from redfence_server.waiting.waiter_limiter import WaiterLimits

# The server answers this much before the caller's deadline: half a network round trip, and a busy event loop.
# The share limits it for a short deadline.
_ANSWER_MARGIN_MS_MAX: Final = 50
_ANSWER_MARGIN_SHARE: Final = 0.25
# How often an attempt is repeated when callers split the nodes, so that no caller was granted.
_SPLIT_TRIES_MAX: Final = 4
_EMPTY_QUEUE: Final = QueueView(0, (), 0)


@dataclass(frozen=True, slots=True)
class NotGranted:
    """The resource is held by another lease.

    Attributes:
        waited: the caller asked to wait, and the wait is over.
        position: its position in the queue at that time; 0 if it had none.
    """

    current: Held | None
    waited: bool
    position: int = 0


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
        self._randomness = randomness
        self._ttl_ms_max = ttl_ms_max
        self._quorum_may_return = quorum_may_return
        self._queues = WaitQueues(
            node_count=len(redlock.nodes), clock=clock, randomness=randomness, limits=limits
        )
        for node in redlock.nodes:
            node.listen(self._queues.on_notice)

    @property
    def ttl_ms_max(self) -> int:
        """The greatest ttl that the cluster allows."""
        return self._ttl_ms_max()

    def drain(self) -> None:
        """Refuse new acquires, and end every wait with `DrainingError`."""
        self._queues.drain()

    def quorum_lost(self) -> None:
        """End every wait, because without a quorum no lease can be granted."""
        reports = ((node.index, node.report().state) for node in self._redlock.nodes)
        away = [(index, state) for index, state in reports if state is not NodeState.READY]
        self._queues.fail(partial(NoQuorumError.naming, away))

    async def acquire(self, call: AcquireCall) -> Lease | NotGranted:
        """Grant the lease, or return the hold that blocks it.

        Raises:
            NoQuorumError, ValidityExhaustedError, DrainingError: see errors.py; every mint is being undone.
            TooManyWaitersError: too many acquires wait here.

        Cancellation: every mint is being undone.
        """
        if self._queues.limiter.closed:
            raise DrainingError
        if call.answer_within_ms is None:
            return await self._try_and_wait(call)
        time_limit_ms = max(call.answer_within_ms - _answer_margin_ms(call.answer_within_ms), 0.0)
        try:
            async with asyncio.timeout(time_limit_ms / 1000):
                return await self._try_and_wait(call)
        except TimeoutError as error:
            # The attempt was cancelled and so undone: the outcome is known.
            raise NoQuorumError("the call's deadline came first; its mints are being undone") from error

    def undo_grant(self, call: AcquireCall, lease: Lease) -> None:
        """Undo a grant that certainly did not reach its caller; see `Redlock.undo_grant`."""
        self._redlock.undo_grant(resource=call.resource, nonce=lease.nonce, ttl_ms=call.ttl_ms)

    async def _try_and_wait(self, call: AcquireCall) -> Lease | NotGranted:
        wait_ms = float(call.wait_ms)
        if call.answer_within_ms is not None:
            # Twice the margin, so that the last try can end before the deadline.
            margin_ms = 2 * _answer_margin_ms(call.answer_within_ms)
            wait_ms = min(wait_ms, call.answer_within_ms - margin_ms)
        if wait_ms <= 0:
            return await self._try(call)
        with self._queues.enter(call) as (queue, waiter):
            return await self._wait(queue, waiter, call.arrived_at_ms + wait_ms)

    async def _wait(self, queue: WaitQueue, waiter: Waiter, give_up_at_ms: float) -> Lease | NotGranted:
        """Try at each of this waiter's turns, until it is granted or its wait ends."""
        call = waiter.call
        failed: ValidityExhaustedError | NoQuorumError | None = None
        while (turn := await queue.turn(waiter, give_up_at_ms)) is not Turn.GIVE_UP:
            if isinstance(turn, Attempt):
                outcome = await self._redlock.finish(turn)
            if not isinstance(turn, Attempt) or _needs_revalidation(outcome):
                outcome = await self._attempt(_order(call, watch_own_hold=queue.wants_notice(waiter)))
            outcome = self._undo_if_late(call, outcome)
            failed = None
            match outcome:
                case AttemptGranted():
                    queue.granted(waiter, outcome)
                    return _lease(call, outcome)
                case TooLate() | Refusal(Failure.EXPIRED):
                    # The attempt was undone; the next try may be faster, and there is time for it.
                    failed = self._too_late(call, outcome)
                    queue.failed(waiter)
                case Refusal(Failure.NO_QUORUM) if _broke(outcome) or self._quorum_may_return():
                    # Connections are being made again. If too few are, `quorum_lost` ends this wait.
                    failed = NoQuorumError.naming(outcome.silent)
                    queue.failed(waiter)
                case Refusal(Failure.NO_QUORUM):
                    # End the other waits too, because no lease can be granted without a quorum.
                    queue.line.fail(partial(NoQuorumError.naming, outcome.silent))
                    raise NoQuorumError.naming(outcome.silent)
                case Refusal():
                    queue.refused(waiter, outcome)
        if failed is not None:
            raise failed
        return NotGranted(queue.current(), waited=True, position=queue.line.position(waiter))

    async def _attempt(self, order: Order) -> AttemptOutcome:
        """Try once; repeat while nodes must be examined again, because a fence was raised on them.

        Each repeat is a new attempt, because mints from before and after a fence must not count together.
        """
        give_up_at_ms = self._clock.now_ms() + REVALIDATION_MS_MAX
        pauses_ms = revalidation_pauses()
        while _needs_revalidation(outcome := await self._redlock.attempt(order)):
            if self._clock.now_ms() >= give_up_at_ms:
                break
            await asyncio.sleep(next(pauses_ms) / 1000)
        return outcome

    def _undo_if_late(self, call: AcquireCall, outcome: AttemptOutcome) -> AttemptOutcome:
        """Undo a grant whose validity ended on the way to its waiter, because the process was suspended."""
        if not isinstance(outcome, AttemptGranted):
            return outcome
        elapsed_ms = self._clock.now_ms() - outcome.minted_at_ms
        if quorum.validity_left_ms(call.ttl_ms, elapsed_ms) > 0:
            return outcome
        self._redlock.undo_grant(resource=call.resource, nonce=outcome.nonce, ttl_ms=call.ttl_ms)
        return TooLate(elapsed_ms)

    async def _try(self, call: AcquireCall) -> Lease | NotGranted:
        """Try once, or a few times while rivals split the nodes so that no caller is granted."""
        split_pauses = pauses(self._randomness)
        for tries_left in reversed(range(_SPLIT_TRIES_MAX)):
            outcome = await self._attempt(_order(call))
            match outcome:
                case AttemptGranted():
                    return _lease(call, outcome)
                case TooLate() | Refusal(Failure.EXPIRED):
                    raise self._too_late(call, outcome)
                case Refusal(Failure.NO_QUORUM):
                    raise NoQuorumError.naming(outcome.silent)
                case Refusal(Failure.SPLIT) if tries_left:
                    await asyncio.sleep(next(split_pauses) / 1000)
                case Refusal():
                    holds = [hold for _, hold in outcome.held]
                    present = quorum.present_hold(holds, quorum=self._redlock.quorum)
                    return NotGranted(present, waited=call.wait_ms > 0)
        raise AssertionError("the last try returns")

    def _too_late(self, call: AcquireCall, outcome: TooLate | Refusal) -> ValidityExhaustedError:
        elapsed_ms = outcome.elapsed_ms if isinstance(outcome, TooLate) else call.ttl_ms
        return ValidityExhaustedError(elapsed_ms, call.ttl_ms)

    async def renew(self, resource: str, lease_id: LeaseId) -> RenewOutcome:
        """Restart the lease's ttl; a renewal that leaves no validity is AT_RISK."""
        sent_at_ms = self._clock.now_ms()
        renewal: Renewal = await self._redlock.renew(resource=resource, digest=lease_id.digest)
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
        return self.was_held(await self.begin_release(resource, lease_id))

    def begin_release(self, resource: str, lease_id: LeaseId) -> Awaitable[Verdict[ReleaseVerdict]]:
        """Hand the lock over to the first waiter at this server, or release it openly.

        The release is on its way to every node on return. Await the result, and pass it to `was_held`.
        """
        digest = lease_id.digest
        queue = self._queues.find(resource)
        successor = None if queue is None else queue.released(digest)
        if queue is None or successor is None:
            return self._redlock.release(resource=resource, digest=digest, ttl_ms_max=self.ttl_ms_max)
        order = _order(successor.call, watch_own_hold=queue.wants_notice(successor))
        attempt, released = self._redlock.hand_over(order, release_first=digest, ttl_ms_max=self.ttl_ms_max)
        queue.hand_over(successor, attempt)
        return released

    @staticmethod
    def was_held(released: Verdict[ReleaseVerdict]) -> bool:
        """Tell whether the released lease was held.

        Raises:
            NoQuorumError: too few nodes answered to decide.
        """
        if released.verdict is ReleaseVerdict.NO_QUORUM:
            raise NoQuorumError.naming(
                quorum.silent_nodes(released.replies), also="; the lease may be held there until its ttl ends"
            )
        return released.verdict is ReleaseVerdict.RELEASED

    async def get_lock(self, resource: str, *, digest: str = "") -> LockView:
        """Return the hold of a resource, its waiters, and the position of the waiter with this digest.

        Raises:
            NoQuorumError: too few nodes answered.
        """
        replies = await self._redlock.inspect(resource)
        holds = [reply for reply in replies if isinstance(reply, Held)]
        silent = quorum.silent_nodes(replies)
        if len(replies) - len(silent) < self._redlock.quorum:
            raise NoQuorumError.naming(silent)
        groups = quorum.by_lease(holds)
        held = bool(groups) and len(groups[0]) >= self._redlock.quorum
        queue = self._queues.find(resource)
        return LockView(
            current=quorum.present_hold(holds, quorum=self._redlock.quorum) if held else None,
            queue=_EMPTY_QUEUE if queue is None else queue.line.view(digest, self._clock.now_ms()),
            nodes=replies,
        )

    async def check_token(self, resource: str, token: int) -> TokenJudgement:
        """Tell whether the lease with this token holds the resource: LIVE or NOT_LIVE.

        Raises:
            NoQuorumError: the nodes that answered cannot decide it.
        """
        outcome = await self._redlock.check_token(resource=resource, token=token)
        if outcome.verdict.verdict is TokenVerdict.NO_QUORUM:
            raise NoQuorumError.naming(
                quorum.silent_nodes(outcome.replies),
                also="; the other nodes cannot decide whether the token is live",
            )
        return outcome.verdict


def _order(call: AcquireCall, *, watch_own_hold: bool = False) -> Order:
    return Order(
        *(call.resource, call.lease_id.digest, call.ttl_ms, call.holder),
        watch_blocking_hold=call.wait_ms > 0,
        watch_own_hold=watch_own_hold,
    )


def _lease(call: AcquireCall, grant: AttemptGranted) -> Lease:
    waited_ms = grant.minted_at_ms - call.arrived_at_ms
    validity_ms = quorum.validity_left_ms(call.ttl_ms, 0) - quorum.wait_drift_ms(call.ttl_ms, waited_ms)
    return Lease(grant.token, int(waited_ms + validity_ms), grant.nonce)


def _needs_revalidation(outcome: AttemptOutcome) -> bool:
    """Tell whether an attempt failed because nodes must be examined again."""
    match outcome:
        case Refusal(Failure.NO_QUORUM, silent=silent):
            return any(reply is NoReply.NOT_ADMITTED for _, reply in silent)
    return False


def _broke(refusal: Refusal) -> bool:
    """Tell whether connections broke during an attempt. The states of the nodes show it an instant later."""
    return any(reply is NoReply.DISCONNECTED for _, reply in refusal.silent)


def _answer_margin_ms(answer_within_ms: float) -> float:
    return min(_ANSWER_MARGIN_MS_MAX, answer_within_ms * _ANSWER_MARGIN_SHARE)
