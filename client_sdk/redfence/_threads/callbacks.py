"""Runs the callbacks of one client outside the session's threads."""

from __future__ import annotations

import _thread
import logging
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue

_log = logging.getLogger("redfence")


class CallbackRunner:
    """Runs functions one after another in a daemon thread, which lives only while there is one to run.

    So there is nothing to close, and a function that never returns holds up neither renewals nor the end of
    the program. `put` never waits, so the session may call it while it holds its lock.
    """

    __slots__ = ("_busy", "_calls")

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._busy = threading.Lock()  # held while there is a thread; only ever tried

    def put(self, call: Callable[[], None]) -> None:
        """Have a function run after all earlier ones."""
        self._calls.put(call)
        if self._busy.acquire(blocking=False):
            try:
                # Not `Thread.start`: it waits, and takes a lock of `threading` that the main thread may hold
                # while its signal handler waits for the session. The end of Python waits for no such thread.
                _thread.start_new_thread(self._run, ())
            except RuntimeError as error:
                # No thread can be started. The renewals go on, and the next call tries again.
                self._busy.release()
                _log.error("callback_delayed error=%r", str(error))

    def _run(self) -> None:
        while True:
            try:
                self._run_all()
            finally:
                self._busy.release()
            # A call that came before the release has started no thread.
            if self._calls.empty() or not self._busy.acquire(blocking=False):
                return

    def _run_all(self) -> None:
        while True:
            try:
                call = self._calls.get_nowait()
            except Empty:
                return
            call()
            del call  # it keeps a lease alive
