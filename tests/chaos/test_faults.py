"""Each fault really does what its name says, is recorded, and heals; and no more than a minority of the nodes is made to forget at a time."""

from __future__ import annotations

import asyncio
import errno
import resource
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from random import Random

import grpc
import hiredis
import pytest

from harness.chaos import limit_faults, services
from harness.chaos.cluster import ChaosCluster, Plan
from harness.chaos.crowd import Crowd
from harness.chaos.faults import DISK_FULL, FAULTS, LOG_CUT, NODE_COPIED, SERVER_CLOCK, deck, possible
from harness.chaos.process_faults import node_killed
from harness.chaos.recorder import now_s
from harness.chaos.strike import Stage, Strike, every_server
from harness.processes.commands import CommandProcess
from harness.processes.node_data import log_file
from harness.processes.redis_nodes import RedisNode
from harness.processes.servers import new_lease_id, until
from harness.processes.tcp_proxy import Flow, TcpProxy
from harness.time.moved_clock import MovedClock
from redfence import StaleTokenError
from redfence_proto.rich_error import from_trailing_metadata
from redfence_proto.v1 import lock_pb2
from redfence_server.embedded.binary import RedisBinary
from redfence_storage.client import AsyncStorageClient

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

# Long enough for somebody to look.
_LASTS_S = 0.2
_NO_MORE_FILES = "no more files"


def _drawn(stage: Stage, kind: str, *, seed: int = 0) -> Strike:
    return FAULTS[kind](stage, Random(seed))


def _drawn_so(stage: Stage, kind: str, *words: str) -> Strike:
    """Return the first strike of a kind whose target has these words."""
    strikes = (_drawn(stage, kind, seed=seed) for seed in count())
    return next(strike for strike in strikes if all(each in strike.target for each in words))


@asynccontextmanager
async def _begun(strike: Strike) -> AsyncIterator[Strike]:
    """Keep a fault up for the body."""
    try:
        await strike.begin()
        yield strike
    finally:
        await strike.heal()


def _place(strike: Strike, what: str) -> int:
    """Return the index of the only node, server or client that a fault takes."""
    (name,) = [each for each in strike.takes if each.startswith(f"{what} ")]
    return int(name.removeprefix(f"{what} "))


def _has_ended(process: CommandProcess | RedisNode) -> bool:
    """Tell whether a process has ended, as it is now."""
    return not process.is_running if isinstance(process, RedisNode) else process.exit_status is not None


def _state(pid: int) -> str:
    """Return how the kernel calls the state of a process."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


async def _is_stopped(pid: int) -> bool:
    """Tell whether a process is stopped; a signal takes effect a little after it was sent."""
    return _state(pid) == "T"


def _cut(stage: Stage) -> list[tuple[int, int]]:
    """Return the pairs of server and node between which nothing passes one way or the other."""
    return [
        (number, place)
        for number, server in enumerate(stage.cluster.servers)
        for place, proxy in enumerate(server.proxies)
        if not _passes(proxy)
    ]


def _passes(proxy: TcpProxy) -> bool:
    return proxy.requests.flow is Flow.PASS and proxy.replies.flow is Flow.PASS


# --- what is common to all ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [kind for kind in FAULTS if kind != _NO_MORE_FILES])
async def test_a_fault_is_recorded_and_heals(stage: Stage, no_disk: str, kind: str) -> None:
    """Afterwards every node votes for every server again, by itself."""
    if kind == DISK_FULL and no_disk:
        pytest.skip(no_disk)
    before, began_s = len(stage.faults), now_s()
    await stage.carry_out(replace(_drawn(stage, kind), lasts_s=_LASTS_S))
    (fault,) = stage.faults[before:]
    assert fault.kind == kind
    assert began_s <= fault.began_s < fault.ended_s <= now_s()
    assert not stage.unhealed
    assert not await stage.cluster.set_right()
    assert not _cut(stage)


@pytest.mark.parametrize("lost", [1, 3])
async def test_a_server_that_was_out_of_files_tells_so_and_goes_on_by_itself(stage: Stage, lost: int) -> None:
    """As soon as it may open files again; what it can tell without, it tells."""
    strikes = (_drawn(stage, _NO_MORE_FILES, seed=seed) for seed in count())
    try:
        async with _begun(next(strike for strike in strikes if len(strike.takes) == 1 + lost)) as strike:
            place = _place(strike, "server")
            server = stage.cluster.servers[place]

            async def has_wanted_one() -> bool:
                report = await server.view.status()
                return any("Too many open files" in node.detail for node in report.nodes)

            # It has lost a node and tried to come back: that is when it wants a file.
            await until(has_wanted_one, timeout_s=10)
        await until(server.is_ready, timeout_s=10)
    finally:
        server.kill()
        server.start()
        await until(server.is_ready, timeout_s=30)


async def test_a_node_forgets_only_after_those_before_have_rejoined(stage: Stage) -> None:
    """More than a minority at a time is more than redfence promises anything about."""
    order: list[str] = []

    def told(strike: Strike, place: int) -> Strike:
        async def begin() -> None:
            assert await stage.cluster.votes(1 - place)
            order.append(f"node {place} forgets")
            await strike.begin()

        return replace(strike, begin=begin, lasts_s=0.0, takes={f"node {place}"}, forgets=[place])

    async def wiped(place: int) -> Strike:
        node = stage.cluster.nodes[place]

        async def begin() -> None:
            await node.call("FLUSHALL")

        return told(Strike("node wiped", f"node {place}", 0.0, begin=begin), place)

    await asyncio.gather(*[stage.carry_out(await wiped(place)) for place in (0, 1)])
    assert len(order) == 2
    assert not stage.unhealed
    assert not await stage.cluster.set_right()


async def test_every_fault_comes_before_one_comes_again() -> None:
    """As often as its weight says, in an order that the seed decides."""
    names = possible(clocks=True, small_disk=True)
    assert set(deck(names, Random(1))) == set(FAULTS)
    assert deck(names, Random(1)) == deck(names, Random(1)) != deck(names, Random(2))
    assert possible(clocks=True, small_disk=False, only=[DISK_FULL]) == []
    assert possible(clocks=False, small_disk=True, only=[SERVER_CLOCK]) == []


# --- processes --------------------------------------------------------------------------------------------------------------


async def test_a_paused_holder_stands_between_its_read_and_its_write(stage: Stage) -> None:
    """It is the one whose write comes too late."""
    async with _begun(_drawn(stage, "holder paused")) as strike:
        place = _place(strike, "client")
        assert _state(stage.crowd.pid(place)) == "T"
        assert stage.crowd.thinks(place)
    assert _state(stage.crowd.pid(place)) != "T"


async def test_a_killed_holder_is_followed_by_another(stage: Stage) -> None:
    """Under another name, so that its calls are not taken for those of the dead."""
    strike = _drawn(stage, "holder killed")
    place = _place(strike, "client")
    name, pid = stage.crowd.name_of(place), stage.crowd.pid(place)
    async with _begun(strike):
        assert stage.crowd.ended_early()
    assert not stage.crowd.ended_early()
    assert stage.crowd.name_of(place) != name
    assert stage.crowd.pid(place) != pid


async def test_a_server_is_paused_and_killed(stage: Stage) -> None:
    """The process itself, not what is seen of it."""
    async with _begun(_drawn(stage, "server paused")) as strike:
        server = stage.cluster.servers[_place(strike, "server")]
        await until(lambda: _is_stopped(server.process.pid))
    async with _begun(_drawn(stage, "server killed")) as strike:
        server = stage.cluster.servers[_place(strike, "server")]
        assert _has_ended(server.process)
    assert not _has_ended(server.process)
    assert not await stage.cluster.set_right()


async def test_a_drained_server_ends_in_good_order_and_is_started_again(stage: Stage) -> None:
    """That it ended is no defect; a status that is not 0 would be one."""
    async with _begun(_drawn(stage, "server drained")) as strike:
        server = stage.cluster.servers[_place(strike, "server")]
        assert server.process.exit_status == 0
    assert not _has_ended(server.process)
    assert not await stage.cluster.set_right()
    assert not stage.broken
    assert not stage.cluster.ended_early()


async def test_a_server_that_does_not_end_in_good_order_when_it_is_told_to_is_a_defect(stage: Stage) -> None:
    """Here somebody kills it meanwhile."""
    strike = _drawn(stage, "server drained")
    server = stage.cluster.servers[_place(strike, "server")]
    server.pause()
    try:

        async def killed() -> None:
            await asyncio.sleep(0.1)
            server.process.kill()

        await asyncio.gather(strike.begin(), killed())
        assert [str(each) for each in stage.broken] == [
            f"server {_place(strike, 'server')} was told to end and did with -9"
        ]
    finally:
        stage.broken.clear()
        await strike.heal()
    assert not await stage.cluster.set_right()


async def test_a_server_that_does_not_end_when_it_is_told_to_is_a_defect(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run goes on with another process, and its verdict is told."""
    monkeypatch.setattr(services, "_DRAIN_S", 0.5)
    strike = _drawn(stage, "server drained")
    server = stage.cluster.servers[_place(strike, "server")]
    server.pause()
    try:
        await strike.begin()
        assert _has_ended(server.process)
        (told,) = stage.broken
        assert "had not ended after 0.5 s" in told
    finally:
        stage.broken.clear()
        await strike.heal()
    assert not await stage.cluster.set_right()


async def test_the_storage_is_paused_and_killed_and_keeps_what_it_had(stage: Stage) -> None:
    """Its callers go on afterwards; its end is no defect."""
    storage = stage.cluster.storage
    async with AsyncStorageClient(storage.address, timeout_s=10.0) as client:
        await client.put("kept", key="k", value=b"v", token=7)
        async with _begun(_drawn(stage, "storage paused")):
            await until(lambda: _is_stopped(storage.process.pid))
        assert (await client.get("kept", key="k")).value == b"v"
        async with _begun(_drawn(stage, "storage killed")):
            assert _has_ended(storage.process)
        assert not _has_ended(storage.process)
        with pytest.raises(StaleTokenError):
            await client.put("kept", key="k", value=b"late", token=6)
        assert (await client.get("kept", key="k")).value == b"v"
    assert not stage.cluster.ended_early()


async def test_a_storage_that_ends_by_itself_is_a_defect(stage: Stage) -> None:
    """Whatever else went well."""
    storage = stage.cluster.storage
    storage.process.kill()
    assert stage.cluster.ended_early() == [
        f"storage: it ended by itself, with -9: {storage.process.stderr[-2000:]}"
    ]
    storage.kill()
    assert stage.cluster.ended_early(), "who kills a dead one does not excuse its death"
    storage._told_to_end.add(storage.process)
    assert not stage.cluster.ended_early()
    storage.start()
    await storage.until_serving()


async def test_a_node_is_paused_and_killed_and_keeps_what_it_had(stage: Stage) -> None:
    """It syncs every write."""
    async with _begun(_drawn(stage, "node paused")) as strike:
        paused = stage.cluster.nodes[_place(strike, "node")]
        await until(lambda: _is_stopped(paused.pid))
    async with _begun(_drawn(stage, "node killed")) as strike:
        node = stage.cluster.nodes[_place(strike, "node")]
        assert _has_ended(node)
        assert not strike.forgets
    assert await node.call("HGET", "redfence:node", "cluster_id")
    assert not await stage.cluster.set_right()


async def test_a_node_that_does_not_sync_counts_as_forgetful_when_it_is_killed(stage: Stage) -> None:
    """And only one of them is killed at a time."""
    always = stage.cluster.plan
    stage.cluster.plan = replace(always, aof="everysec")
    try:
        assert all(len(node_killed(stage, Random(seed)).forgets) == 1 for seed in range(20))
    finally:
        stage.cluster.plan = always


async def test_a_node_without_a_log_comes_back_empty_and_votes_again(
    tmp_path: Path, redis_binary: RedisBinary
) -> None:
    """No server starts meanwhile: it would have seen this place never before, and would want an operator."""
    async with ChaosCluster(Plan(aof="off"), tmp_path, redis_binary) as cluster:
        crowd = Crowd(cluster, seed="0", began_s=now_s(), count=1)
        stage = Stage(cluster, crowd, on_begin=lambda _: None)
        strike = _drawn(stage, "node killed")
        place = _place(strike, "node")
        assert strike.forgets == [place]
        assert every_server(stage) < set(strike.takes)
        node = cluster.nodes[place]
        assert await node.call("SET", "kept", "until then") == b"OK"
        async with _begun(strike):
            assert _has_ended(node)
        assert await node.call("GET", "kept") is None
        assert not await cluster.set_right()
    assert not {LOG_CUT, NODE_COPIED} & set(possible(clocks=True, small_disk=True, logs=False))


# --- memory -----------------------------------------------------------------------------------------------------------------


async def test_a_log_is_shorter_by_what_was_cut(stage: Stage) -> None:
    """And the node starts all the same, for the log was repaired."""
    strike = _drawn(stage, "log cut")
    node = stage.cluster.nodes[_place(strike, "node")]
    before = log_file(node).stat().st_size
    async with _begun(strike):
        assert _has_ended(node)
        assert log_file(node).stat().st_size != before
    assert not _has_ended(node)
    assert not await stage.cluster.set_right()


async def test_a_full_disk_takes_no_byte_and_ends_a_node_that_syncs_every_write(
    stage: Stage, no_disk: str
) -> None:
    """As in the field: it does not acknowledge what it cannot keep."""
    if no_disk:
        pytest.skip(no_disk)
    node = stage.cluster.nodes[0]
    async with _begun(_drawn(stage, DISK_FULL)):
        with pytest.raises(OSError, match="No space") as caught:
            (node.folder / "more").write_bytes(bytes(8192))
        assert caught.value.errno == errno.ENOSPC

        async def ended() -> bool:
            return _has_ended(node)

        await until(ended, timeout_s=20)
    assert not _has_ended(node)
    assert not await stage.cluster.set_right()


async def test_when_a_majority_was_wiped_nothing_is_granted_until_it_is_recovered(stage: Stage) -> None:
    """And then it is granted again, by servers that were not restarted."""
    server = stage.cluster.servers[0]
    strike = _drawn(stage, "majority wiped")
    async with _begun(strike):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await server.view.acquire("refused", ttl_ms=1_000, lease_id=new_lease_id(), timeout_s=5)
        rich = from_trailing_metadata(caught.value.trailing_metadata())
        assert rich is not None
        assert rich.reason == lock_pb2.ERROR_REASON_QUORUM_UNAVAILABLE
    fault = stage.faults[-1]
    assert fault.kind == "majority wiped"
    await until(lambda: server.grants("refused", ttl_ms=1_000))


@pytest.mark.parametrize("mended", ["by a crash", "while it runs"])
@pytest.mark.parametrize(
    ("way", "name", "value"),
    [
        ("evicts (1000 bytes)", b"maxmemory-policy", b"allkeys-lru"),
        ("appendonly no", b"appendonly", b"no"),
        ("appendfsync everysec", b"appendfsync", b"everysec"),
    ],
)
async def test_settings_change_while_a_node_runs_and_are_mended(
    stage: Stage, way: str, name: bytes, value: bytes, mended: str
) -> None:
    """A crash mends them as well: the node's file has the settings of before."""
    strike = _drawn_so(stage, "settings changed", way, mended)
    place = int(strike.target.partition(":")[0].removeprefix("node "))
    node = stage.cluster.nodes[place]
    assert strike.forgets == [place]
    pid = node.pid
    before = [await node.call("CONFIG", "GET", each) for each in (name, "maxmemory")]
    async with _begun(strike):
        assert node.pid == pid
        assert await node.call("CONFIG", "GET", name) == [name, value]
        if value == b"allkeys-lru":
            await until(lambda: _evicts(node))
            assert len(_cut(stage)) == 1
    assert (node.pid == pid) == (mended == "while it runs")
    assert [await node.call("CONFIG", "GET", each) for each in (name, "maxmemory")] == before
    assert not await stage.cluster.set_right()


async def _evicts(node: RedisNode) -> bool:
    """Tell whether it has dropped a key of ours."""
    with suppress(hiredis.ReplyError):  # what is left may be too much all the same
        await node.call("SET", "more", bytes(10_000), "PX", 100)
    told = await node.call("INFO", "stats")
    assert isinstance(told, bytes)
    return b"evicted_keys:0" not in told


# --- network ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "count"),
    [
        ("partition: one node", 2),
        ("partition: one way", 2),
        ("node never answers", 2),
        ("partition: halves", 3),
        ("partition: ring", 2),
    ],
)
async def test_a_partition_cuts_as_many_pairs_as_its_form_says(stage: Stage, kind: str, count: int) -> None:
    """Of two servers and three nodes."""
    async with _begun(_drawn(stage, kind)):
        cut = _cut(stage)
        assert len(cut) == count
        nodes = {place for _, place in cut}
        assert len(nodes) == {"partition: halves": 3, "partition: ring": 2}.get(kind, 1)
    assert not _cut(stage)


@pytest.mark.parametrize("ends", ["old", "new"])
@pytest.mark.parametrize("kind", ["node doubled: empty", NODE_COPIED])
async def test_a_node_is_another_process_for_some_servers_until_one_of_the_two_ends(
    stage: Stage, kind: str, ends: str
) -> None:
    """The other one is empty, or has what the node had; and only for a copy may leases overlap."""
    strike = _drawn_so(stage, kind, f"the {ends} process ends")
    (place,) = strike.forgets
    node = stage.cluster.nodes[place]
    assert await node.call("SET", "mark", "old") == b"OK"
    (old,) = {await _seen_through(node, server.proxies[place]) for server in stage.cluster.servers}
    folder = node.folder
    async with _begun(strike):
        seen = {await _seen_through(node, server.proxies[place]) for server in stage.cluster.servers}
        (other,) = seen - {old}
        assert old in seen
        assert other[1] == (b"old" if kind == NODE_COPIED else None)
    (left,) = {await _seen_through(node, server.proxies[place]) for server in stage.cluster.servers}
    assert left[0] == (old if ends == "new" else other)[0]
    assert folder.exists() == (ends == "new")
    assert len(list(folder.parent.glob("data*/"))) == 1
    assert (strike.overlaps_s is None) == (kind != NODE_COPIED)
    await node.call("DEL", "mark")
    assert not await stage.cluster.set_right()


async def _seen_through(node: RedisNode, proxy: TcpProxy) -> tuple[bytes, object]:
    """Return the run that the address of a node leads to, and the mark that it has."""
    seen = node.beside()
    seen.port = proxy.port
    told = await seen.call("INFO", "server")
    assert isinstance(told, bytes)
    return told.partition(b"run_id:")[2].split()[0], await seen.call("GET", "mark")


# --- limits and clocks ------------------------------------------------------------------------------------------------------


async def test_a_node_takes_no_new_client(stage: Stage) -> None:
    """Whoever connects is told so."""
    async with _begun(_drawn(stage, "maxclients")) as strike:
        node = stage.cluster.nodes[_place(strike, "node")]
        with pytest.raises((hiredis.ReplyError, OSError)):
            await node.call("PING")
    assert await node.call("PING") == b"PONG"


async def test_a_node_out_of_memory_takes_no_write(stage: Stage) -> None:
    """It evicts nothing."""
    async with _begun(_drawn(stage, "maxmemory noeviction")) as strike:
        node = stage.cluster.nodes[_place(strike, "node")]
        with pytest.raises(hiredis.ReplyError, match="OOM"):
            await node.call("SET", "more", "1")
        assert await node.call("CONFIG", "GET", "maxmemory-policy") == [b"maxmemory-policy", b"noeviction"]
    assert await node.call("CONFIG", "GET", "maxmemory") == [b"maxmemory", b"0"]


async def test_a_server_may_open_no_file_more(stage: Stage) -> None:
    """Until it may again."""
    strike = _drawn(stage, _NO_MORE_FILES)
    pid = stage.cluster.servers[_place(strike, "server")].process.pid
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    async with _begun(strike):
        # A file gets the least number that is free: this leaves none, whichever ones it loses.
        assert resource.prlimit(pid, resource.RLIMIT_NOFILE)[0] <= 3
    assert resource.prlimit(pid, resource.RLIMIT_NOFILE) == before
    server = stage.cluster.servers[_place(strike, "server")]
    server.kill()
    server.start()
    assert not await stage.cluster.set_right()


async def test_a_clock_is_half_a_minute_off_and_back_again(stage: Stage) -> None:
    """And the fault says that clocks are moved, for exclusion is not promised then."""
    async with _begun(_drawn(stage, "clock stepped")) as strike:
        assert strike.moves_clocks
        node = stage.cluster.nodes[_place(strike, "node")]
        assert await node.has_clock_offset(30_000) or await node.has_clock_offset(-30_000)
    assert await node.has_clock_offset(0)
    assert not await stage.cluster.set_right()


@pytest.mark.parametrize("how", ["stands still", "is slow"])
async def test_the_clock_of_one_server_loses_time_and_the_others_keep_theirs(stage: Stage, how: str) -> None:
    """It never gets it back."""
    strike = _drawn_so(stage, SERVER_CLOCK, how)
    wrong, right = _clocks(stage, strike)
    before, still = wrong.lag_ms, right.lag_ms
    async with _begun(strike):
        await asyncio.sleep(0.1)
        lost = wrong.lag_ms - before
        assert lost > 50 if how == "stands still" else 0.5 < lost < 5
    assert lost <= wrong.lag_ms - before < 600
    assert right.lag_ms == still
    stage.broken.clear()
    assert not await stage.cluster.set_right()


def _clocks(stage: Stage, strike: Strike) -> tuple[MovedClock, MovedClock]:
    """Return the clock of the server that is struck, and that of the other one."""
    place = int(strike.target.split()[1])
    clocks = [server.clock for server in (stage.cluster.servers[place], stage.cluster.servers[1 - place])]
    wrong, right = clocks
    assert wrong is not None
    assert right is not None
    return wrong, right


async def test_a_server_of_true_clock_that_grants_nothing_is_a_defect(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever keeps it from granting: here it stands still."""
    monkeypatch.setattr(limit_faults, "_NO_GRANT_S", 0.2)
    strike = _drawn(stage, SERVER_CLOCK)
    number = 1 - int(strike.target.split()[1])
    other = stage.cluster.servers[number]
    try:
        async with _begun(strike):
            other.pause()

            async def is_told() -> bool:
                return bool(stage.broken)

            await until(is_told, timeout_s=10.0)
            assert stage.broken == [f"server {number}, whose clock is true, granted nothing for 0.2 s"]
            other.resume()
    finally:
        other.resume()
        stage.broken.clear()
    assert not await stage.cluster.set_right()
