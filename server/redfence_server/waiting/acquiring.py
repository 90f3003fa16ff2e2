"""Carry out an Acquire: the first try without a task, and a task only if the acquire has to go on.

The first try of a free lock is one attempt with callbacks (locking/attempt.py). It costs no task, no future
and no queue. Only a try that was not granted goes on in a task: it waits, or tries again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Final

from redfence_server.clock import Clock
from redfence_server.errors import AcquireCancelledError, NoQuorumError, ValidityExhaustedError
from redfence_server.locking import quorum
from redfence_server.locking.attempt import Attempt, AttemptGranted, AttemptOutcome, TooLate
from redfence_server.locking.backoff import pauses, revalidation_pauses
from redfence_server.locking.node import REVALIDATION_MS_MAX, Held, NoReply
from redfence_server.locking.redlock import Order, Redlock
from redfence_server.locking.tally import Failure, Refusal
from redfence_server.model import AcquireCall, Lease
from redfence_server.randomness import Randomness
from redfence_server.values import value
from redfence_server.waiting.line import Turn, Waiter
from redfence_server.waiting.queue import WaitQueue
from redfence_server.waiting.queues import WaitQueues

# The server answers this much before the caller's deadline: half a network round trip, and a busy event loop.
# The share limits it for a short deadline.
_ANSWER_MARGIN_MS_MAX: Final = 50
_ANSWER_MARGIN_SHARE: Final = 0.25
# How often an attempt is repeated when callers split the nodes, so that no caller was granted.
_SPLIT_TRIES_MAX: Final = 4


@value
class NotGranted:
    """The resource is held by another lease.

    Attributes:
        waited: the caller asked to wait, and the wait is over.
        position: its position in the queue at that time; 0 if it had none.
    """

    current: Held | None
    waited: bool
    position: int = 0


AcquireEnd = Lease | NotGranted | Exception
"""The result of an Acquire, or the error that ended it; after an error every mint is being undone."""


class Acquirer:
    """Begins acquires, and runs those that go on after their first try.

    Args:
        quorum_may_return: tells whether a quorum was lost so lately that it may vote again in a moment.
    """

    def __init__(
        self,
        redlock: Redlock,
        queues: WaitQueues,
        *,
        clock: Clock,
        randomness: Randomness,
        quorum_may_return: Callable[[], bool],
    ) -> None:
        self.redlock = redlock
        self.queues = queues
        self._clock = clock
        self._randomness = randomness
        self._quorum_may_return = quorum_may_return

    def begin(self, call: AcquireCall, on_end: Callable[[AcquireEnd], None]) -> Acquisition:
        """Send the first mints, or queue the call; `on_end` is called once, but not before this returns."""
        acquisition = Acquisition(self, call, on_end)
        acquisition.start()
        return acquisition

    async def wait(
        self, waiter: Waiter, give_up_at_ms: float, outcome: AttemptOutcome | None
    ) -> Lease | NotGranted:
        """Try at each of this waiter's turns, until it is granted or its wait ends.

        `outcome` is the one of its first try, or None if it has not tried yet.
        """
        call, queue = waiter.call, self.queues.of(waiter)
        failed: ValidityExhaustedError | NoQuorumError | None = None
        while outcome is not None or (outcome := await self._turn(queue, waiter, give_up_at_ms)) is not None:
            if _needs_revalidation(outcome):
                outcome = await self._repeat(order(call, watch_own_hold=queue.wants_notice(waiter)))
            outcome = self._undo_if_late(call, outcome)
            failed = None
            match outcome:
                case AttemptGranted():
                    queue.granted(waiter, outcome)
                    return lease(call, outcome)
                case TooLate() | Refusal(Failure.EXPIRED):
                    # The attempt was undone; the next try may be faster, and there is time for it.
                    failed = _too_late(call, outcome)
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
            outcome = None
        if failed is not None:
            raise failed
        return NotGranted(queue.current(), waited=True, position=queue.line.position(waiter))

    async def _turn(self, queue: WaitQueue, waiter: Waiter, give_up_at_ms: float) -> AttemptOutcome | None:
        """Return the outcome of the try at a waiter's next turn; None if its wait ended first."""
        turn = await queue.turn(waiter, give_up_at_ms)
        if turn is Turn.GIVE_UP:
            return None
        if isinstance(turn, Attempt):
            return await self.redlock.finish(turn)
        return await self.redlock.attempt(order(waiter.call, watch_own_hold=queue.wants_notice(waiter)))

    async def try_again(self, call: AcquireCall, outcome: AttemptOutcome) -> Lease | NotGranted:
        """Go on after the first try of a call that does not wait.

        Try a few times while rivals split the nodes so that no caller is granted.
        """
        split_pauses = pauses(self._randomness)
        for tries_left in reversed(range(_SPLIT_TRIES_MAX)):
            if _needs_revalidation(outcome):
                outcome = await self._repeat(order(call))
            match outcome:
                case AttemptGranted():
                    return lease(call, outcome)
                case TooLate() | Refusal(Failure.EXPIRED):
                    raise _too_late(call, outcome)
                case Refusal(Failure.NO_QUORUM):
                    raise NoQuorumError.naming(outcome.silent)
                case Refusal(Failure.SPLIT) if tries_left:
                    await asyncio.sleep(next(split_pauses) / 1000)
                    outcome = await self.redlock.attempt(order(call))
                case Refusal():
                    return self.refused(call, outcome)
        raise AssertionError("the last try returns")

    def refused(self, call: AcquireCall, refusal: Refusal) -> NotGranted:
        """Return the answer to a call that does not wait and was refused."""
        holds = [hold for _, hold in refusal.held]
        return NotGranted(quorum.present_hold(holds, quorum=self.redlock.quorum), waited=call.wait_ms > 0)

    async def _repeat(self, wanted: Order) -> AttemptOutcome:
        """Try again while nodes must be examined again, because a fence was raised on them.

        Each repeat is a new attempt, because mints from before and after a fence must not count together.
        """
        give_up_at_ms = self._clock.now_ms() + REVALIDATION_MS_MAX
        for pause_ms in revalidation_pauses():
            await asyncio.sleep(pause_ms / 1000)
            outcome = await self.redlock.attempt(wanted)
            if not _needs_revalidation(outcome) or self._clock.now_ms() >= give_up_at_ms:
                return outcome
        raise AssertionError("the pauses never end")

    def _undo_if_late(self, call: AcquireCall, outcome: AttemptOutcome) -> AttemptOutcome:
        """Undo a grant whose validity ended on the way to its waiter, because the process was suspended."""
        if not isinstance(outcome, AttemptGranted):
            return outcome
        elapsed_ms = self._clock.now_ms() - outcome.minted_at_ms
        if quorum.validity_left_ms(call.ttl_ms, elapsed_ms) > 0:
            return outcome
        self.redlock.undo_grant(resource=call.resource, nonce=outcome.nonce, ttl_ms=call.ttl_ms)
        return TooLate(elapsed_ms)


class Acquisition:
    """One Acquire under way; it ends with a call of `on_end`, also when it is cancelled.

    A call that may wait has its place in the queue from the start, so acquires are tried in the order of
    their arrival. The caller's deadline ends it with `NoQuorumError`, because its mints are then undone.

    Attributes:
        end: what `on_end` was called with; None before.
    """

    __slots__ = (
        "_acquirer",
        "_attempt",
        "_call",
        "_error",
        "_give_up_at_ms",
        "_on_end",
        "_task",
        "_timer",
        "_waiter",
        "end",
    )

    def __init__(self, acquirer: Acquirer, call: AcquireCall, on_end: Callable[[AcquireEnd], None]) -> None:
        self._acquirer = acquirer
        self._call = call
        self._on_end = on_end
        self.end: AcquireEnd | None = None
        self._attempt: Attempt | None = None
        self._waiter: Waiter | None = None
        self._give_up_at_ms = 0.0
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._error: Exception | None = None

    def start(self) -> None:
        """Send the first mints, or wait behind earlier acquires; called once."""
        call, acquirer = self._call, self._acquirer
        wait_ms = float(call.wait_ms)
        if call.answer_within_ms is not None:
            margin_ms = min(_ANSWER_MARGIN_MS_MAX, call.answer_within_ms * _ANSWER_MARGIN_SHARE)
            time_limit_ms = max(call.answer_within_ms - margin_ms, 0.0)
            self._timer = asyncio.get_running_loop().call_later(time_limit_ms / 1000, self._on_deadline)
            # Twice the margin, so that the last try can end before the deadline.
            wait_ms = min(wait_ms, call.answer_within_ms - 2 * margin_ms)
        if wait_ms > 0:
            self._give_up_at_ms = call.arrived_at_ms + wait_ms
            self._waiter = acquirer.queues.enter(call)
            if not acquirer.queues.tries_alone(self._waiter):
                self._go_on(None)
                return
        self._attempt = acquirer.redlock.begin(order(call), on_outcome=self._on_first)

    def cancel(self) -> None:
        """End it without a grant, with `AcquireCancelledError`; after its end, do nothing."""
        self._stop(AcquireCancelledError())

    def _on_deadline(self) -> None:
        self._stop(NoQuorumError("the call's deadline came first; its mints are being undone"))

    def _stop(self, error: Exception) -> None:
        if self.end is not None:
            return
        self._error = error
        if self._task is not None:
            self._task.cancel()
        elif self._attempt is not None:
            self._attempt.give_up()
            self._end(error)

    def _on_first(self, outcome: AttemptOutcome) -> None:
        """Take the outcome of the first try."""
        call, acquirer, waiter = self._call, self._acquirer, self._waiter
        try:
            if isinstance(outcome, AttemptGranted):
                if waiter is not None:
                    acquirer.queues.granted(waiter, outcome)
                self._end(lease(call, outcome))
            elif waiter is None and isinstance(outcome, Refusal) and outcome.failure is Failure.HELD:
                self._end(acquirer.refused(call, outcome))
            else:
                self._go_on(outcome)
        except Exception as error:
            # A defect must not reach the connection whose reply decided the attempt.
            self._end(error)

    def _go_on(self, outcome: AttemptOutcome | None) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run(outcome))
        # A task that is cancelled before its first step runs nothing.
        self._task.add_done_callback(lambda _: self._end(self._error or AcquireCancelledError()))

    async def _run(self, outcome: AttemptOutcome | None) -> None:
        end: AcquireEnd
        try:
            if self._waiter is not None:
                end = await self._acquirer.wait(self._waiter, self._give_up_at_ms, outcome)
            else:
                assert outcome is not None, "a call that does not wait has tried"
                end = await self._acquirer.try_again(self._call, outcome)
        except asyncio.CancelledError:
            end = self._error or AcquireCancelledError()
        except Exception as error:
            end = error
        self._end(end)

    def _end(self, end: AcquireEnd) -> None:
        if self.end is not None:
            return
        self.end = end
        self._attempt = None  # which refers to this acquisition: a cycle would wait for the garbage collector
        if self._timer is not None:
            self._timer.cancel()
        if self._waiter is not None:
            self._acquirer.queues.leave(self._waiter)
        self._on_end(end)


def order(call: AcquireCall, *, watch_own_hold: bool = False) -> Order:
    """Return the order for a try of this call."""
    return Order(
        *(call.resource, call.lease_id.digest, call.ttl_ms, call.holder),
        watch_blocking_hold=call.wait_ms > 0,
        watch_own_hold=watch_own_hold,
    )


def lease(call: AcquireCall, grant: AttemptGranted) -> Lease:
    """Return the lease that a grant makes; its validity counts from the arrival of the call."""
    waited_ms = grant.minted_at_ms - call.arrived_at_ms
    validity_ms = quorum.validity_left_ms(call.ttl_ms, 0) - quorum.wait_drift_ms(call.ttl_ms, waited_ms)
    return Lease(grant.token, int(waited_ms + validity_ms), grant.nonce)


def _too_late(call: AcquireCall, outcome: TooLate | Refusal) -> ValidityExhaustedError:
    elapsed_ms = outcome.elapsed_ms if isinstance(outcome, TooLate) else call.ttl_ms
    return ValidityExhaustedError(elapsed_ms, call.ttl_ms)


def _needs_revalidation(outcome: AttemptOutcome) -> bool:
    """Tell whether an attempt failed because nodes must be examined again."""
    match outcome:
        case Refusal(Failure.NO_QUORUM, silent=silent):
            return any(reply is NoReply.NOT_ADMITTED for _, reply in silent)
    return False


def _broke(refusal: Refusal) -> bool:
    """Tell whether connections broke during an attempt. The states of the nodes show it an instant later."""
    return any(reply is NoReply.DISCONNECTED for _, reply in refusal.silent)
