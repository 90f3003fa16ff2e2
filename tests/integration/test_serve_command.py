"""`redfence serve` and `redfence cluster init` as real processes: how they start, how they refuse to, and how they end."""

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
from harness.processes.commands import CommandProcess, CommandProcesses
from harness.processes.fixture_types import FlushedNodes, FreshNodes, StartProxy
from harness.processes.ports import free_port
from harness.processes.redis_nodes import RedisNode
from harness.processes.servers import FormedNodes, LockServer, form, memories, memory, now_ms, until
from harness.processes.tcp_proxy import TcpProxy
from harness.time.eventually import eventually
from redfence_proto.v1 import lock_pb2
from redfence_proto.v1.lock_pb2 import (
    ACQUIRE_OUTCOME_GRANTED,
    ERROR_REASON_DRAINING,
    NODE_STATE_READY,
    NODE_STATE_UNREACHABLE,
)
from redfence_server.clock import Clock
from redfence_server.errors import NodeRejectedError
from redfence_server.membership import examination
from redfence_server.membership.examination import Findings
from redfence_server.nodes.cluster import check_urls
from redfence_server.operations import forming as cluster_forming
from redfence_server.randomness import SystemRandomness
from redfence_server.redis_io.dial import DialledNode
from redfence_server.redis_io.scripts import Keyspace

NAME = "orders/42"
READY = r"^redfence serving on 127\.0\.0\.1:(\d+) \((\d) nodes\)$"
# What a command that has to reach nodes is given, so that a refusal does not take ten seconds; but a busy machine has the time to look.
IMPATIENT = ("--start-timeout-ms", "3000", "--dial-timeout-ms", "2000")
NOWHERE = "redis://127.0.0.1:1"
pytestmark = pytest.mark.slow


def node_flags(nodes: Sequence[RedisNode | str]) -> list[str]:
    """Name nodes on a command line."""
    return [flag for node in nodes for flag in ("--node", node if isinstance(node, str) else node.url)]


def start_serve(
    commands: CommandProcesses, nodes: Sequence[RedisNode | str], *flags: str, **environment: str
) -> CommandProcess:
    """Start a server on any free port, unless told otherwise."""
    listen = () if "--listen" in flags else ("--listen", "127.0.0.1:0")
    return commands.start_redfence("serve", *node_flags(nodes), *listen, *flags, environment=environment)


@asynccontextmanager
async def ready(process: CommandProcess) -> AsyncIterator[LockServer]:
    """Yield the server once it has said that it is ready."""
    port = (await process.wait_for_line(READY, timeout_s=20))[1]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield LockServer(channel)


async def refusal(process: CommandProcess, *, command: str = "serve") -> str:
    """Return the one line in which a command says why it does not start; its exit status is 2 and it says nothing else.

    Log entries about nodes are allowed before it: they tell when and where.
    """
    assert await process.wait(timeout_s=20) == 2, process.stderr
    assert process.stdout == ""
    *before, line = process.stderr.splitlines()
    assert all(each.startswith("{") for each in before), process.stderr
    start = f"redfence {command}: "
    assert line.startswith(start)
    return line.removeprefix(start)


# --- serve: it starts and it ends -------------------------------------------------------------------------------------


async def test_a_server_says_when_it_is_ready_and_ends_with_0_at_a_signal(
    commands: CommandProcesses, formed_nodes: FormedNodes
) -> None:
    """One line names the address, with the port that was free; SIGTERM and SIGINT end it in good order."""
    nodes = await formed_nodes(3)
    processes = [start_serve(commands, nodes), start_serve(commands, nodes)]
    for process, number in zip(processes, (signal.SIGTERM, signal.SIGINT), strict=True):
        async with ready(process) as server:
            assert (await server.acquire(number.name)).outcome == ACQUIRE_OUTCOME_GRANTED
            assert process.stdout.count("\n") == 1
            assert await process.stop(number=number) == 0
        assert '"event": "stopped"' in process.stderr.splitlines()[-1]
        assert "Traceback" not in process.stderr


async def test_sigterm_answers_calls_under_way_tells_the_streams_and_does_not_take_the_whole_grace(
    commands: CommandProcesses, formed_nodes: FormedNodes
) -> None:
    """Waiters are sent to another server, streams get the notice and end with OK, and the process ends with 0."""
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
        assert (await calling).reason == ERROR_REASON_DRAINING
        assert (await commanded).error.reason == ERROR_REASON_DRAINING
        assert await session.ended() is None
        assert session.draining is not None
        assert session.draining.grace.ToMilliseconds() == 30_000
        notice = await keep_alive.read()
        assert isinstance(notice, lock_pb2.KeepAliveResponse)
        assert notice.HasField("draining")
        assert await keep_alive.code() is grpc.StatusCode.OK
        assert await process.wait(timeout_s=15) == 0
        assert now_ms() - signalled_at_ms < 15_000


async def test_a_server_starts_with_a_quorum_of_its_nodes_and_takes_the_others_when_they_come(
    commands: CommandProcesses, fresh_formed_nodes: FormedNodes
) -> None:
    """A node that is down at the start is no reason not to serve, and is used once it is back."""
    nodes = await fresh_formed_nodes(3)
    nodes[2].kill()
    process = start_serve(commands, nodes)
    async with ready(process) as server:
        assert (await server.acquire(NAME)).outcome == ACQUIRE_OUTCOME_GRANTED
        await server.until_states(NODE_STATE_READY, NODE_STATE_READY, NODE_STATE_UNREACHABLE)
        await nodes[2].start()
        await server.until_states(*[NODE_STATE_READY] * 3)
        assert await process.stop() == 0


async def test_a_server_whose_nodes_are_gone_ends_at_a_signal_as_well(
    commands: CommandProcesses, fresh_formed_nodes: FormedNodes, start_proxy: StartProxy
) -> None:
    """Connections that break, and others that never come about, do not keep the process from its end."""
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
    """Each setting has one name everywhere: three servers listen where the strongest source says."""
    nodes = await formed_nodes(3)
    by_file, by_environment, by_flag = free_port(), free_port(), free_port()
    file = tmp_path / "redfence.toml"
    urls = ", ".join(f'"{node.url}"' for node in nodes)
    file.write_text(f'nodes = [{urls}]\nlisten = "127.0.0.1:{by_file}"\nnode_timeout_ms = 700\n')
    variables = {"REDFENCE_LISTEN": f"127.0.0.1:{by_environment}"}
    config = ("serve", "--config", str(file))
    processes = {
        by_file: commands.start_redfence(*config),
        by_environment: commands.start_redfence(*config, environment=variables),
        by_flag: commands.start_redfence(*config, "--listen", f"127.0.0.1:{by_flag}", environment=variables),
    }
    for port, process in processes.items():
        ready_line = await process.wait_for_line(READY, timeout_s=20)
        assert ready_line.groups() == (str(port), "3")


async def test_nodes_may_come_from_the_environment(
    commands: CommandProcesses, formed_nodes: FormedNodes
) -> None:
    """Separated by commas; passwords need not stand on a command line."""
    urls = ",".join(node.url for node in await formed_nodes(3))
    process = start_serve(commands, (), REDFENCE_NODES=urls)
    assert (await process.wait_for_line(READY, timeout_s=20))[2] == "3"


# --- serve: it refuses to start -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((), ["nodes", "--node", "REDFENCE_NODES"]),
        (("--node", NOWHERE, "--node", "redis://127.0.0.1:2"), ["node", "2 nodes", "1, 3, 5 or 7"]),
        (
            ("--node", NOWHERE, "--node", "redis://127.0.0.1:2", "--node", NOWHERE),
            ["node", "127.0.0.1:1 is named twice", "node 0 and node 2"],
        ),
        (("--node", "http://:hunter2@127.0.0.1:1"), ["node 0", "starts with redis://"]),
        (("--node", "redis://:hunter2@127.0.0.1:many"), ["node 0", "is malformed"]),
        (("--node", "redis://:hunter2/3@127.0.0.1:1"), ["node 0", "percent-encode"]),
        (("--node", "redis://127.0.0.1:99999999?password=hunter2"), ["node 0", "is malformed"]),
        (("--node", NOWHERE, "--node", "redis://127.0.0.1:2?foo=hunter2"), ["node 1", "an option"]),
        (("--node", "redis://127.0.0.1:1?protocol=3"), ["node 0", "an option"]),
        (("--node", "redis://"), ["node 0", "names no host"]),
        (("--node", NOWHERE, "--listen", "50051"), ["listen", "'50051' is not HOST:PORT"]),
        (("--node", NOWHERE, "--node-timeout-ms", "0"), ["node_timeout_ms", "greater than or equal to 10"]),
        (
            ("--node", NOWHERE, "--counter-idle-ms", str(2**63 - 1)),
            ["counter_idle_ms", "less than or equal to"],
        ),
        (("--node", NOWHERE, "--node-timeout-ms", "soon"), ["node_timeout_ms", "valid integer"]),
        (("--node", NOWHERE, "--key-prefix", "a{b}"), ["key_prefix"]),
        (("--node", NOWHERE, "--log-level", "loud"), ["log_level"]),
        (("--config", "/nowhere/redfence.toml"), ["config", "cannot read /nowhere/redfence.toml"]),
    ],
    ids=lambda value: " ".join(value) or "nothing" if isinstance(value, tuple) else "",
)
async def test_a_wrong_setting_is_told_in_one_line_that_names_it_and_no_password(
    arguments: tuple[str, ...], told: list[str], commands: CommandProcesses
) -> None:
    """Exit status 2, nothing on standard output, and no traceback."""
    process = commands.start_redfence("serve", *arguments)
    line = await refusal(process)
    assert process.stderr.count("\n") == 1
    assert line.startswith(told[0] + ":")
    for words in told[1:]:
        assert words in line
    assert "hunter2" not in process.stderr


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("nodes = [", ["config", "is not TOML"]),
        ("nodez = []", ["nodez", "Extra inputs"]),
        ('nodes = ["redis://127.0.0.1:1"]\nheartbeat_interval_ms = "x"', ["heartbeat_interval_ms"]),
    ],
    ids=["malformed", "unknown key", "wrong value"],
)
async def test_a_wrong_file_is_told_in_one_line_that_names_the_file_or_the_setting(
    text: str, told: list[str], commands: CommandProcesses, tmp_path: Path
) -> None:
    """A slip in the file is not passed over."""
    file = tmp_path / "redfence.toml"
    file.write_text(text)
    process = commands.start_redfence("serve", "--config", str(file))
    line = await refusal(process)
    assert process.stderr.count("\n") == 1
    for words in told:
        assert words in line


async def test_a_port_in_use_is_told_before_any_node_is_asked(commands: CommandProcesses) -> None:
    """Two servers on one port would share the calls at random."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        process = start_serve(commands, [NOWHERE], "--listen", address)
        line = await refusal(process)
    assert line.startswith(f"listen: cannot listen on {address}: ")
    assert process.stderr.count("\n") == 1


async def test_a_server_does_not_run_without_assertions(commands: CommandProcesses) -> None:
    """They guard what must never happen."""
    process = commands.start(sys.executable, "-O", "-m", "redfence", "serve", *node_flags([NOWHERE]))
    assert "python -O" in await refusal(process)


async def test_a_replica_among_the_nodes_is_refused(
    commands: CommandProcesses, fresh_formed_nodes: FormedNodes
) -> None:
    """A replica does not decide what it stores, so it cannot vote."""
    nodes = await fresh_formed_nodes(3)
    await nodes[1].call("REPLICAOF", "127.0.0.1", str(nodes[0].port))
    line = await refusal(start_serve(commands, nodes, *IMPATIENT))
    assert line == (
        f"node 1 (127.0.0.1:{nodes[1].port}): it is a replica; every node must be an independent primary"
    )


async def test_a_node_of_another_cluster_and_nodes_in_another_order_are_refused(
    commands: CommandProcesses, flushed_nodes: FlushedNodes
) -> None:
    """Votes of two clusters, or of one node in two places, do not make a quorum."""
    nodes = await flushed_nodes(6)
    await form(nodes[:3])
    await form(nodes[3:])
    mixed = start_serve(commands, [*nodes[:2], nodes[5]], *IMPATIENT)
    swapped = start_serve(commands, [nodes[1], nodes[0], nodes[2]], *IMPATIENT)
    fewer = start_serve(commands, nodes[:1], *IMPATIENT)
    assert "it belongs to cluster" in await refusal(mixed)
    line = await refusal(swapped)
    assert line.startswith(("node 0", "node 1"))
    assert "the nodes are in another order, or one is named twice" in line
    assert "formed as one of 3 nodes, but 1 are configured" in await refusal(fewer)


async def test_without_a_quorum_a_server_does_not_start_and_tells_of_every_missing_node(
    commands: CommandProcesses, flushed_nodes: FlushedNodes
) -> None:
    """Unreachable, not formed, or behind a wrong password: each is named with what is wrong."""
    nodes = await flushed_nodes(3)
    unformed = start_serve(commands, nodes, *IMPATIENT)
    unreachable = start_serve(commands, [nodes[0], NOWHERE, "redis://127.0.0.1:2"], *IMPATIENT)
    wrong = [f"redis://:hunter2@127.0.0.1:{node.port}" for node in nodes]
    shut_out = start_serve(commands, wrong, *IMPATIENT)
    line = await refusal(unformed)
    for index, node in enumerate(nodes):
        assert f"node {index} (127.0.0.1:{node.port}): it has no cluster identity: never formed" in line
    line = await refusal(unreachable)
    assert line.startswith("no quorum of nodes is ready: ")
    assert "node 1 (127.0.0.1:1): " in line
    assert "node 2 (127.0.0.1:2): " in line
    line = await refusal(shut_out)
    assert line.count("password") >= 3
    assert "hunter2" not in shut_out.stderr


# --- cluster init ---------------------------------------------------------------------------------------------------------


def start_init(commands: CommandProcesses, nodes: Sequence[RedisNode | str], *flags: str) -> CommandProcess:
    """Start to form a cluster."""
    return commands.start_redfence("cluster", "init", *node_flags(nodes), *flags)


async def test_a_cluster_is_formed_once_and_forming_it_again_changes_nothing(
    commands: CommandProcesses, flushed_nodes: FlushedNodes
) -> None:
    """The same id is told each time; the nodes then serve with the greatest ttl that was given."""
    nodes = await flushed_nodes(3)
    first = start_init(commands, nodes, "--max-ttl", "1m")
    assert await first.wait(timeout_s=20) == 0, first.stderr
    line = first.stdout
    assert line.startswith("cluster ")
    assert line.endswith(": formed, 3 nodes\n")
    before = await memories(nodes)
    again, another_ttl = start_init(commands, nodes, "--max-ttl", "60000ms"), start_init(commands, nodes)
    assert await again.wait(timeout_s=20) == 0, again.stderr
    assert again.stdout == line
    assert (await refusal(another_ttl, command="cluster init")).startswith("max_ttl: ")
    assert await memories(nodes) == before
    process = start_serve(commands, nodes)
    async with ready(process) as server:
        status = await server.status()
        assert status.max_ttl.ToMilliseconds() == 60_000
        assert status.cluster_id == line.split()[1].rstrip(":")


async def test_a_cluster_is_formed_also_while_nodes_of_it_are_out(
    commands: CommandProcesses, formed_nodes: FormedNodes
) -> None:
    """Repeating it then changes nothing, and tells who is out and what brings it back."""
    nodes = await formed_nodes(3)
    await nodes[1].call("HSET", "redfence:node", "state", "quarantined")
    before = await memories(nodes)
    process = start_init(commands, nodes)
    assert await process.wait(timeout_s=20) == 0, process.stderr
    assert process.stdout.endswith(": formed, 3 nodes\n")
    [entry] = [json.loads(line) for line in process.stderr.splitlines()]
    assert (entry["event"], entry["node_index"], entry["state"]) == ("node_not_ready", 1, "quarantined")
    assert "comes back by itself" in entry["consequence"]
    assert await memories(nodes) == before


@pytest.mark.parametrize(
    ("count", "consequence"),
    [(1, "`redfence cluster recover`"), (3, "quarantined for 2.5 s, the greatest ttl, and then rejoins")],
)
async def test_whoever_forms_a_cluster_of_nodes_that_are_not_durable_is_told_what_comes_of_it(
    commands: CommandProcesses, fresh_nodes: FreshNodes, count: int, consequence: str
) -> None:
    """Each of them is named with what is missing, while it is early enough."""
    nodes = await fresh_nodes(count, appendfsync="everysec")
    process = start_init(commands, nodes, "--max-ttl", "2.5")
    assert await process.wait(timeout_s=20) == 0, process.stderr
    told = [json.loads(line) for line in process.stderr.splitlines()]
    assert [entry["node_index"] for entry in told] == list(range(count))
    for entry in told:
        assert entry["gap"] == "appendfsync is everysec, not always"
        assert consequence in entry["consequence"]


async def test_a_node_that_would_drop_keys_is_not_formed(
    commands: CommandProcesses, fresh_nodes: FreshNodes
) -> None:
    """It is named, with the setting, and no node is touched."""
    nodes = await fresh_nodes(3)
    await nodes[1].call("CONFIG", "SET", "maxmemory", "100mb")
    await nodes[1].call("CONFIG", "SET", "maxmemory-policy", "volatile-ttl")
    line = await refusal(start_init(commands, nodes), command="cluster init")
    assert line.startswith(f"node 1 (127.0.0.1:{nodes[1].port}): it would drop keys")
    assert "volatile-ttl" in line
    assert await memories(nodes) == [{}, {}, {}]


async def test_two_databases_of_one_server_are_not_formed_as_two_nodes(
    commands: CommandProcesses, flushed_nodes: FlushedNodes
) -> None:
    """They would fail together; here under two names of this machine."""
    nodes = await flushed_nodes(2)
    urls = [nodes[0].url, nodes[1].url, nodes[0].url.replace("127.0.0.1", "localhost") + "/1"]
    line = await refusal(start_init(commands, urls), command="cluster init")
    assert (
        line
        == f"node 2 (localhost:{nodes[0].port}): it is the same process as node 0; every node must be a server of its own"
    )
    assert await memories(nodes) == [{}, {}]


async def test_forming_that_was_broken_off_is_not_served_and_is_finished_by_the_next(
    commands: CommandProcesses, formed_nodes: FormedNodes
) -> None:
    """A crash in the last pass leaves nodes that do not vote yet."""
    nodes = await formed_nodes(3)
    for node in nodes[1:]:
        await node.call("HSET", "redfence:node", "state", "assembled")
    line = await refusal(start_serve(commands, nodes, *IMPATIENT))
    assert line.count("not formed to the end: run `redfence cluster init` again") == 2
    process = start_init(commands, nodes)
    assert await process.wait(timeout_s=20) == 0, process.stderr
    assert [await node.call("HGET", "redfence:node", "state") for node in nodes] == [b"ready"] * 3


@pytest.mark.parametrize(
    ("state", "place", "reached", "wiped", "refused"),
    [
        ("forming", 2, ["forming", "forming", None], [0], False),
        ("assembled", 0, ["forming"] * 3, [0, 1], False),
        ("assembled", 2, ["assembled", "assembled", "forming"], [0, 1], False),
        ("assembled", 2, ["assembled", "assembled", "forming"], [2], True),
        ("ready", 0, ["assembled"] * 3, [0], True),
        ("ready", 2, ["ready", "ready", "assembled"], [0, 1], True),
    ],
)
async def test_nodes_that_are_wiped_after_forming_broke_off_are_formed_again_only_if_none_can_have_voted(
    *,
    state: str,
    place: int,
    reached: list[str | None],
    wiped: list[int],
    refused: bool,
    flushed_nodes: FlushedNodes,
    start_proxy: StartProxy,
) -> None:
    """A quorum that was ready may have granted what it knows nothing of any more."""
    nodes = await flushed_nodes(3)
    proxies = [await start_proxy(node) for node in nodes]
    broken_off = proxies[place].hold_before(f"\r\n{state}\r\n".encode())
    forming = asyncio.create_task(form_through(proxies, nodes))
    async with asyncio.timeout(10):
        await broken_off.wait()
    forming.cancel()
    await asyncio.wait([forming])
    states = [await node.call("HGET", "redfence:node", "state") for node in nodes]
    assert states == [each and each.encode() for each in reached]
    for index in wiped:
        await nodes[index].call("FLUSHALL")
    before = await memories(nodes)
    if refused:
        told = rf"node {wiped[0]} .* `redfence cluster recover` if fewer than a quorum of the others votes"
        with pytest.raises(NodeRejectedError, match=told):
            await form(nodes)
        assert await memories(nodes) == before
    else:
        await form(nodes)
        states = [await node.call("HGET", "redfence:node", "state") for node in nodes]
        assert states == [b"ready"] * 3


async def form_through(proxies: Sequence[TcpProxy], nodes: Sequence[RedisNode]) -> str:
    """Form a cluster through proxies, and return its id."""
    urls = [proxy.url(node.url) for proxy, node in zip(proxies, nodes, strict=True)]
    return await cluster_forming.form(
        check_urls(urls), keys=Keyspace(), ttl_ms_max=300_000, randomness=SystemRandomness()
    )


async def test_nodes_that_are_not_empty_wiped_or_of_another_cluster_are_not_formed_and_nothing_is_changed(
    commands: CommandProcesses, flushed_nodes: FlushedNodes
) -> None:
    """A fresh identity lets a node vote as if it had never forgotten, so it is given to empty nodes of a new cluster only."""
    nodes = await flushed_nodes(7)
    used, wiped, extra = nodes[:3], nodes[3:6], nodes[6]
    await used[1].call("SET", "somebody's", "data")
    await form(wiped)
    await wiped[2].call("FLUSHALL")
    before = await memories(nodes)
    for process, told in (
        (
            start_init(commands, used),
            f"node 1 (127.0.0.1:{used[1].port}): it holds 1 keys; a cluster is formed on empty",
        ),
        (
            start_init(commands, wiped),
            f"node 2 (127.0.0.1:{wiped[2].port}): it is empty, but others belong to cluster",
        ),
        (start_init(commands, [wiped[0]]), "of 3 nodes already"),
        (start_init(commands, [*wiped, extra, used[0]]), "of 3 nodes already"),
        (start_init(commands, [wiped[1], wiped[0], extra]), "it was formed as node 1"),
        (start_init(commands, [extra, NOWHERE, used[2]]), "node 1 (127.0.0.1:1): "),
        (start_init(commands, used[:2]), "node: 2 nodes are configured"),
        (start_init(commands, [extra], "--max-ttl", "99ms"), "max_ttl: it must be from 100 ms to 30 days"),
        (start_init(commands, [extra], "--max-ttl", "721h"), "max_ttl: it must be from 100 ms to 30 days"),
    ):
        line = await refusal(process, command="cluster init")
        assert told in line
        assert process.stderr.count("\n") == 1
    assert await memories(nodes) == before


async def test_a_replica_is_not_formed(commands: CommandProcesses, fresh_nodes: FreshNodes) -> None:
    """It would follow its primary, identity included."""
    nodes = await fresh_nodes(3)
    await nodes[2].call("REPLICAOF", "127.0.0.1", str(nodes[0].port))
    line = await refusal(start_init(commands, nodes), command="cluster init")
    assert (
        line
        == f"node 2 (127.0.0.1:{nodes[2].port}): it is a replica; every node must be an independent primary"
    )
    assert await memories(nodes) == [{}, {}, {}]


async def test_of_two_operators_who_form_the_same_nodes_at_once_one_succeeds_and_the_other_changes_nothing(
    flushed_nodes: FlushedNodes, start_proxy: StartProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both found the nodes empty; whoever gets the first node gets them all, and no mixture is left that nobody can finish."""
    nodes = await flushed_nodes(3)
    slow, fast = [[await start_proxy(node) for node in nodes] for _ in range(2)]
    both_have_looked = asyncio.Barrier(2 * len(nodes))
    examine = examination.examine

    async def examine_together(node: DialledNode, keys: Keyspace, clock: Clock) -> Findings:
        found = await examine(node, keys, clock)
        await both_have_looked.wait()
        # The slow one is the first at node 0, and then late at node 1.
        slow[1].hold(replies=False)
        fast[0].hold(replies=False)
        return found

    monkeypatch.setattr(examination, "examine", examine_together)

    first, second = [asyncio.create_task(form_through(proxies, nodes)) for proxies in (slow, fast)]

    async def begun() -> bool:
        return bool(await memory(nodes[0]))

    await until(begun)
    await fast[0].heal()
    with pytest.raises(NodeRejectedError, match=r"node 0 .* somebody else"):
        await second
    assert await memories(nodes[1:]) == [{}, {}]
    await slow[1].heal()
    cluster_id = await first
    monkeypatch.undo()
    assert await form(nodes) == cluster_id


# --- cluster status -------------------------------------------------------------------------------------------------------


async def test_the_status_of_a_cluster_tells_what_a_server_knows_of_each_node(
    commands: CommandProcesses, fresh_formed_nodes: FormedNodes
) -> None:
    """As JSON and as a table: a node that is well, one that is away, and how often that has changed."""
    nodes = await fresh_formed_nodes(3)
    process = start_serve(commands, nodes)
    async with ready(process) as server:
        await server.until_states(*[NODE_STATE_READY] * 3)
        token = (await server.acquire(NAME)).lease.fencing_token
        port = process.stdout.split(":")[1].split()[0]
        run_id = re.search(rb"^run_id:(\w+)", await info_of(nodes[0]), re.MULTILINE)
        assert run_id
        nodes[2].kill()
        await server.until_states(NODE_STATE_READY, NODE_STATE_READY, NODE_STATE_UNREACHABLE)
        status = ("cluster", "status", "--server", f"127.0.0.1:{port}")
        as_json, as_table = commands.start_redfence(*status, "-o", "json"), commands.start_redfence(*status)
        assert await as_json.wait(timeout_s=20) == 0, as_json.stderr
        told = json.loads(as_json.stdout)
        assert told["ready"]
        first, last = told["nodes"][0], told["nodes"][2]
        assert first["run_id"].encode() == run_id[1]
        assert (first["state"], first["durability"], first["high"]) == ("ready", "proven", token)
        assert abs(first["clock_offset"]) < 1
        assert (first["clock_distrusted_for"], first["state_changes"]) == (0, 1)
        assert (last["state"], last["state_changes"]) == ("unreachable", 2)
        assert last["detail"]
        assert await as_table.wait(timeout_s=20) == 0, as_table.stderr
        heading, *lines = as_table.stdout.splitlines()
        assert " ".join(heading.split()) == "NODE STATE LATENCY CLOCK RUN HIGH DURABLE SINCE ADDRESS"
        cells = lines[0].split()
        assert [*cells[:2], *cells[4:7], cells[8]] == [
            *("0", "ready", first["run_id"][:8], str(token), "proven"),
            f"127.0.0.1:{nodes[0].port}",
        ]
        assert lines[2].split()[:2] == ["2", "unreachable"]
        assert lines[3].startswith("      ")
        assert lines[-1].endswith(": ready (quorum 2)")
        nodes[1].kill()
        await server.until_states(NODE_STATE_READY, NODE_STATE_UNREACHABLE, NODE_STATE_UNREACHABLE)
        no_quorum = commands.start_redfence(*status)
        assert await no_quorum.wait(timeout_s=20) == 1
        assert no_quorum.stdout.splitlines()[-1].endswith(": NO QUORUM (quorum 2)")


async def info_of(node: RedisNode) -> bytes:
    """Return what the node's process says of itself."""
    info = await node.call("INFO", "server")
    assert isinstance(info, bytes)
    return info
