"""Where walks through the world of nodes that forget begin: in the middle of something, so that little luck is needed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection

from harness.adversary_moves import Begin
from harness.forgetful_moves import Arrive, Break, Crash, Dial, Expire, Replace, Save
from harness.forgetful_wire import NOBODY, Letter
from harness.forgetful_world import ForgetfulWorld


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
    """Let an attempt begin and be carried out at these places; what it sends elsewhere stays under way."""
    await world.make(Begin(number))
    await deliver(world, lambda each: each.sender == number and each.connection.place in places)


async def free(world: ForgetfulWorld) -> None:
    """End every hold."""
    for number in range(len(world.processes)):
        await world.make(Expire(number))


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
    """Two attempts were granted by the least of quorums, and one of its nodes remembers the first alone."""
    await attempt(world, 0, quorum(world))
    await world.make(Save(0))
    await free(world)
    await attempt(world, 1, quorum(world))
    await crash(world, 0, 1)


async def a_grant_is_forgotten(world: ForgetfulWorld) -> None:
    """An attempt was granted by the least of quorums, and one of its nodes remembers nothing of it."""
    await attempt(world, 0, quorum(world))
    await crash(world, 0, 0)


async def _one_is_ahead(world: ForgetfulWorld) -> None:
    await attempt(world, 0, [0])
    await free(world)
    await world.make(Begin(1))
    for _ in ("there", "back"):
        for place in quorum(world):
            letter = next(
                each for each in world.under_way if (each.sender, each.connection.place) == (1, place)
            )
            await world.make(Arrive(letter))


async def a_commit_is_late(world: ForgetfulWorld) -> None:
    """An attempt has begun to commit what a node minted that was ahead of the others, and that node forgets it."""
    await _one_is_ahead(world)
    await crash(world, 0, 0)


async def a_commit_is_late_and_its_node_replaced(world: ForgetfulWorld) -> None:
    """An attempt has begun to commit what a node minted that was ahead of the others, and another one takes its place."""
    await _one_is_ahead(world)
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
    a_commit_is_late,
    a_commit_is_late_and_its_node_replaced,
    replaced_unnoticed,
    replaced_unnoticed_and_forgotten,
)
