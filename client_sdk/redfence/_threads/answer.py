"""Defines where a caller waits for the session's threads."""

from __future__ import annotations

from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")


class Answer(Generic[T]):
    """Receives the result of one call. One thread waits for it at most.

    It is safe in signal handlers: a `SimpleQueue` has no lock that interrupted Python code can hold. A
    `Future` has one, so a handler that calls the client could block the thread it waits for.
    """

    __slots__ = ("_done", "_outcome")

    def __init__(self) -> None:
        self._outcome: SimpleQueue[tuple[T, None] | tuple[None, BaseException]] = SimpleQueue()
        self._done = False

    def done(self) -> bool:
        """Return whether the session has set a result or an error."""
        return self._done

    def set_result(self, result: T, /) -> None:
        """Give the caller the result of the call."""
        self._done = True
        self._outcome.put((result, None))

    def set_exception(self, exception: BaseException, /) -> None:
        """Give the caller the error of the call."""
        self._done = True
        self._outcome.put((None, exception))

    def result(self, timeout: float | None = None) -> T:
        """Wait for the result and return it.

        Raises:
            TimeoutError: there is no result after `timeout` seconds.
        """
        try:
            outcome = self._outcome.get(timeout=timeout)
        except Empty:
            raise TimeoutError from None
        if outcome[1] is None:
            return outcome[0]
        try:
            raise outcome[1]
        finally:
            # The error's traceback refers to this frame. A cycle would keep the callers' leases alive.
            del outcome
