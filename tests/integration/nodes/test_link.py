"""The link to a real node through a network that breaks, and a node that forgets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
from structlog.testing import capture_logs

from harness.processes.fixture_types import FlushedNodes, FreshNodes, StartProxy
from harness.processes.redis_nodes import RedisNode
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
from redfence_server.membership import fence
from redfence_server.membership.admission import Reason
from redfence_server.membership.cluster_memory import ClusterMemory
from redfence_server.membership.heartbeat import HeartbeatSettings
from redfence_server.membership.joining import JoiningSettings
from redfence_server.membership.node_clock import ClockWitnesses
from redfence_server.membership.visit import AdminSettings
from redfence_server.nodes.link import LinkSettings, NodeLink
from redfence_server.operations import forming
from redfence_server.randomness import SystemRandomness
from redfence_server.redis_io import scripts
from redfence_server.redis_io.dial import NodeUrl
from redfence_server.redis_io.scripts import Keyspace, Packer

KEYS = Keyspace()
R, A, B = "orders/42", "a" * 64, "b" * 64
CHANNEL = "ours"
TTL_MS = 60_000
# For tests in which a node does not answer; the others are patient.
NODE_TIMEOUT_MS = 500


def new_link(
    url: str,
    *,
    index: int = 0,
    node_count: int = 1,
    memory: ClusterMemory | None = None,
    assume_durable: bool = False,
    channel: str = CHANNEL,
    node_timeout_ms: int = timeouts.NODE_TIMEOUT_MS,
    heartbeat_interval_ms: int = 60_000,
) -> NodeLink:
    """Return a link that is not started. The other nodes of its cluster are out of its reach."""
    visiting = AdminSettings(KEYS, timeouts.NODE_TIMEOUT_MS)
    urls = [NodeUrl(url) if each == index else NodeUrl("redis://127.0.0.1:1") for each in range(node_count)]
    joining = JoiningSettings(
        urls, visiting, assume_durable=assume_durable, accept_empty_nodes=False, fencing=asyncio.Lock()
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
    """Start a link, wait until it has looked at its node, and end it."""
    link.start()
    try:
        await asyncio.wait_for(link.examined.wait(), 10)
        yield link
    finally:
        await link.close()


async def form(*nodes: RedisNode) -> None:
    """Form these nodes into a cluster."""
    await forming.form(
        [NodeUrl(node.url) for node in nodes], keys=KEYS, ttl_ms_max=300_000, randomness=SystemRandomness()
    )


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
    """Return a hand-over whose release stays worth sending for a minute."""
    return Mint(R, lease, nonce, "", TTL_MS, ends=Release(R, ends, SystemClock().now_ms() + TTL_MS))


def is_ready(link: NodeLink) -> bool:
    """Tell whether the node votes."""
    return link.report().state is NodeState.READY


async def ready_again(link: NodeLink) -> None:
    """Return once the link has noticed that its connection is gone, and has made another one."""
    await eventually(lambda: not is_ready(link))
    await eventually(lambda: is_ready(link))


def is_quarantined(link: NodeLink) -> bool:
    """Tell whether the node is up and kept out."""
    return link.report().state is NodeState.QUARANTINED


@pytest.mark.slow
async def test_thousands_of_replies_in_pieces_and_behind_time_outs_reach_their_callers(
    flushed_nodes: FlushedNodes, start_proxy: StartProxy
) -> None:
    """Replies come in slices, and a pause outlasts the timeout; each caller reads its own."""
    (node,) = await flushed_nodes(1)
    await form(node)
    proxy = await start_proxy(node)
    async with linked(new_link(proxy.url(node.url), node_timeout_ms=NODE_TIMEOUT_MS)) as link:
        wrong: list[object] = []
        told = {"answer": 0, "silence": 0}

        def note(name: str, reply: Reply) -> None:
            if isinstance(reply, NoReply):
                told["silence"] += 1
                return
            told["answer"] += 1
            if not isinstance(reply, Granted) or reply.nonce != name:
                wrong.append((name, reply))

        def send(start: int) -> None:
            for number in range(start, start + 300):
                name = f"n{number}"
                link.send(mint(nonce=name, resource=name), lambda reply, name=name: note(name, reply))  # type: ignore[misc]

        proxy.slice(slice_bytes=701)
        send(0)
        await eventually(lambda: sum(told.values()) == 300)
        proxy.hold()
        send(300)
        await eventually(lambda: sum(told.values()) == 600)
        assert told["silence"] >= 300
        await proxy.heal()
        send(600)
        await eventually(lambda: sum(told.values()) == 900)
        assert not wrong
        assert told["answer"] >= 300


@pytest.mark.slow
async def test_a_stalled_connection_is_made_anew_and_an_undo_that_timed_out_is_repeated(
    flushed_nodes: FlushedNodes, start_proxy: StartProxy
) -> None:
    """The node gets the swallowed undo when it is back, so that no hold is left for a whole ttl."""
    (node,) = await flushed_nodes(1)
    await form(node)
    proxy = await start_proxy(node)
    async with linked(new_link(proxy.url(node.url), node_timeout_ms=NODE_TIMEOUT_MS)) as link:
        assert await ask(link, mint()) == Granted("n1", 1)
        proxy.drop()
        assert await ask(link, undo()) is NoReply.TIMED_OUT
        await eventually(lambda: not is_ready(link))
        assert await ask(link, Inspect(R)) is NoReply.UNREACHABLE
        await proxy.heal()
        await eventually(lambda: is_ready(link))
        assert await ask(link, Inspect(R)) is Status.FREE


async def test_undos_for_a_node_that_is_away_are_sent_before_anything_else_when_it_is_back(
    flushed_nodes: FlushedNodes, start_proxy: StartProxy
) -> None:
    """Also one whose connection broke before the answer; nothing but undos is kept."""
    (node,) = await flushed_nodes(1)
    await form(node)
    proxy = await start_proxy(node)
    async with linked(new_link(proxy.url(node.url))) as link:
        assert await ask(link, mint()) == Granted("n1", 1)
        proxy.refuse()
        await eventually(lambda: not is_ready(link))
        link.send(undo())
        assert await ask(link, mint(B, "n2", "other")) is NoReply.UNREACHABLE
        await proxy.heal()
        await eventually(lambda: is_ready(link))
        assert await ask(link, Inspect(R)) is Status.FREE
        assert await ask(link, Inspect("other")) is Status.FREE


async def test_an_answer_that_is_lost_leaves_the_hold_to_be_undone(
    flushed_nodes: FlushedNodes, start_proxy: StartProxy
) -> None:
    """The mint was applied and the connection broke before its reply."""
    (node,) = await flushed_nodes(1)
    await form(node)
    proxy = await start_proxy(node)
    async with linked(new_link(proxy.url(node.url))) as link:
        # The answer to the subscription comes before this one, and is not the one that is lost.
        assert await ask(link, Inspect(R)) is Status.FREE
        proxy.lose_replies(1)
        assert await ask(link, mint()) is NoReply.DISCONNECTED
        await ready_again(link)
        assert isinstance(await ask(link, Inspect(R)), Held)
        assert await ask(link, undo()) is Status.UNDONE


async def test_forgotten_scripts_are_loaded_again_and_the_refused_undo_is_repeated(
    flushed_nodes: FlushedNodes,
) -> None:
    """SCRIPT FLUSH costs one refused command, not the node, and no hold."""
    (node,) = await flushed_nodes(1)
    await form(node)
    async with linked(new_link(node.url)) as link:
        await ask(link, mint())
        await node.call("SCRIPT", "FLUSH")
        assert await ask(link, undo()) is NoReply.REFUSED
        await ready_again(link)
        assert await ask(link, Inspect(R)) is Status.FREE


@pytest.mark.slow
@pytest.mark.parametrize("way", ["refused", "swallowed", "applied, and its reply lost"])
async def test_the_release_of_a_missed_hand_over_is_sent_when_the_node_is_back(
    flushed_nodes: FlushedNodes, start_proxy: StartProxy, way: str
) -> None:
    """The holder has released the lock, so the node must not hold it."""
    (node,) = await flushed_nodes(1)
    await form(node)
    proxy = await start_proxy(node)
    timeout_ms = NODE_TIMEOUT_MS if way == "swallowed" else timeouts.NODE_TIMEOUT_MS
    async with linked(new_link(proxy.url(node.url), node_timeout_ms=timeout_ms)) as link:
        assert await ask(link, mint()) == Granted("n1", 1)
        if way == "refused":
            proxy.refuse()
            await eventually(lambda: not is_ready(link))
            assert await ask(link, hand_over()) is NoReply.UNREACHABLE
        elif way == "swallowed":
            proxy.drop()
            assert await ask(link, hand_over()) is NoReply.TIMED_OUT
            await eventually(lambda: not is_ready(link))
        else:
            proxy.lose_replies(1)
            assert await ask(link, hand_over()) is NoReply.DISCONNECTED
            await eventually(lambda: not is_ready(link))
        await proxy.heal()
        await eventually(lambda: is_ready(link))
        if way == "applied, and its reply lost":
            held = await ask(link, Inspect(R))
            assert isinstance(held, Held)
            assert held.digest == B, "the release that is sent again ends no other lease"
            assert await ask(link, undo("n2")) is Status.UNDONE
        assert await ask(link, Inspect(R)) is Status.FREE


async def test_a_hand_over_that_met_forgotten_scripts_is_sent_again_as_its_release(
    flushed_nodes: FlushedNodes,
) -> None:
    """The attempt was told that it was refused and went on without this node."""
    (node,) = await flushed_nodes(1)
    await form(node)
    async with linked(new_link(node.url)) as link:
        await ask(link, mint())
        await node.call("SCRIPT", "FLUSH")
        assert await ask(link, hand_over()) is NoReply.REFUSED
        await ready_again(link)
        assert await ask(link, Inspect(R)) is Status.FREE


async def test_notices_come_again_after_a_reconnect(
    flushed_nodes: FlushedNodes, start_proxy: StartProxy
) -> None:
    """Every connection subscribes anew; a server that asked before the break is told after it."""
    (node,) = await flushed_nodes(1)
    await form(node)
    proxy = await start_proxy(node)
    heard: list[Notice] = []
    waiting = new_link(proxy.url(node.url))
    waiting.listen(heard.append)
    async with linked(new_link(node.url, channel="theirs")) as holding, linked(waiting):
        for number in (1, 2, 3):
            await ask(holding, mint(nonce=f"n{number}"))
            asks = Mint(R, B, "theirs", "", TTL_MS, notify=True)
            assert isinstance(await ask(waiting, asks), Held)
            proxy.reset()
            await eventually(lambda: not is_ready(waiting))
            await eventually(lambda: is_ready(waiting))
            # Its subscription went out first, so it stands when this is answered.
            assert isinstance(await ask(waiting, Inspect(R)), Held)
            assert await ask(holding, Release(R, A, 0)) is Status.RELEASED
            await eventually(lambda number=number: len(heard) == number)  # type: ignore[misc]
    assert heard == [Notice(0, R, number) for number in (1, 2, 3)]


async def votes_without_notices(url: str, *, refused: str) -> None:
    """Check that a node which refuses notices carries every other command."""
    with capture_logs() as logs:
        link = new_link(url)
        heard: list[Notice] = []
        link.listen(heard.append)
        async with linked(link):
            replies = [ask(link, mint(nonce=f"n{number}", resource=f"r{number}")) for number in range(20)]
            assert await asyncio.gather(*replies) == [
                Granted(f"n{number}", number + 1) for number in range(20)
            ]
            assert is_ready(link)
            assert refused in link.report().detail.lower()
            await ask(link, Mint(R, A, "n1", "", TTL_MS, behind=True))
            assert await ask(link, Release(R, A, 0)) is Status.RELEASED
            assert await ask(link, Inspect(R)) is Status.FREE
    (told,) = (entry for entry in logs if entry["event"] == "node_notices_refused")
    assert refused in told["problem"].lower()
    assert heard == []


async def test_a_node_that_refuses_the_subscription_votes_all_the_same(flushed_nodes: FlushedNodes) -> None:
    """Its waiters are woken by the expiry alone; replies reach their own callers."""
    (node,) = await flushed_nodes(1)
    await form(node)
    rights = ("~*", "&*", "+@all", "-subscribe")
    await node.call("ACL", "SETUSER", "deaf", "reset", "on", ">secret", *rights)
    try:
        await votes_without_notices(f"redis://deaf:secret@127.0.0.1:{node.port}", refused="subscribe")
    finally:
        await node.call("ACL", "DELUSER", "deaf")


async def test_a_node_that_does_not_know_resp3_votes_all_the_same(flushed_nodes: FlushedNodes) -> None:
    """An old proxy may not know it. A subscription would then shift every reply."""
    (node,) = await flushed_nodes(1)
    await form(node)

    carriers: list[asyncio.Task[None]] = []

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(65_536):
                writer.write(data.replace(b"HELLO", b"HOWDY"))
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", node.port)
        carriers.append(asyncio.create_task(carry(reader, far_writer)))
        carriers.append(asyncio.create_task(carry(far_reader, writer)))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    await votes_without_notices(node.url.replace(f":{node.port}", f":{port}"), refused="hello")
    server.close()
    await asyncio.gather(*carriers)


async def test_whatever_else_is_published_on_the_channel_is_logged_and_passed_over(
    flushed_nodes: FlushedNodes,
) -> None:
    """Any user with the right to publish may write there; later notices do not suffer."""
    (node,) = await flushed_nodes(1)
    await form(node)
    with capture_logs() as logs:
        link = new_link(node.url)
        heard: list[Notice] = []
        link.listen(heard.append)
        async with linked(link):
            await ask(link, Mint(R, A, "n1", "", TTL_MS, behind=True))
            for rubbish in (b"", b"rubbish", b"\xff\xfe", b"x redfence:lock:a", b"1 elsewhere"):
                assert await node.call("PUBLISH", CHANNEL, rubbish) == 1
            assert isinstance(await ask(link, Inspect(R)), Held)
            assert await ask(link, Release(R, A, 0)) is Status.RELEASED
            assert await ask(link, Inspect(R)) is Status.FREE
            assert is_ready(link)
    assert [entry["event"] for entry in logs].count("node_notice_malformed") == 5
    assert heard == [Notice(0, R, 1)]


async def test_a_node_that_was_flushed_is_quarantined_by_the_first_command_that_meets_it(
    flushed_nodes: FlushedNodes,
) -> None:
    """It forgot its tokens without a restart, so it must not vote."""
    (node,) = await flushed_nodes(1)
    await form(node)
    async with linked(new_link(node.url)) as link:
        await ask(link, mint())
        await node.call("FLUSHALL")
        assert await ask(link, mint(B, "n2")) is NoReply.NOT_ADMITTED
        await eventually(lambda: is_quarantined(link))
        assert "it was wiped" in link.report().detail
        assert "redfence cluster recover" in link.report().detail
        assert await ask(link, mint(B, "n3")) is NoReply.QUARANTINED
        assert await node.call("HGET", KEYS.node, "state") == b"quarantined"
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
    """Its other votes may be from a process that the fence has put out."""
    nodes = await flushed_nodes(3)
    await form(*nodes)
    async with linked(new_link(nodes[0].url, node_count=3)) as link:
        granted = await ask(link, mint())
        assert isinstance(granted, Granted)
        await raise_floor(nodes[0], 1_000)
        assert await ask(link, Commit(R, A, "n1", 2_000, granted.under)) is NoReply.NOT_ADMITTED
        await ready_again(link)
        assert await ask(link, Commit(R, A, "n1", 2_000, granted.under)) is NoReply.NOT_ADMITTED
        assert is_ready(link), "a late commit tells nothing of the present admission"
        assert await ask(link, Renew(R, A)) == Renewed(1, TTL_MS)
        assert await ask(link, mint(B, "n2", "other")) == Granted("n2", 1_001)


async def test_commands_behind_a_refused_command_are_refused_as_well(
    flushed_nodes: FlushedNodes, start_proxy: StartProxy
) -> None:
    """Another server has raised a fence, so nothing is minted under the earlier id."""
    nodes = await flushed_nodes(3)
    await form(*nodes)
    proxy = await start_proxy(nodes[0])
    async with linked(new_link(proxy.url(nodes[0].url), node_count=3)) as link:
        await ask(link, mint())
        proxy.delay(replies_ms=100)
        await raise_floor(nodes[0], 1_000)
        first = asyncio.ensure_future(ask(link, mint(B, "n2", "other")))
        # The answer to the first is read before the answer to the second.
        await asyncio.sleep(0.05)
        behind = asyncio.ensure_future(ask(link, mint(B, "n3", "other")))
        assert await first is NoReply.NOT_ADMITTED
        assert await behind is NoReply.NOT_ADMITTED
        await proxy.heal()
        await ready_again(link)
        assert await ask(link, Inspect("other")) is Status.FREE
        assert await ask(link, Renew(R, A)) == Renewed(1, TTL_MS)


async def test_a_node_that_lost_its_greatest_number_does_not_vote(flushed_nodes: FlushedNodes) -> None:
    """Evicted or deleted, it would mint numbers again that it minted before."""
    (node,) = await flushed_nodes(1)
    await form(node)
    async with linked(new_link(node.url)) as link:
        await ask(link, mint())
        await node.call("DEL", KEYS.high)
        assert await ask(link, mint(B, "n2", "other")) is NoReply.NOT_ADMITTED
        await eventually(lambda: is_quarantined(link))


async def test_an_answer_that_no_script_gives_is_told_as_a_refusal(flushed_nodes: FlushedNodes) -> None:
    """Another program has changed the keys. Each caller is told all the same."""
    (node,) = await flushed_nodes(1)
    await form(node)
    async with linked(new_link(node.url)) as link:
        await ask(link, mint())
        await node.call("HDEL", KEYS.lock(R), "token")
        replies = await asyncio.gather(ask(link, Inspect(R)), ask(link, Inspect("other")))
        assert replies[0] is NoReply.REFUSED
        await eventually(lambda: is_ready(link))


async def test_a_durable_node_that_was_killed_votes_again_and_remembers(fresh_nodes: FreshNodes) -> None:
    """Its holds stand. A retry takes a token above the floor, for the data may be an old copy."""
    (node,) = await fresh_nodes(1)
    await form(node)
    async with linked(new_link(node.url)) as link:
        await ask(link, mint())
        await node.restart()
        await eventually(lambda: is_ready(link), timeout_s=10)
        held = await ask(link, mint(B, "n2"))
        assert isinstance(held, Held)
        assert (held.digest, held.token) == (A, 1)
        assert await ask(link, Renew(R, A)) == Renewed(1, TTL_MS)
        retried = await ask(link, mint(nonce="n3"))
        assert isinstance(retried, Granted)
        assert retried.token > fence.TOKENS_JUMP
        assert await ask(link, undo("n3")) is Status.KEPT, "an earlier try may have been granted"
        assert await ask(link, mint(nonce="n4")) == Granted("n3", retried.token)


@pytest.mark.slow
async def test_a_node_that_may_have_lost_its_last_second_is_quarantined_after_a_restart(
    fresh_nodes: FreshNodes,
) -> None:
    """Appendfsync everysec proves nothing; the operator's word does."""
    (node,) = await fresh_nodes(1, appendfsync="everysec")
    await form(node)
    await asyncio.sleep(1.1)  # the identity has to be on disk
    await node.restart()
    async with linked(new_link(node.url, assume_durable=True)) as link:
        assert is_ready(link)
    await asyncio.sleep(1.1)
    await node.restart()
    async with linked(new_link(node.url)) as link:
        assert is_quarantined(link)
        assert "appendfsync is everysec" in link.report().detail


@pytest.mark.slow
async def test_a_node_that_stops_being_durable_is_out_at_the_next_heartbeat(fresh_nodes: FreshNodes) -> None:
    """A note on the node would be forgotten with its tokens, and it would seem durable again."""
    (node,) = await fresh_nodes(1)
    await form(node)
    async with linked(new_link(node.url, heartbeat_interval_ms=100)) as link:
        assert is_ready(link)
        await node.call("CONFIG", "SET", "appendonly", "no")
        await eventually(lambda: is_quarantined(link), timeout_s=10)
        assert "appendonly is no" in link.report().detail
        await node.call("CONFIG", "SET", "appendonly", "yes")
        await eventually(lambda: is_ready(link), timeout_s=10)


@pytest.mark.slow
async def test_a_node_is_not_durable_after_the_fact(fresh_nodes: FreshNodes) -> None:
    """What counts is how the run wrote that ended, not how the next one will."""
    (node,) = await fresh_nodes(1, appendfsync="everysec")
    await form(node)
    await asyncio.sleep(1.1)  # the identity has to be on disk
    node.appendfsync = "always"
    await node.restart()
    async with linked(new_link(node.url)) as link:
        assert is_quarantined(link)


async def test_what_is_wrong_with_a_node_is_told_in_words(
    flushed_nodes: FlushedNodes, fresh_nodes: FreshNodes
) -> None:
    """Each mistake of a configuration has a message of its own."""
    first, second, lone = await flushed_nodes(3)
    await form(lone)
    await forming.form(
        [NodeUrl(node.url) for node in (first, second, *(await fresh_nodes(1)))],
        keys=KEYS,
        ttl_ms_max=300_000,
        randomness=SystemRandomness(),
    )
    memory = ClusterMemory(3)
    async with linked(new_link(first.url, index=0, node_count=3, memory=memory)) as link:
        assert is_ready(link)

    async def told(url: str, *, index: int, node_count: int) -> str:
        known = ClusterMemory(node_count)
        known.cluster_id = memory.cluster_id
        async with linked(new_link(url, index=index, node_count=node_count, memory=known)) as link:
            assert not is_ready(link)
            return link.report().detail

    assert "formed as node 1, but is configured as node 2" in await told(second.url, index=2, node_count=3)
    assert "named twice" in await told(first.url, index=1, node_count=3)
    assert "belongs to cluster" in await told(lone.url, index=0, node_count=1)
    assert "one of 3 nodes, but 5" in await told(first.url, index=0, node_count=5)
    wrong_password = first.url.replace(first.url.split(":")[2].split("@")[0], "wrong")
    assert "invalid" in (await told(wrong_password, index=0, node_count=3)).lower()


async def test_a_replica_does_not_vote(fresh_nodes: FreshNodes) -> None:
    """It does not decide what it stores."""
    primary, replica = await fresh_nodes(2)
    await form(primary)
    await form(replica)
    await replica.call("REPLICAOF", "127.0.0.1", primary.port)
    async with linked(new_link(replica.url)) as link:
        assert is_quarantined(link)
        assert link.admission_refused is not None
        assert link.admission_refused.reason is Reason.REPLICA
        assert link.admission_refused.reason.misconfigured


async def test_a_peer_that_is_no_redis_is_a_dial_error_and_tried_again() -> None:
    """Something else answers on the port."""

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
