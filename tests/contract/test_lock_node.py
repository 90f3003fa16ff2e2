"""One suite over the fake node and real nodes behind a `NodeLink`: replies to commands, and the data left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import pytest

from harness.doubles.fake_node import FakeNode
from harness.doubles.joining_commands import RaiseFloor, ReadIdentity, Sight, Step
from harness.doubles.lua_node import Database, LuaNode
from harness.doubles.node_state import FakeNodeState
from harness.processes.fixture_types import FlushedNodes
from harness.processes.redis_nodes import RedisNode
from harness.processes.servers import form
from redfence_server import composition, config
from redfence_server.clock import SystemClock
from redfence_server.embedded.binary import RedisBinary
from redfence_server.locking.node import (
    Command,
    Commit,
    ForceRelease,
    Granted,
    Held,
    Inspect,
    LockNode,
    Mint,
    NoReply,
    Notice,
    Release,
    Renew,
    Renewed,
    Reply,
    Status,
    Undo,
)
from redfence_server.membership.examination import Identity
from redfence_server.randomness import SystemRandomness
from redfence_server.redis_io.dial import dial
from redfence_server.redis_io.scripts import Keyspace

R = "orders/42"
A, B, C = "a" * 64, "b" * 64, "c" * 64
TTL_MS = 30_000
KEYS = Keyspace()
# One server's unanswered questions, far below what its connection takes.
_UNANSWERED_MAX = 1_000


@dataclass(slots=True)
class Server:
    """A server's link to a node, and what the node has told it: replies and notices in one order."""

    node: LockNode
    channel: str
    told: list[Reply | Notice] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.node.listen(self.told.append)


@dataclass(slots=True)
class Site(Server):
    """A node with a first server, and a look behind it.

    Attributes:
        memory: what the node keeps.
        beside: connects another server.
    """

    memory: FakeNodeState | LuaNode = field(kw_only=True)
    beside: Callable[[], Awaitable[Server]] = field(kw_only=True)

    def dump(self) -> Mapping[str, Mapping[str, str]]:
        """Return every key but the identity; of a real node only `high` and the identity live for ever."""
        if isinstance(self.memory, LuaNode):
            database = self.memory.database
            for name in database.call("KEYS", "*"):
                is_lasting = database.call("PTTL", name) == -1
                assert is_lasting == (name.decode() in {KEYS.high, KEYS.node}), name
        return self.memory.keys()

    def identity(self) -> Identity:
        sight = self.memory.join(ReadIdentity())
        assert isinstance(sight, Sight)
        assert sight.identity is not None
        return sight.identity

    def raise_high(self, high: int) -> None:
        admission = self.identity().admission
        assert self.memory.join(RaiseFloor(admission, admission, 0, high, "0a" * 16)) is Step.DONE


def fake_site() -> Site:
    """Return the fake node; its clock stands still, so that only `expire` ends a hold."""
    state = FakeNodeState()

    def link() -> tuple[FakeNode, str]:
        channel = f"notice:{len(state.subscribers)}"
        return FakeNode(0, now_ms=lambda: 0.0, channel=channel, state=state), channel

    async def beside() -> Server:
        return Server(*link())

    return Site(*link(), memory=state, beside=beside)


@asynccontextmanager
async def real_site(redis: RedisNode) -> AsyncIterator[Site]:
    """Form a node and yield it with links that are ready."""
    await form([redis])
    async with AsyncExitStack() as ended:
        database = Database(redis.url)
        ended.callback(database.close)

        async def beside() -> Server:
            return Server(*await ended.enter_async_context(linked(redis.url)))

        first = await ended.enter_async_context(linked(redis.url))
        yield Site(*first, memory=LuaNode(database).load(), beside=beside)


@asynccontextmanager
async def linked(url: str) -> AsyncIterator[tuple[LockNode, str]]:
    """Yield a link that is ready, and its channel."""
    # Heartbeats are rare: tests set the greatest token, which a server would notice.
    settings = config.load({"nodes": [url], "node_timeout_ms": 2_000, "heartbeat_interval_ms": 60_000})
    cluster, _ = composition.assemble(settings, clock=SystemClock(), randomness=SystemRandomness(), dial=dial)
    try:
        await cluster.start(timeout_ms=5_000)
        yield cluster.links[0], cluster.links[0]._settings.channel
    finally:
        await cluster.close()


@pytest.fixture
async def site(contract_node: RedisNode | None) -> AsyncIterator[Site]:
    """The fake node, and a real one of each engine."""
    if contract_node is None:
        yield fake_site()
        return
    async with real_site(contract_node) as real:
        yield real


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
    return Mint(resource, lease, nonce, holder, ttl_ms, release, notify, behind)


def told_by(site: Site) -> tuple[str, ...]:
    return tuple(site.dump()[KEYS.lock(R)]["notify"].split())


def held_alone(token: str, **hold: str) -> dict[str, dict[str, str]]:
    """Return everything that a node keeps of one hold: that of `mint()`, but for these fields."""
    first = {"digest": A, "nonce": "n1", "shared": "0", "holder": "h", "ttl_ms": str(TTL_MS), "notify": ""}
    first["lock_delay_ms"] = ""
    number = {"": token}
    return {KEYS.lock(R): first | {"token": token} | hold, KEYS.counter(R): number, KEYS.high: number}


async def remaining_ms(site: Site) -> int:
    held = await ask(site, Inspect(R))
    assert isinstance(held, Held)
    return held.remaining_ms


# --- mint


async def test_a_mint_of_a_free_lock_takes_it_and_the_next_number(site: Site) -> None:
    assert await ask(site, mint()) == Granted("n1", 1)
    assert site.dump() == held_alone("1")
    assert TTL_MS - 5_000 < await remaining_ms(site) <= TTL_MS


async def test_a_mint_of_a_held_lock_tells_who_holds_it_and_changes_nothing(site: Site) -> None:
    await ask(site, mint())
    before = site.dump()
    reply = await ask(site, mint(B, "n2", ttl_ms=100))
    assert isinstance(reply, Held)
    assert (reply.digest, reply.token, reply.holder) == (A, 1, "h")
    assert TTL_MS - 5_000 < reply.remaining_ms <= TTL_MS
    assert site.dump() == before
    assert await remaining_ms(site) > TTL_MS - 5_000


async def test_a_retried_mint_answers_the_stored_nonce_and_token_and_marks_the_hold_shared(
    site: Site,
) -> None:
    await ask(site, mint())
    assert await ask(site, mint(A, "n2", holder="other", ttl_ms=2 * TTL_MS)) == Granted("n1", 1)
    kept = site.dump()[KEYS.lock(R)]
    assert kept["shared"] == "1"
    assert (kept["nonce"], kept["token"], kept["holder"], kept["ttl_ms"]) == ("n1", "1", "h", str(2 * TTL_MS))
    assert TTL_MS < await remaining_ms(site) <= 2 * TTL_MS


@pytest.mark.parametrize("last", [2**53 - 3, 2**53 - 2])
async def test_tokens_are_exact_up_to_the_last_one_below_2_to_the_53(site: Site, last: int) -> None:
    site.raise_high(last)
    assert await ask(site, mint()) == Granted("n1", last + 1)
    held = await ask(site, Inspect(R))
    assert isinstance(held, Held)
    assert held.token == last + 1
    assert site.dump()[KEYS.high] == {"": str(last + 1)}
    assert site.dump()[KEYS.counter(R)] == {"": str(last + 1)}


@pytest.mark.parametrize("text", ["żółć/锁/🔒", "it's \"quoted\" \\ %s ' ;", "0", " ", "-1e309", "a:b*[c]?"])
async def test_names_and_labels_are_any_text(site: Site, text: str) -> None:
    assert await ask(site, mint(resource=text, holder=text)) == Granted("n1", 1)
    held = await ask(site, mint(B, "n2", resource=text))
    assert isinstance(held, Held)
    assert held.holder == text
    assert KEYS.lock(text) in site.dump()


# --- sequences of commands

Check = Callable[[Site], None]


def expire(site: Site) -> None:
    site.memory.expire(R)


def drop_counter(site: Site) -> None:
    site.memory.drop_counter(R)


def use_up_numbers(site: Site) -> None:
    site.raise_high(2**53 - 1)


def keeps(counter: int, high: int, **hold: str) -> Check:
    """Check the counter, the greatest number and some fields of the hold."""

    def check(site: Site) -> None:
        kept = site.dump()
        assert (kept[KEYS.counter(R)], kept[KEYS.high]) == ({"": str(counter)}, {"": str(high)})
        assert hold.items() <= kept.get(KEYS.lock(R), {}).items()

    return check


def keeps_numbers_alone(site: Site) -> None:
    assert site.dump() == {KEYS.counter(R): {"": "1"}, KEYS.high: {"": "1"}}


FIRST = (mint(), Granted("n1", 1))
RETRY = (mint(A, "n2"), Granted("n1", 1))
OTHER = (mint(resource="other"), Granted("n1", 1))
HELD = (A, 1, "h")
SEQUENCES: dict[str, Sequence[tuple[Command, object] | Check]] = {
    "an undo, a release and an expiry give no number back": [
        FIRST,
        (Undo(R, "n1", 0), Status.UNDONE),
        (mint(B, "n2"), Granted("n2", 2)),
        (Release(R, B, 0), Status.RELEASED),
        (mint(A, "n3"), Granted("n3", 3)),
        expire,
        (mint(B, "n4"), Granted("n4", 4)),
    ],
    "a dropped counter starts again at high": [
        OTHER,
        (Commit("other", A, "n1", 70), Status.COMMITTED),
        (mint(), Granted("n1", 71)),
        (Release(R, A, 0), Status.RELEASED),
        drop_counter,
        (Commit("other", A, "n1", 90), Status.COMMITTED),
        (mint(B, "n2"), Granted("n2", 91)),
    ],
    "a kept counter goes on beside a greater high": [
        FIRST,
        (mint(resource="other"), Granted("n1", 2)),
        (Commit("other", A, "n1", 500), Status.COMMITTED),
        (Release(R, A, 0), Status.RELEASED),
        (mint(B, "n2"), Granted("n2", 2)),
        keeps(2, 500),
    ],
    "without numbers nothing is minted": [use_up_numbers, (mint(), NoReply.REFUSED)],
    "a commit raises the hold, the counter and high, and never lowers them": [
        FIRST,
        (Commit(R, A, "n1", 9), Status.COMMITTED),
        keeps(9, 9, token="9"),
        (Commit(R, A, "n1", 5), Status.COMMITTED),
        keeps(9, 9, token="9"),
    ],
    "a commit without a counter leaves no way to a smaller number": [
        OTHER,
        (Commit("other", A, "n1", 50), Status.COMMITTED),
        (mint(), Granted("n1", 51)),
        drop_counter,
        (Commit(R, A, "n1", 51), Status.COMMITTED),
        (Release(R, A, 0), Status.RELEASED),
        (mint(B, "n2"), Granted("n2", 52)),
    ],
    # A late commit of a first attempt must not reach a second hold, even of the same lease.
    "a commit reaches only the hold of its lease and nonce": [
        FIRST,
        (Commit(R, A, "n2", 9), Status.LOST),
        (Commit(R, B, "n1", 9), Status.LOST),
        (Commit("free", A, "n1", 9), Status.LOST),
    ],
    "an undo goes by the nonce alone": [
        FIRST,
        (Undo(R, "n2", 0), Status.KEPT),
        (Undo(R, "n1", 0), Status.UNDONE),
        keeps_numbers_alone,
        (Undo(R, "n1", 0), Status.KEPT),
    ],
    # Another server may be granting it just now.
    "an undo keeps a shared hold": [
        FIRST,
        RETRY,
        (Undo(R, "n1", 0), Status.KEPT),
        (Undo(R, "n2", 0), Status.KEPT),
    ],
    "a release ends its own lease, also a shared one": [
        FIRST,
        RETRY,
        (Release(R, B, 0), Status.NOT_HELD),
        (Release(R, A, 0), Status.RELEASED),
        keeps_numbers_alone,
        (Release(R, A, 0), Status.NOT_HELD),
    ],
    "a forced release ends its own lease up to its token, and renewals of the lease say so": [
        FIRST,
        RETRY,
        (Commit(R, A, "n1", 5), Status.COMMITTED),
        (ForceRelease(R, B, 0, 9), Status.NOT_HELD),
        (ForceRelease(R, A, 0, 4), Status.NOT_HELD),
        (Renew(R, B), Status.NOT_HELD),
        (ForceRelease(R, A, 0, 5), Status.RELEASED),
        (ForceRelease(R, A, 0, 5), Status.NOT_HELD),
        (Renew(R, A), Status.FORCED),
        (mint(B, "n2"), Granted("n2", 6)),
        (Renew(R, A), Status.FORCED),
        (Renew(R, B), Renewed(6, TTL_MS)),
    ],
    "a renewal neither creates a hold nor reaches another lease": [
        FIRST,
        (Renew(R, B), Status.NOT_HELD),
        expire,
        (Renew(R, A), Status.NOT_HELD),
    ],
    "an inspection changes nothing": [(Inspect(R), Status.FREE), FIRST, (Inspect(R), HELD)],
    "a handover of a lease that does not hold is a plain mint": [(mint(ends=B), Granted("n1", 1))],
    "a handover never ends the hold of a third lease": [FIRST, (mint(B, "n2", ends=C), HELD)],
    # Two servers may hand over the same lease to two tries of one Acquire.
    "a handover to a lease that holds already is its retry": [
        FIRST,
        (mint(B, "n2", ends=A), Granted("n2", 2, released=True)),
        (mint(B, "n3", ends=A), Granted("n2", 2, released=False)),
        keeps(2, 2, shared="1"),
    ],
    "a handover without a counter counts on from high": [
        FIRST,
        (mint(resource="other"), Granted("n1", 2)),
        (Commit("other", A, "n1", 70), Status.COMMITTED),
        drop_counter,
        (mint(B, "n2", ends=A), Granted("n2", 71, released=True)),
    ],
    "without numbers a handover ends nothing": [
        FIRST,
        drop_counter,
        use_up_numbers,
        (mint(B, "n2", ends=A), NoReply.REFUSED),
        (Release(R, A, 0), Status.RELEASED),
    ],
    "an undo of a handover frees the lock, also a shared one": [
        FIRST,
        RETRY,
        (mint(B, "n3", ends=A), Granted("n3", 2, released=True)),
        (Undo(R, "n3", 0), Status.UNDONE),
        (Inspect(R), Status.FREE),
    ],
}
REFUSALS = {Status.FORCED, Status.FREE, Status.KEPT, Status.LOST, Status.NOT_HELD, NoReply.REFUSED, HELD}


@pytest.mark.parametrize("name", SEQUENCES)
async def test_a_sequence_of_commands_is_answered_and_a_refusal_changes_nothing(
    site: Site, name: str
) -> None:
    for step in SEQUENCES[name]:
        if callable(step):
            step(site)
            continue
        command, expected = step
        before = site.dump()
        assert _timeless(await ask(site, command)) == expected, command
        assert expected not in REFUSALS or site.dump() == before, command


async def test_a_renewal_starts_the_stored_ttl_anew(site: Site) -> None:
    await ask(site, mint(ttl_ms=TTL_MS))
    await ask(site, Commit(R, A, "n1", 9))
    assert await ask(site, Renew(R, A)) == Renewed(9, TTL_MS)
    assert TTL_MS - 5_000 < await remaining_ms(site) <= TTL_MS


# --- handover


async def test_a_handover_ends_the_lease_and_mints_for_the_next_in_one_step(site: Site) -> None:
    await ask(site, mint(A, "n1", ttl_ms=TTL_MS))
    await ask(site, mint(A, "n2", ttl_ms=TTL_MS))
    await ask(site, Commit(R, A, "n1", 9))
    reply = await ask(site, mint(B, "n3", holder="next", ttl_ms=2 * TTL_MS, ends=A))
    assert reply == Granted("n3", 10, released=True)
    assert site.dump() == held_alone("10", digest=B, nonce="n3", holder="next", ttl_ms=str(2 * TTL_MS))
    assert TTL_MS < await remaining_ms(site) <= 2 * TTL_MS
    assert await ask(site, Release(R, A, 0)) is Status.NOT_HELD
    assert await ask(site, Commit(R, A, "n1", 20)) is Status.LOST
    assert await ask(site, Undo(R, "n1", 0)) is Status.KEPT


# --- notices


async def waited_for(site: Site) -> Server:
    """Let A hold, and two servers wait for the end of its hold; return the other server."""
    there = await site.beside()
    await ask(site, mint(A, "n1", behind=True))
    await ask(there, mint(B, "n2", notify=True))
    return there


async def test_a_server_that_is_refused_is_told_once_of_the_end_of_that_hold_if_it_asked(site: Site) -> None:
    there, silent = await site.beside(), await site.beside()
    await ask(site, mint(A, "n1"))
    await ask(there, mint(B, "n2", notify=True))
    await ask(there, mint(B, "n3", notify=True))
    await ask(silent, mint(B, "n4"))
    assert told_by(site) == (there.channel,)
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
    admission = site.identity().admission
    for channel in channels:
        site.memory.apply(mint(B, "n2", notify=True), 0.0, admission=admission, channel=channel)
    await ask(site, mint(B, "n2", notify=True))
    assert told_by(site) == (channels if before == 64 else (*channels, site.channel))


async def test_a_server_hears_of_the_end_of_its_own_hold_if_others_wait_behind(site: Site) -> None:
    assert await ask(site, mint(A, "n1", behind=True)) == Granted("n1", 1, contended=False)
    assert told_by(site) == (site.channel,)
    assert await ask(site, mint(A, "n2")) == Granted("n1", 1, contended=False)
    assert told_by(site) == (site.channel,)
    await ask(site, Release(R, A, 0))
    assert await notices(site) == [Notice(0, R, 1)]


async def test_a_hold_that_another_server_waits_for_is_contended_also_for_a_retry(site: Site) -> None:
    there = await site.beside()
    await ask(site, mint(A, "n1"))
    await ask(there, mint(B, "n2", notify=True))
    assert await ask(site, mint(A, "n3", behind=True, notify=True)) == Granted("n1", 1, contended=True)
    assert told_by(site) == (there.channel, site.channel)
    assert await ask(there, mint(A, "n4")) == Granted("n1", 1, contended=True)
    assert told_by(site) == (there.channel, site.channel)


async def test_a_handover_passes_on_which_servers_wait(site: Site) -> None:
    there = await waited_for(site)
    assert await ask(site, mint(B, "n3", ends=A)) == Granted("n3", 2, contended=True, released=True)
    assert told_by(site) == (there.channel,)
    assert await ask(site, mint(C, "n4", ends=B, behind=True)) == Granted(
        "n4", 3, contended=True, released=True
    )
    assert told_by(site) == (there.channel, site.channel)
    assert await notices(there) == await notices(site) == []
    await ask(site, Release(R, C, 0))
    assert await notices(there) == await notices(site) == [Notice(0, R, 3)]


async def test_a_handover_that_is_refused_asks_to_be_told_as_every_mint(site: Site) -> None:
    await ask(site, mint(C, "n1"))
    await ask(site, mint(B, "n2", ends=A, notify=True))
    assert told_by(site) == (site.channel,)


async def test_an_undo_tells_whom_its_hold_was_in_the_way_of(site: Site) -> None:
    there = await waited_for(site)
    await ask(site, Undo(R, "n1", 0))
    assert await notices(there) == await notices(site) == [Notice(0, R, 1)]


async def test_what_ends_nothing_tells_nobody(site: Site) -> None:
    there = await waited_for(site)
    assert await ask(site, Release(R, B, 0)) is Status.NOT_HELD
    assert await ask(site, Undo(R, "n2", 0)) is Status.KEPT
    await ask(site, mint(A, "n3"))
    assert await ask(site, Undo(R, "n1", 0)) is Status.KEPT
    assert await notices(there) == await notices(site) == []


@pytest.mark.parametrize("ttl_ms", [TTL_MS, TTL_MS - 10_000])
async def test_a_handover_tells_the_other_servers_if_the_new_hold_ends_sooner(
    site: Site, ttl_ms: int
) -> None:
    there = await waited_for(site)
    assert isinstance(await ask(site, mint(C, "n3", ends=A, ttl_ms=ttl_ms)), Granted)
    assert await remaining_ms(site) <= ttl_ms
    assert await notices(there) == ([Notice(0, R, 1)] if ttl_ms < TTL_MS else [])
    assert await notices(site) == []


async def test_a_notice_comes_between_the_replies_that_show_the_hold_and_the_others(site: Site) -> None:
    """The order tells a server which hold has ended."""
    there = await site.beside()
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
    await redis.call("ACL", "SETUSER", "mute", "reset", "on", ">secret", "~*", "&*", "+@all", "-publish")
    mute_url = f"redis://mute:secret@127.0.0.1:{redis.port}"
    async with real_site(redis) as site, linked(mute_url) as mute_link:
        mute = Server(*mute_link)
        await ask(site, mint(A, "n1", behind=True))
        assert await ask(mute, Release(R, A, 0)) is Status.RELEASED
        await ask(site, mint(A, "n2", behind=True))
        assert await ask(mute, Undo(R, "n2", 0)) is Status.UNDONE
        assert await ask(site, Inspect(R)) is Status.FREE
        assert await notices(site) == []
    await redis.call("ACL", "DELUSER", "mute")


def _timeless(reply: Reply | Notice) -> object:
    return (reply.digest, reply.token, reply.holder) if isinstance(reply, Held) else reply
