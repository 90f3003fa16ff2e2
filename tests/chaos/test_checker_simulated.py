"""The checker finds no violation in what a perfect lock and storage answer."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.history.checker import check
from harness.history.history_builder import TTL_S, VALIDITY_S, call
from harness.history.records import Fault, History, Kind, Operation, Outcome, in_order

OK, FAILED, UNKNOWN = Outcome.OK, Outcome.FAILED, Outcome.UNKNOWN
WAIT_DRIFT_RATIO = 0.0005
LEASES = 12
SEEDS = st.integers(0, 2**32 - 1)
# Faults end at 1 s, and all resources are free at 998 s.
FAULT_ENDED_S, HEALED_S = 1.0, 998.0


class PerfectResource:
    """One resource that is granted, renewed, written and released without a defect; answers are late or lost.

    Attributes:
        operations: what its clients were told.
        kept: the entries in its storage at the end.
    """

    def __init__(self, name: str, random: Random) -> None:
        self._name = name
        self._random = random
        self._now_s = 2.0
        self._token = 0
        self._entries = 0
        self.operations: list[Operation] = []
        self.kept: list[str] = []
        for number in range(LEASES):
            self._lease(f"{name}/{number}")
        assert self._now_s < HEALED_S
        self.operations.append(call(f"acquire {name}/last {2**40} 999-999.1 resource={name}"))

    def _lease(self, lease: str) -> None:
        random = self._random
        self._token += random.choice((1, 1, 1, 2, 2**20))
        wait_s = random.choice((0.0, 0.3, 5.0))
        granted = self._call(Kind.ACQUIRE, lease, waited_s=wait_s, ttl_s=TTL_S, token=self._token)
        if granted.outcome is OK:
            if random.random() < 0.2:
                self._call(Kind.ACQUIRE, lease, ttl_s=TTL_S, token=self._token)
            self._use(lease, self._token)
        if random.random() < 0.6:
            self._call(Kind.RELEASE, lease)
        else:
            self._now_s += TTL_S

    def _use(self, lease: str, token: int) -> None:
        random = self._random
        if self._call(Kind.READ, lease, token=token).outcome is OK:
            if token > 1 and random.random() < 0.5:
                self._write_late(lease, token - 1)
            for _ in range(random.randrange(3)):
                if self._append(lease, token).outcome is not OK:
                    break
        for _ in range(random.randrange(3)):
            self._call(Kind.RENEW, lease, token=random.choice((0, token)))
        self._call(Kind.CHECK, lease, token=token)
        self._call(Kind.GET_LOCK, f"{lease}'s observer", token=random.choice((0, token)))

    def _append(self, lease: str, token: int) -> Operation:
        done = self._call(Kind.APPEND, lease, token=token, entry=self._new_entry())
        if done.outcome is OK or (done.outcome is UNKNOWN and self._random.random() < 0.5):
            self.kept.append(done.entry)
        return done

    def _write_late(self, lease: str, token: int) -> None:
        """Let an earlier holder write, and refuse its token."""
        late = self._call(Kind.APPEND, f"{lease}'s predecessor", token=token, entry=self._new_entry())
        completed_s = late.completed_s or self._now_s
        self.operations[-1] = replace(late, outcome=FAILED, completed_s=completed_s, stale=True)

    def _new_entry(self) -> str:
        self._entries += 1
        return f"{self._name}-{self._entries}"

    def _call(self, kind: Kind, lease: str, *, waited_s: float = 0.0, **fields: Any) -> Operation:
        """Record one call as its client knows it; the call takes effect between its begin and its answer."""
        random = self._random
        invoked_s = self._now_s + 0.001 - waited_s
        completed_s = self._now_s + 0.001 + random.uniform(0, 0.02) + random.choice((0.0, 0.01, 0.1))
        self._now_s = completed_s
        outcome = OK if random.random() < 0.85 else UNKNOWN
        made = Operation("client1", kind, self._name, lease, invoked_s, completed_s, outcome, **fields)
        if outcome is UNKNOWN:
            token = made.token if kind in (Kind.READ, Kind.APPEND, Kind.CHECK) else 0
            made = replace(made, token=token, completed_s=random.choice((None, completed_s)))
        elif kind in (Kind.ACQUIRE, Kind.RENEW):
            until_s = invoked_s + waited_s + VALIDITY_S - waited_s * WAIT_DRIFT_RATIO
            made = replace(made, until_s=until_s)
        self.operations.append(made)
        return made


def perfect(seed: int) -> History:
    """Return the history of a run without a defect in which answers were lost."""
    resources = {name: PerfectResource(name, Random(f"{seed} {name}")) for name in ("p", "q")}
    operations = [each for resource in resources.values() for each in resource.operations]
    # A busy resource makes the run valid. At 999 s each kind of call works once more.
    for turn in (*range(25), 99_900):
        span = f"{turn / 100}-{turn / 100 + 0.001} resource=busy"
        again = "" if turn < 25 else f"; acquire b {turn} {span}; renew b {span}; release b {span}; "
        again += "" if turn < 25 else f"live {turn} {span}; get {turn} {span}"
        statements = f"read {turn + 1} {span}; append {turn} {turn + 1} {span}{again}"
        operations += map(call, statements.split(";"))
    kept = {name: tuple(resource.kept) for name, resource in resources.items()}
    return History(
        seed=seed,
        operations=in_order(operations),
        faults=(Fault("server stopped", "server 1", 0.3, FAULT_ENDED_S),),
        healed_s=HEALED_S,
        ended_s=1000.0,
        kept=kept | {"busy": (*map(str, range(25)), "99900")},
    )


@pytest.mark.slow
@given(seed=SEEDS)
@settings(max_examples=100, deadline=None)
def test_a_perfect_lock_breaks_no_promise(seed: int) -> None:
    """Waits, repeats, lost answers, stale writers and dead holders are no violations."""
    verdict = check(perfect(seed))
    assert not verdict.violations
    assert all("succeeded" in reason for reason in verdict.invalid)
