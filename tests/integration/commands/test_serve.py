"""`redfence serve` as a real process: how it starts, how it refuses to, and how it ends."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from harness.load.failures import failure_of
from harness.load.session_caller import SessionCaller
from harness.processes.commands import CommandProcess, CommandProcesses, node_flags
from harness.processes.fixture_types import FlushedNodes, StartProxy
from harness.processes.ports import HOST, free_port
from harness.processes.redis_nodes import RedisNode
from harness.processes.servers import FormedNodes, LockServer, form, now_ms
from harness.time.eventually import eventually
from redfence_proto.v1 import lock_pb2
from redfence_proto.v1.lock_pb2 import NODE_STATE_READY, NODE_STATE_UNREACHABLE

NAME = "orders/42"
READY = r"^redfence serving on 127\.0\.0\.1:(\d+) \((\d) nodes\)$"
# A refusal does not take ten seconds, and a busy machine still has the time to look.
IMPATIENT = ("--start-timeout-ms", "3000", "--dial-timeout-ms", "2000")
NOWHERE = "redis://127.0.0.1:1"
pytestmark = pytest.mark.slow


def start_serve(commands: CommandProcesses, nodes: Sequence[RedisNode | str], *flags: str) -> CommandProcess:
    return commands.start_redfence("serve", *node_flags(nodes), "--listen", "127.0.0.1:0", *flags)


@asynccontextmanager
async def ready(process: CommandProcess) -> AsyncIterator[LockServer]:
    port = (await process.wait_for_line(READY, timeout_s=20))[1]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield LockServer(channel)


async def refusal(process: CommandProcess) -> str:
    """Return the one line in which a server says why it does not start.

    Log entries about nodes are allowed before it, because they tell when and where.
    """
    await process.ended(status=2)
    assert process.stdout == ""
    *before, line = process.stderr.splitlines()
    assert all(each.startswith("{") for each in before), process.stderr
    assert line.startswith("redfence serve: ")
    return line.removeprefix("redfence serve: ")


async def test_a_server_says_when_it_is_ready_and_ends_with_0_at_a_signal(
    commands: CommandProcesses, formed_nodes: FormedNodes
) -> None:
    """One line names the address, with the port that was free."""
    nodes = await formed_nodes(3)
    processes = [start_serve(commands, nodes), start_serve(commands, nodes)]
    for process, number in zip(processes, (signal.SIGTERM, signal.SIGINT), strict=True):
        async with ready(process) as server:
            assert (await server.acquire(number.name)).outcome == lock_pb2.ACQUIRE_OUTCOME_GRANTED
            assert process.stdout.count("\n") == 1
            assert await process.stop(number=number) == 0
        assert '"event": "stopped"' in process.stderr.splitlines()[-1]
        assert "Traceback" not in process.stderr


async def test_sigterm_answers_calls_under_way_tells_the_streams_and_ends_before_the_grace(
    commands: CommandProcesses, formed_nodes: FormedNodes
) -> None:
    """Waiters are sent elsewhere, streams get the notice and end with OK, and the process ends with 0."""
    process = start_serve(commands, await formed_nodes(3), "--drain-grace-ms", "30000")
    async with ready(process) as server, SessionCaller(server) as session:
        lease = (await server.acquire(NAME)).lease
        keep_alive = server.locks.KeepAlive()
        await keep_alive.write(lock_pb2.KeepAliveRequest(resource=NAME, lease_id=lease.lease_id))
        await keep_alive.read()
        calling = asyncio.create_task(failure_of(server.acquire(NAME, wait_ms=60_000)))
        commanded = session.acquire(NAME, wait_ms=60_000)
        await server.until_waiting(NAME, count=2)
        signalled_at_ms = now_ms()
        process.send_signal(signal.SIGTERM)
        assert (await calling).reason == lock_pb2.ERROR_REASON_DRAINING
        assert (await commanded).error.reason == lock_pb2.ERROR_REASON_DRAINING
        assert await session.ended() is None
        assert session.draining is not None
        assert session.draining.grace.ToMilliseconds() == 30_000
        notice = await keep_alive.read()
        assert isinstance(notice, lock_pb2.KeepAliveResponse)
        assert notice.HasField("draining")
        assert await keep_alive.code() is grpc.StatusCode.OK
        assert await process.wait(timeout_s=15) == 0
        assert now_ms() - signalled_at_ms < 15_000


async def test_a_server_whose_nodes_are_gone_ends_at_a_signal_as_well(
    commands: CommandProcesses, fresh_formed_nodes: FormedNodes, start_proxy: StartProxy
) -> None:
    nodes = await fresh_formed_nodes(3)
    proxy = await start_proxy(nodes[0])
    process = start_serve(commands, [proxy.url(nodes[0].url), *nodes[1:]])
    async with ready(process) as server:
        await server.until_states(*[NODE_STATE_READY] * 3)
        # It takes connections and says nothing; the others are dead.
        proxy.hold()
        proxy.reset()
        for node in nodes[1:]:
            node.kill()
        await eventually(lambda: proxy.connection_count)
        assert (await failure_of(server.acquire(NAME, wait_ms=1_000))).is_retryable
        assert await process.stop(timeout_s=5) == 0
    assert "Traceback" not in process.stderr


async def test_a_flag_wins_over_the_environment_and_that_over_the_file(
    commands: CommandProcesses, formed_nodes: FormedNodes, tmp_path: Path
) -> None:
    """Each setting has one name everywhere: three servers listen where the strongest source says.

    The fourth has its nodes from the environment, separated by commas.
    """
    urls = [node.url for node in await formed_nodes(3)]
    by_file, by_environment, by_flag, by_nodes = (free_port() for _ in range(4))
    file = tmp_path / "redfence.toml"
    file.write_text(f'nodes = {json.dumps(urls)}\nlisten = "127.0.0.1:{by_file}"\nnode_timeout_ms = 700\n')
    variables = {"REDFENCE_LISTEN": f"127.0.0.1:{by_environment}"}
    named = {"REDFENCE_LISTEN": f"127.0.0.1:{by_nodes}", "REDFENCE_NODES": ",".join(urls)}
    config = ("serve", "--config", str(file))
    processes = {
        by_file: commands.start_redfence(*config),
        by_environment: commands.start_redfence(*config, environment=variables),
        by_flag: commands.start_redfence(*config, "--listen", f"127.0.0.1:{by_flag}", environment=variables),
        by_nodes: commands.start_redfence("serve", environment=named),
    }
    for port, process in processes.items():
        ready_line = await process.wait_for_line(READY, timeout_s=20)
        assert ready_line.groups() == (str(port), "3")


async def until_quorum_awaited(process: CommandProcess) -> None:
    await eventually(lambda: "quorum_awaited" in process.stderr, timeout_s=20)


async def test_a_server_without_a_quorum_waits_says_why_and_ends_with_0_at_a_signal(
    commands: CommandProcesses, flushed_nodes: FlushedNodes
) -> None:
    """Its port answers meanwhile. Once the cluster is formed, the same process serves."""
    nodes = await flushed_nodes(3)
    ports = [free_port(), free_port()]
    processes = [start_serve(commands, nodes, "--listen", f"{HOST}:{port}") for port in ports]
    for process, port in zip(processes, ports, strict=True):
        await until_quorum_awaited(process)
        status = commands.start_redfence("cluster", "status", "--server", f"{HOST}:{port}")
        told = await status.ended(status=1)
        assert told.count("it has no cluster identity: never formed") == 3
        assert told.endswith("cluster (not formed): NO QUORUM (quorum 2)\n")
        assert process.stdout == ""
    assert await processes[0].stop() == 0
    await form(nodes)
    async with ready(processes[1]) as server:
        assert (await server.acquire(NAME)).outcome == lock_pb2.ACQUIRE_OUTCOME_GRANTED
    assert await processes[1].stop() == 0


# --- it refuses to start --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("", ["nodes", "--node", "REDFENCE_NODES"]),
        (f"--node {NOWHERE} --node redis://127.0.0.1:2", ["node", "2 nodes", "1, 3, 5 or 7"]),
        (
            f"--node {NOWHERE} --node redis://127.0.0.1:2 --node {NOWHERE}",
            ["node", "127.0.0.1:1 is named twice", "node 0 and node 2"],
        ),
        ("--node http://:hunter2@127.0.0.1:1", ["node 0", "starts with redis://"]),
        ("--node redis://:hunter2@127.0.0.1:many", ["node 0", "is malformed"]),
        (f"--node {NOWHERE} --node redis://127.0.0.1:2?foo=hunter2", ["node 1", "an unknown option"]),
        (f"--node {NOWHERE} --listen 50051", ["listen", "'50051' is not HOST:PORT"]),
        (f"--node {NOWHERE} --node-timeout-ms 0", ["node_timeout_ms", "greater than or equal to 10"]),
        (f"--node {NOWHERE} --counter-idle-ms {2**63 - 1}", ["counter_idle_ms", "less than or equal to"]),
        (f"--node {NOWHERE} --node-timeout-ms soon", ["node_timeout_ms", "valid integer"]),
        (f"--node {NOWHERE} --processes 0", ["processes", "greater than or equal to 1"]),
        (f"--node {NOWHERE} --processes many", ["processes: 'many' is not a number from 1 to 64 or auto"]),
        (f"--node {NOWHERE} --node redis://127.0.0.1:2 --processes 3", ["node", "2 nodes"]),
        (f"--node {NOWHERE} --key-prefix a{{b}}", ["key_prefix"]),
        (f"--node {NOWHERE} --log-level loud", ["log_level"]),
        ("--config /nowhere/redfence.toml", ["config", "cannot read /nowhere/redfence.toml"]),
        ("nodes = [", ["config", "is not TOML"]),
        ("nodez = []", ["nodes", "nodez: Extra inputs"]),
        (f'nodes = ["{NOWHERE}"]\nheartbeat_interval_ms = "x"', ["heartbeat_interval_ms"]),
    ],
)
async def test_a_wrong_setting_is_told_in_one_line_that_names_it_and_no_password(
    arguments: str, told: list[str], commands: CommandProcesses, tmp_path: Path
) -> None:
    """The setting comes from a flag or from a file."""
    flags = arguments.split()
    if flags and not arguments.startswith("--"):
        (tmp_path / "redfence.toml").write_text(arguments)
        flags = ["--config", str(tmp_path / "redfence.toml")]
    process = commands.start_redfence("serve", *flags)
    line = await refusal(process)
    assert process.stderr.count("\n") == 1
    assert line.startswith(told[0])
    for words in told[1:]:
        assert words in line
    assert "hunter2" not in process.stderr


async def test_a_port_in_use_is_told_before_any_node_is_asked(commands: CommandProcesses) -> None:
    """Two servers on one port would share the calls at random."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        process = commands.start_redfence("serve", "--node", NOWHERE, "--listen", address)
        line = await refusal(process)
    assert line.startswith(f"listen: cannot listen on {address}: ")
    assert process.stderr.count("\n") == 1


async def test_a_server_does_not_run_without_assertions(commands: CommandProcesses) -> None:
    process = commands.start(sys.executable, "-O", "-m", "redfence", "serve", "--node", NOWHERE)
    assert "python -O" in await refusal(process)


async def test_nodes_that_are_no_quorum_of_one_cluster_are_refused_and_each_is_named(
    commands: CommandProcesses, flushed_nodes: FlushedNodes
) -> None:
    """Votes of two clusters, or of one node in two places, do not make a quorum."""
    nodes = await flushed_nodes(10)
    mine, others, unformed = nodes[:3], nodes[3:6], nodes[6:9]
    await form(mine)
    await form(others)
    await form(nodes[9:])
    await nodes[9].call("HSET", "redfence:node", "state", "assembled")
    wrong_passwords = [f"redis://:hunter2@127.0.0.1:{node.port}" for node in mine]
    never_formed = "node {} (127.0.0.1:{}): it has no cluster identity: never formed"
    cases: list[tuple[Sequence[RedisNode | str], list[str]]] = [
        ([*mine[:2], others[2]], ["it belongs to cluster"]),
        ([mine[1], mine[0], mine[2]], ["the nodes are in another order, or one is named twice"]),
        (mine[:1], ["formed as one of 3 nodes, but 1 are configured"]),
        (nodes[9:], ["not formed to the end: run `redfence cluster init` again"]),
        (unformed, [never_formed.format(index, node.port) for index, node in enumerate(unformed)]),
        ([mine[0], NOWHERE, "redis://127.0.0.1:2"], ["no quorum of", "node 1 (127.0.0.1:1): ", "node 2 ("]),
        (wrong_passwords, [f"node {index} (127.0.0.1:{node.port}): " for index, node in enumerate(mine)]),
    ]
    processes = [start_serve(commands, named, *IMPATIENT) for named, _ in cases]
    for process, (_, parts) in zip(processes, cases, strict=True):
        line = await refusal(process)
        assert all(part in line for part in parts), line
    assert line.count("password") >= 3
    assert "hunter2" not in processes[-1].stderr


# --- cluster status -------------------------------------------------------------------------------


async def test_the_status_of_a_cluster_tells_what_a_server_knows_of_each_node(
    commands: CommandProcesses, fresh_formed_nodes: FormedNodes
) -> None:
    """The JSON and the table show a node that is well, one that is away, and how often that has changed."""
    nodes = await fresh_formed_nodes(3)
    process = start_serve(commands, nodes)
    async with ready(process) as server:
        await server.until_states(*[NODE_STATE_READY] * 3)
        token = (await server.acquire(NAME)).lease.fencing_token
        port = process.stdout.split(":")[1].split()[0]
        info = await nodes[0].call("INFO", "server")
        assert isinstance(info, bytes)
        run_id = re.search(rb"^run_id:(\w+)", info, re.MULTILINE)
        assert run_id
        nodes[2].kill()
        await server.until_states(NODE_STATE_READY, NODE_STATE_READY, NODE_STATE_UNREACHABLE)
        status = ("cluster", "status", "--server", f"127.0.0.1:{port}")
        as_json, as_table = commands.start_redfence(*status, "-o", "json"), commands.start_redfence(*status)
        told = json.loads(await as_json.ended())
        assert told["ready"]
        first, last = told["nodes"][0], told["nodes"][2]
        assert first["run_id"].encode() == run_id[1]
        assert (first["state"], first["durability"], first["high"]) == ("ready", "proven", token)
        assert abs(first["clock_offset"]) < 1
        assert (first["clock_distrusted_for"], first["state_changes"]) == (0, 1)
        assert (last["state"], last["state_changes"]) == ("unreachable", 2)
        assert last["detail"]
        lines = (await as_table.ended()).splitlines()
        assert lines[1].split()[:2] == ["0", "ready"]
        assert lines[3].split()[:2] == ["2", "unreachable"]
        assert lines[-1].endswith(": ready (quorum 2)")
        nodes[1].kill()
        await server.until_states(NODE_STATE_READY, NODE_STATE_UNREACHABLE, NODE_STATE_UNREACHABLE)
        no_quorum = await commands.start_redfence(*status).ended(status=1)
        assert no_quorum.endswith(": NO QUORUM (quorum 2)\n")
