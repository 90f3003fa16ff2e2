"""The watch finds each change of a node without a vote, and no other change."""

from __future__ import annotations

import pytest

from harness.history.vote_watch import VoteWatch
from harness.processes.fixture_types import FlushedNodes
from harness.processes.redis_nodes import RedisNode
from harness.processes.servers import form, until

NODE = "redfence:node"
_FENCED = "redis.call('SET', KEYS[2], 9); redis.call('HSET', KEYS[1], 'floor:1', 9)"


def hold(nonce: str) -> str:
    """Return a hold as hold.lua describes it."""
    return f"digest 1 0 1000 {nonce}\nholder"


@pytest.fixture
async def node(flushed_nodes: FlushedNodes) -> RedisNode:
    """A formed node, whose identity a test may change."""
    [node] = await flushed_nodes(1)
    await form([node])
    return node


async def looked(watch: VoteWatch, *, times: int = 2) -> None:
    """Return once the watch has looked at the nodes again."""
    goal = watch.looks + times

    async def reached() -> bool:
        return watch.looks >= goal

    await until(reached)


async def test_a_node_that_votes_may_change_as_it_likes(node: RedisNode) -> None:
    async with VoteWatch([node]) as watch:
        await looked(watch)
        await node.call("SET", "redfence:counter:r", 1)
        await looked(watch)
    assert watch.quarantines == [set()]


@pytest.mark.parametrize(
    "change",
    [
        ("SET", "redfence:high", 7),
        ("SET", "redfence:counter:r", 1),
        ("INCR", "redfence:counter:there"),
        ("DEL", "redfence:counter:there"),
        ("SET", "redfence:lock:r", hold("n")),
        ("SET", "redfence:lock:there", hold("m")),
    ],
    ids=lambda change: " ".join(map(str, change[:2])),
)
@pytest.mark.parametrize("why", ["quarantined", "restarted", "not admitted in this run"])
async def test_a_node_without_a_vote_must_not_change(
    why: str, change: tuple[str | int, ...], node: RedisNode
) -> None:
    await node.call("SET", "redfence:counter:there", 1)
    await node.call("SET", "redfence:lock:there", hold("n"))
    taken = ("run_id", "another") if why == "not admitted in this run" else ("state", why)
    await node.call("HSET", NODE, "admission", "q", *taken)
    with pytest.raises(AssertionError, match="node 0 has no vote"):  # noqa: PT012  (the exit is what fails)
        async with VoteWatch([node]) as watch:
            await looked(watch)
            await node.call(*change)
            await looked(watch)
    assert watch.quarantines == [{b"q"} if why == "quarantined" else set()]


async def test_locks_may_expire_and_a_fence_or_a_restored_vote_may_raise_tokens(node: RedisNode) -> None:
    """A restart with proof is no quarantine."""
    await node.call("SET", "redfence:lock:there", hold("n"))
    await node.call("HSET", NODE, "state", "quarantined", "admission", "q")
    async with VoteWatch([node]) as watch:
        await looked(watch)
        await node.call("DEL", "redfence:lock:there")
        await looked(watch)
        await node.call("EVAL", _FENCED, 2, NODE, "redfence:high")
        await looked(watch)
        await node.call("HSET", NODE, "state", "ready", "admission", "a")
        await looked(watch)
        await node.call("HSET", NODE, "state", "restarted", "admission", "r")
        await looked(watch)
        await node.call("HSET", NODE, "state", "quarantined", "admission", "p")
        await looked(watch)
    assert watch.quarantines == [{b"q", b"p"}]


async def test_a_node_that_is_down_is_not_looked_at(node: RedisNode) -> None:
    async with VoteWatch([node]) as watch:
        await looked(watch)
        node.kill()
        before = watch.unanswered

        async def tried_in_vain() -> bool:
            return watch.unanswered >= before + 2

        await until(tried_in_vain)
        await node.start()
        await looked(watch)
