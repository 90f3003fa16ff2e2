"""What callers were granted and when, and whether it could be true: the promises of tokens and leases, judged from outside."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

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
    """Records what holders did and were told, and checks it afterwards; it believes nothing but instants and answers.

    Attributes:
        grants: as they were answered.
        counted_on_until_ms: by lease id, until when its holder counted on it, where that is not the end of what the grant told.
        succeeded: how many calls of each kind came to what they were for.
    """

    def __init__(self) -> None:
        self.grants: list[Grant] = []
        self.counted_on_until_ms: dict[str, float] = {}
        self.succeeded: Counter[str] = Counter()

    def note(self, lease: lock_pb2.Lease, *, began_at_ms: float) -> Grant:
        """Record a grant that was answered just now."""
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
        """Record a renewal that was answered just now; return whether it came before the lease had ended for its holder."""
        if self.end_ms(grant) < now_ms():
            return False
        self.counted_on_until_ms[grant.lease_id] = sent_at_ms + validity_ms
        self.succeeded["renew"] += 1
        return True

    def given_up(self, grant: Grant) -> None:
        """Record that the holder counts on the lease no more: it is about to release it."""
        self.counted_on_until_ms[grant.lease_id] = min(self.end_ms(grant), now_ms())

    def end_ms(self, grant: Grant) -> float:
        """Return until when the holder counts on the lease."""
        return self.counted_on_until_ms.get(grant.lease_id, grant.began_at_ms + grant.validity_ms)

    def check(self) -> None:
        """Fail unless tokens are unique among leases, and greater whenever their attempt began after another's answer."""
        for grants in self._by_resource():
            _check_unique(grants)
            _check_ordered(grants)

    def check_exclusion(self) -> None:
        """Fail if two holders counted on leases of one resource at the same instant; where no clock was set, that is promised too."""
        for grants in self._by_resource():
            leases: dict[str, Grant] = {}
            for grant in sorted(grants, key=lambda each: each.answered_at_ms):
                leases.setdefault(grant.lease_id, grant)
            last: Grant | None = None
            for grant in leases.values():
                end_ms = self.end_ms(grant)
                if end_ms <= grant.answered_at_ms:
                    continue  # it came too late to be counted on
                assert last is None or self.end_ms(last) <= grant.answered_at_ms, (
                    f"{grant.resource!r} had two holders: tokens {last.token} and {grant.token}, "
                    f"for {self.end_ms(last) - grant.answered_at_ms:.1f} ms"
                )
                last = grant

    def _by_resource(self) -> list[list[Grant]]:
        assert self.grants, "nothing was granted: there is nothing to check"
        by_resource = defaultdict(list)
        for grant in self.grants:
            by_resource[grant.resource].append(grant)
        return list(by_resource.values())


def _check_unique(grants: list[Grant]) -> None:
    owners: dict[int, str] = {}
    for grant in grants:
        owner = owners.setdefault(grant.token, grant.lease_id)
        assert owner == grant.lease_id, f"two leases of {grant.resource!r} were granted token {grant.token}"


def _check_ordered(grants: list[Grant]) -> None:
    # A retried Acquire is answered its first token again, so a lease counts by its first attempt and its first answer.
    leases: dict[str, Grant] = {}
    for grant in sorted(grants, key=lambda each: each.began_at_ms):
        first = leases.setdefault(grant.lease_id, grant)
        assert first.token == grant.token, f"a retry on {grant.resource!r} was answered another token"
    answered = sorted(leases.values(), key=lambda each: each.answered_at_ms)
    greatest, position = 0, 0
    for grant in leases.values():
        while position < len(answered) and answered[position].answered_at_ms < grant.began_at_ms:
            greatest = max(greatest, answered[position].token)
            position += 1
        assert grant.token > greatest, (
            f"{grant.resource!r} was granted with token {grant.token} after {greatest} had been answered"
        )
