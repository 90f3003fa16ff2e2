"""A world of plain values around the pure cores, with time, chance and answers set by hand."""

from __future__ import annotations

from typing import Any

from redfence import ClientOptions, LeaseState
from redfence._config import in_milliseconds
from redfence._core.calls import AcquireCall
from redfence._core.lease import LeaseCore
from redfence._core.session import SessionCore
from redfence._errors import OverloadedError, RedfenceError, UnavailableError
from redfence._messages.requests import acquire_order
from redfence_proto.v1 import lock_pb2


class FixedChance:
    """The same fraction every time, and lease ids in order."""

    def __init__(self, fraction: float = 0.0) -> None:
        self._fraction = fraction
        self._lease_ids = 0

    def fraction(self) -> float:
        return self._fraction

    def lease_id(self) -> str:
        self._lease_ids += 1
        return f"{self._lease_ids:032x}"


class Slot:
    """A future without a loop or a thread."""

    def __init__(self) -> None:
        self.result: Any = None
        self.error: BaseException | None = None
        self.cancelled = False
        self.settled = False

    def done(self) -> bool:
        return self.settled or self.cancelled

    def set_result(self, result: Any, /) -> None:
        assert not self.done()
        self.settled, self.result = True, result

    def set_exception(self, exception: BaseException, /) -> None:
        assert not self.done()
        self.settled, self.error = True, exception


def in_state(lease: LeaseCore, state: LeaseState) -> bool:
    """Tell whether a lease is in a state; a type checker believes that a property never changes."""
    return lease.state is state


class World:
    """A session core and everything around it; instants are milliseconds from zero."""

    def __init__(self, *, address_count: int = 1, **options: float) -> None:
        self.timeouts = in_milliseconds(ClientOptions(**options))
        self.core = SessionCore(timeouts=self.timeouts, randomness=FixedChance(), address_count=address_count)
        self.now_ms = 0.0

    def connected(self) -> World:
        self.core.link_up(now_ms=self.now_ms)
        return self

    def broken(self, error: RedfenceError | None = None) -> None:
        self.core.link_down(error or UnavailableError("gone"), now_ms=self.now_ms)

    def reconnect(self) -> World:
        self.broken()
        return self.connected()

    def later(self, milliseconds: float) -> World:
        """Let time pass, with every alarm rung when it is due."""
        end_ms = self.now_ms + milliseconds
        while (alarm_ms := self.core.next_alarm_ms()) <= end_ms:
            self.now_ms = max(self.now_ms, alarm_ms)
            self.core.tick(self.now_ms)
        self.now_ms = end_ms
        return self

    def later_with_echo(self, milliseconds: float) -> World:
        """Let time pass at a server that answers every probe; nothing else is to be written meanwhile."""
        end_ms = self.now_ms + milliseconds
        while (alarm_ms := self.core.next_alarm_ms()) <= end_ms:
            self.later(max(0.0, alarm_ms - self.now_ms))
            for command in self.sent():
                self.answer(echo(command))
        return self.later(end_ms - self.now_ms)

    def acquire(
        self, resource: str = "r", *, ttl: float = 9, wait: float | None = 0, **more: Any
    ) -> tuple[AcquireCall, Slot]:
        slot = Slot()
        order = acquire_order(resource, ttl=ttl, wait=wait, holder="", max_hold=more.get("max_hold"))
        return self.core.acquire(order, slot, now_ms=self.now_ms), slot

    def ask(self, *args: Any, **more: Any) -> tuple[Slot, lock_pb2.SessionCommand]:
        """Begin an acquire and take its command, which is the only one to be written."""
        _, slot = self.acquire(*args, **more)
        return slot, self.one("acquire")

    def sent(self) -> list[lock_pb2.SessionCommand]:
        """Take everything that is to be written now."""
        commands: list[lock_pb2.SessionCommand] = []
        while (batch := self.core.take_batch(self.now_ms)) is not None:
            commands += batch.commands
        return commands

    def sent_kinds(self) -> list[str]:
        return [str(command.WhichOneof("command")) for command in self.sent()]

    def one(self, kind: str) -> lock_pb2.SessionCommand:
        """Take the only command that is to be written now."""
        (command,) = self.sent()
        assert command.WhichOneof("command") == kind
        return command

    def answer(self, *results: lock_pb2.SessionResult) -> None:
        self.core.received(lock_pb2.SessionResponse(results=results), now_ms=self.now_ms)

    def held(self, **arguments: Any) -> LeaseCore:
        """Acquire with an immediate grant."""
        _, slot = self.acquire(**arguments)
        self.answer(granted(self.one("acquire")))
        assert isinstance(slot.result, LeaseCore)
        return slot.result


def granted(
    command: lock_pb2.SessionCommand, *, token: int = 1, waited_ms: int = 0
) -> lock_pb2.SessionResult:
    result = lock_pb2.SessionResult(id=command.id)
    result.acquire.outcome = lock_pb2.ACQUIRE_OUTCOME_GRANTED
    result.acquire.lease.fencing_token = token
    result.acquire.lease.validity.FromMilliseconds(
        waited_ms + validity_ms(command.acquire.ttl.ToMilliseconds())
    )
    return result


def not_granted(
    command: lock_pb2.SessionCommand, outcome: lock_pb2.AcquireOutcome.ValueType, *, position: int = 0
) -> lock_pb2.SessionResult:
    result = lock_pb2.SessionResult(id=command.id)
    result.acquire.outcome = outcome
    result.acquire.position = position
    result.acquire.current.holder = "them"
    result.acquire.current.fencing_token = 7
    result.acquire.current.remaining.FromMilliseconds(1500)
    return result


def failed(
    command: lock_pb2.SessionCommand, code: int, reason: lock_pb2.ErrorReason.ValueType
) -> lock_pb2.SessionResult:
    return lock_pb2.SessionResult(
        id=command.id, error=lock_pb2.CommandError(code=code, reason=reason, message="no")
    )


def renewed(
    command: lock_pb2.SessionCommand, state: lock_pb2.LeaseState.ValueType, *, ttl_ms: int = 9000
) -> lock_pb2.SessionResult:
    result = lock_pb2.SessionResult(id=command.id)
    result.renew.state = state
    if state == lock_pb2.LEASE_STATE_ACTIVE:
        result.renew.validity.FromMilliseconds(validity_ms(ttl_ms))
    return result


def released(command: lock_pb2.SessionCommand, *, held: bool = True) -> lock_pb2.SessionResult:
    result = lock_pb2.SessionResult(id=command.id)
    result.release.outcome = lock_pb2.RELEASE_OUTCOME_RELEASED if held else lock_pb2.RELEASE_OUTCOME_NOT_HELD
    return result


def echo(command: lock_pb2.SessionCommand) -> lock_pb2.SessionResult:
    assert command.cancel.id == command.id, "not a probe"
    return lock_pb2.SessionResult(id=command.id, cancel=lock_pb2.CancelResult(found=False))


def validity_ms(ttl_ms: int) -> int:
    return ttl_ms - ttl_ms // 100 - 2


def limited(world: World, commands_max: str) -> World:
    """End the stream as a server does that was asked for more than it allows; and open the next."""
    error = OverloadedError("too many", error_reason="TOO_MANY_COMMANDS", metadata={"limit": commands_max})
    world.broken(error)
    return world.connected()


def too_many(command: lock_pb2.SessionCommand, scope: str) -> lock_pb2.SessionResult:
    result = failed(command, 8, lock_pb2.ERROR_REASON_TOO_MANY_WAITERS)
    result.error.metadata["scope"] = scope
    result.error.retry_after.FromSeconds(1)
    return result


def without_quorum(command: lock_pb2.SessionCommand) -> lock_pb2.SessionResult:
    return failed(command, 14, lock_pb2.ERROR_REASON_QUORUM_UNAVAILABLE)


def drains(command: lock_pb2.SessionCommand) -> lock_pb2.SessionResult:
    return failed(command, 14, lock_pb2.ERROR_REASON_DRAINING)
