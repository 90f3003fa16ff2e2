"""`redfence doctor` on real nodes: what it finds on nodes that are well, and on nodes of which each has something."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from harness.processes.commands import CommandProcess, CommandProcesses
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

OPERATIONS = Path(__file__).parents[2] / "docs" / "operations.md"
SERIOUS, WARNING, NOTE = Severity
pytestmark = pytest.mark.slow

Found = set[tuple[int | None, Severity, Kind]]
NO_LIMIT: Found = {(index, NOTE, Kind.NO_MEMORY_LIMIT) for index in range(3)}


def urls_of(nodes: Sequence[RedisNode | str]) -> list[str]:
    """Addresses, as they are or of a node."""
    return [node if isinstance(node, str) else node.url for node in nodes]


async def checkups_of(nodes: Sequence[RedisNode | str], *, watch_ms: int = 100) -> list[Checkup]:
    """Look at the nodes from within this process."""
    urls, clock = check_urls(urls_of(nodes)), SystemClock()
    return await check_up(urls, Keyspace(), dial_timeout_ms=2_000, clock=clock, watch_ms=watch_ms)


async def examined(nodes: Sequence[RedisNode | str]) -> Diagnosis:
    """Look, and judge."""
    return diagnose(await checkups_of(nodes), Limits(node_timeout_ms=500))


# How long a busy machine takes to answer is no matter of the nodes.
LATENCY = frozenset({Kind.SLOW, Kind.UNSTEADY})


def found(diagnosis: Diagnosis, *, but: Found = NO_LIMIT, ignored: Collection[Kind] = LATENCY) -> Found:
    """What was found, but for what is not of interest."""
    told = {(each.node, each.severity, each.kind) for each in diagnosis.findings if each.kind not in ignored}
    return told - but


def text_of(diagnosis: Diagnosis, kind: Kind) -> str:
    """The sentences of the only finding of a kind."""
    (finding,) = (each for each in diagnosis.findings if each.kind is kind)
    return f"{finding.what}\n{finding.advice}"


async def set_all(node: RedisNode, **settings: str) -> None:
    """Change a running node's settings."""
    node.disturbed = True
    for name, value in settings.items():
        assert await node.call("CONFIG", "SET", name.replace("_", "-"), value) == b"OK"


# --- the command ------------------------------------------------------------------------------------------------------


def start_doctor(
    commands: CommandProcesses, nodes: Sequence[RedisNode | str], *flags: str, **environment: str
) -> CommandProcess:
    """Run it."""
    named = [flag for url in urls_of(nodes) for flag in ("--node", url)]
    return commands.start_redfence("doctor", *named, *flags, environment=environment)


async def outputs(start: Callable[[], CommandProcess], *, status: int) -> CommandProcess:
    """Run it until it has nothing to say about the latency, which is this machine's affair, and return it ended."""
    async with asyncio.timeout(60):
        while True:
            process = start()
            assert await process.wait(timeout_s=30) == status, process.stderr
            if "round trips" not in process.stdout:
                return process


async def test_of_nodes_that_are_well_it_says_so_and_ends_with_0(
    commands: CommandProcesses, fresh_nodes: FreshNodes, engine: RedisBinary
) -> None:
    """A line for each node, the cluster, and nothing else; the same for programs. A note does not change it."""
    nodes = await fresh_nodes(3, binary=engine)
    cluster_id = await form(nodes)
    for node in nodes[1:]:
        await set_all(node, maxmemory="1gb")
    with_note = await outputs(lambda: start_doctor(commands, nodes), status=0)
    await set_all(nodes[0], maxmemory="1gb")
    environment = {"REDFENCE_NODES": ",".join(urls_of(nodes))}
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
    """A stopped node (SIGSTOP), a wrong password and an evicting one: each by name, and no password anywhere."""
    nodes = await fresh_formed_nodes(3)
    nodes[0].pause()
    await set_all(nodes[1], maxmemory="1gb", maxmemory_policy="allkeys-lru")
    wrong = f"redis://:hunter2@127.0.0.1:{nodes[2].port}"
    # Long enough for the two that do answer, on a machine that stands still now and then.
    flags = ("--dial-timeout-ms", "2000")
    table = start_doctor(commands, [*nodes[:2], wrong], *flags)
    as_json = start_doctor(commands, [*nodes[:2], wrong], *flags, "--output", "json")
    for process in (table, as_json):
        assert await process.wait(timeout_s=30) == 1, process.stderr
        for secret in ("hunter2", *(url.split("@")[0].rpartition(":")[2] for url in urls_of(nodes))):
            assert secret not in process.stdout + process.stderr
    told = {(each["node"], each["severity"], each["kind"]) for each in json.loads(as_json.stdout)["findings"]}
    assert {each for each in told if each[1] == "serious"} == {
        (None, "serious", "no_quorum"),
        (0, "serious", "unreachable"),
        (1, "serious", "evicts"),
        (2, "serious", "denied"),
    }
    text = " ".join(table.stdout.split())
    for words in (
        "0 SERIOUS no - - -",
        f"node 0 (127.0.0.1:{nodes[0].port}) serious it does not answer: Timeout",
        "set maxmemory-policy noeviction",
        "serious it does not let this user in",
        "the cluster serious 0 of 3 nodes can vote and 2 are needed",
        "found: 4 serious",
    ):
        assert words in text, text


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ((), ["nodes"]),
        (("--node", "redis://:hunter2@host:port"), ["node 0", "malformed"]),
        (("--node", "redis://a:1", "--node", "redis://b:1"), ["2 nodes are configured"]),
        (("--node", "redis://a:1", "--node", "redis://a:1"), ["named twice"]),
        (("--node", "redis://a:1", "--dial-timeout-ms", "1"), ["dial_timeout_ms"]),
        (("--config", "nowhere.toml"), ["nowhere.toml"]),
        (("--node", "redis://a:1", "-o", "yaml"), ["yaml"]),
    ],
    ids=" ".join,
)
async def test_what_it_cannot_run_with_is_told_and_ends_with_2(
    flags: tuple[str, ...], told: list[str], commands: CommandProcesses
) -> None:
    """That is no finding about the nodes."""
    process = commands.start_redfence("doctor", *flags)
    assert await process.wait(timeout_s=20) == 2
    assert process.stdout == ""
    for words in ("redfence doctor: ", *told):
        assert words in process.stderr
    assert "hunter2" not in process.stderr
    assert "Traceback" not in process.stderr


async def test_its_help_tells_what_its_exit_status_means(commands: CommandProcesses) -> None:
    """Whoever runs it from a timer needs that first."""
    process = commands.start_redfence("doctor", "--help")
    assert await process.wait(timeout_s=20) == 0
    text = " ".join(process.stdout.split())
    for words in ("exit status: 0 nothing serious", "1 something serious", "2 it could not run"):
        assert words in text


# --- reach ------------------------------------------------------------------------------------------------------------


async def test_a_node_that_is_down_or_stops_or_breaks_off_does_not_hold_the_others_up(
    fresh_formed_nodes: FormedNodes, start_proxy: StartProxy
) -> None:
    """Each is told, and the third one is well."""
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
    """Whether it comes to its end or is broken off in the middle."""
    nodes = await formed_nodes(3)

    async def connections() -> int:
        lists = [await node.call("CLIENT", "LIST") for node in nodes]
        return sum(each.count(b" name=redfence ") for each in lists if isinstance(each, bytes))

    async def all_there() -> bool:
        return await connections() == 3

    async def all_gone() -> bool:
        return await connections() == 0

    await checkups_of(nodes)
    await until(all_gone)
    looking = asyncio.create_task(checkups_of(nodes, watch_ms=60_000))
    await until(all_there, timeout_s=20)
    looking.cancel()
    await asyncio.wait([looking])
    assert looking.cancelled()
    await until(all_gone)


async def test_a_slow_way_to_a_node_is_told(formed_nodes: FormedNodes, start_proxy: StartProxy) -> None:
    """By what a grant takes off every lease."""
    nodes = await formed_nodes(3)
    proxy = await start_proxy(nodes[1])
    proxy.delay(replies_ms=20)
    diagnosis = await examined([nodes[0], proxy.url(nodes[1].url), nodes[2]])
    assert (1, WARNING, Kind.SLOW) in found(diagnosis, ignored=())
    assert diagnosis.voters == {0, 1, 2}


async def test_the_documented_access_list_is_enough_and_what_is_missing_is_named(
    flushed_nodes: FlushedNodes, engine: RedisBinary
) -> None:
    """Without a right, what can be said without it is said all the same."""
    nodes = await flushed_nodes(3, binary=engine)
    await form(nodes)
    rules = re.search(r"^ACL SETUSER redfence on >PASSWORD (.*)$", OPERATIONS.read_text(), re.MULTILINE)
    assert rules
    documented = rules[1].split()
    assert {"+time", "+config|get", "+info", "+eval", "~redfence:*"} <= set(documented)

    async def without(*missing: str) -> Diagnosis:
        rights = [rule for rule in documented if rule not in missing]
        async with restricted(nodes[0], rights) as url:
            return await examined([url, *nodes[1:]])

    assert found(await without()) == set()
    for right, severity, kind in (
        ("+time", SERIOUS, Kind.REFUSED),
        ("+config|get", SERIOUS, Kind.SETTINGS_HIDDEN),
        ("+info", SERIOUS, Kind.REFUSED),
        ("+eval", SERIOUS, Kind.REFUSED),
        ("+hgetall", SERIOUS, Kind.REFUSED),
        ("~redfence:*", SERIOUS, Kind.REFUSED),
    ):
        diagnosis = await without(right)
        assert {each for each in found(diagnosis) if each[0] == 0} == {(0, severity, kind)}, right
        assert right in text_of(diagnosis, kind)
        assert (0 in diagnosis.voters) == (severity is not SERIOUS)


@asynccontextmanager
async def restricted(node: RedisNode, rights: Sequence[str]) -> AsyncIterator[str]:
    """Give the node a user with these rights, and yield that user's URL."""
    assert await node.call("ACL", "SETUSER", "redfence", "reset", "on", ">secret", *rights) == b"OK"
    try:
        yield f"redis://redfence:secret@{HOST}:{node.port}"
    finally:
        await node.call("ACL", "DELUSER", "redfence")


async def test_a_server_of_another_kind_and_keys_of_another_hand_are_told(formed_nodes: FormedNodes) -> None:
    """Nothing that they answer ends the checkup."""
    nodes = await formed_nodes(3)
    await nodes[1].call("HSET", "redfence:node", "index", "one")
    await nodes[2].call("DEL", "redfence:node")
    await nodes[2].call("SET", "redfence:node", "x")

    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail.example ESMTP\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(greet, HOST, port := free_port()):
        diagnosis = await examined([f"redis://{HOST}:{port}", *nodes[1:]])
    assert found(diagnosis) == {
        (None, SERIOUS, Kind.NO_QUORUM),
        (0, SERIOUS, Kind.UNREACHABLE),
        (1, SERIOUS, Kind.UNINTELLIGIBLE),
        (2, SERIOUS, Kind.REFUSED),
    }
    assert "malformed" in text_of(diagnosis, Kind.UNINTELLIGIBLE)
    assert "WRONGTYPE" in text_of(diagnosis, Kind.REFUSED)


# --- settings and process ---------------------------------------------------------------------------------------------


async def test_nodes_that_would_lose_what_they_answered_are_told_apart(fresh_nodes: FreshNodes) -> None:
    """One that was formed so votes, and must go through quarantine after each restart; one that became so does not vote."""
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


async def test_a_durable_node_that_restarted_is_well_if_enough_others_answer(
    fresh_formed_nodes: FormedNodes,
) -> None:
    """It has forgotten nothing; a server gives it the vote as soon as two others have taken its floor."""
    nodes = await fresh_formed_nodes(3)
    await nodes[1].restart()
    assert found(await examined(nodes)) == set()
    nodes[2].kill()
    diagnosis = await examined(nodes)
    assert (1, SERIOUS, Kind.RESTARTED) in found(diagnosis)
    assert "needs 2 of the other nodes" in text_of(diagnosis, Kind.RESTARTED)
    assert diagnosis.voters == {0}


async def test_a_replica_its_primary_and_a_promoted_replica_are_told(
    fresh_formed_nodes: FormedNodes, engine: RedisBinary, fresh_nodes: FreshNodes
) -> None:
    """What a replica shows of itself is its primary's; once promoted, it stands at another's place."""
    nodes = await fresh_nodes(3, binary=engine)
    await form(nodes)
    primary, replica = nodes[0], nodes[1]
    await set_all(primary, repl_diskless_sync_delay="0")
    await follow(replica, primary)
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


async def follow(replica: RedisNode, primary: RedisNode) -> None:
    """Make one node a replica of another, and wait until it has all that the other has."""
    password = primary.url.split("@")[0].rpartition(":")[2]
    await set_all(replica, masterauth=password)
    assert await replica.call("REPLICAOF", HOST, primary.port) == b"OK"
    primary.disturbed = True

    async def followed() -> bool:
        info = await replica.call("INFO", "replication")
        assert isinstance(info, bytes)
        return b"master_link_status:up" in info

    await until(followed, timeout_s=20)


async def test_a_node_that_is_loading_is_told_and_not_taken_for_broken(fresh_nodes: FreshNodes) -> None:
    """It lets users in, and then answers nothing that needs its data."""
    nodes = await fresh_nodes(3)
    await form(nodes)
    primary, slow = (await fresh_nodes(1))[0], nodes[1]
    fill = "for i = 1, 5000 do redis.call('SET', i, string.rep('x', 1000)) end"
    await primary.call("EVAL", fill, 0)
    await set_all(primary, repl_diskless_sync_delay="0")
    password = primary.url.split("@")[0].rpartition(":")[2]
    # 1 ms for each key.
    await set_all(
        slow, masterauth=password, key_load_delay="1000", loading_process_events_interval_bytes="1024"
    )
    assert await slow.call("REPLICAOF", HOST, primary.port) == b"OK"

    async def loading() -> bool:
        info = await slow.call("INFO", "persistence")
        assert isinstance(info, bytes)
        return b"\r\nloading:1" in info

    await until(loading, timeout_s=20)
    assert found(await examined(nodes)) == {(1, WARNING, Kind.LOADING)}


async def test_a_server_in_cluster_mode_is_told(
    commands: CommandProcesses, fresh_formed_nodes: FormedNodes, engine: RedisBinary
) -> None:
    """Its keys are spread over slots, and scripts over them are refused."""
    nodes = await fresh_formed_nodes(3)
    port = free_port()
    flags = (
        "--port",
        str(port),
        "--cluster-enabled",
        "yes",
        "--cluster-port",
        str(free_port()),
        "--save",
        "",
    )
    process = commands.start(str(engine.path), *flags)
    await process.wait_for_line("Ready to accept connections")
    diagnosis = await examined([*nodes[:2], f"redis://{HOST}:{port}"])
    assert (2, SERIOUS, Kind.CLUSTER_MODE) in found(diagnosis)
    assert diagnosis.voters == {0, 1}


async def test_failed_snapshots_and_rewrites_are_told(fresh_formed_nodes: FormedNodes) -> None:
    """As a full disk lets them fail. The snapshot stops all writes only where snapshots are to be made."""
    nodes = await fresh_formed_nodes(3)
    for node in nodes[:2]:
        (node.folder / "dump.rdb").mkdir()
        assert await node.call("BGSAVE")
        await until_told(node, "rdb_last_bgsave_status:err")
    await set_all(nodes[0], save="3600 1")
    # A rewrite begins new files, whose names go up from those that are there.
    for number in range(2, 9):
        (nodes[2].folder / "appendonlydir" / f"appendonly.aof.{number}.base.rdb").mkdir()
    assert await nodes[2].call("BGREWRITEAOF")
    await until_told(nodes[2], "aof_last_bgrewrite_status:err")
    assert found(await examined(nodes)) == {
        (0, SERIOUS, Kind.SNAPSHOT_FAILED),
        (1, WARNING, Kind.SNAPSHOT_FAILED),
        (2, WARNING, Kind.LOG_REWRITE_FAILED),
    }


async def until_told(node: RedisNode, line: str) -> None:
    """Wait until INFO has this line."""
    node.disturbed = True

    async def told() -> bool:
        info = await node.call("INFO", "persistence")
        assert isinstance(info, bytes)
        return line in info.decode().splitlines()

    await until(told)


async def test_memory_that_runs_short_and_keys_that_were_dropped_are_told(
    fresh_formed_nodes: FormedNodes,
) -> None:
    """With the figures of the node itself."""
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


# --- identity ---------------------------------------------------------------------------------------------------------


async def test_nodes_that_are_not_formed_half_formed_or_wiped_are_told(flushed_nodes: FlushedNodes) -> None:
    """Before the first `cluster init` that is one finding, and not one for each node."""
    nodes = await flushed_nodes(3)
    unformed = await examined(nodes)
    assert found(unformed) == {(None, SERIOUS, Kind.NOT_FORMED)}
    assert "redfence cluster init" in text_of(unformed, Kind.NOT_FORMED)
    await form(nodes)
    await nodes[1].call("HSET", "redfence:node", "state", "forming")
    assert found(await examined(nodes)) == {(1, SERIOUS, Kind.FORMING)}
    await nodes[1].call("FLUSHALL")
    wiped = await examined(nodes)
    assert found(wiped) == {(1, SERIOUS, Kind.EMPTY)}
    assert wiped.voters == {0, 2}
    await nodes[1].call("SET", "somebody's", "data")
    assert found(await examined(nodes)) == {(1, SERIOUS, Kind.NOT_EMPTY)}


async def test_nodes_that_are_not_what_the_others_know_are_told(flushed_nodes: FlushedNodes) -> None:
    """Another cluster, place, process or greatest ttl; a place that another process has; quarantine."""
    nodes = await flushed_nodes(6)
    await form(nodes[:3])
    await form(nodes[3:])
    assert found(await examined([nodes[3], *nodes[1:3]])) == {(0, SERIOUS, Kind.OTHER_CLUSTER)}
    swapped = await examined([nodes[0], nodes[2], nodes[1]])
    assert found(swapped) == {
        (None, SERIOUS, Kind.NO_QUORUM),
        (1, SERIOUS, Kind.WRONG_PLACE),
        (2, SERIOUS, Kind.WRONG_PLACE),
    }
    # Two databases of one server are two nodes on paper.
    twin = nodes[0].url.replace(HOST, "localhost") + "/1"
    assert found(await examined([nodes[0], twin, nodes[2]])) == {(1, SERIOUS, Kind.SAME_PROCESS)}
    await nodes[1].call("HSET", "redfence:node", "max_ttl_ms", "1000")
    assert found(await examined(nodes[:3])) == {(1, SERIOUS, Kind.TTL_DIFFERS)}
    await nodes[3].call("HSET", "redfence:node", "floor:1", 5)
    await nodes[5].call("HSET", "redfence:node", "state", "quarantined")
    assert found(await examined(nodes[3:])) == {
        (None, SERIOUS, Kind.NO_QUORUM),
        (1, SERIOUS, Kind.REPLACED),
        (2, WARNING, Kind.QUARANTINED),
    }


# --- clocks -----------------------------------------------------------------------------------------------------------


async def test_the_offset_of_each_clock_is_measured_and_a_clock_that_is_set_meanwhile_is_serious(
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


async def test_who_reads_no_further_ends_it_without_a_word(tmp_path: Path) -> None:
    """As `| head` does; the status is that of a program which SIGPIPE ended."""
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
