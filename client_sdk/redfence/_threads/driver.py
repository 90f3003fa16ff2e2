"""Runs a session core on two daemon threads: one for commands and alarms, one for the link.

Only these two threads touch the core, and one lock lies between them. A caller puts a command into a
queue, and waits for an `Answer`. So an exception that interrupts a caller, or a signal handler that calls
the client, never meets a half-changed core or a held lock. Lock order: this lock, then a link's own.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from itertools import count
from queue import Empty, SimpleQueue
from typing import TypeAlias

from redfence._clock import Clock
from redfence._config import Timeouts
from redfence._core.endpoints import Endpoints
from redfence._core.outbox import COMMANDS_PER_MESSAGE_MAX
from redfence._core.session import SessionCore
from redfence._errors import RedfenceError
from redfence._threads.answer import Answer
from redfence._transport.links import SyncConnector, SyncLink

_log = logging.getLogger("redfence")

# See redfence._aio.session.TIMER_MS_MAX.
TIMER_MS_MAX = 1000

Command: TypeAlias = Callable[[SessionCore, float], object]
"""Changes the core at the present instant, in milliseconds; it must not block."""


class SessionDriver:
    """Owns the core and the threads of one client; `run` starts them at the first command.

    Attributes:
        link: the present link, or None. A caller may make unary calls on it.
    """

    def __init__(
        self,
        core: SessionCore,
        *,
        endpoints: Endpoints,
        connector: SyncConnector,
        timeouts: Timeouts,
        clock: Clock,
    ) -> None:
        self._core = core
        self._endpoints = endpoints
        self._connector = connector
        self._timeouts = timeouts
        self._clock = clock
        self._commands: SimpleQueue[Command] = SimpleQueue()
        self._lock = threading.Lock()
        # The link's thread waits for this: the core needs a link, or the session stops.
        self._changed = threading.Condition(self._lock)
        # The first thread that takes a number runs the session.
        self._numbers = count()
        self._running = False
        self._stopping = False
        self._ended = False
        self._threads: list[threading.Thread] = []
        self._timer_at_ms = math.inf
        self.link: SyncLink | None = None

    def run(self, command: Command) -> None:
        """Have the session's thread run `command`, after all earlier ones. Never waits for the core."""
        self._commands.put(command)
        if not self._running:
            # If a signal handler interrupts this, it starts a second thread, and one of the two ends at once.
            threading.Thread(target=self._run_commands, name="redfence-session", daemon=True).start()
        elif self._ended:
            self._run_rest()

    def close(self) -> None:
        """Close the core, wait for its releases within the close timeout, and end the threads."""
        if self._is_first():
            self._core.close(Answer[None](), now_ms=self._clock.now_ms())
            self._running = self._ended = True
            # Another thread may have used the client meanwhile.
            self._run_rest()
            return
        idle: Answer[None] = Answer()
        try:
            self.run(lambda core, now_ms: core.close(idle, now_ms=now_ms))
            idle.result(self._timeouts.close_timeout_ms / 1000)
        except TimeoutError:
            pass  # `_stop` fails the releases that got no answer
        finally:
            self.run(self._stop)
            # The link's thread can be in the middle of connecting, which it soon gives up.
            for thread in self._threads:
                thread.join(self._timeouts.connect_timeout_ms / 1000 + 1)

    def abandon(self) -> None:
        """Close the core, and end the threads after its releases, because no caller is left; never waits."""
        self.run(lambda core, now_ms: core.close(_Stopper(self), now_ms=now_ms))

    def time_moved(self) -> None:
        """Handle every alarm that is due, and return when that is done; a test has moved the clock."""
        done: Answer[None] = Answer()

        def tick(core: SessionCore, _now_ms: float) -> None:
            core.tick(self._clock.now_ms())
            done.set_result(None)

        self.run(tick)
        done.result()

    @property
    def is_own_thread(self) -> bool:
        """Whether this is one of the session's threads: the garbage collector runs finalizers there, too."""
        return threading.current_thread() in self._threads

    # The thread of commands and alarms.

    def _is_first(self) -> bool:
        return next(self._numbers) == 0

    def _run_commands(self) -> None:
        if not self._is_first():
            return
        self._running = True
        self._threads.append(threading.current_thread())
        link = threading.Thread(target=self._run_link, name="redfence-link", daemon=True)
        unwatch = self._clock.watch(self.time_moved)
        try:
            link.start()
            self._threads.append(link)
            while not self._stopping:
                command = self._next_command()
                with self._lock:
                    self._step(command)
                del command  # it may keep a lease alive
        finally:
            # Also after a failure, e.g. if no thread can be started: no caller may wait for ever.
            unwatch()
            with self._lock:
                self._stopping = True
                _close(self._core, self._clock.now_ms())
                self._changed.notify_all()
            self._ended = True
            self._run_rest()

    def _next_command(self) -> Command | None:
        """Wait for a command, until the next alarm at the latest."""
        with self._lock:
            now_ms = self._clock.now_ms()
            delay_ms = min(max(self._core.next_alarm_ms() - now_ms, 0.0), TIMER_MS_MAX)
            self._timer_at_ms = now_ms + delay_ms
        try:
            return self._commands.get(timeout=delay_ms / 1000)
        except Empty:
            return None

    def _step(self, command: Command | None) -> None:
        now_ms = self._clock.now_ms()
        try:
            if self._core.next_alarm_ms() <= now_ms:
                self._core.tick(now_ms)
                self._wake(now_ms)
            if command is not None:
                command(self._core, now_ms)
            # The commands of several callers leave in one message.
            for _ in range(min(self._commands.qsize(), COMMANDS_PER_MESSAGE_MAX)):
                self._commands.get()(self._core, now_ms)
            self._wake(now_ms)
        except Exception as bug:  # noqa: BLE001  (the caller must get an error, and not wait for ever)
            _log.error("internal_error where=session", exc_info=bug)
            _close(self._core, now_ms)

    def _run_rest(self) -> None:
        """Fail the commands that came after the core was closed and its threads had ended."""
        while True:
            try:
                command = self._commands.get_nowait()
            except Empty:
                return
            command(self._core, self._clock.now_ms())

    def _stop(self, core: SessionCore, now_ms: float) -> None:
        if self._stopping:
            return
        # Again, because Ctrl-C may have come before `close` could ask for it.
        core.close(Answer[None](), now_ms=now_ms)
        link = self.link
        if link is not None:
            # The releases leave, although this client does not wait for their answers.
            self._wake(now_ms)
        # After the threads have ended, nothing else would wake the callers.
        core.stop()
        self._stopping = True
        if link is not None:
            link.abort()

    def _wake(self, now_ms: float) -> None:
        """Write the core's commands, and wake the link's thread if it is needed; the lock is held."""
        if self.link is None:
            self._changed.notify_all()
            return
        while (batch := self._core.take_batch(now_ms)) is not None:
            self.link.send(batch)
        if self._core.should_leave(now_ms):
            self.link.abort()

    # The thread of the link.

    def _run_link(self) -> None:
        """Keep a link open while the core needs one."""
        try:
            while self._wait_for_work():
                address = self._endpoints.current()
                try:
                    link = self._connector.connect(
                        address,
                        timeout_ms=self._timeouts.connect_timeout_ms,
                        is_closing=lambda: self._stopping,
                    )
                except RedfenceError as error:
                    self._link_failed(error)
                else:
                    self._use(link)
                self._pause(self._endpoints.advance())
        except Exception as bug:  # noqa: BLE001  (the callers must get an error, and not wait for ever)
            _log.error("internal_error where=link", exc_info=bug)
            self.run(_close)

    def _wait_for_work(self) -> bool:
        with self._lock:
            while not self._stopping and not self._core.wants_link:
                self._changed.wait()
            return not self._stopping

    def _pause(self, pause_ms: float) -> None:
        with self._lock:
            self._changed.wait_for(lambda: self._stopping, timeout=pause_ms / 1000)

    def _link_failed(self, error: RedfenceError) -> None:
        with self._lock:
            now_ms = self._clock.now_ms()
            self._core.link_failed(error, now_ms=now_ms)
            self._settle(now_ms)

    def _use(self, link: SyncLink) -> None:
        with self._lock:
            if not self._stopping:
                self.link = link
                now_ms = self._clock.now_ms()
                self._core.link_up(now_ms=now_ms)
                self._settle(now_ms)
        error: RedfenceError | None = None
        try:
            if self.link is not None:
                self._read(link)
        except RedfenceError as exc:
            error = exc
        finally:
            with self._lock:
                self.link = None
                now_ms = self._clock.now_ms()
                self._core.link_down(error, now_ms=now_ms)
                self._settle(now_ms)
            link.close()

    def _read(self, link: SyncLink) -> None:
        while (response := link.receive()) is not None:
            with self._lock:
                now_ms = self._clock.now_ms()
                self._core.received(response, now_ms=now_ms)
                if not self._core.leaving:
                    self._endpoints.mark_healthy()
                self._settle(now_ms)

    def _settle(self, now_ms: float) -> None:
        """Write, and wake the thread of alarms if the next one is earlier than it waits for."""
        self._wake(now_ms)
        if self._core.next_alarm_ms() < self._timer_at_ms:
            self.run(_nothing)


class _Stopper(Answer[None]):
    """Ends the threads of a driver when its core is idle."""

    __slots__ = ("_driver",)

    def __init__(self, driver: SessionDriver) -> None:
        super().__init__()
        self._driver = driver

    def set_result(self, _result: None, /) -> None:
        """Have the threads end; bounded, because each release fails after the rpc timeout."""
        self._driver.run(self._driver._stop)  # noqa: SLF001  (it is a part of the driver)


def _nothing(_core: SessionCore, _now_ms: float) -> None:
    """Only end the wait for a command."""


def _close(core: SessionCore, now_ms: float) -> None:
    """Close the core after a failure, so that callers get an error and do not wait for ever."""
    core.close(Answer[None](), now_ms=now_ms)
    core.stop()
