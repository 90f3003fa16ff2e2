"""Writes down the calls of one client as they happen, so that a client that is killed leaves its unanswered calls behind."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self

from harness.history.records import Kind, Operation, Outcome, line


@dataclass(slots=True)
class Call:
    """A call under way; what is known of it in the end is set before its `async with`, or `with`, is left.

    Attributes:
        operation: as it stands; an outcome that nobody sets stays unknown.
    """

    operation: Operation

    def at(self, server: str) -> None:
        """Note which server is called."""
        self.operation = replace(self.operation, server=server)

    def ok(self, *, token: int = 0, until_s: float = 0.0) -> None:
        """Note that it has done what it was for."""
        token = token or self.operation.token
        self.operation = replace(self.operation, outcome=Outcome.OK, token=token, until_s=until_s)

    def failed(
        self, detail: str, *, stale: bool = False, lost: bool = False, admission_refused: bool = False
    ) -> None:
        """Note that it has had no effect and never will."""
        self.operation = replace(
            self.operation,
            outcome=Outcome.FAILED,
            detail=detail,
            stale=stale,
            lost=lost,
            admission_refused=admission_refused,
        )

    def unknown(self, detail: str) -> None:
        """Note that it may have had its effect, or may still have it."""
        self.operation = replace(self.operation, outcome=Outcome.UNKNOWN, detail=detail)

    @property
    def outcome(self) -> Outcome:
        """What is known so far."""
        return self.operation.outcome


class Recorder:
    """Appends to one client's file: a line when a call begins, and one when it has ended."""

    def __init__(self, path: Path, *, client: str) -> None:
        self.client = client
        # A line is one write, which a kill cannot take back. Threads may share it: one write is one step for them as well.
        self._file = path.open("a", buffering=1, encoding="utf-8")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def call(
        self,
        kind: Kind,
        resource: str,
        lease: str,
        *,
        token: int = 0,
        ttl_s: float = 0.0,
        entry: str = "",
        invoked_s: float | None = None,
    ) -> Recording:
        """Return the frame around one call: enter it right before the request, leave it right after the answer.

        Args:
            kind: what is called.
            resource: for which.
            lease: the word for the lease.
            token: that is shown.
            ttl_s: that is asked for.
            entry: that is appended.
            invoked_s: when it was called, if that was before now.
        """
        return Recording(
            self,
            Operation(
                self.client,
                kind,
                resource,
                lease,
                now_s() if invoked_s is None else invoked_s,
                None,
                Outcome.UNKNOWN,
                token=token,
                ttl_s=ttl_s,
                entry=entry,
            ),
        )

    def write(self, operation: Operation) -> None:
        """Append one line."""
        self._file.write(line(operation))


class Recording:
    """The frame around one call."""

    __slots__ = ("_call", "_recorder")

    def __init__(self, recorder: Recorder, operation: Operation) -> None:
        self._recorder = recorder
        self._call = Call(operation)

    def __enter__(self) -> Call:
        self._recorder.write(self._call.operation)
        return self._call

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self._call.outcome is Outcome.UNKNOWN and not self._call.operation.detail:
            self._call.unknown(type(error).__name__)
        self._recorder.write(replace(self._call.operation, completed_s=now_s()))


def now_s() -> float:
    """Return the instant, on the clock that all processes of the machine share."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def settled(lines: Iterable[Operation]) -> list[Operation]:
    """Return each call once: as it ended, or as it began if its end was never written."""
    calls: dict[tuple[str, Kind, str, float], Operation] = {}
    for each in lines:
        key = (each.client, each.kind, each.lease, each.invoked_s)
        if each.completed_s is not None or key not in calls:
            calls[key] = each
    return list(calls.values())
