"""The link to a real node: broken networks, missed commands, notices and admission."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from harness.processes.fixture_types import FlushedNodes, StartProxy
from harness.processes.redis_nodes import RedisNode
from harness.processes.servers import form
from harness.processes.tcp_proxy import TcpProxy
from harness.time import timeouts
from harness.time.eventually import eventually
from redfence_server.clock import SystemClock
from redfence_server.locking.node import (
    Command,
    Commit,
    Granted,
    Held,
    Inspect,
    Mint,
    NodeState,
    NoReply,
    Notice,
    Release,
    Renew,
    Renewed,
    Reply,
    Status,
    Undo,
)
from redfence_server.membership.admin import AdminSettings
from redfence_server.membership.cluster_memory import ClusterMemory
from redfence_server.membership.examination import examine
from redfence_server.membership.heartbeat import HeartbeatSettings
from redfence_server.membership.joining import JoiningSettings
from redfence_server.membership.node_clock import ClockWitnesses
from redfence_server.nodes.link import LinkSettings, NodeLink
from redfence_server.randomness import SystemRandomness
from redfence_server.redis_io import scripts
from redfence_server.redis_io.dial import NodeUrl, dial
from redfence_server.redis_io.scripts import Keyspace, Packer

KEYS = Keyspace()
R, A, B = "orders/42", "a" * 64, "b" * 64
CHANNEL = "ours"
TTL_MS = 60_000
# For tests in which a node does not answer.
NODE_TIMEOUT_MS = 500


def new_link(
    url: str,
    *,
    index: int = 0,
    node_count: int = 1,
    memory: ClusterMemory | None = None,
    channel: str = CHANNEL,
    node_timeout_ms: int = timeouts.NODE_TIMEOUT_MS,
    heartbeat_interval_ms: int = 60_000,
) -> NodeLink:
    """Return a link that is not started. The other nodes of its cluster are out of its reach."""
    visiting = AdminSettings(KEYS, timeouts.NODE_TIMEOUT_MS)
    urls = [NodeUrl(url) if each == index else NodeUrl("redis://127.0.0.1:1") for each in range(node_count)]
    joining = JoiningSettings(
        urls, visiting, assume_durable=False, accept_empty_nodes=False, fencing=asyncio.Lock()
    )
    return NodeLink(
        index,
        settings=LinkSettings(
            packer=Packer(KEYS, channel=channel),
            channel=channel,
            node_timeout_ms=node_timeout_ms,
            joining=joining,
            heartbeat=HeartbeatSettings(heartbeat_interval_ms, KEYS, ClockWitnesses(node_count)),
        ),
        memory=memory or ClusterMemory(node_count),
        clock=SystemClock(),
        randomness=SystemRandomness(),
    )


@asynccontextmanager
async def linked(link: NodeLink) -> AsyncIterator[NodeLink]:
    """Start a link, yield it once it has examined its node, and close it."""
    link.start()
    try:
        await asyncio.wait_for(link.examined.wait(), 10)
        yield link
    finally:
        await link.close()


@pytest.fixture
async def node(flushed_nodes: FlushedNodes) -> RedisNode:
    """A formed node, the only one of its cluster."""
    (node,) = await flushed_nodes(1)
    await form([node])
    return node


async def ask(link: NodeLink, command: Command) -> Reply:
    """Send one command and return its reply."""
    told: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
    link.send(command, told.set_result)
    return await asyncio.wait_for(told, 5)


def mint(lease: str = A, nonce: str = "n1", resource: str = R) -> Mint:
    """Return a mint."""
    return Mint(resource, lease, nonce, "", TTL_MS)


def undo(nonce: str = "n1") -> Undo:
    """Return an undo that stays worth sending for a minute."""
    return Undo(R, nonce, SystemClock().now_ms() + TTL_MS)


def hand_over(lease: str = B, nonce: str = "n2", *, ends: str = A) -> Mint:
    """Return a handover whose release stays worth sending for a minute."""
    return Mint(R, lease, nonce, "", TTL_MS, release_first=Release(R, ends, SystemClock().now_ms() + TTL_MS))


def is_ready(link: NodeLink) -> bool:
    """Tell whether the node votes."""
    return link.report().state is NodeState.READY


async def ready_again(link: NodeLink, *, heal: TcpProxy | None = None) -> None:
    """Return once the link has noticed that its connection is gone, and has made another one."""
    await eventually(lambda: not is_ready(link))
    if heal:
        await heal.heal()
    await eventually(lambda: is_ready(link))


def is_quarantined(link: NodeLink) -> bool:
    """Tell whether the node is up and kept out."""
    return link.report().state is NodeState.QUARANTINED


async def test_an_undo_behind_an_unanswered_batch_leaves_before_the_link_is_closed(node: RedisNode) -> None:
    """A server that stops undoes the mints of the calls that it cancels."""
    link = new_link(node.url)
    async with linked(link):
        link.send(mint())
        await asyncio.sleep(0)
        link.send(undo())
    async with linked(new_link(node.url)) as later:
        assert await ask(later, Inspect(R)) is Status.FREE


async def test_a_defect_in_a_callback_costs_no_other_command_its_reply(node: RedisNode) -> None:
    def break_down(_: object) -> None:
        raise RuntimeError("a defect")

    async with linked(new_link(node.url)) as link:
        with capture_logs() as logs:
            link.listen(break_down)
            link.send(mint(), break_down)
            refused = replace(hand_over("c" * 64, "n3", ends=B), watch_blocking_hold=True)
            assert isinstance(await ask(link, refused), Held)
            assert await ask(link, Release(R, A, SystemClock().now_ms() + TTL_MS)) is Status.RELEASED
            assert await ask(link, Inspect(R)) is Status.FREE
        assert [entry["where"] for entry in logs] == ["node_reply", "node_notice"]
        assert is_ready(link)


@pytest.mark.slow
@pytest.mark.parametrize("missed", ["undo", "handover"])
@pytest.mark.parametrize("way", ["refused", "swallowed", "applied, and its reply lost", "scripts forgotten"])
async def test_a_missed_undo_or_release_is_sent_first_when_the_node_is_back(
    node: RedisNode, start_proxy: StartProxy, way: str, missed: str
) -> None:
    """The link sends nothing else again, so a missed handover becomes a release."""
    proxy = await start_proxy(node)
    timeout_ms = NODE_TIMEOUT_MS if way == "swallowed" else timeouts.NODE_TIMEOUT_MS
    command = undo() if missed == "undo" else hand_over()
    async with linked(new_link(proxy.url(node.url), node_timeout_ms=timeout_ms)) as link:
        assert await ask(link, mint()) == Granted("n1", 1)
        match way:
            case "refused":
                proxy.refuse()
                await eventually(lambda: not is_ready(link))
                reply = NoReply.UNREACHABLE
            case "swallowed":
                proxy.drop()
                reply = NoReply.TIMED_OUT
            case "applied, and its reply lost":
                proxy.lose_replies(1)
                reply = NoReply.DISCONNECTED
            case _:
                await node.call("SCRIPT", "FLUSH")
                reply = NoReply.REFUSED
        assert await ask(link, command) is reply
        if way == "refused":
            assert await ask(link, mint(B, "n3", "other")) is NoReply.UNREACHABLE
        await ready_again(link, heal=proxy)
        if way.startswith("applied") and missed == "handover":
            held = await ask(link, Inspect(R))
            assert isinstance(held, Held)
            assert held.digest == B, "the release that is sent again ends no other lease"
            assert await ask(link, undo("n2")) is Status.UNDONE
        assert await ask(link, Inspect(R)) is Status.FREE
        assert await ask(link, Inspect("other")) is Status.FREE


async def test_notices_come_again_after_a_reconnect(node: RedisNode, start_proxy: StartProxy) -> None:
    """A server that asked before the break is told after it."""
    proxy = await start_proxy(node)
    heard: list[Notice] = []
    waiting = new_link(proxy.url(node.url))
    waiting.listen(heard.append)
    async with linked(new_link(node.url, channel="theirs")) as holding, linked(waiting):
        for number in (1, 2, 3):
            await ask(holding, mint(nonce=f"n{number}"))
            asks = Mint(R, B, "theirs", "", TTL_MS, watch_blocking_hold=True)
            assert isinstance(await ask(waiting, asks), Held)
            proxy.reset()
            await ready_again(waiting)
            # The subscription went out before this command.
            assert isinstance(await ask(waiting, Inspect(R)), Held)
            assert await ask(holding, Release(R, A, 0)) is Status.RELEASED
            await eventually(lambda number=number: len(heard) == number)  # type: ignore[misc]
    assert heard == [Notice(0, R, number) for number in (1, 2, 3)]


async def test_a_node_that_refuses_the_subscription_votes_all_the_same(node: RedisNode) -> None:
    """Only the expiry wakes its waiters. Replies reach their own callers."""
    rights = ("~*", "&*", "+@all", "-subscribe")
    await node.call("ACL", "SETUSER", "deaf", "reset", "on", ">secret", *rights)
    with capture_logs() as logs:
        link = new_link(f"redis://deaf:secret@127.0.0.1:{node.port}")
        heard: list[Notice] = []
        link.listen(heard.append)
        async with linked(link):
            replies = [ask(link, mint(nonce=f"n{number}", resource=f"r{number}")) for number in range(20)]
            assert await asyncio.gather(*replies) == [
                Granted(f"n{number}", number + 1) for number in range(20)
            ]
            assert is_ready(link)
            assert "subscribe" in link.report().detail.lower()
            await ask(link, Mint(R, A, "n1", "", TTL_MS, watch_own_hold=True))
            assert await ask(link, Release(R, A, 0)) is Status.RELEASED
            assert await ask(link, Inspect(R)) is Status.FREE
    await node.call("ACL", "DELUSER", "deaf")
    (told,) = (entry for entry in logs if entry["event"] == "node_notices_refused")
    assert "subscribe" in told["problem"].lower()
    assert heard == []


async def test_other_messages_on_the_channel_are_logged_and_ignored(
    node: RedisNode,
) -> None:
    """Later notices arrive."""
    with capture_logs() as logs:
        link = new_link(node.url)
        heard: list[Notice] = []
        link.listen(heard.append)
        async with linked(link):
            await ask(link, Mint(R, A, "n1", "", TTL_MS, watch_own_hold=True))
            for rubbish in (b"", b"rubbish", b"\xff\xfe", b"x redfence:lock:a", b"1 elsewhere"):
                assert await node.call("PUBLISH", CHANNEL, rubbish) == 1
            assert isinstance(await ask(link, Inspect(R)), Held)
            assert await ask(link, Release(R, A, 0)) is Status.RELEASED
            assert await ask(link, Inspect(R)) is Status.FREE
            assert is_ready(link)
    assert [entry["event"] for entry in logs].count("node_notice_malformed") == 5
    assert heard == [Notice(0, R, 1)]


@pytest.mark.parametrize("loss", ["FLUSHALL", "DEL"])
async def test_a_node_that_lost_its_tokens_is_quarantined_by_the_first_command(
    node: RedisNode, loss: str
) -> None:
    """FLUSHALL forgets everything. DEL forgets the greatest token, as an eviction may."""
    async with linked(new_link(node.url)) as link:
        await ask(link, mint())
        await node.call(*((loss, KEYS.high) if loss == "DEL" else (loss,)))
        assert await ask(link, mint(B, "n2", "other")) is NoReply.NOT_ADMITTED
        await eventually(lambda: is_quarantined(link))
        assert await ask(link, mint(B, "n3")) is NoReply.QUARANTINED
        assert await node.call("HGET", KEYS.node, "state") == b"quarantined"
        if loss == "FLUSHALL":
            assert "it was wiped" in link.report().detail
            assert "redfence cluster recover" in link.report().detail
            assert await node.call("DBSIZE") == 1


async def raise_floor(node: RedisNode, floor: int) -> None:
    """Raise the fence for another node index, as another server does."""
    admission = await node.call("HGET", KEYS.node, "admission")
    assert isinstance(admission, bytes)
    arguments = (KEYS.node, KEYS.high, admission, "f" * 32, 2, floor, "a" * 32)
    assert await node.call("EVAL", scripts.load("raise_floor"), 2, *arguments) == [b"raised"]


async def test_an_attempt_that_began_before_a_fence_is_not_committed_after_it(
    flushed_nodes: FlushedNodes,
) -> None:
    """Its other votes may come from a process that the fence has put out."""
    nodes = await flushed_nodes(3)
    await form(nodes)
    async with linked(new_link(nodes[0].url, node_count=3)) as link:
        granted = await ask(link, mint())
        assert isinstance(granted, Granted)
        await raise_floor(nodes[0], 1_000)
        assert await ask(link, Commit(R, A, "n1", 2_000, granted.admission_id)) is NoReply.NOT_ADMITTED
        await ready_again(link)
        assert await ask(link, Commit(R, A, "n1", 2_000, granted.admission_id)) is NoReply.NOT_ADMITTED
        assert is_ready(link), "a late commit tells nothing of the present admission"
        assert await ask(link, Renew(R, A)) == Renewed(1, TTL_MS)
        assert await ask(link, mint(B, "n2", "other")) == Granted("n2", 1_001)


async def test_a_lock_key_that_holds_no_hold_is_told_as_a_refusal(node: RedisNode) -> None:
    """Another program has changed the keys. Each caller gets an answer."""
    async with linked(new_link(node.url)) as link:
        await ask(link, mint())
        await node.call("SET", KEYS.lock(R), "text")
        replies = await asyncio.gather(ask(link, Inspect(R)), ask(link, Inspect("other")))
        assert replies[0] is NoReply.REFUSED
        await eventually(lambda: is_ready(link))


async def test_a_peer_that_is_no_redis_is_a_dial_error_and_tried_again() -> None:
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with linked(new_link(f"redis://127.0.0.1:{port}")) as link:
        assert link.report().state is NodeState.UNREACHABLE
        assert link.report().detail
    server.close()
    await server.wait_closed()


@pytest.mark.parametrize("password", ["the node's", "wrong"])
async def test_a_server_can_be_stopped_at_every_step_of_connecting(node: RedisNode, password: str) -> None:
    url = node.url if password == "the node's" else f"redis://:{password}@{NodeUrl(node.url).address}"

    async def connect() -> None:
        dialled = await dial(NodeUrl(url), timeout_ms=5_000)
        try:
            await examine(dialled, KEYS, SystemClock())
        finally:
            await dialled.close()

    for step_count in range(1_000):
        connecting = asyncio.create_task(connect())
        for _ in range(step_count):
            await asyncio.sleep(0)
        if connecting.done():
            assert (connecting.exception() is None) == (url == node.url)
            break
        connecting.cancel()
        await asyncio.wait([connecting])
        assert connecting.cancelled(), f"lost at step {step_count}: {connecting.exception()!r}"
    assert step_count > 5, "there was nothing to cancel"
