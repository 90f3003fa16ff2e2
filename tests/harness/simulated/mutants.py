"""The product with one rule removed, rule by rule. Each of them must be caught, or the simulation is worth nothing.

Those that only a rare order of events shows are for the searches and walks of tests/model: commits without condition or nonce, and rejoins.
"""

from __future__ import annotations

from typing import Final

from harness import adversary_mutants
from harness.fake_node import FakeNodeState, Hold
from harness.simulated.world import Rules
from redfence_server import node_clock, node_joining, quorum, redlock
from redfence_server.lock_node import Command, Renew, Reply


class ExtendThatRecreates(FakeNodeState):
    """A renewal of a lease that has ended makes its hold anew."""

    def __init__(self, **fields: object) -> None:
        super().__init__(**fields)  # type: ignore[arg-type]  # passed on
        self._ended: dict[tuple[str, str], Hold] = {}

    def apply(self, command: Command, now_ms: float, *, admission: str = "", channel: str = "here") -> Reply:
        for resource, hold in self.holds.items():
            self._ended[resource, hold.digest] = hold
        if (
            isinstance(command, Renew)
            and self._hold(command.resource, now_ms) is None
            and (ended := self._ended.get((command.resource, command.digest))) is not None
        ):
            self.holds[command.resource] = Hold(
                *(ended.digest, ended.nonce, False, ended.token, ended.holder, ended.ttl_ms),
                now_ms + ended.ttl_ms,
            )
        return super().apply(command, now_ms, admission=admission, channel=channel)


_NO_QUARANTINE = (node_joining, "quarantine_ms", lambda _: 0.0)
MUTANTS: Final = {
    "fencing off": Rules(fenced=False),
    "validity counted from the answer": Rules(counts_from_answer=True),
    "extend that re-creates": Rules(node=ExtendThatRecreates),
    "max without commit": Rules(patches=((redlock, "Tally", adversary_mutants.MaxWithoutCommit),)),
    "undo of a shared hold": Rules(node=adversary_mutants.UndoOfAShared),
    "undo by lease": Rules(patches=((redlock, "Attempt", adversary_mutants.UndoByLease),)),
    "counter from zero": Rules(node=adversary_mutants.CounterFromZero),
    "a minority grants": Rules(patches=((quorum, "majority", lambda count: max(1, count // 2)),)),
    "no quarantine": Rules(patches=(_NO_QUARANTINE,)),
    "clocks not watched": Rules(patches=((node_clock.NodeClock, "trusted", lambda *_: True),)),
}
BREAKS: Final = {
    "fencing off": {"F"},
    "validity counted from the answer": {"L"},
    "extend that re-creates": {"L"},
    "max without commit": {"T1", "T2"},
    "undo of a shared hold": {"L", "D"},
    "undo by lease": {"L", "D"},
    "counter from zero": {"T1", "T2"},
    "a minority grants": {"T1", "T2"},
    "no quarantine": {"L"},
    "clocks not watched": {"L"},
}
"""The promise that each rule is for: one of these letters is found without it."""
