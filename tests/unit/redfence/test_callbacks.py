"""The thread of the callbacks: it lives only while there is one to run, and leaves none behind."""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue

import pytest

from redfence._threads.callbacks import CallbackRunner


class _LateCall(SimpleQueue[Callable[[], None]]):
    """Puts one call at the worst instant: the thread has found no call, and is not gone yet."""

    def __init__(self, put: Callable[[], None]) -> None:
        self._puts = [put]

    def get_nowait(self) -> Callable[[], None]:
        try:
            return super().get_nowait()
        except Empty:
            if self._puts:
                self._puts.pop()()
            raise


def test_a_call_that_meets_the_end_of_the_thread_runs_too() -> None:
    runner, ran = CallbackRunner(), threading.Event()
    runner._calls = _LateCall(lambda: runner.put(ran.set))
    runner.put(lambda: None)
    assert ran.wait(5)


def test_calls_run_in_order_and_the_thread_ends_after_them() -> None:
    runner, ran, go_on = CallbackRunner(), list[int](), threading.Event()
    runner.put(lambda: ran.append(go_on.wait(10)))
    for number in range(2, 100):
        runner.put(lambda number=number: ran.append(number))  # type: ignore[misc]
    assert not ran
    go_on.set()
    assert runner._busy.acquire(timeout=10)  # the thread held it until its end
    assert ran == [True, *range(2, 100)]


def test_a_refused_thread_is_logged_and_the_next_call_tries_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> int:
        raise RuntimeError("can't start new thread")

    runner, ran = CallbackRunner(), threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(_thread, "start_new_thread", refuse)
        runner.put(ran.set)
    assert "callback_delayed" in caplog.text
    assert not ran.is_set()
    runner.put(lambda: None)
    assert ran.wait(10)
