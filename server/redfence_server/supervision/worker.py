"""Serve as one of the processes of a supervisor: `python -P -m redfence_server.supervision.worker NUMBER`.

The supervisor writes the settings to standard input, as one line of JSON. The worker answers on standard
output: `serving`, or `refused` with the reason. It drains when the supervisor closes standard input. The
supervisor sends no SIGTERM: a service manager may have sent one to each worker, and a second one would break
off the drain.
"""

from __future__ import annotations

import asyncio
import signal
import sys

from redfence_server import log_setup
from redfence_server.api.serving import stop_signal
from redfence_server.composition import drain_at, lock_server, quorum_before, relax_garbage_collector
from redfence_server.config import ServeConfig
from redfence_server.errors import StartupError

SERVING = "serving"
REFUSED = "refused"
EXIT_REFUSED = 2


def main(number: int) -> int:
    """Serve until standard input ends or a signal comes; return 0 after a drain, 2 if it could not start."""
    settings = ServeConfig.model_validate_json(sys.stdin.buffer.readline())
    log_setup.configure(log_format=settings.log_format, level=settings.log_level, process=number)
    try:
        asyncio.run(_serve(settings))
    except StartupError as error:
        _report(f"{REFUSED} {error}")
        return EXIT_REFUSED
    return 0


async def _serve(settings: ServeConfig) -> None:
    async with lock_server(settings, share_port=True) as running:
        stop = stop_signal()
        loop = asyncio.get_running_loop()

        def on_end() -> None:
            loop.remove_reader(sys.stdin)
            if not stop.done():
                stop.set_result(signal.SIGTERM)

        # The supervisor writes nothing after the settings, so only the end can be read.
        loop.add_reader(sys.stdin, on_end)
        if await quorum_before(stop, running):
            relax_garbage_collector()
            _report(SERVING)
        await drain_at(stop, running, settings)


def _report(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
