"""Decide a renewal, a release or a token check from what the nodes answered; and what a quorum is. Pure.

A vector of replies has one reply for each node, and None where none has come yet. A judge returns None while it waits for more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from redfence_server.locking.node import Granted, Held, NoReply, Renewed, Reply, Status

NODE_COUNTS = (1, 3, 5, 7)
"""An even number of nodes tolerates no more failures than the odd number below it, and can split in two halves."""

DRIFT_RATIO = 0.01
"""How much of a ttl node clocks may gain on ours. Raised: leases are shorter for their holders. Lowered: a fast
node clock frees the lock while its holder still counts on it."""
DRIFT_FIXED_MS = 2
"""Twice the rounding of expiry on the nodes (1 ms), which shortens a short ttl."""


def majority(node_count: int) -> int:
    """Return the size of a quorum: any two quorums share a node."""
    assert node_count in NODE_COUNTS, node_count
    return node_count // 2 + 1


def validity_left_ms(ttl_ms: int, elapsed_ms: float) -> float:
    """Return how long a lease can still be counted on, `elapsed_ms` after the instant its ttl is counted from."""
    return ttl_ms - elapsed_ms - (ttl_ms * DRIFT_RATIO + DRIFT_FIXED_MS)


WAIT_DRIFT_RATIO = 0.0005
"""How much the clocks of a caller and of this server may part while the caller waits: as much as a clock is ever slewed."""


def wait_drift_ms(ttl_ms: int, waited_ms: float) -> float:
    """Return what to take from the validity of a lease after a wait, because the caller counts from its sending.

    It is at most half of the ttl, so that the lease is worth something. A caller that waited so long renews at once.
    """
    return min(waited_ms * WAIT_DRIFT_RATIO, ttl_ms / 2)


Replies = Sequence[Reply | None]


class RenewVerdict(Enum):
    """The outcome of a renewal."""

    ACTIVE = auto()
    """Renewed on a quorum."""
    LOST = auto()
    """So many nodes do not hold the lease that it can never again have a quorum."""
    AT_RISK = auto()
    """Too few nodes answered to tell."""


@dataclass(frozen=True, slots=True)
class Renewal:
    """The verdict; when ACTIVE the ttl and the token, which is 0 if no quorum of the answers agrees on it."""

    verdict: RenewVerdict
    token: int = 0
    ttl_ms: int = 0


def judge_renew(replies: Replies) -> Renewal | None:
    """Decide a renewal."""
    quorum = majority(len(replies))
    renewed = [reply for reply in replies if isinstance(reply, Renewed)]
    if len(renewed) >= quorum:
        tokens = [reply.token for reply in renewed]
        agreed = next((token for token in tokens if tokens.count(token) >= quorum), 0)
        return Renewal(RenewVerdict.ACTIVE, agreed, min(reply.ttl_ms for reply in renewed))
    if replies.count(Status.NOT_HELD) > len(replies) - quorum:
        return Renewal(RenewVerdict.LOST)
    return None if None in replies else Renewal(RenewVerdict.AT_RISK)


class ReleaseVerdict(Enum):
    """The outcome of a release."""

    RELEASED = auto()
    """The lease held the lock on a node and does not any more."""
    NOT_HELD = auto()
    """A quorum does not hold the lease, so it was not held."""
    NO_QUORUM = auto()
    """Too few nodes answered to tell."""


def judge_release(replies: Replies) -> ReleaseVerdict | None:
    """Decide a release: a lease that was held has a node in every quorum of answers."""
    quorum = majority(len(replies))
    released = replies.count(Status.RELEASED)
    if released + replies.count(Status.NOT_HELD) >= quorum:
        return ReleaseVerdict.RELEASED if released else ReleaseVerdict.NOT_HELD
    return ReleaseVerdict.NO_QUORUM if len(silent_nodes(replies)) > len(replies) - quorum else None


def release_part(reply: Reply) -> Reply:
    """Return what a node's answer to a hand-over says of the lease that was to end."""
    match reply:
        case Granted(released=True):
            return Status.RELEASED
        case Granted() | Held():
            return Status.NOT_HELD
    return reply


class TokenVerdict(Enum):
    """Whether a token is that of the lease which holds the lock."""

    LIVE = auto()
    """The lease with this token holds a quorum."""
    NOT_LIVE = auto()
    """It cannot hold a quorum."""
    NO_QUORUM = auto()
    """Too few nodes answered to tell."""


@dataclass(frozen=True, slots=True)
class TokenJudgement:
    """The verdict, and the hold that most of the nodes asked so far see."""

    verdict: TokenVerdict
    current: Held | None


def judge_token(replies: Replies, token: int) -> TokenJudgement | None:
    """Decide whether the lease with this token holds a quorum."""
    quorum = majority(len(replies))
    holds = [reply for reply in replies if isinstance(reply, Held)]
    unknown = len(replies) - len(holds) - replies.count(Status.FREE)
    groups = [[hold.token for hold in group] for group in by_lease(holds)]
    if any(_shows(group, token, quorum) for group in groups):
        verdict = TokenVerdict.LIVE
    # An unknown node can at best show the token itself, for whichever lease.
    elif not any(_shows(group + [token] * unknown, token, quorum) for group in [*groups, []]):
        verdict = TokenVerdict.NOT_LIVE
    elif None in replies:
        return None
    else:
        verdict = TokenVerdict.NO_QUORUM
    return TokenJudgement(verdict, present_hold(holds, quorum=quorum))


def _shows(tokens: Sequence[int], token: int, quorum: int) -> bool:
    """Tell whether what nodes show for one lease proves that this is its token.

    A node the grant never reached may show another number for the lease, even one that an earlier lease was granted. But that
    lease's quorum shares a node with any quorum of this one, and there this one minted more: so the greatest number of a
    quorum is never a stale one, and a smaller one counts only if a quorum shows it.
    """
    return tokens.count(token) >= quorum or (len(tokens) >= quorum and token == max(tokens))


def silent_nodes(replies: Replies) -> tuple[tuple[int, NoReply], ...]:
    """Return the nodes that surely will not answer, by index, and why."""
    return tuple((node, reply) for node, reply in enumerate(replies) if isinstance(reply, NoReply))


def judge_all_answered(replies: Replies) -> Replies | None:
    """Wait for every node; each answers in bounded time."""
    return None if None in replies else replies


def by_lease(holds: Sequence[Held]) -> list[list[Held]]:
    """Group holds by lease, largest group first; ties go to the highest token, probably the latest grant."""
    groups: dict[str, list[Held]] = {}
    for hold in holds:
        groups.setdefault(hold.digest, []).append(hold)
    return sorted(
        groups.values(), key=lambda group: (len(group), max(hold.token for hold in group)), reverse=True
    )


def present_hold(holds: Sequence[Held], *, quorum: int) -> Held | None:
    """Sum up what the nodes say of the lease that is on most of them, for a human; None if there is no hold.

    If the lease is on a quorum, the token is never that of an earlier lease; `_shows` says why.
    """
    groups = by_lease(holds)
    if not groups:
        return None
    group = groups[0]
    tokens = [hold.token for hold in group]
    token = next((each for each in tokens if tokens.count(each) >= quorum), max(tokens))
    return Held(group[0].digest, token, group[0].holder, max(hold.remaining_ms for hold in group))
