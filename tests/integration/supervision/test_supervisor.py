"""`redfence serve --processes N` as real processes: one port, one log, and no process left behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

import grpc
import pytest

import redfence
from harness.load.failures import failure_of
from harness.load.lock_load import LockLoad
from harness.processes.commands import CommandProcesses, node_flags
from harness.processes.fixture_types import FlushedNodes
from harness.processes.metrics import scrape, value
from harness.processes.ports import HOST, free_port
from harness.processes.process_look import connection_count, is_alive, listener_count
from harness.processes.redis_nodes import RedisNode
from harness.processes.servers import FormedNodes, LockServer, until_no_locks
from harness.time.eventually import eventually
from redfence_proto.v1 import lock_pb2

pytestmark = pytest.mark.slow

NAME = "orders/42"
READY = r"^redfence serving on 127\.0\.0\.1:(\d+) \(3 nodes, (\d) processes\)$"
CONNECTIONS_MAX = 64


class Workers:
    """A supervisor with its workers. Its log says which process each of them has."""

    def __init__(self, commands: CommandProcesses, nodes: Sequence[RedisNode], *flags: str) -> None:
        arguments = ("serve", *node_flags(nodes), "--listen", f"{HOST}:0", *flags)
        self.supervisor = commands.start_redfence(*arguments)
        self.port = 0

    async def ready(self, *, count: int = 2) -> None:
        found = await self.supervisor.wait_for_line(READY, timeout_s=30)
        self.port = int(found[1])
        assert int(found[2]) == count == len(self.pids)
        assert all(map(is_alive, self.pids.values()))

    def events(self, name: str) -> list[dict[str, Any]]:
        """Return the log's events of this name; every whole line of the log is an event."""
        lines = self.supervisor.stderr.splitlines(keepends=True)
        events = [json.loads(line) for line in lines if line.endswith("\n")]
        return [event for event in events if event["event"] == name]

    @property
    def pids(self) -> dict[int, int]:
        """The last process of each worker, by number."""
        return {event["process"]: event["pid"] for event in self.events("process_started")}

    async def worker_of(self, connect: Callable[[], Awaitable[object]]) -> int:
        """Return the number of the worker that the connection made by `connect` has reached."""
        before = self._connections()
        await connect()
        return max(Counter(self._connections()) - Counter(before))

    def _connections(self) -> dict[int, int]:
        return {number: connection_count(pid, port=self.port) for number, pid in self.pids.items()}

    async def connect(self, stack: AsyncExitStack) -> tuple[int, LockServer]:
        """Return a server over a connection of its own, and the number of the worker behind it."""
        options = [("grpc.use_local_subchannel_pool", 1)]
        target = f"{HOST}:{self.port}"
        server = LockServer(
            await stack.enter_async_context(grpc.aio.insecure_channel(target, options=options))
        )
        return await self.worker_of(server.status), server

    async def connect_to_each(self, stack: AsyncExitStack, *, count: int) -> dict[int, list[LockServer]]:
        """Return `count` connections to each of the workers; the kernel chooses a worker by chance."""
        servers: dict[int, list[LockServer]] = {number: [] for number in self.pids}
        for _ in range(CONNECTIONS_MAX):
            number, server = await self.connect(stack)
            servers[number].append(server)
            if all(len(each) >= count for each in servers.values()):
                return {number: each[:count] for number, each in servers.items()}
        raise AssertionError(f"{CONNECTIONS_MAX} connections did not reach every worker: {servers}")

    async def until_restarted(self, number: int, *, killed: int) -> None:
        await eventually(lambda: self.pids[number] != killed, timeout_s=30, interval_s=0.02)


def can_listen(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_server((HOST, port)):
        return True
    return False


async def test_locks_over_several_workers_go_on_while_a_killed_one_is_restarted(
    commands: CommandProcesses, formed_nodes: FormedNodes
) -> None:
    """Holders exclude each other over all workers, tokens rise, and a client of the SDK gets no error."""
    nodes = await formed_nodes(3)
    workers = Workers(commands, nodes, "--processes", "2")
    await workers.ready()
    async with AsyncExitStack() as stack:
        mortal, others = (await workers.connect_to_each(stack, count=2)).values()
        client = await stack.enter_async_context(redfence.AsyncClient(f"{HOST}:{workers.port}"))
        while await workers.worker_of(client.cluster_status) != 1:
            client = await stack.enter_async_context(redfence.AsyncClient(f"{HOST}:{workers.port}"))
        load = await stack.enter_async_context(LockLoad(*mortal, *others, mortal=mortal))
        await load.until_granted_by_each(50)
        async with client.lock(NAME, ttl=5, wait=5) as lease:
            before = lease.token
            killed = workers.pids[1]
            os.kill(killed, signal.SIGKILL)
            await load.until_granted(200)
            lease.raise_if_lost()
        async with client.lock(NAME, ttl=5, wait=5) as lease:
            assert lease.token > before
        await workers.until_restarted(1, killed=killed)
        # The new process takes connections, and its locks are in the same history.
        (restarted,) = (await workers.connect_to_each(stack, count=1))[1]
        async with LockLoad(restarted, *others, history=load.history) as more:
            await more.until_granted_by_each(50)
    load.check()
    (ended,) = workers.events("process_ended")
    assert (ended["process"], ended["exit_status"]) == (1, -signal.SIGKILL)
    assert await workers.supervisor.stop() == 0
    await until_no_locks(nodes)


@pytest.mark.parametrize("told", ["the supervisor", "all"])
async def test_sigterm_drains_every_worker_and_ends_with_0(
    commands: CommandProcesses, formed_nodes: FormedNodes, told: str
) -> None:
    """Waiters at each worker are sent elsewhere. A service manager may send the signal to every process."""
    workers = Workers(commands, await formed_nodes(3), "--processes", "2", "--drain-grace-ms", "20000")
    await workers.ready()
    async with AsyncExitStack() as stack:
        servers = [server for (server,) in (await workers.connect_to_each(stack, count=1)).values()]
        await servers[0].acquire(NAME)
        waiting = [asyncio.create_task(failure_of(each.acquire(NAME, wait_ms=60_000))) for each in servers]
        for server in servers:
            await server.until_waiting(NAME)
        pids = workers.pids
        for pid in pids.values() if told == "all" else ():
            os.kill(pid, signal.SIGTERM)
        workers.supervisor.send_signal(signal.SIGTERM)
        assert [(await each).reason for each in waiting] == [lock_pb2.ERROR_REASON_DRAINING] * 2
        assert await workers.supervisor.wait(timeout_s=15) == 0
    assert not any(map(is_alive, pids.values()))
    assert workers.supervisor.stdout.count("\n") == 1
    assert {event["process"] for event in workers.events("stopped")} == {1, 2}
    assert not workers.events("process_ended")
    assert workers.pids == pids


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_a_supervisor_that_is_broken_off_leaves_no_process_and_no_port(
    commands: CommandProcesses, formed_nodes: FormedNodes, number: signal.Signals
) -> None:
    """It is killed, or told a second time while a caller keeps the drain from ending."""
    workers = Workers(commands, await formed_nodes(3), "--processes", "2", "--drain-grace-ms", "60000")
    await workers.ready()
    pids = workers.pids
    # A worker that is stopped does not drain.
    os.kill(pids[1], signal.SIGSTOP)
    workers.supervisor.send_signal(number)
    if number == signal.SIGTERM:
        await eventually(lambda: workers.events("stopped"), timeout_s=10, interval_s=0.02)
        assert workers.supervisor.exit_status is None
        workers.supervisor.send_signal(number)
    assert await workers.supervisor.wait() == -number
    await eventually(lambda: not any(map(is_alive, pids.values())), interval_s=0.02)
    # The last thread of a process may hold its sockets a moment longer.
    await eventually(lambda: can_listen(workers.port), interval_s=0.02)


async def test_a_worker_without_a_quorum_takes_no_connection_until_the_nodes_are_back(
    commands: CommandProcesses, fresh_formed_nodes: FormedNodes
) -> None:
    """The supervisor tries again, ever more slowly, while the other worker answers every caller."""
    nodes = await fresh_formed_nodes(3)
    workers = Workers(commands, nodes, "--processes", "2", "--start-timeout-ms", "300")
    await workers.ready()
    for node in nodes[1:]:
        node.kill()
    killed = workers.pids[1]
    os.kill(killed, signal.SIGKILL)
    await eventually(lambda: workers.events("process_ended"), interval_s=0.02)

    def refused_twice() -> bool:
        assert listener_count(port=workers.port) == 1
        return len(workers.events("process_not_started")) >= 2

    await eventually(refused_twice, timeout_s=30, interval_s=0.02)
    refusals = workers.events("process_not_started")
    assert all("no quorum" in refusal["reason"] for refusal in refusals)
    assert refusals[1]["restart_in_s"] > refusals[0]["restart_in_s"]
    async with AsyncExitStack() as stack:
        for _ in range(8):
            assert (await workers.connect(stack))[0] == 2
    for node in nodes[1:]:
        await node.start()
    await workers.until_restarted(1, killed=killed)
    assert listener_count(port=workers.port) == 2
    assert await workers.supervisor.stop() == 0


async def test_workers_that_do_not_come_to_serve_end_the_supervisor_with_their_reason(
    commands: CommandProcesses, formed_nodes: FormedNodes
) -> None:
    """No quorum, or a taken port: one line says so, once, and no process is left."""
    nodes = await formed_nodes(3)
    workers = Workers(commands, nodes, "--processes", "2")
    lonely = Workers(commands, nodes[:1], "--processes", "3", "--dial-timeout-ms", "2000")
    told = (await lonely.supervisor.ended(status=2)).splitlines()
    assert told[-1].startswith("redfence serve: ")
    assert "formed as one of 3 nodes" in told[-1]
    assert sum(not line.startswith("{") for line in told) == 1
    await workers.ready()
    address = f"{HOST}:{workers.port}"
    for flags in ((), ("--processes", "2")):
        second = commands.start_redfence("serve", *node_flags(nodes), "--listen", address, *flags)
        line = await second.ended(status=2)
        assert line == f"redfence serve: listen: cannot listen on {address}: Address already in use\n"
    assert await workers.supervisor.stop(number=signal.SIGINT) == 0


async def test_one_process_has_no_supervisor(commands: CommandProcesses, formed_nodes: FormedNodes) -> None:
    """`auto` on one core serves as without the flag."""
    allowed = os.sched_getaffinity(0)
    with contextlib.ExitStack() as stack:
        # The process inherits this thread's cores.
        os.sched_setaffinity(0, {min(allowed)})
        stack.callback(os.sched_setaffinity, 0, allowed)
        server, address = await commands.start_serve(await formed_nodes(3), "--processes", "auto")
    assert connection_count(server.pid, port=int(address.rpartition(":")[2])) == 0
    async with redfence.AsyncClient(address) as client:
        await client.cluster_status()
        assert connection_count(server.pid, port=int(address.rpartition(":")[2])) == 1
    assert await server.stop() == 0
    assert "process_started" not in server.stderr


async def test_the_port_answers_without_a_quorum_and_a_signal_ends_all_processes(
    commands: CommandProcesses, flushed_nodes: FlushedNodes
) -> None:
    port = free_port()
    flags = ("--processes", "2", "--listen", f"{HOST}:{port}")
    process = commands.start_redfence("serve", *node_flags(await flushed_nodes(3)), *flags)
    await eventually(lambda: process.stderr.count("quorum_awaited") == 2, timeout_s=30)
    async with redfence.AsyncClient(f"{HOST}:{port}") as client:
        report = await client.cluster_status()
        assert not report.ready
        assert "never formed" in report.nodes[0].detail
    assert process.stdout == ""
    assert await process.stop() == 0


async def test_each_process_serves_its_metrics_on_the_port_after_the_one_before(
    commands: CommandProcesses, formed_nodes: FormedNodes
) -> None:
    """Their counts add up to what the callers were told."""
    first = free_port()
    workers = Workers(
        *(commands, await formed_nodes(3)), "--processes", "2", "--metrics-listen", f"{HOST}:{first}"
    )
    await workers.ready()
    for number in range(20):
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(f"{HOST}:{workers.port}", options=options) as channel:
            await LockServer(channel).acquire(f"{NAME}/{number}")

    scrapes = [await scrape(port) for port in (first, first + 1)]
    assert sum(value(each, "redfence_requests_total", outcome="granted") for each in scrapes) == 20
    assert all(value(each, "redfence_ready") == 1 for each in scrapes)
    assert await workers.supervisor.stop() == 0
