"""What callers were granted and when, and whether it could be true: the tokens' two promises, judged from outside."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from harness.servers import now_ms
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
    """Records grants and checks them afterwards; it believes nothing but instants and answers."""

    def __init__(self) -> None:
        self.grants: list[Grant] = []

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
        return grant

    def check(self) -> None:
        """Fail unless tokens are unique among leases, and greater whenever their attempt began after another's answer."""
        assert self.grants, "nothing was granted: there is nothing to check"
        by_resource = defaultdict(list)
        for grant in self.grants:
            by_resource[grant.resource].append(grant)
        for grants in by_resource.values():
            _check_unique(grants)
            _check_ordered(grants)


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
