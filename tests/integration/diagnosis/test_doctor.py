"""`redfence doctor` on real nodes: it finds every fault of a node, and nothing on nodes that are well."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import pytest

from harness.processes.access_list import restricted
from harness.processes.commands import CommandProcess, CommandProcesses, node_flags
from harness.processes.fixture_types import FlushedNodes, FreshNodes, StartProxy
from harness.processes.ports import HOST, free_port
from harness.processes.redis_nodes import RedisNode
from harness.processes.servers import FormedNodes, form, until
from redfence_server.clock import SystemClock
from redfence_server.diagnosis.checkup import Checkup, check_up
from redfence_server.diagnosis.doctor import Limits, diagnose
from redfence_server.diagnosis.finding import Diagnosis, Kind, Severity
from redfence_server.embedded.binary import RedisBinary
from redfence_server.nodes.cluster import check_urls
from redfence_server.redis_io.scripts import Keyspace

SERIOUS, WARNING, NOTE = Severity
pytestmark = pytest.mark.slow

Found = set[tuple[int | None, Severity, Kind]]
NO_LIMIT: Found = {(index, NOTE, Kind.NO_MEMORY_LIMIT) for index in range(3)}


async def checkups_of(nodes: Sequence[RedisNode | str], *, watch_ms: int = 100) -> list[Checkup]:
    """Look at the nodes from within this process."""
    urls = check_urls([node if isinstance(node, str) else node.url for node in nodes])
    return await check_up(urls, Keyspace(), dial_timeout_ms=2_000, clock=SystemClock(), watch_ms=watch_ms)


async def examined(nodes: Sequence[RedisNode | str]) -> Diagnosis:
    """Look, and judge."""
    return diagnose(await checkups_of(nodes), Limits(node_timeout_ms=500))


# A busy machine answers late, and no node is to blame.
LATENCY = frozenset({Kind.SLOW, Kind.UNSTEADY})


def found(diagnosis: Diagnosis, *, but: Found = NO_LIMIT, ignored: Collection[Kind] = LATENCY) -> Found:
    """Return the findings, without those that are not of interest."""
    told = {(each.node, each.severity, each.kind) for each in diagnosis.findings if each.kind not in ignored}
    return told - but


def text_of(diagnosis: Diagnosis, kind: Kind) -> str:
    """Return the sentences of the only finding of a kind."""
    (finding,) = (each for each in diagnosis.findings if each.kind is kind)
    return f"{finding.what}\n{finding.advice}"


async def set_all(node: RedisNode, **settings: str) -> None:
    """Change a running node's settings."""
    node.disturbed = True
    for name, value in settings.items():
        assert await node.call("CONFIG", "SET", name.replace("_", "-"), value) == b"OK"


async def until_info(node: RedisNode, section: str, line: str) -> None:
    """Return once INFO has this line."""
    node.disturbed = True

    async def told() -> bool:
        info = await node.call("INFO", section)
        assert isinstance(info, bytes)
        return line in info.decode().splitlines()

    await until(told, timeout_s=20)


# --- the command ----------------------------------------------------------------------------------


def start_doctor(
    commands: CommandProcesses, nodes: Sequence[RedisNode | str], *flags: str, **environment: str
) -> CommandProcess:
    return commands.start_redfence("doctor", *node_flags(nodes), *flags, environment=environment)


async def outputs(start: Callable[[], CommandProcess], *, status: int) -> CommandProcess:
    """Run it until it does not complain of the latency, which is this machine's, and return it ended."""
    async with asyncio.timeout(60):
        while True:
            process = start()
            await process.ended(status=status)
            if "round trips" not in process.stdout:
                return process


async def test_of_nodes_that_are_well_it_says_so_and_ends_with_0(
    commands: CommandProcesses, fresh_nodes: FreshNodes, engine: RedisBinary
) -> None:
    """It prints a line for each node and the cluster, and nothing else. A note does not change that."""
    nodes = await fresh_nodes(3, binary=engine)
    cluster_id = await form(nodes)
    for node in nodes[1:]:
        await set_all(node, maxmemory="1gb")
    with_note = await outputs(lambda: start_doctor(commands, nodes), status=0)
    await set_all(nodes[0], maxmemory="1gb")
    environment = {"REDFENCE_NODES": ",".join(node.url for node in nodes)}
    table = await outputs(lambda: start_doctor(commands, [], **environment), status=0)
    head, *lines = table.stdout.splitlines()
    assert head.split()[:3] == ["NODE", "VERDICT", "VOTE"]
    for index, (node, line) in enumerate(zip(nodes, lines, strict=False)):
        words = line.split()
        assert words[:4] == [str(index), "well", "yes", engine.engine]
        assert words[-1] == f"127.0.0.1:{node.port}"
    last = f"cluster {cluster_id}: 3 of 3 nodes can vote (quorum 2); all is well"
    assert lines[3:] == ["", last]
    assert with_note.stdout.splitlines()[-1] == last
    assert "no memory limit" in with_note.stdout
    assert table.stderr == with_note.stderr == ""
    as_json = await outputs(lambda: start_doctor(commands, nodes, "-o", "json"), status=0)
    told = json.loads(as_json.stdout)
    assert (told["serious"], told["findings"], told["cluster_id"]) == (False, [], cluster_id)
    for node in told["nodes"]:
        assert node["can_vote"]
        assert node["engine"] == engine.engine
        assert node["latency_ms"]["median"] > 0
        # One machine, so one clock; but Valkey looks at it once in a ms.
        assert abs(node["clock_offset_ms"]["offset"]) <= node["clock_offset_ms"]["unsure"] + 1


async def test_of_nodes_that_are_not_well_it_says_what_to_do_and_ends_with_1(
    commands: CommandProcesses, fresh_formed_nodes: FormedNodes
) -> None:
    """It names a stopped node, a wrong password and an evicting node, and shows no password."""
    nodes = await fresh_formed_nodes(3)
    nodes[0].pause()
    await set_all(nodes[1], maxmemory="1gb", maxmemory_policy="allkeys-lru")
    wrong = f"redis://:hunter2@127.0.0.1:{nodes[2].port}"
    # Long enough for the two that do answer, on a machine that stands still now and then.
    flags = ("--dial-timeout-ms", "2000")
    table = start_doctor(commands, [*nodes[:2], wrong], *flags)
    as_json = start_doctor(commands, [*nodes[:2], wrong], *flags, "--output", "json")
    for process in (table, as_json):
        output = await process.ended(status=1)
        for secret in ("hunter2", *(node.url.split("@")[0].rpartition(":")[2] for node in nodes)):
            assert secret not in output
    told = {(each["node"], each["severity"], each["kind"]) for each in json.loads(as_json.stdout)["findings"]}
    assert {each for each in told if each[1] == "serious"} == {
        (None, "serious", "no_quorum"),
        (0, "serious", "unreachable"),
        (1, "serious", "evicts"),
        (2, "serious", "denied"),
    }
    text = " ".join(table.stdout.split())
    assert f"node 0 (127.0.0.1:{nodes[0].port}) serious it does not answer: Timeout" in text
    assert "found: 4 serious" in text


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("", "nodes"),
        ("--node redis://:hunter2@host:port", "malformed"),
        ("--node redis://a:1 --dial-timeout-ms 1", "dial_timeout_ms"),
        ("--node redis://a:1 -o yaml", "yaml"),
    ],
)
async def test_settings_that_it_cannot_run_with_end_it_with_2(
    flags: str, told: str, commands: CommandProcesses
) -> None:
    process = commands.start_redfence("doctor", *flags.split())
    output = await process.ended(status=2)
    assert process.stdout == ""
    assert "redfence doctor: " in output
    assert told in output
    assert "hunter2" not in output


async def test_its_help_tells_what_its_exit_status_means(commands: CommandProcesses) -> None:
    text = " ".join((await commands.start_redfence("doctor", "--help").ended()).split())
    for words in ("exit status: 0 no serious finding", "1 a serious finding", "2 it could not run"):
        assert words in text


async def test_a_reader_that_stops_reading_ends_it_without_a_word(tmp_path: Path) -> None:
    """`| head` does so; the status is that of a program which SIGPIPE ended."""
    reading, writing = os.pipe()
    os.close(reading)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "redfence", "doctor", "--node", "redis://127.0.0.1:1"),
        stdout=writing,
        stderr=asyncio.subprocess.PIPE,
        cwd=tmp_path,
    )
    os.close(writing)
    _, told = await asyncio.wait_for(process.communicate(), timeout=30)
    assert (process.returncode, told) == (141, b"")


# --- reach ----------------------------------------------------------------------------------------


async def test_a_node_that_is_down_or_stops_or_breaks_off_does_not_hold_the_others_up(
    fresh_formed_nodes: FormedNodes, start_proxy: StartProxy
) -> None:
    nodes = await fresh_formed_nodes(3)
    nodes[0].kill()
    proxy = await start_proxy(nodes[1])
    through = proxy.url(nodes[1].url)
    # It comes after all that is asked, and begins the watch of the latency.
    breaks_off = proxy.hold_before(b"\r\nPING\r\n")
    diagnosis = await examined([nodes[0], through, nodes[2]])
    assert breaks_off.is_set()
    unreachable = {(index, SERIOUS, Kind.UNREACHABLE) for index in (0, 1)}
    assert found(diagnosis) == unreachable | {(None, SERIOUS, Kind.NO_QUORUM)}
    assert diagnosis.voters == {2}


async def test_a_checkup_leaves_no_connection(formed_nodes: FormedNodes) -> None:
    """Its connections go when it ends, and when it is broken off in the middle."""
    nodes = await formed_nodes(3)

    async def connections() -> int:
        lists = [await node.call("CLIENT", "LIST") for node in nodes]
        return sum(each.count(b" name=redfence ") for each in lists if isinstance(each, bytes))

    async def until_connected(count: int) -> None:
        async def reached() -> bool:
            return await connections() == count

        await until(reached, timeout_s=20)

    await checkups_of(nodes)
    await until_connected(0)
    looking = asyncio.create_task(checkups_of(nodes, watch_ms=60_000))
    await until_connected(3)
    looking.cancel()
    await asyncio.wait([looking])
    assert looking.cancelled()
    await until_connected(0)


async def test_the_documented_access_list_is_enough_and_what_is_missing_is_named(
    flushed_nodes: FlushedNodes, engine: RedisBinary
) -> None:
    """Without a right, it says all that it can say without it."""
    nodes = await flushed_nodes(3, binary=engine)
    await form(nodes)

    async def without(*missing: str) -> Diagnosis:
        async with restricted(nodes[:1], without=missing) as urls:
            return await examined([*urls, *nodes[1:]])

    assert found(await without()) == set()
    for right in ("+time", "+config|get", "+info", "+eval", "+hgetall", "~redfence:*"):
        kind = Kind.SETTINGS_HIDDEN if right == "+config|get" else Kind.REFUSED
        diagnosis = await without(right)
        assert {each for each in found(diagnosis) if each[0] == 0} == {(0, SERIOUS, kind)}, right
        assert right in text_of(diagnosis, kind)
        assert 0 not in diagnosis.voters


# --- settings and process -------------------------------------------------------------------------


async def test_nodes_that_would_lose_what_they_answered_are_told_apart(fresh_nodes: FreshNodes) -> None:
    """A node that was formed so votes, until it restarts; a node that became so does not vote."""
    nodes = await fresh_nodes(5)
    await set_all(nodes[0], appendonly="no")
    await set_all(nodes[1], appendfsync="everysec", no_appendfsync_on_rewrite="yes")
    await form(nodes)
    await set_all(nodes[1], appendfsync="always", no_appendfsync_on_rewrite="no")
    await set_all(nodes[2], appendonly="no")
    await set_all(nodes[3], aof_load_truncated="yes")
    diagnosis = await examined(nodes)
    assert found(diagnosis, but={(index, NOTE, Kind.NO_MEMORY_LIMIT) for index in range(5)}) == {
        (0, WARNING, Kind.NOT_DURABLE),
        (1, NOTE, Kind.NOT_YET_DURABLE),
        (2, SERIOUS, Kind.NOT_DURABLE),
        (3, SERIOUS, Kind.NOT_DURABLE),
    }
    assert diagnosis.voters == {0, 1, 4}
    await nodes[1].restart()
    diagnosis = await examined(nodes)
    assert (1, WARNING, Kind.FORGOT) in found(diagnosis)
    assert diagnosis.voters == {0, 4}


async def test_a_replica_its_primary_and_a_promoted_replica_are_told(
    engine: RedisBinary, fresh_nodes: FreshNodes
) -> None:
    """A replica shows the identity of its primary; once promoted, it stands at another's index."""
    nodes = await fresh_nodes(3, binary=engine)
    await form(nodes)
    primary, replica = nodes[0], nodes[1]
    await replica.follow(primary)
    await until_info(replica, "replication", "master_link_status:up")
    diagnosis = await examined(nodes)
    assert found(diagnosis) == {
        (0, WARNING, Kind.HAS_REPLICAS),
        (1, SERIOUS, Kind.REPLICA),
    }
    assert f"it follows 127.0.0.1:{primary.port}" in text_of(diagnosis, Kind.REPLICA)
    assert diagnosis.voters == {0, 2}
    primary.kill()
    assert await replica.call("REPLICAOF", "NO", "ONE") == b"OK"
    failed_over = await examined([replica, f"redis://{HOST}:1", nodes[2]])
    assert (0, WARNING, Kind.FORGOT) in found(failed_over)
    assert "replica" in text_of(failed_over, Kind.FORGOT)
    assert failed_over.voters == {2}


async def test_a_node_that_is_loading_is_told_and_not_taken_for_broken(fresh_nodes: FreshNodes) -> None:
    """It lets users in, and then answers no command that needs its data."""
    nodes = await fresh_nodes(3)
    await form(nodes)
    primary, slow = (await fresh_nodes(1))[0], nodes[1]
    fill = "for i = 1, 5000 do redis.call('SET', i, string.rep('x', 1000)) end"
    await primary.call("EVAL", fill, 0)
    # 1 ms for each key.
    await set_all(slow, key_load_delay="1000", loading_process_events_interval_bytes="1024")
    await slow.follow(primary)
    await until_info(slow, "persistence", "loading:1")
    assert found(await examined(nodes)) == {(1, WARNING, Kind.LOADING)}


async def test_a_server_in_cluster_mode_is_told(
    commands: CommandProcesses, fresh_formed_nodes: FormedNodes, engine: RedisBinary
) -> None:
    """It spreads keys over slots, and refuses scripts over them."""
    nodes = await fresh_formed_nodes(3)
    port = free_port()
    flags = f"--port {port} --cluster-enabled yes --cluster-port {free_port()} --save".split()
    process = commands.start(str(engine.path), *flags, "")
    await process.wait_for_line("Ready to accept connections")
    diagnosis = await examined([*nodes[:2], f"redis://{HOST}:{port}"])
    assert (2, SERIOUS, Kind.CLUSTER_MODE) in found(diagnosis)
    assert diagnosis.voters == {0, 1}


async def test_failed_snapshots_and_rewrites_are_told(fresh_formed_nodes: FormedNodes) -> None:
    """The failed snapshot stops all writes only where snapshots are to be made."""
    nodes = await fresh_formed_nodes(3)
    for node in nodes[:2]:
        (node.folder / "dump.rdb").mkdir()
        assert await node.call("BGSAVE")
        await until_info(node, "persistence", "rdb_last_bgsave_status:err")
    await set_all(nodes[0], save="3600 1")
    # A rewrite begins new files, whose names go up from those that are there.
    for number in range(2, 9):
        (nodes[2].folder / "appendonlydir" / f"appendonly.aof.{number}.base.rdb").mkdir()
    assert await nodes[2].call("BGREWRITEAOF")
    await until_info(nodes[2], "persistence", "aof_last_bgrewrite_status:err")
    assert found(await examined(nodes)) == {
        (0, SERIOUS, Kind.SNAPSHOT_FAILED),
        (1, WARNING, Kind.SNAPSHOT_FAILED),
        (2, WARNING, Kind.LOG_REWRITE_FAILED),
    }


async def test_memory_that_runs_short_and_keys_that_were_dropped_are_told(
    fresh_formed_nodes: FormedNodes,
) -> None:
    nodes = await fresh_formed_nodes(3)
    await set_all(nodes[0], maxmemory_policy="volatile-ttl")
    await set_all(nodes[1], maxmemory="1mb")
    await set_all(nodes[2], maxmemory="4mb", maxmemory_policy="volatile-lru")
    fill = "for i = 1, 5000 do redis.call('SET', i, string.rep('x', 1000), 'EX', 600) end"
    for _ in range(3):
        await nodes[2].call("EVAL", fill, 0)
    await set_all(nodes[2], maxmemory="0", maxmemory_policy="noeviction")
    diagnosis = await examined(nodes)
    assert found(diagnosis) == {
        (None, SERIOUS, Kind.NO_QUORUM),
        (0, WARNING, Kind.EVICTION_POLICY),
        (1, SERIOUS, Kind.MEMORY_SHORT),
        (2, WARNING, Kind.FORGOT),
    }
    assert "of its 1.0 MiB are used" in text_of(diagnosis, Kind.MEMORY_SHORT)
    assert "it has dropped" in text_of(diagnosis, Kind.FORGOT)


# --- clocks ---------------------------------------------------------------------------------------


async def test_the_offset_of_each_clock_is_measured_and_a_clock_set_meanwhile_is_serious(
    nodes_with_clocks: FreshNodes, start_proxy: StartProxy
) -> None:
    """The difference does no harm; the step does."""
    nodes = await nodes_with_clocks(3)
    await form(nodes)
    await nodes[1].step_clock(30_000)
    apart = await checkups_of(nodes)
    assert found(diagnose(apart, Limits(node_timeout_ms=500))) == set()
    offset = apart[1].clock_offset_ms
    assert offset
    # The slower a node answers, the less is sure. Valkey looks at its clock once in a ms.
    assert abs(offset[0] - 30_000) <= offset[1] + 2

    proxy = await start_proxy(nodes[2])
    # Its clock has been read once when the first of these is sent.
    watched = proxy.hold_before(b"\r\nPING\r\n")

    async def step() -> None:
        async with asyncio.timeout(20):
            await watched.wait()
        await nodes[2].step_clock(-500)
        await proxy.heal()

    through = proxy.url(nodes[2].url)
    checkups, _ = await asyncio.gather(checkups_of([*nodes[:2], through], watch_ms=1_000), step())
    for each in checkups:
        # A clock that only runs wrong needs the time to show it.
        assert each.readings[-1].received_ms - each.readings[0].sent_ms >= 1_000
    diagnosis = diagnose(checkups, Limits(node_timeout_ms=500))
    assert (2, SERIOUS, Kind.CLOCK_STEPS) in found(diagnosis)
    assert "back" in text_of(diagnosis, Kind.CLOCK_STEPS)
    assert diagnosis.voters == {0, 1}
