"""Serve as one of the processes of a supervisor: `python -P -m redfence_server.supervision.worker NUMBER`.

The supervisor writes the settings to standard input, as one line of JSON. The worker answers on standard
output: `serving`, or `refused` with the reason. A further line has the settings to reload. The worker drains
when the supervisor closes standard input. The supervisor sends no signal: a service manager may have sent
SIGTERM to each worker, and a second one would break off the drain. So the worker ignores SIGHUP.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys

from redfence_server import log_setup
from redfence_server.api.serving import stop_signal
from redfence_server.composition import LockServer
from redfence_server.config import ServeConfig
from redfence_server.errors import StartupError
from redfence_server.process_memory import relax_garbage_collector

SERVING = "serving"
REFUSED = "refused"
EXIT_REFUSED = 2
_READ_BYTES = 64 * 1024


def main(number: int) -> int:
    """Serve until standard input ends or a signal comes; return 0 after a drain, 2 if it could not start."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    # Without a buffer, which could swallow the beginning of the next line.
    with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as stdin:
        settings = ServeConfig.model_validate_json(stdin.readline())
    log_setup.configure(log_format=settings.log_format, level=settings.log_level, process=number)
    try:
        asyncio.run(_serve(settings))
    except StartupError as error:
        _report(f"{REFUSED} {error}")
        return EXIT_REFUSED
    return 0


async def _serve(settings: ServeConfig) -> None:
    async with LockServer(settings, share_port=True) as running:
        stop = stop_signal()
        loop = asyncio.get_running_loop()
        received = bytearray()

        def on_input() -> None:
            data = os.read(sys.stdin.fileno(), _READ_BYTES)
            received.extend(data)
            while b"\n" in received:
                line, _, rest = received.partition(b"\n")
                received[:] = rest
                running.reload(ServeConfig.model_validate_json(line))
            if not data:
                loop.remove_reader(sys.stdin)
                if not stop.done():
                    stop.set_result(signal.SIGTERM)

        loop.add_reader(sys.stdin, on_input)
        if await running.quorum_before(stop):
            relax_garbage_collector()
            _report(SERVING)
        await running.serve_until(stop, grace_ms=settings.drain_grace_ms)


def _report(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
