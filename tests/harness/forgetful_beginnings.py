"""Where walks and searches through the world of nodes that forget begin: in the middle of something, so that little luck is needed."""

from __future__ import annotations

from collections.abc import Callable, Collection

from harness.adversary_moves import Begin
from harness.forgetful_moves import Arrive, Break, ByAttempt, Crash, Dial, Expire, Letter, Replace, Save
from harness.forgetful_world import ForgetfulWorld


def deliver(world: ForgetfulWorld, wanted: Callable[[Letter], bool]) -> None:
    """Let the letters that are wanted arrive, and the answers, and what is sent because of them, until there is none."""
    while (letter := next((each for each in world.under_way if wanted(each)), None)) is not None:
        world.make(Arrive(letter))


def quorum(world: ForgetfulWorld, first: int = 0) -> list[int]:
    """Return as many places as a quorum has, from the first one on."""
    return [(first + offset) % world.node_count for offset in range(world.node_count // 2 + 1)]


def attempt(world: ForgetfulWorld, number: int, places: Collection[int]) -> None:
    """Let an attempt begin and be carried out at these places; what it sends elsewhere stays under way."""
    world.make(Begin(number))
    deliver(world, lambda each: each.sender == ByAttempt(number) and each.place in places)


def free(world: ForgetfulWorld) -> None:
    """End every hold."""
    for number in range(len(world.processes)):
        world.make(Expire(number))


def bring_back(world: ForgetfulWorld, place: int, process: int, *, server: int = 0) -> None:
    """Let a server find out that a node has forgotten, quarantine it, and bring it back."""
    # Each look ends a connection, or is the last; so it is for the others when they are voided.
    for _ in range(3):
        for other in range(world.node_count):
            if world.servers[server].connections[other] is None:
                number = process if other == place else other
                world.make(Dial(server, other, number))
                _deliver_to(world, server)


def _deliver_to(world: ForgetfulWorld, server: int) -> None:
    deliver(world, lambda each: each.server == server and not isinstance(each.sender, ByAttempt))


def crash(world: ForgetfulWorld, process: int, saved: int) -> None:
    """Let a process die and start again, and every server notice that."""
    world.make(Crash(process, saved))
    for server in world.servers:
        for place in range(world.node_count):
            if world.is_broken(server.number, place):
                world.make(Break(server.number, place))


# --- beginnings ---------------------------------------------------------------------------------------------------


def nothing_yet(_: ForgetfulWorld) -> None:
    """Begin from the very beginning."""


def a_grant_is_half_forgotten(world: ForgetfulWorld) -> None:
    """Two attempts were granted by the least of quorums, and one of its nodes remembers the first alone."""
    attempt(world, 0, quorum(world))
    world.make(Save(0))
    free(world)
    attempt(world, 1, quorum(world))
    crash(world, 0, 1)


def a_grant_is_forgotten(world: ForgetfulWorld) -> None:
    """An attempt was granted by the least of quorums, and one of its nodes remembers nothing of it."""
    attempt(world, 0, quorum(world))
    crash(world, 0, 0)


def _one_is_ahead(world: ForgetfulWorld) -> None:
    attempt(world, 0, [0])
    free(world)
    world.make(Begin(1))
    places = quorum(world)
    for _ in ("there", "back"):
        for place in places:
            letter = next(
                each for each in world.under_way if (each.sender, each.place) == (ByAttempt(1), place)
            )
            world.make(Arrive(letter))


def a_commit_is_late(world: ForgetfulWorld) -> None:
    """An attempt has begun to commit what a node minted that was ahead of the others, and that node forgets it."""
    _one_is_ahead(world)
    crash(world, 0, 0)


def a_commit_is_late_and_its_node_replaced(world: ForgetfulWorld) -> None:
    """An attempt has begun to commit what a node minted that was ahead of the others, and another one takes its place."""
    _one_is_ahead(world)
    world.make(Replace(0))


def replaced_unnoticed(world: ForgetfulWorld) -> None:
    """One server has put a new node in the place of one that the other server still talks to."""
    world.make(Replace(0))
    world.make(Break(0, 0))
    bring_back(world, 0, world.node_count)


def replaced_unnoticed_and_forgotten(world: ForgetfulWorld) -> None:
    """And one of the nodes that know of it forgets it."""
    replaced_unnoticed(world)
    crash(world, 1, 0)


BEGINNINGS: tuple[Callable[[ForgetfulWorld], None], ...] = (
    nothing_yet,
    a_grant_is_half_forgotten,
    a_grant_is_forgotten,
    a_commit_is_late,
    a_commit_is_late_and_its_node_replaced,
    replaced_unnoticed,
    replaced_unnoticed_and_forgotten,
)
