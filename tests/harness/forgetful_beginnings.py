"""Where walks through the world of nodes that forget begin: in the middle of something, so that little luck is needed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection

from harness.adversary_moves import Begin
from harness.forgetful_moves import (
    Arrive,
    Break,
    Crash,
    Dial,
    Expire,
    Lose,
    Replace,
    Restart,
    Save,
    Tell,
    TimeOut,
)
from harness.forgetful_wire import NOBODY, Letter
from harness.forgetful_world import ForgetfulWorld
from redfence_server.lock_node import Mint


async def deliver(world: ForgetfulWorld, wanted: Callable[[Letter], bool]) -> None:
    """Let the letters that are wanted arrive, and the answers, and what is sent because of them, until there is none."""
    while (letter := next((each for each in world.under_way if wanted(each)), None)) is not None:
        await world.make(Arrive(letter))


async def connect(world: ForgetfulWorld) -> None:
    """Let every server be admitted everywhere."""
    for server in world.servers:
        for place in range(world.node_count):
            await world.make(Dial(server.number, place, place))
    await deliver(world, lambda _: True)


def quorum(world: ForgetfulWorld) -> range:
    """Return as many places as a quorum has."""
    return range(world.node_count // 2 + 1)


async def attempt(world: ForgetfulWorld, number: int, places: Collection[int]) -> None:
    """Let an attempt begin and be carried out at these places; what it sends elsewhere is lost."""
    await world.make(Begin(number))
    await deliver(world, lambda each: each.sender == number and each.connection.place in places)
    await lose(world, number)


async def free(world: ForgetfulWorld) -> None:
    """End every hold."""
    for number in range(len(world.processes)):
        await world.make(Expire(number))


async def lose(world: ForgetfulWorld, number: int, but_to: Collection[int] = ()) -> None:
    """Lose what an attempt has sent, but to these places."""
    sent = [each for each in world.under_way if each.sender == number]
    for letter in sent:
        if letter.connection.place not in but_to:
            if letter.on_answer is not None:
                await world.make(TimeOut(letter))
            await world.make(Lose(letter))


async def bring_back(world: ForgetfulWorld, place: int, process: int, *, server: int = 0) -> None:
    """Let a server find out that a node has forgotten, quarantine it, and bring it back."""
    # The first look ends in a quarantine, and so in the end of its connection.
    for _ in range(3):
        for other, link in enumerate(world.servers[server].links):
            if link.connection is None:
                await world.make(Dial(server, other, process if other == place else other))
        await deliver(world, lambda each: each.connection.server == server and each.sender == NOBODY)


async def crash(world: ForgetfulWorld, process: int, saved: int) -> None:
    """Let a process die and start again, and every server notice that."""
    await world.make(Crash(process, saved))
    for server in world.servers:
        for place in range(world.node_count):
            if world.is_broken(server.number, place):
                await world.make(Break(server.number, place))


# --- beginnings ---------------------------------------------------------------------------------------------------


async def nothing_yet(_: ForgetfulWorld) -> None:
    """Begin from the very beginning."""


async def a_grant_is_half_forgotten(world: ForgetfulWorld) -> None:
    """Two attempts were granted by quorums that share one node, and that one remembers the first alone."""
    await attempt(world, 0, quorum(world))
    await world.make(Save(0))
    await free(world)
    await attempt(world, 1, [0, *range(quorum(world).stop, world.node_count)])
    await crash(world, 0, 1)


async def a_grant_is_forgotten(world: ForgetfulWorld) -> None:
    """An attempt was granted by the least of quorums, and one of its nodes remembers nothing of it."""
    await attempt(world, 0, quorum(world))
    await crash(world, 0, 0)


async def a_grant_is_forgotten_after_a_return(world: ForgetfulWorld) -> None:
    """A node came back, minted above its floor for a grant, and remembers nothing of all that; the servers were started anew since."""
    await crash(world, 0, 0)
    await bring_back(world, 0, 0)
    # The other server finds its ids void, and has to look again.
    await world.make(Tell(1))
    await deliver(world, lambda _: True)
    await bring_back(world, 0, 0, server=1)
    await attempt(world, 0, quorum(world))
    await free(world)
    await crash(world, 0, 0)
    for server in world.servers:
        await world.make(Restart(server.number))


async def _one_is_ahead(world: ForgetfulWorld) -> None:
    """Let a quorum mint for an attempt, and one of its nodes by more than the others."""
    for number in (0, 1):
        await attempt(world, number, [0])
        await free(world)
    await world.make(Begin(2))
    await lose(world, 2, but_to=quorum(world))
    await deliver(world, lambda each: _is_vote(world, each) and each.answer is None)


def _is_vote(world: ForgetfulWorld, letter: Letter) -> bool:
    return (
        letter.sender == 2 and isinstance(letter.command, Mint) and letter.connection.place in quorum(world)
    )


async def a_vote_is_late(world: ForgetfulWorld) -> None:
    """An attempt was told what a node minted that was ahead of the others, and not yet what they have; the node forgot it and came back."""
    await _one_is_ahead(world)
    await deliver(world, lambda each: _is_vote(world, each) and each.connection.place == 0)
    await crash(world, 0, 0)
    await bring_back(world, 0, 0)


async def a_commit_is_late(world: ForgetfulWorld) -> None:
    """An attempt has begun to commit what a node minted that was ahead of the others; the node forgot it and came back."""
    await _one_is_ahead(world)
    await deliver(world, lambda each: _is_vote(world, each))
    await crash(world, 0, 0)
    await bring_back(world, 0, 0)


async def a_commit_is_late_and_its_node_replaced(world: ForgetfulWorld) -> None:
    """An attempt has begun to commit what a node minted that was ahead of the others, and another one takes its place."""
    await _one_is_ahead(world)
    await deliver(world, lambda each: _is_vote(world, each))
    await world.make(Replace(0))


async def replaced_unnoticed(world: ForgetfulWorld) -> None:
    """One server has put a new node in the place of one that the other server still talks to."""
    await world.make(Replace(0))
    await world.make(Break(0, 0))
    await bring_back(world, 0, world.node_count)


async def replaced_unnoticed_and_forgotten(world: ForgetfulWorld) -> None:
    """And one of the nodes that know of it forgets it."""
    await replaced_unnoticed(world)
    await crash(world, 1, 0)


Beginning = Callable[[ForgetfulWorld], Awaitable[None]]
BEGINNINGS: tuple[Beginning, ...] = (
    nothing_yet,
    a_grant_is_half_forgotten,
    a_grant_is_forgotten,
    a_grant_is_forgotten_after_a_return,
    a_vote_is_late,
    a_commit_is_late,
    a_commit_is_late_and_its_node_replaced,
    replaced_unnoticed,
    replaced_unnoticed_and_forgotten,
)
