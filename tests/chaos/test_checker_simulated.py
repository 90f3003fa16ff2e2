"""The judge believes what a perfect lock and storage tell, however calls overlap and get lost; and finds one thing that is made wrong in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.history.checker import check
from harness.history.records import Fault, History, Kind, Operation, Outcome, in_order

OK, FAILED, UNKNOWN = Outcome.OK, Outcome.FAILED, Outcome.UNKNOWN
TTL_S = 2.0
VALIDITY_S = 1.978
WAIT_DRIFT_RATIO = 0.0005
LEASES = 12
SEEDS = st.integers(0, 2**32 - 1)


class PerfectResource:
    """One resource that is granted, renewed, written and released as it should be; answers are late or lost by chance.

    Attributes:
        operations: what its clients were told.
        kept: what its storage shows in the end.
    """

    def __init__(self, name: str, chance: Random) -> None:
        self._name = name
        self._chance = chance
        self._now_s = 2.0
        self._token = 0
        self._entries = 0
        self.operations: list[Operation] = []
        self.kept: list[str] = []

    def live(self) -> None:
        """Grant so many leases, one after another."""
        for number in range(LEASES):
            self._lease(f"{self._name}/{number}")

    def _lease(self, lease: str) -> None:
        chance = self._chance
        self._token += chance.choice((1, 1, 1, 2, 2**20))
        told = self._call(
            Kind.ACQUIRE, lease, waited_s=chance.choice((0.0, 0.3, 5.0)), ttl_s=TTL_S, token=self._token
        )
        if told.outcome is OK and chance.random() < 0.2:
            self._call(Kind.ACQUIRE, lease, ttl_s=TTL_S, token=self._token)
        if told.outcome is OK:
            self._use(lease, self._token)
        if chance.random() < 0.6:
            self._call(Kind.RELEASE, lease)
        else:
            self._now_s += TTL_S

    def _use(self, lease: str, token: int) -> None:
        chance = self._chance
        if self._call(Kind.READ, lease, token=token).outcome is OK:
            self._stale(lease, token)
            for _ in range(chance.randrange(3)):
                if self._append(lease, token).outcome is not OK:
                    break
        for _ in range(chance.randrange(3)):
            self._call(Kind.RENEW, lease, token=chance.choice((0, token)))
        self._call(Kind.CHECK, lease, token=token)
        self._call(Kind.GET_LOCK, f"{lease}'s neighbour", token=chance.choice((0, token)))

    def _append(self, lease: str, token: int) -> Operation:
        self._entries += 1
        entry = f"{self._name}-{self._entries}"
        done = self._call(Kind.APPEND, lease, token=token, entry=entry)
        if done.outcome is OK or (done.outcome is UNKNOWN and self._chance.random() < 0.5):
            self.kept.append(entry)
        return done

    def _stale(self, lease: str, token: int) -> None:
        """Let an earlier holder wake up and write."""
        if token > 1 and self._chance.random() < 0.5:
            self._entries += 1
            entry = f"{self._name}-{self._entries}"
            late = self._call(Kind.APPEND, f"{lease}'s forerunner", token=token - 1, entry=entry)
            self.operations[-1] = replace(
                late, outcome=FAILED, completed_s=late.completed_s or self._now_s, stale=True
            )

    def _call(self, kind: Kind, lease: str, *, waited_s: float = 0.0, **fields: Any) -> Operation:
        """Carry a call out, at an instant between its invocation and its answer, and return it as its caller knows it."""
        chance = self._chance
        invoked_s = self._now_s + 0.001 - waited_s
        done_s = self._now_s + 0.001 + chance.uniform(0, 0.02)
        completed_s = self._now_s = done_s + chance.choice((0.0, 0.01, 0.1))
        outcome = OK if chance.random() < 0.85 else UNKNOWN
        call = Operation("c", kind, self._name, lease, invoked_s, completed_s, outcome, **fields)
        if outcome is UNKNOWN:
            token = call.token if kind in (Kind.READ, Kind.APPEND, Kind.CHECK) else 0
            call = replace(call, token=token, completed_s=chance.choice((None, completed_s)))
        elif kind in (Kind.ACQUIRE, Kind.RENEW):
            call = replace(call, until_s=invoked_s + waited_s + VALIDITY_S - waited_s * WAIT_DRIFT_RATIO)
        self.operations.append(call)
        return call


def perfect(seed: int) -> History:
    """Return the history of a run in which all was well, but for answers."""
    resources = [PerfectResource(name, Random(f"{seed} {name}")) for name in ("p", "q")]
    operations: list[Operation] = []
    for resource in resources:
        resource.live()
        operations += resource.operations
        last_s = resource._now_s
        operations.append(
            Operation(
                "c",
                Kind.ACQUIRE,
                resource._name,
                f"{resource._name}/last",
                999.0,
                999.1,
                OK,
                2**40,
                999 + VALIDITY_S,
                TTL_S,
            )
        )
        assert last_s < 990
    busy = [
        replace(
            Operation("c", kind, "busy", f"b{turn}", turn / 100, turn / 100 + 0.001, OK),
            token=turn + 1,
            entry=str(turn) if kind is Kind.APPEND else "",
            until_s=turn / 100 + VALIDITY_S,
            ttl_s=TTL_S,
        )
        # In the end whatever there is works once more.
        for turn in (*range(25), 99_900)
        for kind in ((Kind.READ, Kind.APPEND) if turn < 25 else Kind)
    ]
    return History(
        seed=seed,
        operations=in_order(operations + busy),
        faults=(Fault("server stopped", "server 1", 0.3, 1.0),),
        began_s=0.0,
        healed_s=998.0,
        ended_s=1000.0,
        kept={
            **{each._name: tuple(each.kept) for each in resources},
            "busy": (*map(str, range(25)), "99900"),
        },
    )


def _grants(history: History) -> list[Operation]:
    """Return the first grants of leases of one resource that were told, with a time between each answer and the next call."""
    first: dict[str, Operation] = {}
    unsure = {
        call.lease for call in history.operations if call.kind is Kind.ACQUIRE and call.outcome is not OK
    }
    for call in history.operations:
        if (
            call.resource == "p"
            and call.kind is Kind.ACQUIRE
            and call.outcome is OK
            and call.lease not in unsure
        ):
            first.setdefault(call.lease, call)
    apart: list[Operation] = []
    for call in first.values():
        if not apart or (apart[-1].completed_s or 0.0) < call.invoked_s:
            apart.append(call)
    return apart


def _with_token(history: History, lease: str, token: int) -> tuple[Operation, ...]:
    return tuple(
        replace(call, token=token)
        if call.lease == lease and call.kind is Kind.ACQUIRE and call.outcome is OK
        else call
        for call in history.operations
    )


def token_repeated(history: History, chance: Random) -> tuple[str, History]:
    """Tell a lease the token of another one."""
    one, other = chance.sample(_grants(history), 2)
    return "T1", replace(history, operations=_with_token(history, other.lease, one.token))


def order_swapped(history: History, chance: Random) -> tuple[str, History]:
    """Tell two leases that followed each other each other's token."""
    one, other = chance.sample(_grants(history), 2)
    swapped = replace(history, operations=_with_token(history, other.lease, one.token))
    return "T2", replace(swapped, operations=_with_token(swapped, one.lease, other.token))


def append_dropped(history: History, chance: Random) -> tuple[str, History]:
    """Lose an append that was acknowledged."""
    entry = chance.choice(_acknowledged(history))
    return "F", _keeping(history, tuple(each for each in history.kept["p"] if each != entry))


def append_doubled(history: History, chance: Random) -> tuple[str, History]:
    """Keep an append twice."""
    return "F", _keeping(history, (*history.kept["p"], chance.choice(_acknowledged(history))))


def stale_kept(history: History, chance: Random) -> tuple[str, History]:
    """Keep an append that was refused."""
    stale = [call.entry for call in history.operations if call.stale and call.resource == "p"]
    place = chance.randrange(len(history.kept["p"]) + 1)
    return "F", _keeping(
        history, (*history.kept["p"][:place], chance.choice(stale), *history.kept["p"][place:])
    )


def order_kept_swapped(history: History, chance: Random) -> tuple[str, History]:
    """Keep two acknowledged appends in the other order."""
    one, other = chance.sample(_acknowledged(history), 2)
    swap = {one: other, other: one}
    return "F", _keeping(history, tuple(swap.get(each, each) for each in history.kept["p"]))


def stale_let_in(history: History, chance: Random) -> tuple[str, History]:
    """Let a write in that was refused."""
    stale = chance.choice([call for call in history.operations if call.stale and call.resource == "p"])
    let_in = replace(stale, outcome=OK, stale=False)
    return "F", replace(history, operations=tuple(let_in if c is stale else c for c in history.operations))


def holders_overlap(history: History, chance: Random) -> tuple[str, History]:
    """Grant a lock a second time, at once after its holder was told."""
    grant = chance.choice(_grants(history)[:-1])
    told_s = grant.completed_s or 0.0
    assert told_s < grant.until_s
    rival = replace(
        grant, lease="rival", token=2**39, until_s=told_s + VALIDITY_S, invoked_s=told_s, completed_s=told_s
    )
    return "L", replace(history, operations=in_order((*history.operations, rival)))


def dead_told_live(history: History, chance: Random) -> tuple[str, History]:
    """Tell that a token is live when a later lease has been granted."""
    dead, later = sorted(chance.sample(_grants(history), 2), key=lambda grant: grant.token)
    told_s = (later.completed_s or 0.0) + 0.001
    check_of_dead = Operation("c", Kind.CHECK, "p", dead.lease, told_s, told_s, OK, token=dead.token)
    return "T2", replace(history, operations=in_order((*history.operations, check_of_dead)))


def live_told_dead(history: History, chance: Random) -> tuple[str, History]:
    """Tell that a token is not live while its holder counts on it."""
    met_s = max(fault.ended_s for fault in history.faults)
    grant = chance.choice(
        [each for each in _grants(history) if each.invoked_s > met_s and _asked_once(history, each.lease)]
    )
    told_s = grant.completed_s or 0.0
    not_live = Operation(
        "c", Kind.CHECK, "p", grant.lease, told_s, told_s, FAILED, token=grant.token, lost=True
    )
    return "D", replace(history, operations=in_order((*history.operations, not_live)))


def _asked_once(history: History, lease: str) -> bool:
    return sum(call.lease == lease and call.kind is Kind.ACQUIRE for call in history.operations) == 1


def _acknowledged(history: History) -> list[str]:
    return [
        c.entry for c in history.operations if c.kind is Kind.APPEND and c.outcome is OK and c.resource == "p"
    ]


def _keeping(history: History, entries: tuple[str, ...]) -> History:
    return replace(history, kept={**history.kept, "p": entries})


CORRUPTIONS = (
    token_repeated,
    order_swapped,
    append_dropped,
    append_doubled,
    stale_kept,
    order_kept_swapped,
    stale_let_in,
    holders_overlap,
    dead_told_live,
    live_told_dead,
)


@given(seed=SEEDS)
@settings(max_examples=100, deadline=None)
def test_what_a_perfect_lock_tells_is_clean(seed: int) -> None:
    """Waits, repeats, lost answers, stale writers and holders that died break nothing."""
    verdict = check(perfect(seed))
    assert not verdict.violations
    assert all("was ever OK" in reason for reason in verdict.invalid)


@pytest.mark.parametrize("corrupt", CORRUPTIONS, ids=lambda corrupt: corrupt.__name__)
@given(seed=SEEDS)
@settings(max_examples=25, deadline=None)
def test_one_thing_made_wrong_is_found(
    corrupt: Callable[[History, Random], tuple[str, History]], seed: int
) -> None:
    """Wherever it is, whatever is told around it, and for that resource alone."""
    history = perfect(seed)
    try:
        letter, corrupted = corrupt(history, Random(seed))
    except (IndexError, ValueError):
        return  # there was nothing of the kind in this run
    found = check(corrupted).violations
    assert letter in {str(violation.invariant) for violation in found}
    assert {violation.resource for violation in found} == {"p"}
