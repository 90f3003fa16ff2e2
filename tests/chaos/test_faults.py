"""Each fault does what its name says, is recorded and ends; at most a minority of nodes forgets at a time."""

from __future__ import annotations

import asyncio
import errno
import resource
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from random import Random
from typing import TypeAlias

import grpc
import hiredis
import pytest

from harness.chaos import limit_faults, services
from harness.chaos.client_pool import ClientPool
from harness.chaos.cluster import ChaosCluster, Plan
from harness.chaos.fault_injection import STORAGE, FaultInjection, FaultInjector, locks_of_servers, run_step
from harness.chaos.faults import FAULTS, deck, draw, possible
from harness.chaos.limit_faults import SERVER_CLOCK
from harness.chaos.memory_faults import DISK_FULL, LOG_CUT
from harness.chaos.network_faults import NODE_COPIED
from harness.chaos.process_faults import node_killed
from harness.chaos.recorder import now_s
from harness.processes.commands import CommandProcess
from harness.processes.node_data import log_file
from harness.processes.redis_nodes import RedisNode, has_clock_offset
from harness.processes.servers import new_lease_id, until
from harness.processes.tcp_direction import Flow
from harness.processes.tcp_proxy import TcpProxy
from harness.time.moved_clock import MovedClock
from redfence import StaleTokenError
from redfence_proto.rich_error import from_trailing_metadata
from redfence_proto.v1 import lock_pb2
from redfence_server.embedded.binary import RedisBinary
from redfence_storage.client import AsyncStorageClient

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

_LASTS_S = 0.2
_NO_MORE_FILES = "no more files"


def _drawn(injector: FaultInjector, kind: str, *, seed: int = 0) -> FaultInjection:
    return draw(kind, injector, Random(seed))


def _drawn_so(injector: FaultInjector, kind: str, *words: str) -> FaultInjection:
    """Return the first fault of a kind whose target has these words."""
    injections = (_drawn(injector, kind, seed=seed) for seed in count())
    return next(injection for injection in injections if all(each in injection.target for each in words))


@asynccontextmanager
async def _begun(injection: FaultInjection) -> AsyncIterator[FaultInjection]:
    """Begin a fault before the body and end it after the body."""
    try:
        await run_step(injection.begin)
        yield injection
    finally:
        await run_step(injection.end)


def _index(injection: FaultInjection, what: str) -> int:
    """Return the index of the only node, server or client that a fault locks."""
    (name,) = [each for each in injection.locks if each.startswith(f"{what} ")]
    return int(name.removeprefix(f"{what} "))


def _struck(injector: FaultInjector, injection: FaultInjection) -> CommandProcess | RedisNode:
    """Return the present process of the server, the storage or the first node that a fault affects."""
    if injection.target.startswith("node"):
        return injector.cluster.nodes[_index(injection, "node")]
    if injection.target == STORAGE:
        return injector.cluster.storage.process
    return injector.cluster.servers[_index(injection, "server")].process


def _has_ended(process: CommandProcess | RedisNode) -> bool:
    """Tell whether a process has ended."""
    return not process.is_running if isinstance(process, RedisNode) else process.exit_status is not None


def _state(pid: int) -> str:
    """Return the kernel's letter for the state of a process."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


async def _is_stopped(pid: int) -> bool:
    """Tell whether a process is stopped; a signal takes effect with a delay."""
    return _state(pid) == "T"


def _cut(injector: FaultInjector) -> list[tuple[int, int]]:
    """Return the pairs of server and node between which at least one direction is blocked."""
    return [
        (number, index)
        for number, server in enumerate(injector.cluster.servers)
        for index, proxy in enumerate(server.proxies)
        if not _passes(proxy)
    ]


def _passes(proxy: TcpProxy) -> bool:
    return proxy.requests.flow is Flow.PASS and proxy.replies.flow is Flow.PASS


# A check of what a fault does runs to its first yield before it, to its second during it, then after it.

Check: TypeAlias = Callable[[FaultInjector, FaultInjection], AsyncGenerator[None]]
_CHECKS: dict[str, Check] = {}


def _of(*kinds: str) -> Callable[[Check], Check]:
    """Let a check examine these faults."""

    def register(check: Check) -> Check:
        _CHECKS.update(dict.fromkeys(kinds, check))
        return check

    return register


async def _no_check(injector: FaultInjector, injection: FaultInjection) -> AsyncGenerator[None]:
    yield
    yield


@_of("holder paused")
async def _holder_paused(injector: FaultInjector, injection: FaultInjection) -> AsyncGenerator[None]:
    index = _index(injection, "client")
    yield
    assert _state(injector.client_pool.pid(index)) == "T"
    assert injector.client_pool.is_before_write(index)
    yield
    assert _state(injector.client_pool.pid(index)) != "T"


@_of("holder killed")
async def _holder_killed(injector: FaultInjector, injection: FaultInjection) -> AsyncGenerator[None]:
    clients, index = injector.client_pool, _index(injection, "client")
    name, pid = clients.name_of(index), clients.pid(index)
    yield
    assert clients.ended_early()
    yield
    assert not clients.ended_early()
    # Under its own name, so that its calls are not taken for those of the dead client.
    assert clients.name_of(index) != name
    assert clients.pid(index) != pid


@_of("server paused", "storage paused", "node paused")
async def _paused(injector: FaultInjector, injection: FaultInjection) -> AsyncGenerator[None]:
    yield
    pid = _struck(injector, injection).pid
    await until(lambda: _is_stopped(pid))
    yield
    assert _state(pid) != "T"


@_of("server killed", "server drained", "node killed", "log cut")
async def _ended(injector: FaultInjector, injection: FaultInjection) -> AsyncGenerator[None]:
    is_cut = injection.kind == LOG_CUT
    node = injector.cluster.nodes[_index(injection, "node")] if is_cut else None
    size = log_file(node).stat().st_size if node else 0
    yield
    process = _struck(injector, injection)
    assert _has_ended(process)
    if injection.kind == "server drained":
        assert isinstance(process, CommandProcess)
        assert process.exit_status == 0
    if node:
        assert log_file(node).stat().st_size != size
    yield
    struck = _struck(injector, injection)
    assert not _has_ended(struck)
    if injection.kind == "node killed":
        assert isinstance(struck, RedisNode)
        assert not injection.forgets
        assert await struck.call("HGET", "redfence:node", "cluster_id")


@_of("storage killed")
async def _storage_killed(injector: FaultInjector, injection: FaultInjection) -> AsyncGenerator[None]:
    storage = injector.cluster.storage
    async with AsyncStorageClient(storage.address, timeout=10.0) as client:
        await client.put("kept", key="k", value=b"v", token=7)
        yield
        assert _has_ended(storage.process)
        yield
        with pytest.raises(StaleTokenError):
            await client.put("kept", key="k", value=b"late", token=6)
        assert (await client.get("kept", key="k", unfenced=True)).value == b"v"


@_of(DISK_FULL)
async def _disk_full(injector: FaultInjector, injection: FaultInjection) -> AsyncGenerator[None]:
    node = injector.cluster.nodes[0]
    yield
    with pytest.raises(OSError, match="No space") as caught:
        (node.folder / "more").write_bytes(bytes(8192))
    assert caught.value.errno == errno.ENOSPC

    async def ended() -> bool:
        return _has_ended(node)

    # The node does not acknowledge what it cannot keep.
    await until(ended, timeout_s=20)
    yield
    assert not _has_ended(node)


@_of("majority wiped")
async def _majority_wiped(injector: FaultInjector, injection: FaultInjection) -> AsyncGenerator[None]:
    server = injector.cluster.servers[0]
    yield
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await server.view.acquire("refused", ttl_ms=1_000, lease_id=new_lease_id(), timeout_s=5)
    rich = from_trailing_metadata(caught.value.trailing_metadata())
    assert rich is not None
    assert rich.reason == lock_pb2.ERROR_REASON_QUORUM_UNAVAILABLE
    yield
    await until(lambda: server.grants("refused", ttl_ms=1_000))


_CUT_PAIRS = {
    "partition: one node": 2,
    "partition: one way": 2,
    "node never answers": 2,
    "partition: halves": 3,
    "partition: ring": 2,
}


@_of(*_CUT_PAIRS)
async def _cut_off(injector: FaultInjector, injection: FaultInjection) -> AsyncGenerator[None]:
    yield
    cut = _cut(injector)
    assert len(cut) == _CUT_PAIRS[injection.kind]
    cut_nodes = {"partition: halves": 3, "partition: ring": 2}.get(injection.kind, 1)
    assert len({node for _, node in cut}) == cut_nodes
    yield


@_of("maxclients")
async def _clients_limited(injector: FaultInjector, injection: FaultInjection) -> AsyncGenerator[None]:
    node = injector.cluster.nodes[_index(injection, "node")]
    yield
    with pytest.raises((hiredis.ReplyError, OSError)):
        await node.call("PING")
    yield
    assert await node.call("PING") == b"PONG"


@_of("maxmemory noeviction")
async def _memory_limited(injector: FaultInjector, injection: FaultInjection) -> AsyncGenerator[None]:
    node = injector.cluster.nodes[_index(injection, "node")]
    yield
    with pytest.raises(hiredis.ReplyError, match="OOM"):
        await node.call("SET", "more", "1")
    assert await node.call("CONFIG", "GET", "maxmemory-policy") == [b"maxmemory-policy", b"noeviction"]
    yield
    assert await node.call("CONFIG", "GET", "maxmemory") == [b"maxmemory", b"0"]


@_of("clock stepped")
async def _clock_stepped(injector: FaultInjector, injection: FaultInjection) -> AsyncGenerator[None]:
    node = injector.cluster.nodes[_index(injection, "node")]
    assert injection.moves_clocks
    yield
    assert await has_clock_offset(node, 30_000) or await has_clock_offset(node, -30_000)
    yield
    assert await has_clock_offset(node, 0)


@pytest.mark.parametrize("kind", [kind for kind in FAULTS if kind != _NO_MORE_FILES])
async def test_a_fault_does_what_it_says_is_recorded_and_heals(
    injector: FaultInjector, no_disk: str, kind: str
) -> None:
    """Afterwards every node votes for every server again, by itself."""
    if kind == DISK_FULL and no_disk:
        pytest.skip(no_disk)
    before, began_s = len(injector.faults), now_s()
    injection = _drawn(injector, kind)
    phases = _CHECKS.get(kind, _no_check)(injector, injection)
    await anext(phases)

    async def begin() -> None:
        await run_step(injection.begin)
        await anext(phases)

    await injector.inject(replace(injection, begin=begin, lasts_s=_LASTS_S))
    assert not [phase async for phase in phases]
    (fault,) = injector.faults[before:]
    assert fault.kind == kind
    assert began_s <= fault.began_s < fault.ended_s <= now_s()
    assert not injector.unhealed
    assert not injector.broken
    assert not await injector.cluster.set_right()
    assert not injector.cluster.ended_early()
    assert not _cut(injector)


@pytest.mark.parametrize("lost", [1, 3])
async def test_a_server_that_was_out_of_files_tells_so_and_goes_on_by_itself(
    injector: FaultInjector, lost: int
) -> None:
    """While it may open no file, it reports so; afterwards it connects again."""
    injections = (_drawn(injector, _NO_MORE_FILES, seed=seed) for seed in count())
    injection = next(each for each in injections if len(each.locks) == 1 + lost)
    server = injector.cluster.servers[_index(injection, "server")]
    pid = server.process.pid
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)

    async def reports_it() -> bool:
        report = await server.view.status()
        return any("Too many open files" in node.detail for node in report.nodes)

    try:
        async with _begun(injection):
            # A file gets the lowest free number, so this limit leaves no number free.
            assert resource.prlimit(pid, resource.RLIMIT_NOFILE)[0] <= 3
            await until(reports_it, timeout_s=10)
        assert resource.prlimit(pid, resource.RLIMIT_NOFILE) == before
        await until(server.is_ready, timeout_s=10)
    finally:
        server.kill()
        server.start()
        await until(server.is_ready, timeout_s=30)


async def test_a_node_forgets_only_after_those_before_have_rejoined(injector: FaultInjector) -> None:
    """Nothing is promised if more than a minority forgets at a time."""
    order: list[int] = []

    def wiped(index: int) -> FaultInjection:
        async def begin() -> None:
            assert await injector.cluster.votes(1 - index)
            order.append(index)
            await injector.cluster.nodes[index].call("FLUSHALL")

        return FaultInjection(f"node {index}", 0.0, begin=begin, locks={f"node {index}"}, forgets=[index])

    await asyncio.gather(*(injector.inject(wiped(index)) for index in (0, 1)))
    assert sorted(order) == [0, 1]
    assert not injector.unhealed
    assert not await injector.cluster.set_right()


async def test_every_fault_comes_before_one_comes_again() -> None:
    """The seed decides the order, and a weight decides how often."""
    names = possible(clocks=True, small_disk=True)
    assert set(deck(names, Random(1))) == set(FAULTS)
    assert deck(names, Random(1)) == deck(names, Random(1)) != deck(names, Random(2))
    assert possible(clocks=True, small_disk=False, only=[DISK_FULL]) == []
    assert possible(clocks=False, small_disk=True, only=[SERVER_CLOCK]) == []


@pytest.mark.parametrize("defect", ["did with -9", "had not ended after 0.5 s"])
async def test_a_server_that_does_not_end_in_order_after_sigterm_is_a_defect(
    injector: FaultInjector, monkeypatch: pytest.MonkeyPatch, defect: str
) -> None:
    """Another process kills it meanwhile, or it does not end at all."""
    is_killed = defect == "did with -9"
    monkeypatch.setattr(services, "_DRAIN_S", 10.0 if is_killed else 0.5)
    injection = _drawn(injector, "server drained")
    server = injector.cluster.servers[_index(injection, "server")]
    server.pause()

    async def kill() -> None:
        await asyncio.sleep(0.1)
        if is_killed:
            server.process.kill()

    try:
        await asyncio.gather(run_step(injection.begin), kill())
        assert _has_ended(server.process)
        (reported,) = injector.broken
        assert reported.startswith(injection.target)
        assert defect in reported
    finally:
        injector.broken.clear()
        await run_step(injection.end)
    assert not await injector.cluster.set_right()


async def test_a_storage_that_ends_by_itself_is_a_defect(injector: FaultInjector) -> None:
    """A kill of a process that has ended does not excuse its end."""
    storage = injector.cluster.storage
    storage.process.kill()
    assert injector.cluster.ended_early() == [
        f"storage: it ended by itself, with -9: {storage.process.stderr[-2000:]}"
    ]
    storage.kill()
    assert injector.cluster.ended_early()
    storage._told_to_end.add(storage.process)
    assert not injector.cluster.ended_early()
    storage.start()
    await storage.until_serving()


async def test_a_node_that_does_not_sync_counts_as_forgetful_when_it_is_killed(
    injector: FaultInjector,
) -> None:
    """Only one such node is killed at a time."""
    always = injector.cluster.plan
    injector.cluster.plan = replace(always, aof="everysec")
    try:
        assert all(len(node_killed(injector, Random(seed)).forgets) == 1 for seed in range(20))
    finally:
        injector.cluster.plan = always


async def test_a_node_without_a_log_comes_back_empty_and_votes_again(
    tmp_path: Path, redis_binary: RedisBinary
) -> None:
    """No server starts meanwhile: a server that never saw the node would need an operator."""
    async with ChaosCluster(Plan(aof="off"), tmp_path, redis_binary) as cluster:
        client_pool = ClientPool(cluster, seed="0", began_s=now_s(), count=1)
        injector = FaultInjector(cluster, client_pool, on_begin=lambda _: None)
        injection = _drawn(injector, "node killed")
        index = _index(injection, "node")
        assert injection.forgets == [index]
        assert locks_of_servers(injector) < set(injection.locks)
        node = cluster.nodes[index]
        assert await node.call("SET", "kept", "until then") == b"OK"
        async with _begun(injection):
            assert _has_ended(node)
        assert await node.call("GET", "kept") is None
        assert not await cluster.set_right()
    assert not {LOG_CUT, NODE_COPIED} & set(possible(clocks=True, small_disk=True, logs=False))


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
    injector: FaultInjector, way: str, name: bytes, value: bytes, mended: str
) -> None:
    """A crash repairs them as well, because the node's file has the earlier settings."""
    injection = _drawn_so(injector, "settings changed", way, mended)
    index = int(injection.target.partition(":")[0].removeprefix("node "))
    node = injector.cluster.nodes[index]
    assert injection.forgets == [index]
    pid = node.pid
    before = [await node.call("CONFIG", "GET", each) for each in (name, "maxmemory")]
    async with _begun(injection):
        assert node.pid == pid
        assert await node.call("CONFIG", "GET", name) == [name, value]
        if value == b"allkeys-lru":
            await until(lambda: _evicts(node))
            assert len(_cut(injector)) == 1
    assert (node.pid == pid) == (mended == "while it runs")
    assert [await node.call("CONFIG", "GET", each) for each in (name, "maxmemory")] == before
    assert not await injector.cluster.set_right()


async def _evicts(node: RedisNode) -> bool:
    """Tell whether a node has evicted a key."""
    with suppress(hiredis.ReplyError):  # the rest may still be too much
        await node.call("SET", "more", bytes(10_000), "PX", 100)
    told = await node.call("INFO", "stats")
    assert isinstance(told, bytes)
    return b"evicted_keys:0" not in told


@pytest.mark.parametrize("ends", ["old", "new"])
@pytest.mark.parametrize("kind", ["node doubled: empty", NODE_COPIED])
async def test_a_node_is_another_process_for_some_servers_until_one_of_the_two_ends(
    injector: FaultInjector, kind: str, ends: str
) -> None:
    """The second process is empty or a copy of the node; leases may overlap only beside a copy."""
    injection = _drawn_so(injector, kind, f"the {ends} process ends")
    (index,) = injection.forgets
    node = injector.cluster.nodes[index]
    assert await node.call("SET", "mark", "old") == b"OK"
    (old,) = {await _seen_through(node, server.proxies[index]) for server in injector.cluster.servers}
    folder = node.folder
    async with _begun(injection):
        seen = {await _seen_through(node, server.proxies[index]) for server in injector.cluster.servers}
        (other,) = seen - {old}
        assert old in seen
        assert other[1] == (b"old" if kind == NODE_COPIED else None)
    (left,) = {await _seen_through(node, server.proxies[index]) for server in injector.cluster.servers}
    assert left[0] == (old if ends == "new" else other)[0]
    assert folder.exists() == (ends == "new")
    assert len(list(folder.parent.glob("data*/"))) == 1
    assert (injection.overlaps_s is None) == (kind != NODE_COPIED)
    await node.call("DEL", "mark")
    assert not await injector.cluster.set_right()


async def _seen_through(node: RedisNode, proxy: TcpProxy) -> tuple[bytes, object]:
    """Return the run id and the mark of the process that a server reaches at a node's address."""
    seen = node.beside()
    seen.port = proxy.port
    told = await seen.call("INFO", "server")
    assert isinstance(told, bytes)
    return told.partition(b"run_id:")[2].split()[0], await seen.call("GET", "mark")


@pytest.mark.parametrize("how", ["stands still", "is slow"])
async def test_the_clock_of_one_server_loses_time_and_the_others_keep_theirs(
    injector: FaultInjector, how: str
) -> None:
    """The lost time never comes back."""
    injection = _drawn_so(injector, SERVER_CLOCK, how)
    wrong, right = _clocks(injector, injection)
    before, still = wrong.lag_ms, right.lag_ms
    async with _begun(injection):
        await asyncio.sleep(0.1)
        lost = wrong.lag_ms - before
        assert lost > 50 if how == "stands still" else 0.5 < lost < 5
    assert lost <= wrong.lag_ms - before < 600
    assert right.lag_ms == still
    injector.broken.clear()
    assert not await injector.cluster.set_right()


def _clocks(injector: FaultInjector, injection: FaultInjection) -> tuple[MovedClock, MovedClock]:
    """Return the clock of the affected server and that of the other server."""
    index = int(injection.target.split()[1])
    clocks = [
        server.clock for server in (injector.cluster.servers[index], injector.cluster.servers[1 - index])
    ]
    wrong, right = clocks
    assert wrong is not None
    assert right is not None
    return wrong, right


async def test_a_server_of_true_clock_that_grants_nothing_is_a_defect(
    injector: FaultInjector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the other server is stopped."""
    monkeypatch.setattr(limit_faults, "_NO_GRANT_S", 0.2)
    injection = _drawn(injector, SERVER_CLOCK)
    number = 1 - int(injection.target.split()[1])
    other = injector.cluster.servers[number]
    try:
        async with _begun(injection):
            other.pause()

            async def is_told() -> bool:
                return bool(injector.broken)

            await until(is_told, timeout_s=10.0)
            assert injector.broken == [f"server {number}, whose clock is true, granted nothing for 0.2 s"]
            other.resume()
    finally:
        other.resume()
        injector.broken.clear()
    assert not await injector.cluster.set_right()
