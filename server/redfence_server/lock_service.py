"""What the lock server does for its callers. Knows neither gRPC nor Redis.

Takes checked values (model.py), runs the algorithm (redlock.py), waits (waiting.py), and answers with values or domain errors.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from redfence_server import quorum
from redfence_server.clock import Clock
from redfence_server.errors import (
    DrainingError,
    NoQuorumError,
    TooManyWaitersError,
    ValidityExhaustedError,
)
from redfence_server.lock_node import Held, Plain, Reply, Silence
from redfence_server.model import AcquireCall, CurrentHold, Lease, LeaseId, NotGranted
from redfence_server.quorum import Failure, Refusal, ReleaseVerdict, Renewal, RenewVerdict, TokenVerdict
from redfence_server.randomness import Randomness
from redfence_server.redlock import AttemptGranted, Redlock, TooLate
from redfence_server.waiting import SPLIT_TRIES_MAX, pauses

# The server answers this much before the caller's deadline, for half a network round trip and a busy event loop; but it
# does not give away more than a share of a short one.
_ANSWER_MARGIN_MS_MAX: Final = 50
_ANSWER_MARGIN_SHARE: Final = 0.25
# A wake-up that comes this late was held up by more than a busy event loop.
_STALLED_MS: Final = 250


@dataclass(frozen=True, slots=True)
class RenewOutcome:
    """What a renewal came to. `validity_ms` counts from the instant the caller sent it."""

    verdict: RenewVerdict
    token: int
    validity_ms: int


@dataclass(frozen=True, slots=True)
class LockView:
    """Who holds a resource: the answer of a quorum, and of each node by index."""

    current: CurrentHold | None
    waiters: int
    nodes: tuple[Held | Plain | Silence, ...]


@dataclass(frozen=True, slots=True)
class TokenView:
    """Whether a token is that of the present lease, and who holds the resource as far as the asked nodes saw."""

    live: bool
    current: CurrentHold | None


class LockService:
    """The use cases. Stateless but for the calls under way: every lease lives in the nodes."""

    def __init__(
        self,
        redlock: Redlock,
        *,
        clock: Clock,
        randomness: Randomness,
        ttl_ms_max: Callable[[], int],
        waiters_max: int,
    ) -> None:
        self._redlock = redlock
        self._clock = clock
        self._randomness = randomness
        self._ttl_ms_max = ttl_ms_max
        self._waiters_max = waiters_max
        self._waiting: dict[str, int] = {}
        self._waiting_count = 0
        self._draining = asyncio.Event()

    @property
    def ttl_ms_max(self) -> int:
        """The greatest ttl the cluster allows."""
        return self._ttl_ms_max()

    def drain(self) -> None:
        """Take no more acquires, and tell those that wait to go elsewhere."""
        self._draining.set()

    # --- acquire --------------------------------------------------------------------------------------------------

    async def acquire(self, call: AcquireCall) -> Lease | NotGranted:
        """Grant the lease, or tell who holds the resource.

        Raises:
            NoQuorumError, ValidityExhaustedError, DrainingError: see errors.py; whatever was minted is being undone.
            TooManyWaitersError: too many acquires wait here.

        Cancellation: whatever was minted is being undone.
        """
        if self._draining.is_set():
            raise DrainingError
        if call.answer_within_ms is None:
            return await self._try_and_wait(call)
        patience_ms = max(call.answer_within_ms - _answer_margin_ms(call.answer_within_ms), 0.0)
        try:
            async with asyncio.timeout(patience_ms / 1000):
                return await self._try_and_wait(call)
        except TimeoutError as error:
            # The attempt under way was cancelled and so undone: the outcome is known.
            raise NoQuorumError(
                "the call's deadline came first; what this call minted is being undone"
            ) from error

    def take_back(self, call: AcquireCall, lease: Lease) -> None:
        """Undo a grant that its caller surely was not told of; see `Redlock.take_back`."""
        self._redlock.take_back(resource=call.resource, nonce=lease.nonce, ttl_ms=call.ttl_ms)

    async def _try_and_wait(self, call: AcquireCall) -> Lease | NotGranted:
        outcome = await self._try(call)
        if not isinstance(outcome, Refusal):
            return outcome
        wait_ms = float(call.wait_ms)
        if call.answer_within_ms is not None:
            # Twice the margin, so that the last try can end before the patience does.
            margin_ms = 2 * _answer_margin_ms(call.answer_within_ms)
            wait_ms = min(wait_ms, call.answer_within_ms - margin_ms)
        give_up_at_ms = call.arrived_at_ms + wait_ms
        if self._clock.now_ms() >= give_up_at_ms:
            return self._not_granted(call, outcome)
        self._enter(call.resource)
        try:
            return await self._wait(call, outcome, give_up_at_ms)
        finally:
            self._leave(call.resource)

    async def _wait(self, call: AcquireCall, refusal: Refusal, give_up_at_ms: float) -> Lease | NotGranted:
        for pause_ms in pauses(self._randomness, lambda: self._waiting_count):
            left_ms = give_up_at_ms - self._clock.now_ms()
            if left_ms <= 0:
                break
            await self._pause(min(pause_ms, left_ms))
            outcome = await self._try(call)
            if not isinstance(outcome, Refusal):
                return outcome
            refusal = outcome
        return self._not_granted(call, refusal)

    async def _try(self, call: AcquireCall) -> Lease | Refusal:
        """Attempt once, or a few times while rivals split the nodes so that nobody is granted."""
        split: Refusal | None = None
        for _, pause_ms in zip(range(SPLIT_TRIES_MAX), pauses(self._randomness), strict=False):
            if split is not None:
                await self._pause(pause_ms)
            started_at_ms = self._clock.now_ms()
            outcome = await self._redlock.attempt(
                resource=call.resource, digest=call.lease_id.digest, ttl_ms=call.ttl_ms, holder=call.holder
            )
            match outcome:
                case AttemptGranted(token, minted_at_ms, nonce):
                    waited_ms = minted_at_ms - call.arrived_at_ms
                    return Lease(token, int(waited_ms + quorum.validity_left_ms(call.ttl_ms, 0)), nonce)
                case TooLate(elapsed_ms):
                    raise ValidityExhaustedError(elapsed_ms, call.ttl_ms)
                case Refusal(Failure.EXPIRED):
                    raise ValidityExhaustedError(self._clock.now_ms() - started_at_ms, call.ttl_ms)
                case Refusal(Failure.NO_QUORUM):
                    raise _no_quorum(outcome.silent)
                case Refusal(Failure.HELD):
                    return outcome
                case Refusal(Failure.SPLIT):
                    split = outcome
        assert split is not None
        return split

    async def _pause(self, pause_ms: float) -> None:
        """Sleep, unless the server drains.

        Raises:
            DrainingError: it does.
        """
        due_at_ms = self._clock.now_ms() + pause_ms
        try:
            async with asyncio.timeout(pause_ms / 1000):
                await self._draining.wait()
        except TimeoutError:
            if self._clock.now_ms() - due_at_ms > _STALLED_MS:
                # This process was stopped, and its callers may have gone elsewhere meanwhile. Hear that first, or a lock
                # would be taken for somebody who is not there.
                await asyncio.sleep(_STALLED_MS / 1000)
            return
        raise DrainingError

    def _enter(self, resource: str) -> None:
        if self._waiting_count >= self._waiters_max:
            raise TooManyWaitersError(self._waiters_max)
        self._waiting_count += 1
        self._waiting[resource] = self._waiting.get(resource, 0) + 1

    def _leave(self, resource: str) -> None:
        self._waiting_count -= 1
        self._waiting[resource] -= 1
        if not self._waiting[resource]:
            del self._waiting[resource]

    def _not_granted(self, call: AcquireCall, refusal: Refusal) -> NotGranted:
        return NotGranted(_describe(quorum.present_hold(refusal.held)), waited=call.wait_ms > 0)

    # --- the lease ------------------------------------------------------------------------------------------------

    async def renew(self, resource: str, lease_id: LeaseId) -> RenewOutcome:
        """Start the lease's ttl anew; a renewal that comes too late to be worth anything is AT_RISK."""
        sent_at_ms = self._clock.now_ms()
        renewal: Renewal = await self._redlock.renew(resource=resource, digest=lease_id.digest)
        if renewal.verdict is not RenewVerdict.ACTIVE:
            return RenewOutcome(renewal.verdict, 0, 0)
        elapsed_ms = self._clock.now_ms() - sent_at_ms
        if quorum.validity_left_ms(renewal.ttl_ms, elapsed_ms) <= 0:
            return RenewOutcome(RenewVerdict.AT_RISK, 0, 0)
        return RenewOutcome(
            RenewVerdict.ACTIVE, renewal.token, int(quorum.validity_left_ms(renewal.ttl_ms, 0))
        )

    async def release(self, resource: str, lease_id: LeaseId) -> bool:
        """End the lease; tell whether it was held.

        Raises:
            NoQuorumError: too few nodes answered to tell.
        """
        outcome = await self._redlock.release(
            resource=resource, digest=lease_id.digest, ttl_ms_max=self.ttl_ms_max
        )
        if outcome.verdict is ReleaseVerdict.NO_QUORUM:
            raise _no_quorum(
                quorum.silent_nodes(outcome.replies), also="; the lease may be held there until its ttl ends"
            )
        return outcome.verdict is ReleaseVerdict.RELEASED

    # --- looking --------------------------------------------------------------------------------------------------

    async def look(self, resource: str) -> LockView:
        """Tell who holds a resource.

        Raises:
            NoQuorumError: too few nodes answered.
        """
        replies = await self._redlock.inspect(resource)
        holds = [reply for reply in replies if isinstance(reply, Held)]
        silent = quorum.silent_nodes(replies)
        if len(replies) - len(silent) < self._redlock.quorum:
            raise _no_quorum(silent)
        groups = quorum.by_lease(holds)
        held = bool(groups) and len(groups[0]) >= self._redlock.quorum
        return LockView(
            current=_describe(quorum.present_hold(holds)) if held else None,
            waiters=self._waiting.get(resource, 0),
            nodes=tuple(_answer(reply) for reply in replies),
        )

    async def check_token(self, resource: str, token: int) -> TokenView:
        """Tell whether the lease with this token holds the resource.

        Raises:
            NoQuorumError: the answering nodes cannot decide it.
        """
        outcome = await self._redlock.check_token(resource=resource, token=token)
        judgement = outcome.verdict
        if judgement.verdict is TokenVerdict.NO_QUORUM:
            raise _no_quorum(
                quorum.silent_nodes(outcome.replies),
                also="; the others cannot tell whether the token is live",
            )
        return TokenView(judgement.verdict is TokenVerdict.LIVE, _describe(judgement.current))


def _answer_margin_ms(answer_within_ms: float) -> float:
    return min(_ANSWER_MARGIN_MS_MAX, answer_within_ms * _ANSWER_MARGIN_SHARE)


def _answer(reply: Reply | None) -> Held | Plain | Silence:
    assert isinstance(reply, Held | Plain | Silence), reply
    return reply


def _describe(hold: Held | None) -> CurrentHold | None:
    return None if hold is None else CurrentHold(hold.holder, hold.token, hold.remaining_ms)


def _no_quorum(silent: Sequence[tuple[int, Silence]], *, also: str = "") -> NoQuorumError:
    return NoQuorumError.naming(((node, reply.name.lower()) for node, reply in silent), also=also)
