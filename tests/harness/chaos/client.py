"""Runs one client process, `python -m harness.chaos.client`, which finishes its work after SIGTERM."""

from __future__ import annotations

import argparse
import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

from harness.chaos import sdk_workloads, workloads
from harness.chaos.lock_calls import LockCalls
from harness.chaos.recorder import Recorder
from harness.chaos.storage_calls import StorageCalls
from harness.chaos.workloads import Work
from redfence import AsyncClient, Client

READY = "working"
WORKLOADS = ("append", "race", "keep", "sdk", "threads")
_RAW: dict[str, Callable[[Work], Coroutine[Any, Any, None]]] = {
    "append": workloads.append,
    "race": workloads.race,
    "keep": workloads.keep,
}
_THREAD_END_S = 15.0


def main() -> None:
    """Work until SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name", required=True)
    parser.add_argument("--workload", required=True, choices=WORKLOADS)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--server", action="append", required=True)
    parser.add_argument("--storage", required=True)
    parser.add_argument("--records", type=Path, required=True)
    parser.add_argument("--seed", required=True)
    parser.add_argument("--began", type=float, required=True)
    arguments = parser.parse_args()
    with Recorder(arguments.records, client=arguments.name) as recorder:
        if arguments.workload == "threads":
            _work_in_threads(arguments, recorder)
        else:
            asyncio.run(_work(arguments, recorder))


def _work_in_threads(arguments: argparse.Namespace, recorder: Recorder) -> None:
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    with Client(*arguments.server) as client:
        threads = [
            threading.Thread(
                target=sdk_workloads.hold_with_sdk,
                args=(recorder, client),
                kwargs={"random": Random(f"{arguments.seed}/{number}"), "stopping": stopping.is_set},
            )
            for number in range(arguments.workers)
        ]
        for thread in threads:
            thread.start()
        print(READY, flush=True)
        for thread in threads:
            # A join without a timeout would block the signal handler.
            while thread.is_alive() and not stopping.is_set():
                thread.join(0.2)
        for thread in threads:
            thread.join(_THREAD_END_S)


async def _work(arguments: argparse.Namespace, recorder: Recorder) -> None:
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    random = Random(arguments.seed)
    locks = LockCalls(arguments.server, recorder=recorder, random=random)
    storage = StorageCalls(arguments.storage, recorder=recorder)
    work = Work(locks, storage, recorder, random, arguments.began, stopping.is_set)
    print(READY, flush=True)
    try:
        if arguments.workload == "sdk":
            async with AsyncClient(*arguments.server) as client, asyncio.TaskGroup() as group:
                for _ in range(arguments.workers):
                    group.create_task(sdk_workloads.append_with_sdk(work, client))
        else:
            async with asyncio.TaskGroup() as group:
                for _ in range(arguments.workers):
                    group.create_task(_RAW[arguments.workload](work))
    finally:
        await storage.close()
        await locks.close()


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main()
