"""`redfence doctor` on real nodes: it finds every fault of a node, and nothing on nodes that are well."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from harness.processes.access_list import restricted
from harness.processes.commands import CommandProcess, CommandProcesses, node_flags
from harness.processes.fixture_types import FlushedNodes, FreshNodes
from harness.processes.ports import free_port
from harness.processes.redis_nodes import RedisNode
from harness.processes.servers import FormedNodes, form, until
from redfence_server import config
from redfence_server.clock import SystemClock
from redfence_server.diagnosis.checkup import Checkup, check_up
from redfence_server.diagnosis.doctor import diagnose
from redfence_server.diagnosis.finding import Diagnosis, Kind, Severity
from redfence_server.embedded.binary import RedisBinary
from redfence_server.errors import NodeRejectedError
from redfence_server.nodes.cluster import check_urls
from redfence_server.redis_io.scripts import Keyspace

SERIOUS, WARNING, NOTE = Severity
pytestmark = pytest.mark.slow

Found = set[tuple[int | None, Severity, Kind]]
NO_LIMIT: Found = {(index, NOTE, Kind.NO_MEMORY_LIMIT) for index in range(3)}


async def checkups_of(nodes: Sequence[RedisNode | str], *, watch_ms: int = 100) -> list[Checkup]:
    urls = check_urls([node if isinstance(node, str) else node.url for node in nodes])
    return await check_up(urls, Keyspace(), dial_timeout_ms=2_000, clock=SystemClock(), watch_ms=watch_ms)


async def examined(nodes: Sequence[RedisNode | str]) -> Diagnosis:
    return diagnose(await checkups_of(nodes), config.load({"nodes": ()}))


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
    node.disturbed = True
    for name, value in settings.items():
        assert await node.call("CONFIG", "SET", name.replace("_", "-"), value) == b"OK"


async def until_info(node: RedisNode, section: str, line: str) -> None:
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


# --- facts of nodes -------------------------------------------------------------------------------


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


async def test_a_node_in_cluster_mode_is_told_to_leave_it(
    engine: RedisBinary, fresh_nodes: FreshNodes, tmp_path: Path
) -> None:
    options = f"--cluster-enabled yes --cluster-port {free_port()}"
    nodes = await fresh_nodes(1, binary=started_with(engine, options, folder=tmp_path))
    diagnosis = await examined(nodes)
    assert {each for each in found(diagnosis) if each[0] == 0} == {(0, SERIOUS, Kind.CLUSTER_MODE)}
    assert "CONFIG SET cannot change it" in text_of(diagnosis, Kind.CLUSTER_MODE)
    with pytest.raises(NodeRejectedError, match="it runs in cluster mode; set cluster-enabled no"):
        await form(nodes)


async def test_a_renamed_config_is_named_and_not_taken_for_a_missing_right(
    engine: RedisBinary, fresh_nodes: FreshNodes, tmp_path: Path
) -> None:
    renamed = started_with(engine, "--rename-command CONFIG OTHER", folder=tmp_path)
    nodes = await fresh_nodes(3, binary=renamed)
    await form(nodes)
    told = text_of(await examined(nodes[:1]), Kind.SETTINGS_HIDDEN)
    assert "unknown command" in told
    assert "rename-command" in told


def started_with(engine: RedisBinary, options: str, *, folder: Path) -> RedisBinary:
    wrapper = folder / "node-with-options"
    wrapper.write_text(f'#!/bin/sh\nexec {shlex.quote(str(engine.path))} "$@" {options}\n')
    wrapper.chmod(0o700)
    return replace(engine, path=wrapper)


async def test_a_replica_and_its_primary_are_told(engine: RedisBinary, fresh_nodes: FreshNodes) -> None:
    """A replica shows the identity of its primary."""
    nodes = await fresh_nodes(3, binary=engine)
    await form(nodes)
    primary, replica = nodes[0], nodes[1]
    await replica.follow(primary)
    await until_info(replica, "replication", "master_link_status:up")
    diagnosis = await examined(nodes)
    assert found(diagnosis) == {(0, WARNING, Kind.HAS_REPLICAS), (1, SERIOUS, Kind.REPLICA)}
    assert f"it follows 127.0.0.1:{primary.port}" in text_of(diagnosis, Kind.REPLICA)
    assert diagnosis.voters == {0, 2}


async def test_each_field_of_info_that_the_doctor_reads_exists(
    fresh_nodes: FreshNodes, engine: RedisBinary
) -> None:
    """The unit tests state what each value means."""
    (checkup,) = await checkups_of(await fresh_nodes(1, binary=engine))
    assert checkup.info.keys() >= {
        *("redis_version", "role", "connected_slaves", "cluster_enabled"),
        *("used_memory", "maxmemory", "maxmemory_policy", "mem_not_counted_for_evict"),
        *("rdb_last_bgsave_status", "aof_last_write_status"),
        *("aof_last_bgrewrite_status", "aof_delayed_fsync"),
    }


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
