"""Run several workers on one port: start them, restart a dead one, and drain all at a signal.

Each worker is a whole lock server with its own connections to the nodes. The workers know nothing of each
other, like servers on several machines. A worker listens once it has a quorum, or after a second
without one. The kernel spreads the connections over the processes that listen. The supervisor serves nothing,
and opens no connection.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Sequence
from typing import Any

import structlog

from redfence_server.api.serving import stop_signal
from redfence_server.clock import Clock
from redfence_server.config import ServeConfig
from redfence_server.supervision.port import hold_port
from redfence_server.supervision.process import WorkerProcess, WorkerStartError

# The pause before a restart doubles while a worker keeps failing.
_PAUSE_S_FIRST = 0.25
_PAUSE_S_LAST = 30.0
# A worker that served for so long has not failed at its start.
_SETTLED_MS = 60_000
# For the worker's last steps after `drain_grace_ms`: it closes its connections to the nodes.
_STOP_TIMEOUT_S = 10.0


async def supervise(
    settings: ServeConfig,
    *,
    clock: Clock,
    on_serving: Callable[[int], None],
    read_settings: Callable[[], ServeConfig | None],
) -> int:
    """Run `settings.processes` workers until SIGTERM or SIGINT, then drain them; leave no process.

    At SIGHUP every worker gets the settings of `read_settings`.
    `on_serving` gets the port, once, when all workers serve. Returns 0, or 1 if a worker that served did not
    drain in order. A signal before all workers serve ends the workers at once, as does a second signal.

    Raises:
        StartupError: the port is taken, or a worker did not come to serve at the first try.
    """
    with hold_port(settings.listen) as port:
        host = settings.listen.rpartition(":")[0]
        shared = settings.model_copy(update={"listen": f"{host}:{port}"})
        workers = [WorkerProcess(number, shared) for number in range(1, settings.processes + 1)]
        try:
            stop = stop_signal()
            asyncio.get_running_loop().add_signal_handler(
                signal.SIGHUP, lambda: _reload(workers, read_settings())
            )
            if not await _start_before(stop, workers):
                return 0
            for worker in workers:
                structlog.get_logger().info("process_started", process=worker.number, pid=worker.pid)
            on_serving(port)
            async with asyncio.TaskGroup() as tasks:
                keeping = [tasks.create_task(_keep(each, clock), name="keep-worker") for each in workers]
                await stop
                for task in keeping:
                    task.cancel()
            return await _drain(workers, timeout_s=settings.drain_grace_ms / 1000 + _STOP_TIMEOUT_S)
        finally:
            await asyncio.gather(*(worker.kill() for worker in workers))


async def _start_before(stop: asyncio.Future[signal.Signals], workers: Sequence[WorkerProcess]) -> bool:
    """Return True once all serve, or False if `stop` comes first."""
    starting = asyncio.ensure_future(_start(workers))
    either: set[asyncio.Future[Any]] = {starting, stop}
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            return False
        await starting
        return True
    finally:
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)


def _reload(workers: Sequence[WorkerProcess], settings: ServeConfig | None) -> None:
    for worker in workers:
        worker.reload(settings)


async def _start(workers: Sequence[WorkerProcess]) -> None:
    """Start all; raise the first refusal alone, because the others say the same."""
    try:
        async with asyncio.TaskGroup() as tasks:
            for worker in workers:
                tasks.create_task(worker.start(), name="start-worker")
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None


async def _keep(worker: WorkerProcess, clock: Clock) -> None:
    """Start the worker again whenever it ends, for ever."""
    log = structlog.get_logger().bind(process=worker.number)
    pause_s = _PAUSE_S_FIRST
    while True:
        began_at_ms = clock.now_ms()
        status = await worker.ended()
        if clock.now_ms() - began_at_ms >= _SETTLED_MS:
            pause_s = _PAUSE_S_FIRST
        log.warning("process_ended", exit_status=status, restart_in_s=pause_s)
        while not worker.serves:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_S_LAST)
            try:
                await worker.start()
            except WorkerStartError as error:
                log.warning("process_not_started", reason=str(error), restart_in_s=pause_s)
        log.info("process_started", pid=worker.pid)


async def _drain(workers: Sequence[WorkerProcess], *, timeout_s: float) -> int:
    """Let the workers that serve end in order; the caller kills the others."""
    serving = [worker for worker in workers if worker.serves]
    for worker in serving:
        worker.begin_drain()
    try:
        async with asyncio.timeout(timeout_s):
            statuses = await asyncio.gather(*(worker.ended() for worker in serving))
    except TimeoutError:
        still = [worker.number for worker in serving if worker.serves]
        structlog.get_logger().error("processes_killed", processes=still, after_s=timeout_s)
        return 1
    return 1 if any(statuses) else 0
