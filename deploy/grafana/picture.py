"""Make docs/dashboard.png: run the platform of `make platform` under load, stop a node for 20 s, photograph.

`preview.html` draws the panels, from the shipped dashboard and the Prometheus of the run. Chromium shows it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from PIL import Image

import redfence
from redfence_storage.client import AsyncStorageClient

DEPLOY = Path(__file__).resolve().parents[1]
sys.path.append(str(DEPLOY / "local"))
import start_platform  # noqa: E402  (a script, in no package)

SIZE = "1400,1937"
FAULT_S = 20.0
STALE_WRITES, STALE_WRITE_EVERY_S = 4, 6.0  # one for each scrape, so that their rate shows
# Virtual time stands still while Chromium waits for an answer, so this is enough on a slow machine too.
VIRTUAL_TIME_MS = 30_000
CHROMIUM = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


async def _hold(client: redfence.AsyncClient, resource: str, *, wait_s: float, hold_s: float) -> None:
    async with client.lock(resource, ttl=5, wait=wait_s) as lease:
        await client.check_token(lease)
        await asyncio.sleep(hold_s * random.uniform(0.5, 1.5))


async def _write(client: redfence.AsyncClient, storage: AsyncStorageClient) -> None:
    async with client.lock("orders/ledger", ttl=5, wait=10) as lease:
        await storage.put("orders/ledger", key="total", value=b"1", token=lease.token)


async def _repeat(work: Callable[[], Awaitable[None]], *, pause_s: float) -> None:
    while True:
        # Some calls are made to fail, and others fail while the node is stopped.
        with suppress(redfence.RedfenceError):
            await work()
        await asyncio.sleep(pause_s * random.uniform(0.5, 1.5))


@asynccontextmanager
async def _load(platform: start_platform.Platform) -> AsyncIterator[None]:
    """Run a few dozen operations a second: many names, one that all want, one that the policy denies."""
    async with (
        redfence.AsyncClient(platform.servers[0]) as first,
        redfence.AsyncClient(platform.servers[1]) as second,
        AsyncStorageClient(platform.storage) as storage,
    ):
        clients = (first, second)
        works = [
            partial(_repeat, partial(_hold, clients[n % 2], f"orders/{n}", wait_s=0, hold_s=0.1), pause_s=0.5)
            for n in range(12)
        ]
        works += [
            partial(_repeat, partial(_hold, clients[n % 2], "orders/hot", wait_s=w, hold_s=0.2), pause_s=0.3)
            for n, w in enumerate((10, 10, 10, 10, 10, 10, 0.4, 0))
        ]
        works.append(partial(_repeat, partial(_write, first, storage), pause_s=1))
        works.append(partial(_repeat, partial(_hold, second, "closed/1", wait_s=0, hold_s=0), pause_s=3))
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work()) for work in works]
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()


async def _run(platform: start_platform.Platform, *, minutes: float) -> None:
    """Load the platform for so long; after half the time, node 2 stands still, and then stale tokens come."""
    half_s = minutes * 60 / 2
    async with _load(platform):
        await asyncio.sleep(half_s)
        os.kill(platform.node_pids[2], signal.SIGSTOP)
        await asyncio.sleep(FAULT_S)
        os.kill(platform.node_pids[2], signal.SIGCONT)
        async with AsyncStorageClient(platform.storage) as storage:
            for _ in range(STALE_WRITES):
                with suppress(redfence.StaleTokenError):
                    await storage.put("orders/ledger", key="total", value=b"0", token=1)
                await asyncio.sleep(STALE_WRITE_EVERY_S)
        await asyncio.sleep(max(0.0, half_s - FAULT_S - STALE_WRITES * STALE_WRITE_EVERY_S))


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Log nothing."""


def _photograph(prometheus: str, *, minutes: float, picture: Path, folder: Path) -> None:
    chromium = shutil.which("chromium")
    assert chromium, "main has looked for it"
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(DEPLOY / "grafana"))) as pages:
        threading.Thread(target=pages.serve_forever, daemon=True).start()
        page = (
            f"http://127.0.0.1:{pages.server_port}/preview.html?prometheus={prometheus}&minutes={minutes:g}"
        )
        subprocess.run(
            [
                *(chromium, *CHROMIUM, f"--user-data-dir={folder / 'chromium'}", f"--window-size={SIZE}"),
                *(f"--virtual-time-budget={VIRTUAL_TIME_MS}", f"--screenshot={picture}", page),
            ],
            check=True,
            capture_output=True,
            timeout=120,
        )
        pages.shutdown()
    # 256 colours take half the space, and look alike.
    with Image.open(picture) as image:
        image.convert("RGB").quantize(256).save(picture, optimize=True)


def main() -> None:
    """Run the platform and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=6, help="how long the load lasts (default: 6)")
    parser.add_argument("--picture", type=Path, default=DEPLOY.parent / "docs/dashboard.png")
    arguments = parser.parse_args()
    for program in ("prometheus", "chromium"):
        if shutil.which(program) is None:
            sys.exit(f"this machine has no program {program}; install the Debian package {program}")
    with tempfile.TemporaryDirectory(prefix="redfence-picture-") as name:
        folder = Path(name)
        with start_platform.running(folder) as platform:
            print(
                f"the load takes {arguments.minutes:g} minutes; Prometheus: {platform.prometheus}", flush=True
            )
            os.environ.update(platform.client)
            asyncio.run(_run(platform, minutes=arguments.minutes))
            _photograph(
                platform.prometheus,
                minutes=arguments.minutes,
                picture=arguments.picture.absolute(),
                folder=folder,
            )
    print(f"wrote {arguments.picture}: {arguments.picture.stat().st_size // 1024} KiB")


if __name__ == "__main__":
    main()
