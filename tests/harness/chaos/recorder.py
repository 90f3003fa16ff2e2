"""Writes down the calls of one client as they happen; a killed client leaves its unanswered calls behind."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from harness.history.records import Kind, Operation, Outcome, line


@dataclass(slots=True)
class Call:
    """A call under way. Its outcome stays unknown unless `ok` or `failed` sets it inside `with`.

    Attributes:
        operation: what is known so far.
    """

    operation: Operation

    def at(self, server: str) -> None:
        """Note which server is called."""
        self.operation = replace(self.operation, server=server)

    def ok(self, *, token: int = 0, until_s: float = 0.0) -> None:
        """Note that the call succeeded."""
        token = token or self.operation.token
        self.operation = replace(self.operation, outcome=Outcome.OK, token=token, until_s=until_s)

    def failed(self, detail: str, **flags: bool) -> None:
        """Note that the call has had no effect and never will; `flags` are fields of the operation."""
        fields: dict[str, Any] = flags
        self.operation = replace(self.operation, outcome=Outcome.FAILED, detail=detail, **fields)

    def unknown(self, detail: str) -> None:
        """Note that the call may have had its effect, or may still have it."""
        self.operation = replace(self.operation, outcome=Outcome.UNKNOWN, detail=detail)

    @property
    def outcome(self) -> Outcome:
        """The outcome that is known so far."""
        return self.operation.outcome


class Recorder:
    """Appends to one client's file: a line when a call begins, and a line when it ends."""

    def __init__(self, path: Path, *, client: str) -> None:
        self.client = client
        # A line is one write. A kill cannot take it back, and threads cannot split it.
        self._file = path.open("a", buffering=1, encoding="utf-8")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    @contextmanager
    def call(
        self, kind: Kind, resource: str, lease: str, *, invoked_s: float | None = None, **fields: Any
    ) -> Iterator[Call]:
        """Record one call: enter the context right before the request, leave it right after the answer.

        Args:
            kind: the method that is called.
            resource: its resource.
            lease: the id that all calls for one lease share.
            invoked_s: when it was called, if that was before now.
            fields: of the operation.
        """
        called_s = now_s() if invoked_s is None else invoked_s
        call = Call(Operation(self.client, kind, resource, lease, called_s, None, Outcome.UNKNOWN, **fields))
        self._file.write(line(call.operation))
        try:
            yield call
        except GeneratorExit:
            return  # the context was never left, so the call has no end
        except BaseException as error:
            if call.outcome is Outcome.UNKNOWN and not call.operation.detail:
                call.unknown(type(error).__name__)
            self._end(call)
            raise
        self._end(call)

    def _end(self, call: Call) -> None:
        self._file.write(line(replace(call.operation, completed_s=now_s())))


def now_s() -> float:
    """Return the present instant on the clock that all processes of the machine share."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def settled(lines: Iterable[Operation]) -> list[Operation]:
    """Return each call once: as it ended, or as it began if its end was never written."""
    calls: dict[tuple[str, Kind, str, float], Operation] = {}
    for each in lines:
        key = (each.client, each.kind, each.lease, each.invoked_s)
        if each.completed_s is not None or key not in calls:
            calls[key] = each
    return list(calls.values())
