"""Carry out an Acquire, from its first try to its end.

Everything happens in callbacks: of the attempt (locking/attempt.py), of the queue that gives the waiter its
turns (waiting/queue.py), and of timers. An acquire has no task and no future. So the reply that frees a lock
also answers the waiter that gets it, in the same turn of the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Final

import structlog

from redfence_server.clock import Clock
from redfence_server.errors import (
    AcquireCancelledError,
    NoQuorumError,
    RedfenceServerError,
    ValidityExhaustedError,
)
from redfence_server.locking import quorum
from redfence_server.locking.attempt import Attempt, AttemptGranted, AttemptOutcome, TooLate
from redfence_server.locking.backoff import pauses, revalidation_pauses
from redfence_server.locking.node import REVALIDATION_MS_MAX, Granted, Held, NoReply, Reply
from redfence_server.locking.redlock import Order, Redlock
from redfence_server.locking.tally import Failure, Refusal
from redfence_server.model import AcquireCall, Lease
from redfence_server.randomness import Randomness
from redfence_server.values import value
from redfence_server.waiting.line import Turn, Waiter
from redfence_server.waiting.queues import WaitQueues

# The server answers this much before the caller's deadline: half a network round trip, and a busy event loop.
# The share limits it for a short deadline.
_ANSWER_MARGIN_MS_MAX: Final = 50
_ANSWER_MARGIN_SHARE: Final = 0.25
# How often an attempt is repeated when callers split the nodes, so that no caller was granted.
_SPLIT_REPEATS_MAX: Final = 3


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
    """Begins acquires.

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
        self.clock = clock
        self.randomness = randomness
        self.quorum_may_return = quorum_may_return

    def begin(self, call: AcquireCall, on_end: Callable[[AcquireEnd], None]) -> Acquisition:
        """Send the first mints, or queue the call; `on_end` is called once, perhaps before this returns."""
        acquisition = Acquisition(self, call, on_end)
        acquisition.start()
        return acquisition


class Acquisition:
    """One Acquire under way; it ends with a call of `on_end`, also when it is cancelled.

    A call that may wait has its place in the queue from the start, so acquires are tried in the order of
    their arrival. At the caller's deadline it ends with `NoQuorumError`, and its mints are undone.

    Attributes:
        end: what `on_end` was called with; None before.
    """

    __slots__ = (
        "_acquirer",
        "_attempt",
        "_call",
        "_deadline",
        "_failed",
        "_give_up_at_ms",
        "_on_end",
        "_pause",
        "_revalidation",
        "_splits",
        "_waiter",
        "end",
    )

    def __init__(self, acquirer: Acquirer, call: AcquireCall, on_end: Callable[[AcquireEnd], None]) -> None:
        self._acquirer = acquirer
        self._call = call
        self._on_end = on_end
        self._attempt: Attempt | None = None
        self._waiter: Waiter | None = None
        self._give_up_at_ms = 0.0
        # The error to tell if the wait ends before another try.
        self._failed: ValidityExhaustedError | NoQuorumError | None = None
        # Until when tries are repeated for nodes that must be examined again, and the pauses between them.
        self._revalidation: tuple[float, Iterator[float]] | None = None
        self._splits: Iterator[float] | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._pause: asyncio.TimerHandle | None = None
        self.end: AcquireEnd | None = None

    def start(self) -> None:
        """Send the first mints, or wait behind earlier acquires; called once."""
        call, queues = self._call, self._acquirer.queues
        wait_ms = float(call.wait_ms)
        if call.answer_within_ms is not None:
            margin_ms = min(_ANSWER_MARGIN_MS_MAX, call.answer_within_ms * _ANSWER_MARGIN_SHARE)
            time_limit_ms = max(call.answer_within_ms - margin_ms, 0.0)
            self._deadline = asyncio.get_running_loop().call_later(time_limit_ms / 1000, self._on_deadline)
            # Twice the margin, so that the last try can end before the deadline.
            wait_ms = min(wait_ms, call.answer_within_ms - 2 * margin_ms)
        if wait_ms <= 0:
            self._try()
            return
        self._give_up_at_ms = call.arrived_at_ms + wait_ms
        self._waiter = queues.enter(call, self._on_turn)
        if queues.tries_alone(self._waiter):
            self._try()
        else:
            self._next_turn(self._waiter)

    def cancel(self) -> None:
        """End it without a grant, with `AcquireCancelledError`; after its end, do nothing."""
        self._stop(AcquireCancelledError())

    def _on_deadline(self) -> None:
        self._stop(NoQuorumError("the call's deadline came first; its mints are being undone"))

    def _stop(self, error: Exception) -> None:
        if self.end is None:
            # The undo goes before the mint of the waiter that is next.
            if self._attempt is not None and self._attempt.is_open:
                self._attempt.give_up()
            self._finish(error)

    def _try(self) -> None:
        try:
            waiter = self._waiter
            watch_own_hold = waiter is not None and self._acquirer.queues.wants_notice(waiter)
            attempt = self._acquirer.redlock.begin(order(self._call, watch_own_hold=watch_own_hold))
            self._attempt = attempt
            attempt.on_outcome, attempt.on_late_reply = self._on_outcome, self._on_late_reply
        except Exception as defect:
            self._fail(defect)

    def _on_outcome(self, outcome: AttemptOutcome) -> None:
        """Take the outcome of a try."""
        try:
            if isinstance(outcome, AttemptGranted):
                if self._waiter is not None:
                    self._acquirer.queues.granted(self._waiter, outcome)
                self._finish(lease(self._call, outcome))
            elif _needs_revalidation(outcome) and self._repeats():
                return
            elif self._waiter is None:
                self._on_failure(outcome)
            else:
                self._on_failure_of_waiter(outcome, self._waiter)
        except Exception as defect:
            if isinstance(outcome, AttemptGranted) and self.end is None:
                call = self._call
                self._acquirer.redlock.undo_grant(
                    resource=call.resource, nonce=outcome.nonce, hold_ms=call.hold_ms
                )
            self._fail(defect)

    def _on_late_reply(self, node: int, reply: Reply) -> None:
        """Tell the queue, also after this waiter has left, because the next one relies on this try."""
        if self._call.wait_ms > 0 and (queue := self._acquirer.queues.find(self._call.resource)) is not None:
            queue.answered_late(node, granted=isinstance(reply, Granted))

    def _fail(self, defect: Exception) -> None:
        """End with a defect, which must reach the caller and not the code that called back.

        In the next turn of the loop: now, the turns of all later waiters would nest in this one.
        """
        if self.end is None:
            asyncio.get_running_loop().call_soon(self._finish, defect)
        else:
            structlog.get_logger().error("internal_error", where="acquire", exc_info=defect)

    def _repeats(self) -> bool:
        """Try again if nodes must be examined again, because a fence was raised on them.

        Return whether it tries. Each repeat is a new attempt, because mints from before and after a fence
        must not count together.
        """
        now_ms = self._acquirer.clock.now_ms()
        if self._revalidation is None:
            self._revalidation = (now_ms + REVALIDATION_MS_MAX, revalidation_pauses())
        until_ms, pauses_ms = self._revalidation
        if now_ms >= until_ms:
            return False
        self._try_after(next(pauses_ms))
        return True

    def _try_after(self, pause_ms: float) -> None:
        self._pause = asyncio.get_running_loop().call_later(pause_ms / 1000, self._try)

    def _on_failure(self, outcome: TooLate | Refusal) -> None:
        """End a call that does not wait, or try a few times while rivals split the nodes between them."""
        self._revalidation = None
        match outcome:
            case TooLate() | Refusal(Failure.EXPIRED):
                self._finish(_too_late(self._call, outcome))
            case Refusal(Failure.NO_QUORUM):
                self._finish(NoQuorumError.naming(outcome.silent))
            case Refusal(Failure.SPLIT) if (pause_ms := self._next_split_pause_ms()) is not None:
                self._try_after(pause_ms)
            case Refusal():
                holds = [hold for _, hold in outcome.held]
                current = quorum.present_hold(holds, quorum=self._acquirer.redlock.quorum)
                self._finish(NotGranted(current, waited=self._call.wait_ms > 0))

    def _next_split_pause_ms(self) -> float | None:
        if self._splits is None:
            self._splits = islice(pauses(self._acquirer.randomness), _SPLIT_REPEATS_MAX)
        return next(self._splits, None)

    def _on_failure_of_waiter(self, outcome: TooLate | Refusal, waiter: Waiter) -> None:
        """Report a try to the queue, and wait for the next turn."""
        self._revalidation = self._failed = None
        queue = self._acquirer.queues.of(waiter)
        match outcome:
            case TooLate() | Refusal(Failure.EXPIRED):
                # The attempt was undone; the next try may be faster, and there is time for it.
                self._failed = _too_late(self._call, outcome)
                queue.failed(waiter)
            case Refusal(Failure.NO_QUORUM) if _broke(outcome) or self._acquirer.quorum_may_return():
                # Connections are being made again. If too few are, `quorum_lost` ends this wait.
                self._failed = NoQuorumError.naming(outcome.silent)
                queue.failed(waiter)
            case Refusal(Failure.NO_QUORUM):
                # End the other waits too, because no lease can be granted without a quorum.
                queue.line.fail(partial(NoQuorumError.naming, outcome.silent))
                self._finish(NoQuorumError.naming(outcome.silent))
                return
            case Refusal():
                queue.refused(waiter, outcome)
        self._next_turn(waiter)

    def _next_turn(self, waiter: Waiter) -> None:
        turn: Turn | RedfenceServerError | None
        try:
            turn = self._acquirer.queues.of(waiter).turn(waiter, self._give_up_at_ms)
        except RedfenceServerError as error:
            turn = error.with_traceback(None)  # the traceback refers to this acquisition: a cycle
        if turn is not None:
            self._on_turn(turn)

    def _on_turn(self, turn: Turn | Attempt | Exception) -> None:
        """Take the turn that the queue gives, or the error that ends the wait."""
        try:
            if isinstance(turn, Attempt):
                self._attempt = turn
                turn.on_outcome, turn.on_late_reply = self._on_outcome, self._on_late_reply
            elif isinstance(turn, Exception):
                self._finish(turn)
            elif turn is Turn.TRY:
                self._try()
            else:
                self._finish(self._failed or self._not_granted())
        except Exception as defect:
            self._fail(defect)

    def _not_granted(self) -> NotGranted:
        assert self._waiter is not None, "only a waiter gives up"
        queue = self._acquirer.queues.of(self._waiter)
        return NotGranted(queue.current(), waited=True, position=queue.line.position(self._waiter))

    def _finish(self, end: AcquireEnd) -> None:
        if self.end is not None:
            return
        self.end = end
        self._attempt = None  # it refers to this acquisition: a cycle would wait for the garbage collector
        for timer in (self._deadline, self._pause):
            if timer is not None:
                timer.cancel()
        try:
            if self._waiter is not None:
                self._acquirer.queues.leave(self._waiter)
                self._waiter = None
        finally:
            self._on_end(end)


def order(call: AcquireCall, *, watch_own_hold: bool = False) -> Order:
    """Return the order for a try of this call."""
    return Order(
        *(call.resource, call.lease_id.digest, call.ttl_ms, call.holder),
        watch_blocking_hold=call.wait_ms > 0,
        watch_own_hold=watch_own_hold,
        lock_delay_ms=call.lock_delay_ms,
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
