"""Processes that share one virtual loop, and can be paused and killed like real ones."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import random
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar, TypeVarTuple

from harness.time.virtual_loop import LoopClock, VirtualLoop, on_virtual_time

P = ParamSpec("P")
T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")
_process: contextvars.ContextVar[Process] = contextvars.ContextVar("process")


def now_ms() -> float:
    return LoopClock().now_ms()


class Chance(random.Random):
    """Seeded randomness, the product's as well."""

    def hex_id(self) -> str:
        return f"{self.getrandbits(128):032x}"


class _OfProcess:
    """A callback of a process: it runs only while the process does."""

    __slots__ = ()
    process: Process

    def _run(self) -> None:
        if self.process.runs or not self.process.holds(self):
            super()._run()  # type: ignore[misc]  # a handle's own


class _Handle(_OfProcess, asyncio.Handle):
    __slots__ = ("process",)


class _Timer(_OfProcess, asyncio.TimerHandle):
    __slots__ = ("process",)


class ProcessLoop(VirtualLoop):
    """Run callbacks of a process, and whatever they schedule, only while the process runs."""

    def call_soon(
        self,
        callback: Callable[[*Arguments], object],
        *args: *Arguments,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        context = contextvars.copy_context() if context is None else context
        process = context.get(_process)
        if process is None or self._over:
            handle = asyncio.Handle(callback, args, self, context)
        else:
            handle = _Handle(callback, args, self, context)
            handle.process = process
        if not self._over:
            self._ready.append(handle)
        return handle

    def call_at(
        self,
        when: float,
        callback: Callable[[*Arguments], object],
        *args: *Arguments,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        context = contextvars.copy_context() if context is None else context
        process = context.get(_process)
        if process is None:
            return super().call_at(when, callback, *args, context=context)
        timer = _Timer(when, callback, args, self, context)
        timer.process = process
        self.schedule(timer)
        return timer

    def __init__(self) -> None:
        super().__init__()
        self.set_task_factory(_make_task)  # type: ignore[arg-type]  # its stub asks for a wider coroutine
        self._over = False
        self.processes: list[Process] = []

    def bury(self) -> None:
        """Drop the remains of dead processes at the end: their coroutines run `finally` without effect."""
        self._over = True
        for process in self.processes:
            for task in process.tasks:
                coroutine = task.get_coro()
                assert coroutine is not None
                task._log_destroy_pending = False  # type: ignore[attr-defined]  # it has no public name
                with contextlib.suppress(RuntimeError):
                    coroutine.close()

    def go_on(self, handle: _OfProcess) -> None:
        self._ready.append(handle)


def on_processes(test: Callable[P, Coroutine[None, None, None]]) -> Callable[P, None]:
    """Run an async test on a loop of its own that knows processes."""
    return on_virtual_time(test, loop=ProcessLoop)


def _make_task(
    loop: asyncio.AbstractEventLoop,
    coroutine: Coroutine[Any, Any, Any],
    *,
    context: contextvars.Context | None = None,
) -> asyncio.Task[Any]:
    context = contextvars.copy_context() if context is None else context
    task = asyncio.Task(coroutine, loop=loop, context=context)
    process = context.get(_process)
    if process is not None:
        process.tasks[task] = None
        task.add_done_callback(lambda _: process.tasks.pop(task, None), context=contextvars.Context())
    return task


class Process:
    """One process: its tasks, and the tasks that they start, run only while it is neither paused nor dead."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.alive = True
        self._paused = False
        self.runs = True
        self._held: deque[_OfProcess] = deque()
        self._context = contextvars.copy_context()
        self._context.run(_process.set, self)
        # In the order of their creation, and kept until they end, so that every run is the same.
        self.tasks: dict[asyncio.Task[Any], None] = {}
        loop = asyncio.get_running_loop()
        assert isinstance(loop, ProcessLoop)
        self.loop = loop
        loop.processes.append(self)

    def spawn(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        return self.loop.create_task(coroutine, context=self._context)

    def soon(self, callback: Callable[..., object], *args: Any) -> None:
        self.loop.call_soon(callback, *args, context=self._context)

    def at(self, when_s: float, callback: Callable[..., object], *args: Any) -> None:
        """Have it do something at an instant, or as soon as it runs afterwards."""
        timer = _Timer(when_s, callback, args, self.loop, self._context)
        timer.process = self
        self.loop.schedule(timer)

    def pause(self) -> None:
        """Stop it, as SIGSTOP does: what it would do is held back."""
        self._paused = True
        self.runs = False

    def resume(self) -> None:
        """Let it go on. What was held back comes in the order in which it would have come."""
        self._paused = False
        self.runs = self.alive
        while self._held:
            self.loop.go_on(self._held.popleft())

    def kill(self) -> None:
        """End it, as kill -9 does: nothing of it ever runs again, not even a `finally`."""
        self.alive = self.runs = False
        self._held.clear()

    async def end(self) -> None:
        tasks = list(self.tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def holds(self, callback: _OfProcess) -> bool:
        """Hold a callback back if the process does not run; drop it if it never will."""
        if not self.alive:
            return True
        if self._paused:
            self._held.append(callback)
        return self._paused


class ProcessClock:
    """The clock of one machine: it may go wrong, and be set.

    Args:
        rate: how many ms it counts in a ms.
    """

    def __init__(self, *, offset_ms: float = 0.0, rate: float = 1.0) -> None:
        self._loop = asyncio.get_running_loop()
        self._offset_ms = offset_ms
        self.usual_rate = self._rate = rate

    def now_ms(self) -> float:
        return self._offset_ms + self._rate * self._loop.time() * 1000

    def wall_ms(self) -> float:
        return self.now_ms()

    def set_by(self, ms: float) -> None:
        self._offset_ms += ms

    def go_at(self, rate: float) -> None:
        """Count so many ms in a ms from now on."""
        before_ms = self.now_ms()
        self._rate = rate
        self._offset_ms += before_ms - self.now_ms()
