"""Starts the services of a comparison, and tells how to load each of them.

Each turn has a service of its own. So no idle service takes CPU time from the one that is measured,
and none inherits work: the leases that an etcd client leaves behind would expire in a later turn.
"""

from __future__ import annotations

import asyncio
import shlex
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench import builds, cluster
from bench.cluster import ServiceError
from bench.figures import Target
from redfence_server.embedded.nodes import free_port

# The clients of redfence, and the peers.
CLIENTS = ("session", "unary", "sdk")
# etcd grants a lease and locks with it, as redfence gives each lock its ttl. A client that keeps one
# lease for all its locks saves a third of the writes: `etcd-one-lease`.
ETCD = ("etcd", "etcd-one-lease")
# Redlock in the client's process: no server, and no fencing token.
REDLOCKS = ("redsync", "node-redlock", "aioredlock")
PEERS = (*REDLOCKS, *ETCD)
# The Go client can begin pairs at a fixed rate.
OPEN_LOOP = frozenset({"session", "unary", "redsync", *ETCD})
# It keeps leases alive over sessions.
LEASES = frozenset({"session"})
# The load program acquires tens of thousands of names in its first seconds.
_SETTINGS = {"REDFENCE_NEW_RESOURCES_PER_SECOND": "0"}
_START_TIMEOUT_S = 30.0
_POLL_INTERVAL_S = 0.05


@dataclass(frozen=True, slots=True)
class Variant:
    """One build of the redfence server: a program, and further arguments for `serve`."""

    name: str
    program: tuple[str, ...] = cluster.REDFENCE
    arguments: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str, *, shared_arguments: Sequence[str] = ()) -> Variant:
        """Read `NAME=PROGRAM [ARGUMENT…]`; the program `redfence` is the one of this checkout.

        Raises:
            ValueError: no name or no program.
        """
        name, _, command = text.partition("=")
        program, *arguments = shlex.split(command) or [""]
        if not name or not program:
            raise ValueError(f"--server {text!r}: write NAME=PROGRAM [ARGUMENT…]")
        found = cluster.REDFENCE if program == "redfence" else (str(Path(program).absolute()),)
        return cls(name, found, (*arguments, *shared_arguments))


@dataclass(frozen=True, slots=True)
class Running:
    """A service that is up.

    Attributes:
        command: the load program with the arguments that do not depend on the load.
        processes: the process ids of each role.
    """

    command: tuple[str, ...]
    processes: Mapping[str, tuple[int, ...]]


# Runs a new service until the exit. It raises ServiceError if the service cannot be run.
Start = Callable[[], AbstractAsyncContextManager[Running]]


def targets(
    *, kinds: Sequence[str], node_counts: Sequence[int], variants: Sequence[Variant], connections: int
) -> dict[Target, Start]:
    """Return what to measure, in the order of the table, and how to start each.

    A Go client of redfence opens this many connections.
    """
    found: dict[Target, Start] = {}
    for count in node_counts:
        for variant in variants:
            for kind in (each for each in kinds if each in CLIENTS):
                target = Target(f"{variant.name} {kind} N={count}", kind, variant.name, count)
                found[target] = partial(_redfence, kind, variant, node_count=count, connections=connections)
        for kind in (each for each in kinds if each in REDLOCKS):
            found[Target(f"{kind} N={count}", kind, "", count)] = partial(_redlock, kind, count)
    for kind in (each for each in kinds if each in ETCD):
        found[Target(kind, kind, "", 0)] = partial(_etcd, kind)
    return found


@asynccontextmanager
async def _redfence(
    kind: str, variant: Variant, *, node_count: int, connections: int
) -> AsyncIterator[Running]:
    program: tuple[str, ...] = (sys.executable, "-m", "bench.load")
    if kind != "sdk":
        program = (str(await builds.go_client()), "--target", kind)
    async with (
        cluster.formed_nodes(node_count, program=variant.program) as nodes,
        cluster.served_process(
            nodes, program=variant.program, arguments=variant.arguments, settings=_SETTINGS
        ) as server,
    ):
        addresses = ",".join([server.address] * connections)
        yield Running((*program, "--addr", addresses), {"server": (server.pid,), "node": nodes.pids})


@asynccontextmanager
async def _redlock(kind: str, node_count: int) -> AsyncIterator[Running]:
    program = await _redlock_program(kind)
    async with cluster.running_nodes(node_count) as nodes:
        yield Running((*program, "--addr", ",".join(nodes.urls)), {"node": nodes.pids})


async def _redlock_program(kind: str) -> tuple[str, ...]:
    if kind == "node-redlock":
        return ("node", str(await builds.node_redlock()))
    if kind == "aioredlock":
        return (str(await builds.aioredlock()), "-m", "bench.load", "--target", kind)
    return (str(await builds.go_client()), "--target", kind)


@asynccontextmanager
async def _etcd(kind: str) -> AsyncIterator[Running]:
    """Run one etcd with its defaults, which sync every write."""
    client_program, server_program = await builds.go_client(), await builds.etcd()
    client, peer = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    with cluster.data_folder() as folder:
        process = await asyncio.create_subprocess_exec(
            *(str(server_program), "--data-dir", str(folder), "--log-level", "fatal"),
            *("--listen-client-urls", client, "--advertise-client-urls", client),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
            *("--initial-cluster", f"default={peer}"),
        )
        try:
            await _until_healthy(process, client)
            command = (str(client_program), "--target", kind, "--addr", client.removeprefix("http://"))
            yield Running(command, {"server": (process.pid,)})
        finally:
            if process.returncode is None:
                process.terminate()
            await process.wait()


async def _until_healthy(process: asyncio.subprocess.Process, url: str) -> None:
    try:
        async with asyncio.timeout(_START_TIMEOUT_S):
            while not await asyncio.to_thread(_is_healthy, url):
                if process.returncode is not None:
                    raise ServiceError(f"etcd ended with status {process.returncode}")
                await asyncio.sleep(_POLL_INTERVAL_S)
    except TimeoutError:
        raise ServiceError(f"etcd was not ready after {_START_TIMEOUT_S:.0f} s") from None


def _is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=1) as answer:
            return b"true" in answer.read()
    except (urllib.error.URLError, OSError):
        return False
