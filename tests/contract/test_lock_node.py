"""One suite over the fake node and real nodes behind a `NodeLink`: replies to commands, and the data left."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.doubles.fake_node import FakeNode, FakeNodeState
from harness.processes.fixture_types import FlushedNodes
from harness.processes.redis_nodes import ENGINES, RedisNode, engine_binary
from harness.time.eventually import eventually
from redfence_server.clock import SystemClock
from redfence_server.embedded.binary import RedisBinary
from redfence_server.locking.node import (
    Command,
    Commit,
    Granted,
    Held,
    Inspect,
    LockNode,
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
from redfence_server.membership.cluster_memory import ClusterMemory
from redfence_server.membership.heartbeat import HeartbeatSettings
from redfence_server.membership.joining import JoiningSettings
from redfence_server.membership.node_clock import ClockWitnesses
from redfence_server.membership.visit import AdminSettings
from redfence_server.nodes.link import LinkSettings, NodeLink
from redfence_server.operations import forming
from redfence_server.randomness import SystemRandomness
from redfence_server.redis_io.dial import NodeUrl
from redfence_server.redis_io.scripts import Keyspace, Packer

R = "orders/42"
A, B, C = "a" * 64, "b" * 64, "c" * 64
# As long as each other, as the channels of servers are: none is a part of another.
HERE, THERE = "notice:1", "notice:2"
TTL_MS = 30_000
KEYS = Keyspace()
# One server's unanswered questions, far below what its connection takes.
_UNANSWERED_MAX = 1_000

Fields = dict[str, str]
"""What a node keeps, by key; each value as text, without what is left of its time."""


class Server(Protocol):
    """What asks a node: its link, and what the node has told it, replies and notices in one order."""

    @property
    def node(self) -> LockNode: ...
    @property
    def told(self) -> list[Reply | Notice]: ...


class Site(Server, Protocol):
    """A node of either kind with a first server, and a look behind it."""

    async def beside(self, channel: str) -> Server: ...

    async def dump(self) -> dict[str, Fields]: ...
    async def expire(self, resource: str) -> None: ...
    async def drop_counter(self, resource: str) -> None: ...
    async def set_high(self, value: int) -> None: ...
    async def take_admission_away(self) -> None: ...
    async def set_notify(self, resource: str, channels: Sequence[str]) -> None: ...
    async def ttl_left_ms(self, resource: str) -> int: ...


@dataclass(slots=True)
class FakeSite:
    """The fake node; its clock stands still, so that only `expire` ends a hold."""

    node: FakeNode
    told: list[Reply | Notice] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.node.listen(self.told.append)

    async def beside(self, channel: str) -> FakeSite:
        return fake_site(channel, state=self.node.state)

    async def dump(self) -> dict[str, Fields]:
        return self.node.state.keys()

    async def expire(self, resource: str) -> None:
        self.node.state.expire(resource)

    async def drop_counter(self, resource: str) -> None:
        self.node.state.drop_counter(resource)

    async def set_high(self, value: int) -> None:
        self.node.state.high = value

    async def take_admission_away(self) -> None:
        self.node.state.admission = "another"

    async def set_notify(self, resource: str, channels: Sequence[str]) -> None:
        holds = self.node.state.holds
        holds[resource] = replace(holds[resource], notify=tuple(channels))

    async def ttl_left_ms(self, resource: str) -> int:
        return int(self.node.state.holds[resource].expires_at_ms)


@dataclass(slots=True)
class RealSite:
    """A real node with a link to it."""

    node: NodeLink
    redis: RedisNode
    told: list[Reply | Notice] = field(default_factory=list)
    others: list[RealSite] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.node.listen(self.told.append)

    async def beside(self, channel: str) -> RealSite:
        other = await linked_site(self.redis, channel=channel)
        self.others.append(other)
        return other

    async def close(self) -> None:
        for each in (*self.others, self):
            await each.node.close()

    async def dump(self) -> dict[str, Fields]:
        """Return every key but the identity, and check that only `high` and the identity live for ever."""
        kept: dict[str, Fields] = {}
        names = await self.redis.call("KEYS", "*")
        assert isinstance(names, list)
        for raw in names:
            name = raw.decode()
            ttl_ms = await self.redis.call("PTTL", raw)
            assert isinstance(ttl_ms, int)
            assert (ttl_ms == -1) == (name in {KEYS.high, KEYS.node}), (name, ttl_ms)
            if name == KEYS.node:
                continue
            if await self.redis.call("TYPE", raw) == b"string":
                value = await self.redis.call("GET", raw)
                assert isinstance(value, bytes)
                kept[name] = {"": value.decode()}
            else:
                flat = await self.redis.call("HGETALL", raw)
                assert isinstance(flat, list)
                texts = [each.decode() for each in flat]
                kept[name] = dict(zip(texts[::2], texts[1::2], strict=True))
        return kept

    async def expire(self, resource: str) -> None:
        await self.redis.call("DEL", KEYS.lock(resource))

    async def drop_counter(self, resource: str) -> None:
        await self.redis.call("DEL", KEYS.counter(resource))

    async def set_high(self, value: int) -> None:
        await self.redis.call("SET", KEYS.high, value)

    async def take_admission_away(self) -> None:
        await self.redis.call("HSET", KEYS.node, "admission", "another")

    async def set_notify(self, resource: str, channels: Sequence[str]) -> None:
        await self.redis.call("HSET", KEYS.lock(resource), "notify", " ".join(channels))

    async def ttl_left_ms(self, resource: str) -> int:
        left = await self.redis.call("PTTL", KEYS.lock(resource))
        assert isinstance(left, int)
        return left


def fake_site(channel: str = HERE, *, state: FakeNodeState | None = None) -> FakeSite:
    return FakeSite(FakeNode(0, now_ms=lambda: 0.0, channel=channel, state=state))


async def real_site(redis: RedisNode) -> RealSite:
    url = NodeUrl(redis.url)
    await forming.form([url], keys=KEYS, ttl_ms_max=300_000, randomness=SystemRandomness())
    return await linked_site(redis)


async def linked_site(redis: RedisNode, *, channel: str = HERE, url: str = "") -> RealSite:
    """Return a link that is ready to a formed node, by another URL if one is given."""
    link = NodeLink(
        0,
        settings=LinkSettings(
            packer=Packer(KEYS, channel=channel),
            channel=channel,
            node_timeout_ms=2_000,
            joining=JoiningSettings(
                urls=[NodeUrl(url or redis.url)],
                visiting=AdminSettings(KEYS, dial_timeout_ms=2_000),
                assume_durable=False,
                accept_empty_nodes=False,
                fencing=asyncio.Lock(),
            ),
            # No heartbeat: tests set the greatest token back, which is an old snapshot.
            heartbeat=HeartbeatSettings(3_600_000, KEYS, ClockWitnesses(1)),
        ),
        memory=ClusterMemory(1),
        clock=SystemClock(),
        randomness=SystemRandomness(),
    )
    link.start()
    await eventually(lambda: link.report().state is NodeState.READY)
    return RealSite(link, redis)


@pytest.fixture(params=("fake", *ENGINES))
async def site(request: pytest.FixtureRequest, flushed_nodes: FlushedNodes) -> AsyncIterator[Site]:
    """The fake node, and a real one of each engine."""
    if request.param == "fake":
        yield fake_site()
        return
    binary = engine_binary(request.param)
    if binary is None:
        assert os.environ.get("REDFENCE_REQUIRE_REDIS") != "1", f"no {request.param} on this machine"
        pytest.skip(f"no {request.param} on this machine")
    (redis,) = await flushed_nodes(1, binary=binary)
    real = await real_site(redis)
    yield real
    await real.close()


async def ask(server: Server, command: Command) -> Reply:
    reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()

    def note(told: Reply) -> None:
        server.told.append(told)
        reply.set_result(told)

    server.node.send(command, note)
    assert not reply.done(), "a reply never comes before `send` has returned"
    return await asyncio.wait_for(reply, 5)


async def notices(server: Server) -> list[Notice]:
    """Return the notices that a server has: the reply to a question comes behind them."""
    await ask(server, Inspect("whatever"))
    return [each for each in server.told if isinstance(each, Notice)]


def mint(
    lease: str = A,
    nonce: str = "n1",
    *,
    resource: str = R,
    holder: str = "h",
    ttl_ms: int = TTL_MS,
    ends: str | None = None,
    notify: bool = False,
    behind: bool = False,
) -> Mint:
    release = None if ends is None else Release(resource, ends, 0)
    return Mint(resource, lease, nonce, holder, ttl_ms, ends=release, notify=notify, behind=behind)


async def told_by(site: Site) -> tuple[str, ...]:
    return tuple((await site.dump())[KEYS.lock(R)]["notify"].split())


# --- mint


async def test_a_mint_of_a_free_lock_takes_it_and_the_next_number(site: Site) -> None:
    assert await ask(site, mint()) == Granted("n1", 1)
    assert await site.dump() == {
        KEYS.lock(R): {
            "digest": A,
            "nonce": "n1",
            "shared": "0",
            "token": "1",
            "holder": "h",
            "ttl_ms": str(TTL_MS),
            "notify": "",
        },
        KEYS.counter(R): {"": "1"},
        KEYS.high: {"": "1"},
    }
    assert TTL_MS - 5_000 < await site.ttl_left_ms(R) <= TTL_MS


async def test_a_mint_of_a_held_lock_tells_who_holds_it_and_changes_nothing(site: Site) -> None:
    await ask(site, mint())
    before = await site.dump()
    reply = await ask(site, mint(B, "n2", ttl_ms=100))
    assert isinstance(reply, Held)
    assert (reply.digest, reply.token, reply.holder) == (A, 1, "h")
    assert TTL_MS - 5_000 < reply.remaining_ms <= TTL_MS
    assert await site.dump() == before
    assert await site.ttl_left_ms(R) > TTL_MS - 5_000


async def test_a_retried_mint_answers_the_stored_nonce_and_token_and_marks_the_hold_shared(
    site: Site,
) -> None:
    await ask(site, mint())
    assert await ask(site, mint(A, "n2", holder="other", ttl_ms=2 * TTL_MS)) == Granted("n1", 1)
    kept = (await site.dump())[KEYS.lock(R)]
    assert kept["shared"] == "1"
    assert (kept["nonce"], kept["token"], kept["holder"], kept["ttl_ms"]) == ("n1", "1", "h", str(2 * TTL_MS))
    assert TTL_MS < await site.ttl_left_ms(R) <= 2 * TTL_MS


async def test_numbers_grow_across_leases_and_ends(site: Site) -> None:
    assert await ask(site, mint(A, "n1")) == Granted("n1", 1)
    assert await ask(site, Undo(R, "n1", 0)) is Status.UNDONE
    assert await ask(site, mint(B, "n2")) == Granted("n2", 2)
    assert await ask(site, Release(R, B, 0)) is Status.RELEASED
    assert await ask(site, mint(A, "n3")) == Granted("n3", 3)
    await site.expire(R)
    assert await ask(site, mint(B, "n4")) == Granted("n4", 4)


async def test_a_counter_that_was_dropped_starts_again_at_high(site: Site) -> None:
    await ask(site, mint(resource="other"))
    await ask(site, Commit("other", A, "n1", 70))
    assert await ask(site, mint()) == Granted("n1", 71)
    await ask(site, Release(R, A, 0))
    await site.drop_counter(R)
    await ask(site, Commit("other", A, "n1", 90))
    assert await ask(site, mint(B, "n2")) == Granted("n2", 91)


async def test_a_counter_that_is_kept_goes_on_beside_a_greater_high(site: Site) -> None:
    assert await ask(site, mint()) == Granted("n1", 1)
    await ask(site, mint(resource="other"))
    await ask(site, Commit("other", A, "n1", 500))
    await ask(site, Release(R, A, 0))
    assert await ask(site, mint(B, "n2")) == Granted("n2", 2)
    assert (await site.dump())[KEYS.high] == {"": "500"}


@pytest.mark.parametrize("last", [2**53 - 3, 2**53 - 2])
async def test_tokens_are_exact_up_to_the_last_one_below_2_to_the_53(site: Site, last: int) -> None:
    await site.set_high(last)
    assert await ask(site, mint()) == Granted("n1", last + 1)
    held = await ask(site, Inspect(R))
    assert isinstance(held, Held)
    assert held.token == last + 1
    assert (await site.dump())[KEYS.high] == {"": str(last + 1)}
    assert (await site.dump())[KEYS.counter(R)] == {"": str(last + 1)}


async def test_when_the_numbers_are_used_up_a_mint_is_refused_and_changes_nothing(site: Site) -> None:
    await site.set_high(2**53 - 1)
    before = await site.dump()
    assert await ask(site, mint()) is NoReply.REFUSED
    assert await site.dump() == before


@pytest.mark.parametrize("text", ["żółć/锁/🔒", "it's \"quoted\" \\ %s ' ;", "0", " ", "-1e309", "a:b*[c]?"])
async def test_names_and_labels_are_any_text(site: Site, text: str) -> None:
    assert await ask(site, mint(resource=text, holder=text)) == Granted("n1", 1)
    held = await ask(site, mint(B, "n2", resource=text))
    assert isinstance(held, Held)
    assert held.holder == text
    assert KEYS.lock(text) in await site.dump()


# --- commit


async def test_a_commit_raises_the_hold_the_counter_and_high(site: Site) -> None:
    await ask(site, mint())
    assert await ask(site, Commit(R, A, "n1", 9)) is Status.COMMITTED
    kept = await site.dump()
    assert kept[KEYS.lock(R)]["token"] == "9"
    assert (kept[KEYS.counter(R)], kept[KEYS.high]) == ({"": "9"}, {"": "9"})


async def test_a_commit_never_lowers(site: Site) -> None:
    await ask(site, mint())
    await ask(site, Commit(R, A, "n1", 9))
    before = await site.dump()
    assert await ask(site, Commit(R, A, "n1", 5)) is Status.COMMITTED
    assert await site.dump() == before


async def test_a_commit_after_the_counter_was_dropped_leaves_no_way_to_a_smaller_number(site: Site) -> None:
    """`high` is above the token, so a fresh counter starts above it."""
    await ask(site, mint(resource="other"))
    await ask(site, Commit("other", A, "n1", 50))
    await ask(site, mint())
    await site.drop_counter(R)
    assert await ask(site, Commit(R, A, "n1", 51)) is Status.COMMITTED
    await ask(site, Release(R, A, 0))
    assert await ask(site, mint(B, "n2")) == Granted("n2", 52)


@pytest.mark.parametrize(
    "commit",
    [Commit(R, A, "n2", 9), Commit(R, B, "n1", 9), Commit("free", A, "n1", 9)],
    ids=["another nonce", "another lease", "no hold"],
)
async def test_a_commit_of_anything_but_the_very_hold_is_refused_and_changes_nothing(
    site: Site, commit: Commit
) -> None:
    """A late commit of a first attempt must not reach a second hold, even of the same lease."""
    await ask(site, mint())
    before = await site.dump()
    assert await ask(site, commit) is Status.LOST
    assert await site.dump() == before


# --- undo, release, renew, inspect


async def test_an_undo_goes_by_the_nonce_alone(site: Site) -> None:
    await ask(site, mint())
    assert await ask(site, Undo(R, "n2", 0)) is Status.KEPT
    assert KEYS.lock(R) in await site.dump()
    assert await ask(site, Undo(R, "n1", 0)) is Status.UNDONE
    assert await site.dump() == {KEYS.counter(R): {"": "1"}, KEYS.high: {"": "1"}}
    assert await ask(site, Undo(R, "n1", 0)) is Status.KEPT


@pytest.mark.parametrize("nonce", ["n1", "n2"])
async def test_an_undo_keeps_a_hold_that_a_retry_shares(site: Site, nonce: str) -> None:
    """Another server may be granting it just now."""
    await ask(site, mint(A, "n1"))
    await ask(site, mint(A, "n2"))
    before = await site.dump()
    assert await ask(site, Undo(R, nonce, 0)) is Status.KEPT
    assert await site.dump() == before


async def test_a_release_ends_its_own_lease_also_a_shared_one_and_no_other(site: Site) -> None:
    await ask(site, mint(A, "n1"))
    await ask(site, mint(A, "n2"))
    before = await site.dump()
    assert await ask(site, Release(R, B, 0)) is Status.NOT_HELD
    assert await site.dump() == before
    assert await ask(site, Release(R, A, 0)) is Status.RELEASED
    assert KEYS.lock(R) not in await site.dump()
    assert await ask(site, Release(R, A, 0)) is Status.NOT_HELD


async def test_a_renewal_starts_the_stored_ttl_anew(site: Site) -> None:
    await ask(site, mint(ttl_ms=TTL_MS))
    await ask(site, Commit(R, A, "n1", 9))
    assert await ask(site, Renew(R, A)) == Renewed(9, TTL_MS)
    assert TTL_MS - 5_000 < await site.ttl_left_ms(R) <= TTL_MS


async def test_a_renewal_never_creates_a_hold_again_and_never_touches_another_lease(site: Site) -> None:
    await ask(site, mint())
    before = await site.dump()
    assert await ask(site, Renew(R, B)) is Status.NOT_HELD
    assert await site.dump() == before
    await site.expire(R)
    before = await site.dump()
    assert await ask(site, Renew(R, A)) is Status.NOT_HELD
    assert await site.dump() == before


async def test_looking_changes_nothing(site: Site) -> None:
    assert await ask(site, Inspect(R)) is Status.FREE
    await ask(site, mint())
    before = await site.dump()
    reply = await ask(site, Inspect(R))
    assert isinstance(reply, Held)
    assert (reply.digest, reply.token, reply.holder) == (A, 1, "h")
    assert await site.dump() == before


# --- hand-over


async def test_a_hand_over_ends_the_lease_and_mints_for_the_next_in_one_step(site: Site) -> None:
    await ask(site, mint(A, "n1", ttl_ms=TTL_MS))
    await ask(site, mint(A, "n2", ttl_ms=TTL_MS))
    await ask(site, Commit(R, A, "n1", 9))
    reply = await ask(site, mint(B, "n3", holder="next", ttl_ms=2 * TTL_MS, ends=A))
    assert reply == Granted("n3", 10, released=True)
    assert await site.dump() == {
        KEYS.lock(R): {
            "digest": B,
            "nonce": "n3",
            "shared": "0",
            "token": "10",
            "holder": "next",
            "ttl_ms": str(2 * TTL_MS),
            "notify": "",
        },
        KEYS.counter(R): {"": "10"},
        KEYS.high: {"": "10"},
    }
    assert TTL_MS < await site.ttl_left_ms(R) <= 2 * TTL_MS
    assert await ask(site, Release(R, A, 0)) is Status.NOT_HELD
    assert await ask(site, Commit(R, A, "n1", 20)) is Status.LOST
    assert await ask(site, Undo(R, "n1", 0)) is Status.KEPT


async def test_a_hand_over_can_shorten_what_is_left_of_the_time(site: Site) -> None:
    await ask(site, mint(A, "n1", ttl_ms=TTL_MS))
    await ask(site, mint(B, "n2", ttl_ms=1_000, ends=A))
    assert await site.ttl_left_ms(R) <= 1_000


async def test_a_hand_over_of_a_lease_that_does_not_hold_is_a_plain_mint(site: Site) -> None:
    assert await ask(site, mint(B, "n1", ends=A)) == Granted("n1", 1, released=False)


async def test_a_hand_over_never_ends_the_hold_of_a_third_lease(site: Site) -> None:
    await ask(site, mint(C, "n1"))
    before = await site.dump()
    reply = await ask(site, mint(B, "n2", ends=A))
    assert isinstance(reply, Held)
    assert (reply.digest, reply.token) == (C, 1)
    assert await site.dump() == before


async def test_a_hand_over_to_a_lease_that_holds_already_is_its_retry(site: Site) -> None:
    """Two servers may hand over the same lease to two tries of one Acquire."""
    await ask(site, mint(A, "n1"))
    assert await ask(site, mint(B, "n2", ends=A)) == Granted("n2", 2, released=True)
    assert await ask(site, mint(B, "n3", ends=A)) == Granted("n2", 2, released=False)
    assert (await site.dump())[KEYS.lock(R)]["shared"] == "1"


async def test_a_hand_over_counts_on_from_high_where_the_counter_is_gone(site: Site) -> None:
    await ask(site, mint(A, "n1"))
    await ask(site, mint(resource="other"))
    await ask(site, Commit("other", A, "n1", 70))
    await site.drop_counter(R)
    assert await ask(site, mint(B, "n2", ends=A)) == Granted("n2", 71, released=True)


async def test_when_the_numbers_are_used_up_a_hand_over_ends_nothing(site: Site) -> None:
    await ask(site, mint(A, "n1"))
    await site.drop_counter(R)
    await site.set_high(2**53 - 1)
    before = await site.dump()
    assert await ask(site, mint(B, "n2", ends=A)) is NoReply.REFUSED
    assert await site.dump() == before
    assert await ask(site, Release(R, A, 0)) is Status.RELEASED


async def test_an_undo_of_a_hand_over_frees_the_lock(site: Site) -> None:
    await ask(site, mint(A, "n1"))
    await ask(site, mint(A, "n2"))
    await ask(site, mint(B, "n3", ends=A))
    assert await ask(site, Undo(R, "n3", 0)) is Status.UNDONE
    assert await ask(site, Inspect(R)) is Status.FREE


# --- notices


async def test_a_server_that_is_refused_is_told_once_of_the_end_of_that_hold_if_it_asked(site: Site) -> None:
    there, silent = await site.beside(THERE), await site.beside("notice:3")
    await ask(site, mint(A, "n1"))
    await ask(there, mint(B, "n2", notify=True))
    await ask(there, mint(B, "n3", notify=True))
    await ask(silent, mint(B, "n4"))
    assert await told_by(site) == (THERE,)
    await ask(site, Commit(R, A, "n1", 9))
    await ask(site, Release(R, A, 0))
    assert await notices(there) == [Notice(0, R, 9)]
    await ask(site, mint(A, "n5"))
    await ask(site, Release(R, A, 0))
    assert await notices(there) == [Notice(0, R, 9)]
    assert await notices(silent) == await notices(site) == []


@pytest.mark.parametrize("before", [62, 63, 64])
async def test_at_most_64_servers_are_told_of_one_hold(site: Site, before: int) -> None:
    await ask(site, mint(A, "n1"))
    channels = tuple(f"channel-{number}" for number in range(before))
    await site.set_notify(R, channels)
    await ask(site, mint(B, "n2", notify=True))
    assert await told_by(site) == (channels if before == 64 else (*channels, HERE))


async def test_a_server_hears_of_the_end_of_its_own_hold_if_others_wait_behind(
    site: Site,
) -> None:
    assert await ask(site, mint(A, "n1", behind=True)) == Granted("n1", 1, contended=False)
    assert await told_by(site) == (HERE,)
    assert await ask(site, mint(A, "n2")) == Granted("n1", 1, contended=False)
    assert await told_by(site) == (HERE,)
    await ask(site, Release(R, A, 0))
    assert await notices(site) == [Notice(0, R, 1)]


async def test_a_hold_that_another_server_waits_for_is_contended_also_for_a_retry(site: Site) -> None:
    there = await site.beside(THERE)
    await ask(site, mint(A, "n1"))
    await ask(there, mint(B, "n2", notify=True))
    assert await ask(site, mint(A, "n3", behind=True, notify=True)) == Granted("n1", 1, contended=True)
    assert await told_by(site) == (THERE, HERE)
    assert await ask(there, mint(A, "n4")) == Granted("n1", 1, contended=True)
    assert await told_by(site) == (THERE, HERE)


async def test_a_hand_over_passes_on_which_servers_wait(
    site: Site,
) -> None:
    there = await site.beside(THERE)
    await ask(site, mint(A, "n1", behind=True))
    await ask(there, mint(B, "n2", notify=True))
    assert await ask(site, mint(B, "n3", ends=A)) == Granted("n3", 2, contended=True, released=True)
    assert await told_by(site) == (THERE,)
    assert await ask(site, mint(C, "n4", ends=B, behind=True)) == Granted(
        "n4", 3, contended=True, released=True
    )
    assert await told_by(site) == (THERE, HERE)
    assert await notices(there) == await notices(site) == []
    await ask(site, Release(R, C, 0))
    assert await notices(there) == await notices(site) == [Notice(0, R, 3)]


async def test_a_hand_over_that_is_refused_asks_to_be_told_as_every_mint(site: Site) -> None:
    await ask(site, mint(C, "n1"))
    await ask(site, mint(B, "n2", ends=A, notify=True))
    assert await told_by(site) == (HERE,)


async def test_an_undo_tells_whom_its_hold_was_in_the_way_of(site: Site) -> None:
    there = await site.beside(THERE)
    await ask(site, mint(A, "n1", behind=True))
    await ask(there, mint(B, "n2", notify=True))
    await ask(site, Undo(R, "n1", 0))
    assert await notices(there) == await notices(site) == [Notice(0, R, 1)]


async def test_what_ends_nothing_tells_nobody(site: Site) -> None:
    there = await site.beside(THERE)
    await ask(site, mint(A, "n1", behind=True))
    await ask(there, mint(B, "n2", notify=True))
    assert await ask(site, Release(R, B, 0)) is Status.NOT_HELD
    assert await ask(site, Undo(R, "n2", 0)) is Status.KEPT
    await ask(site, mint(A, "n3"))
    assert await ask(site, Undo(R, "n1", 0)) is Status.KEPT
    assert await notices(there) == await notices(site) == []


@pytest.mark.parametrize("ttl_ms", [TTL_MS, TTL_MS - 10_000])
async def test_a_hand_over_tells_the_other_servers_if_the_new_hold_ends_sooner(
    site: Site, ttl_ms: int
) -> None:
    there = await site.beside(THERE)
    await ask(site, mint(A, "n1", behind=True))
    await ask(there, mint(B, "n2", notify=True))
    assert isinstance(await ask(site, mint(C, "n3", ends=A, ttl_ms=ttl_ms)), Granted)
    assert await notices(there) == ([Notice(0, R, 1)] if ttl_ms < TTL_MS else [])
    assert await notices(site) == []


async def test_a_notice_comes_between_the_replies_that_show_the_hold_and_the_others(
    site: Site,
) -> None:
    """The order tells a server which hold has ended."""
    there = await site.beside(THERE)
    for number in range(1, 11):
        there.told.clear()
        await ask(site, mint(A, f"n{number}"))
        await ask(there, mint(B, "theirs", notify=True))
        release = asyncio.ensure_future(ask(site, Release(R, A, 0)))
        asked = 0
        while not release.done():
            # A node that stands still would soon owe more answers than it may.
            if asked - len(there.told) < _UNANSWERED_MAX:
                there.node.send(Inspect(R), there.told.append)
                asked += 1
            await asyncio.sleep(0)
        await ask(there, Inspect(R))
        seen = [_timeless(each) for each in there.told]
        end = seen.index(Notice(0, R, number))
        assert seen[:end] == [(A, number, "h")] * end
        assert seen[end + 1 :] == [Status.FREE] * (len(seen) - end - 1) != []


async def test_a_server_that_may_not_publish_ends_leases_all_the_same(
    flushed_nodes: FlushedNodes, engine: RedisBinary
) -> None:
    (redis,) = await flushed_nodes(1, binary=engine)
    site = await real_site(redis)
    await redis.call("ACL", "SETUSER", "mute", "reset", "on", ">secret", "~*", "&*", "+@all", "-publish")
    try:
        url = f"redis://mute:secret@127.0.0.1:{redis.port}"
        mute = await linked_site(redis, channel="mute", url=url)
        site.others.append(mute)
        await ask(site, mint(A, "n1", behind=True))
        assert await ask(mute, Release(R, A, 0)) is Status.RELEASED
        await ask(site, mint(A, "n2", behind=True))
        assert await ask(mute, Undo(R, "n2", 0)) is Status.UNDONE
        assert await ask(site, Inspect(R)) is Status.FREE
        assert await notices(site) == []
    finally:
        await site.close()
        await redis.call("ACL", "DELUSER", "mute")


# --- admission


@pytest.mark.parametrize(
    "command",
    [
        mint(B, "n2", resource="free"),
        mint(A, "n2"),
        mint(B, "n2", ends=A),
        Commit(R, A, "n1", 9),
        Undo(R, "n1", 0),
        Renew(R, A),
        Release(R, A, 0),
        Inspect(R),
    ],
    ids=lambda command: type(command).__name__,
)
async def test_a_node_that_was_admitted_under_another_id_refuses_and_changes_nothing(
    site: Site, command: Command
) -> None:
    await ask(site, mint())
    await site.take_admission_away()
    before = await site.dump()
    # Or what came of the look that follows, for what would have been sent again after it.
    assert await ask(site, command) in {NoReply.NOT_ADMITTED, NoReply.UNREACHABLE}
    assert await site.dump() == before


# --- the twin is honest

_resources = st.sampled_from("xxxy")
_leases = st.sampled_from([A, B, C])
_nonces = st.sampled_from(["n1", "n2", "n3"])
_yes_or_no = st.booleans()
# Far enough apart for the time that a real node takes.
_ttls_ms = st.sampled_from([TTL_MS, TTL_MS, TTL_MS - 10_000])


@st.composite
def _mints(draw: st.DrawFn) -> Mint:
    resource, lease = draw(_resources), draw(_leases)
    ended = draw(st.none() | _leases.filter(lambda each: each != lease))
    ends = None if ended is None else Release(resource, ended, 0.0)
    holder = draw(st.text(max_size=3))
    return Mint(
        resource,
        lease,
        draw(_nonces),
        holder,
        draw(_ttls_ms),
        ends,
        notify=draw(_yes_or_no),
        behind=draw(_yes_or_no),
    )


_commands: st.SearchStrategy[Command] = st.one_of(
    _mints(),
    _mints(),
    st.builds(Commit, _resources, _leases, _nonces, st.integers(1, 12)),
    st.builds(Undo, _resources, _nonces, st.just(0.0)),
    st.builds(Renew, _resources, _leases),
    st.builds(Release, _resources, _leases, st.just(0.0)),
    st.builds(Inspect, _resources),
)
Touch = Callable[[Site], Awaitable[None]]
Step = Touch | tuple[int, Command]
"""Something done to the node behind everybody's back, or a command of the first or the second server."""


@st.composite
def _steps(draw: st.DrawFn) -> Step:
    match draw(st.integers(0, 14)):
        case 0:
            resource = draw(_resources)
            return lambda site: site.expire(resource)
        case 1:
            resource = draw(_resources)
            return lambda site: site.drop_counter(resource)
    return draw(st.integers(0, 1)), draw(_commands)


@pytest.mark.slow
async def test_a_fake_and_a_real_node_cannot_be_told_apart(flushed_nodes: FlushedNodes) -> None:
    """Random commands, expiries and dropped counters give both the same replies, notices and keys."""
    (redis,) = await flushed_nodes(1)
    real = await real_site(redis)
    real_servers: tuple[Server, Server] = (real, await real.beside(THERE))
    loop = asyncio.get_running_loop()

    async def play(steps: list[Step]) -> None:
        for resource in "xy":
            await real.redis.call("DEL", KEYS.lock(resource), KEYS.counter(resource))
        await real.set_high(0)
        for server in real_servers:
            await notices(server)
            server.told.clear()
        fake = fake_site()
        fake_servers = (fake, await fake.beside(THERE))
        for step in steps:
            if callable(step):
                await step(fake)
                await step(real)
            else:
                who, command = step
                answers = [_timeless(await ask(each[who], command)) for each in (fake_servers, real_servers)]
                assert answers[0] == answers[1], step
        assert await fake.dump() == await real.dump()
        for twins in zip(fake_servers, real_servers, strict=True):
            heard = [await notices(server) for server in twins]
            assert heard[0] == heard[1]
            seen.update(heard[0])

    seen: set[Notice] = set()

    @settings(max_examples=250, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
    @given(steps=st.lists(_steps(), min_size=50, max_size=60))
    def check(steps: list[Step]) -> None:
        asyncio.run_coroutine_threadsafe(play(steps), loop).result()

    await asyncio.to_thread(check)
    assert seen, "nobody heard anything"
    await real.close()


def _timeless(reply: Reply | Notice) -> object:
    return (reply.digest, reply.token, reply.holder) if isinstance(reply, Held) else reply
