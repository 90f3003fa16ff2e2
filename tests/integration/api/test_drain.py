"""The drain of a real process: it ends within its grace, and first tells load balancers."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import grpc
import ngh2
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from harness.http2.raw_client import RawClient
from harness.load.failures import failure_of
from harness.processes.commands import CommandProcess, CommandProcesses, node_flags
from harness.processes.ports import HOST, free_port
from harness.processes.servers import FormedNodes, LockServer
from redfence_proto.v1 import lock_pb2
from redfence_server.http2.settings import Transport
from redfence_server.http2.wire import framed

pytestmark = pytest.mark.slow

NAME = "orders/42"
# One stream may have 10,000 commands unanswered.
COMMANDS = 9_900
STREAMS = 6


async def start(
    commands: CommandProcesses, formed_nodes: FormedNodes, *flags: str
) -> tuple[CommandProcess, int]:
    port = free_port()
    arguments = (*node_flags(await formed_nodes(3)), "--listen", f"{HOST}:{port}", *flags)
    process = commands.start_redfence("serve", *arguments)
    await process.wait_for_line("^redfence serving on", timeout_s=30)
    return process, port


async def fill(client: RawClient) -> None:
    """Send commands and read nothing, until the server's socket is full of answers."""
    client.http2.set_local_window_size(2**30, stream_id=0)
    streams = [client.begin("/redfence.v1.LockService/Session") for _ in range(STREAMS)]
    # The headers come after the server's own windows.
    await client.until(lambda: all(client.answers[stream_id].headers for stream_id in streams))
    client.stop_reading()
    for first in range(1, COMMANDS, 100):
        commands = [lock_pb2.SessionCommand(id=first + number) for number in range(100)]
        request = framed(lock_pb2.SessionRequest(commands=commands).SerializeToString())
        for stream_id in streams:
            client.send(stream_id, request)
        await asyncio.sleep(0.005)


async def until_idle(process: CommandProcess) -> None:
    """Return once the process and its workers use no CPU."""
    before = -1.0
    while (now := cpu_s(process.pid)) - before > 0.02:
        before = now
        await asyncio.sleep(0.2)


def cpu_s(pid: int) -> float:
    """Return the CPU time of a process and its children."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    own_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return own_s + sum(cpu_s(int(child)) for child in children)


@pytest.mark.parametrize("processes", ["1", "2"])
async def test_a_peer_that_reads_nothing_does_not_prolong_the_drain(
    processes: str, transport: Transport, commands: CommandProcesses, formed_nodes: FormedNodes
) -> None:
    """The server's socket is full. The server waits for it once, after the grace; grpcio would wait on."""
    flags = ("--drain-grace-ms", "1000", "--processes", processes)
    process, port = await start(commands, formed_nodes, *flags)
    windows = {ngh2.Setting.INITIAL_WINDOW_SIZE: 2**30}
    async with RawClient(port, settings=windows) as client:
        await fill(client)
        await until_idle(process)
        assert await process.stop() == 0
    # grpcio cannot end such a connection, so the server leaves it to the end of the process.
    abandoned = 1 if transport is Transport.GRPCIO else 0
    assert process.stderr.count('"event": "connections_abandoned"') == abandoned
    assert "processes_killed" not in process.stderr


async def test_a_stopping_server_says_so_for_as_long_as_a_load_balancer_needs(
    commands: CommandProcesses, formed_nodes: FormedNodes
) -> None:
    """New connections still get NOT_SERVING and DRAINING two seconds after the signal."""
    process, port = await start(commands, formed_nodes, "--drain-notice-ms", "3000")
    process.send_signal(signal.SIGTERM)
    await asyncio.sleep(2.0)
    async with grpc.aio.insecure_channel(f"{HOST}:{port}") as channel:
        checked = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert checked.status == health_pb2.HealthCheckResponse.NOT_SERVING
        failure = await failure_of(LockServer(channel).acquire(NAME))
        assert failure.reason == lock_pb2.ERROR_REASON_DRAINING
    assert await process.wait() == 0
