"""Records the grants of a load test and checks them with the rules of `check`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from harness.history.checker import require
from harness.history.records import History, Kind, Operation, Outcome, in_order
from harness.history.verdict import Invariant
from harness.processes.servers import now_ms
from redfence_proto.v1 import lock_pb2


@dataclass(frozen=True, slots=True)
class Grant:
    """One answered grant. Instants are on the holder's clock, in ms.

    Attributes:
        began_at_ms: before the attempt's request was sent.
        answered_at_ms: after its answer was read.
        validity_ms: as answered; it counts from `began_at_ms`.
    """

    resource: str
    lease_id: str
    token: int
    began_at_ms: float
    answered_at_ms: float
    validity_ms: int


class TokenHistory:
    """Records what holders did and were told; it believes only instants and answers.

    Attributes:
        grants: in the order of their recording.
        counted_on_until_ms: by lease id, until when its holder counted on it, unless its grant says so.
        succeeded: the number of successful calls of each kind.
    """

    def __init__(self) -> None:
        self.grants: list[Grant] = []
        self.counted_on_until_ms: dict[str, float] = {}
        self.succeeded: Counter[str] = Counter()

    def note(self, lease: lock_pb2.Lease, *, began_at_ms: float) -> Grant:
        grant = Grant(
            resource=lease.resource,
            lease_id=lease.lease_id,
            token=lease.fencing_token,
            began_at_ms=began_at_ms,
            answered_at_ms=now_ms(),
            validity_ms=lease.validity.ToMilliseconds(),
        )
        self.grants.append(grant)
        self.succeeded["acquire"] += 1
        return grant

    def renewed(self, grant: Grant, *, sent_at_ms: float, validity_ms: int) -> bool:
        """Record a renewal that was answered just now; return whether it was answered in time."""
        if self.end_ms(grant) < now_ms():
            return False
        self.counted_on_until_ms[grant.lease_id] = sent_at_ms + validity_ms
        self.succeeded["renew"] += 1
        return True

    def given_up(self, grant: Grant) -> None:
        """Record that the holder is about to release the lease and counts on it no more."""
        self.counted_on_until_ms[grant.lease_id] = min(self.end_ms(grant), now_ms())

    def end_ms(self, grant: Grant) -> float:
        """Return until when the holder counts on a grant."""
        return self.counted_on_until_ms.get(grant.lease_id, grant.began_at_ms + grant.validity_ms)

    def check(self) -> None:
        """Fail if a token was granted twice or out of order, or if a retry returned another token."""
        firsts = self._first_grants(lambda grant: grant.began_at_ms)
        for grant in self.grants:
            first = firsts[grant.resource, grant.lease_id]
            assert first.token == grant.token, f"a retry on {grant.resource!r} was answered another token"
        require(self._history(firsts), Invariant.UNIQUE, Invariant.ORDERED)

    def check_exclusion(self) -> None:
        """Fail if two leases of one resource were valid at once; for runs in which no clock was set."""
        firsts = self._first_grants(lambda grant: grant.answered_at_ms)
        require(self._history(firsts), Invariant.EXCLUSION)

    def _first_grants(self, instant: Callable[[Grant], float]) -> dict[tuple[str, str], Grant]:
        """Return the first grant of each lease; a retry returns the token of that grant again."""
        assert self.grants, "nothing was granted: there is nothing to check"
        firsts: dict[tuple[str, str], Grant] = {}
        for grant in sorted(self.grants, key=instant):
            firsts.setdefault((grant.resource, grant.lease_id), grant)
        return firsts

    def _history(self, grants: dict[tuple[str, str], Grant]) -> History:
        return History(
            in_order(
                Operation(
                    client="",
                    kind=Kind.ACQUIRE,
                    resource=grant.resource,
                    lease=grant.lease_id,
                    invoked_s=grant.began_at_ms / 1000,
                    completed_s=grant.answered_at_ms / 1000,
                    outcome=Outcome.OK,
                    token=grant.token,
                    until_s=self.end_ms(grant) / 1000,
                )
                for grant in grants.values()
            )
        )
