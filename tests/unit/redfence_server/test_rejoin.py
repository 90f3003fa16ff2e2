"""How the others vouch for a node that forgot: every answer that can come, without a node."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from redfence_proto import bounds
from redfence_server.lock_node import Command, NodeReport, Notice, Plain, Pulse, Pulsed, Reply, Silence, Vouch
from redfence_server.randomness import SystemRandomness
from redfence_server.rejoin import CHANGES_JUMP, NUMBERS_JUMP, Claim, Failure, Rejoin, Vouched


class Other:
    """Another node: it keeps what it is asked until the test answers."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.asked: list[tuple[Command, Callable[[Reply], None]]] = []

    def send(self, command: Command, on_reply: Callable[[Reply], None] | None = None) -> bool:
        """Keep the command."""
        assert on_reply is not None
        self.asked.append((command, on_reply))
        return True

    def answer(self, reply: Reply) -> Command:
        """Answer the oldest command, and return it."""
        command, on_reply = self.asked.pop(0)
        on_reply(reply)
        return command

    def listen(self, on_notice: Callable[[Notice], None]) -> None:
        """Not asked for."""
        raise NotImplementedError

    def report(self) -> NodeReport:
        """Not asked for."""
        raise NotImplementedError


def knows(high: int, *, changes: tuple[int, ...] = (0, 0, 0), floors: tuple[int, ...] = (0, 0, 0)) -> Pulsed:
    """Return what a node of three tells."""
    return Pulsed(0.0, 0, high, changes, floors)


def rejoin(others: list[Other], *, place: int = 2, number: int = 0, changes: int = 0) -> Rejoin:
    """Return a rejoin that has asked."""
    begun = Rejoin(place, others, number=number, changes=changes, randomness=SystemRandomness())
    begun.start()
    return begun


def vouch(begun: Rejoin) -> Claim:
    """Ask the others to vouch, as once the node has claimed it; return what was claimed."""
    claim = begun.recalled.result()
    assert isinstance(claim, Claim)
    begun.vouch(claim)
    return claim


async def test_a_node_comes_back_above_everything_that_a_quorum_of_others_knows() -> None:
    """Its floor, its changes, and what it must know of every place."""
    zero, one = others = [Other(0), Other(1)]
    begun = rejoin(others, number=40, changes=3)
    assert zero.answer(knows(50, changes=(0, 0, 9), floors=(5, 0, 1))) == Pulse((0, 0, 3))
    assert not zero.asked, "one of two others is not enough"
    one.answer(knows(70, floors=(0, 6, 1)))
    claim = Claim(70 + NUMBERS_JUMP, 9 + CHANGES_JUMP)
    assert not any(other.asked for other in others), "the node has to claim it first"
    assert vouch(begun) == claim
    for other in others:
        assert not begun.outcome.done(), "every node that is asked must vouch"
        asked = other.answer(Plain.VOUCHED)
        assert isinstance(asked, Vouch)
        assert (asked.place, asked.floor, asked.changes) == (2, claim.floor, claim.changes)
    assert begun.outcome.result() == Vouched(claim, (5, 6, claim.floor))


async def test_what_was_heard_from_the_node_itself_counts_as_well() -> None:
    """It may have minted more than the others ever learnt."""
    others = [Other(0), Other(1)]
    begun = rejoin(others, number=90)
    for other in others:
        other.answer(knows(50))
    assert vouch(begun).floor == 90 + NUMBERS_JUMP


async def test_each_other_node_gets_an_admission_id_of_its_own() -> None:
    """What one server is told must admit nobody anywhere else."""
    others = [Other(0), Other(1)]
    begun = rejoin(others)
    for other in others:
        other.answer(knows(0))
    vouch(begun)
    ids = {asked.admission for other in others for asked, _ in other.asked if isinstance(asked, Vouch)}
    assert len(ids) == 2


async def test_of_four_others_the_first_three_decide_and_alone_are_asked_to_vouch() -> None:
    """A slow node holds nobody up; and two could have missed the same token."""
    others = [Other(index) for index in (0, 1, 2, 4)]
    nothing = (0,) * 5
    begun = rejoin(others, place=3)
    for other, high in zip(others[:2], (5, 9), strict=True):
        other.answer(Pulsed(0.0, 0, high, nothing, nothing))
    assert not begun.recalled.done()
    others[3].answer(Pulsed(0.0, 0, 7, nothing, nothing))
    assert vouch(begun).floor == 9 + NUMBERS_JUMP
    others[2].answer(Pulsed(0.0, 0, 900, nothing, nothing))
    assert [len(other.asked) for other in others] == [1, 1, 0, 1]


@pytest.mark.parametrize("silence", Silence)
async def test_without_a_quorum_of_others_nobody_is_asked_to_vouch(silence: Silence) -> None:
    """Fewer could all have missed the greatest token."""
    zero, one = others = [Other(0), Other(1)]
    begun = rejoin(others)
    zero.answer(silence)
    assert begun.recalled.result() is Failure.TOO_FEW
    one.answer(knows(3))
    assert not one.asked


async def test_a_lone_node_never_comes_back_by_itself() -> None:
    """Nobody remembers for it."""
    assert rejoin([], place=0).recalled.result() is Failure.TOO_FEW


@pytest.mark.parametrize("reply", [Plain.TOO_LOW, *Silence])
@pytest.mark.parametrize("which", [0, 1])
async def test_one_that_does_not_vouch_means_starting_over(reply: Reply, which: int) -> None:
    """A floor that is not on a quorum could be forgotten with the next node; whatever the rest say later."""
    others = [Other(0), Other(1)]
    begun = rejoin(others)
    for other in others:
        other.answer(knows(0))
    vouch(begun)
    others[which].answer(reply)
    assert begun.outcome.result() is Failure.OVERTAKEN
    others[1 - which].answer(Plain.VOUCHED)
    assert begun.outcome.result() is Failure.OVERTAKEN


async def test_answers_to_a_rejoin_that_was_cancelled_change_nothing() -> None:
    """The server is stopping."""
    others = [Other(0), Other(1)]
    begun = rejoin(others)
    begun.recalled.cancel()
    for other in others:
        other.answer(knows(0))
    assert begun.recalled.cancelled()


async def test_a_floor_that_leaves_no_numbers_is_not_asked_for() -> None:
    """The others would take it as their `high`, and nobody could ever be granted anything again."""
    others = [Other(0), Other(1)]
    begun = rejoin(others, number=bounds.FENCING_TOKEN_MAX - NUMBERS_JUMP)
    for other in others:
        other.answer(knows(0))
    assert begun.recalled.result() is Failure.EXHAUSTED
