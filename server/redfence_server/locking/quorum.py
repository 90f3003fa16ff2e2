"""Decide a renewal, a release or a token check from the replies of the nodes. Pure.

`Replies` has one reply for each node, or None where none has come yet. A judge returns None to wait for more.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto

from redfence_server.locking.node import Granted, Held, NoReply, Renewed, Reply, Status
from redfence_server.values import value

NODE_COUNTS = (1, 3, 5, 7)
"""An even number of nodes tolerates no more failures than one node less, and can split into two halves."""

DRIFT_RATIO = 0.01
"""How far a node's clock may gain on the server's, as a part of the ttl. Higher: leases are shorter for their
holders. Lower: a fast node clock frees the lock while its holder still counts on it."""
DRIFT_FIXED_MS = 2
"""Twice the rounding of expiry on the nodes (1 ms), which shortens a short ttl."""


def majority(node_count: int) -> int:
    """Return the size of a quorum: any two quorums share a node."""
    assert node_count in NODE_COUNTS, node_count
    return node_count // 2 + 1


def validity_left_ms(ttl_ms: int, elapsed_ms: float) -> float:
    """Return the validity that is left `elapsed_ms` after the start of the ttl."""
    return ttl_ms - elapsed_ms - (ttl_ms * DRIFT_RATIO + DRIFT_FIXED_MS)


WAIT_DRIFT_RATIO = 0.0005
"""How far the clocks of a caller and a server may part in a wait: clocks are never slewed faster."""


def wait_drift_ms(ttl_ms: int, waited_ms: float) -> float:
    """Return how much a wait shortens the validity, because the caller counts from its request.

    It is at most half of the ttl, so that some validity is left. A caller that waited so long renews at once.
    """
    return min(waited_ms * WAIT_DRIFT_RATIO, ttl_ms / 2)


Replies = Sequence[Reply | None]


class RenewVerdict(Enum):
    """The outcome of a renewal."""

    ACTIVE = auto()
    """Renewed on a quorum."""
    LOST = auto()
    """So many nodes do not have the hold that the lease can never have a quorum again."""
    FORCED = auto()
    """LOST, and a node knows that an operator ended the lease."""
    AT_RISK = auto()
    """Too few nodes answered to decide."""


@value
class Renewal:
    """A verdict; if ACTIVE, with the ttl and the token, which is 0 if no quorum of replies agrees on one."""

    verdict: RenewVerdict
    token: int = 0
    ttl_ms: int = 0


def judge_renew(replies: Replies) -> Renewal | None:
    """Return the verdict on a renewal, or None to wait for more replies."""
    quorum = majority(len(replies))
    renewed = [reply for reply in replies if isinstance(reply, Renewed)]
    if len(renewed) >= quorum:
        tokens = [reply.token for reply in renewed]
        agreed = next((token for token in tokens if tokens.count(token) >= quorum), 0)
        return Renewal(RenewVerdict.ACTIVE, agreed, min(reply.ttl_ms for reply in renewed))
    forced = replies.count(Status.FORCED)
    if replies.count(Status.NOT_HELD) + forced > len(replies) - quorum:
        return Renewal(RenewVerdict.FORCED if forced else RenewVerdict.LOST)
    return None if None in replies else Renewal(RenewVerdict.AT_RISK)


class ReleaseVerdict(Enum):
    """The outcome of a release."""

    RELEASED = auto()
    """The lease held the lock on a node until this release."""
    NOT_HELD = auto()
    """A quorum does not have the hold, so the lease was not held."""
    NO_QUORUM = auto()
    """Too few nodes answered to decide."""


def judge_release(replies: Replies) -> ReleaseVerdict | None:
    """Return the verdict on a release: a held lease has a node in every quorum of replies."""
    quorum = majority(len(replies))
    released = replies.count(Status.RELEASED)
    answered = released + replies.count(Status.NOT_HELD)
    if answered >= quorum:
        return ReleaseVerdict.RELEASED if released else ReleaseVerdict.NOT_HELD
    silent = len(replies) - replies.count(None) - answered
    return ReleaseVerdict.NO_QUORUM if silent > len(replies) - quorum else None


def release_part(reply: Reply) -> Reply:
    """Return what a node's reply to a handover says about the released lease."""
    match reply:
        case Granted(released=True):
            return Status.RELEASED
        case Granted() | Held():
            return Status.NOT_HELD
    return reply


class TokenVerdict(Enum):
    """Whether the lease with a token holds the lock."""

    LIVE = auto()
    """The lease with this token holds a quorum."""
    NOT_LIVE = auto()
    """The lease with this token cannot hold a quorum."""
    NO_QUORUM = auto()
    """Too few nodes answered to decide."""


@value
class TokenJudgement:
    """A verdict, and the hold that most nodes report so far."""

    verdict: TokenVerdict
    current: Held | None


def judge_token(replies: Replies, token: int) -> TokenJudgement | None:
    """Return whether the lease with this token holds a quorum, or None to wait for more replies."""
    quorum = majority(len(replies))
    holds = [reply for reply in replies if isinstance(reply, Held)]
    unknown = len(replies) - len(holds) - replies.count(Status.FREE)
    live = [hold for hold in holds if not hold.closed]
    groups = [[hold.token for hold in group] for group in by_lease(live)]
    if any(_shows(group, token, quorum) for group in groups):
        verdict = TokenVerdict.LIVE
    # An unknown node can at best report the token itself, for any lease.
    elif not any(_shows(group + [token] * unknown, token, quorum) for group in [*groups, []]):
        verdict = TokenVerdict.NOT_LIVE
    elif None in replies:
        return None
    else:
        verdict = TokenVerdict.NO_QUORUM
    return TokenJudgement(verdict, present_hold(holds, quorum=quorum))


def _shows(tokens: Sequence[int], token: int, quorum: int) -> bool:
    """Tell whether the tokens that nodes report for one lease prove that `token` is the granted one.

    A node that the commit never reached may report another token, even one granted to an earlier lease. But
    the quorum of that lease shares a node with any quorum of this one, and there this lease minted more. So
    the greatest token of a quorum is never stale, and a smaller one counts only if a quorum reports it.
    """
    return tokens.count(token) >= quorum or (len(tokens) >= quorum and token == max(tokens))


def silent_nodes(replies: Replies) -> tuple[tuple[int, NoReply], ...]:
    """Return the nodes that certainly will not answer, by index, each with the reason."""
    return tuple((node, reply) for node, reply in enumerate(replies) if isinstance(reply, NoReply))


def judge_all_answered(replies: Replies) -> Replies | None:
    """Return the replies once every node has answered; each answers in bounded time."""
    return None if None in replies else replies


def by_lease(holds: Sequence[Held]) -> list[list[Held]]:
    """Group holds by lease, largest group first; ties go to the highest token, probably the latest grant."""
    groups: dict[str, list[Held]] = {}
    for hold in holds:
        groups.setdefault(hold.digest, []).append(hold)
    return sorted(
        groups.values(), key=lambda group: (len(group), max(hold.token for hold in group)), reverse=True
    )


def hold_of_a_quorum(replies: Replies) -> Held | None:
    """Return the hold of the lease that a quorum reports, or None if there is no such lease."""
    holds = [reply for reply in replies if isinstance(reply, Held)]
    size = majority(len(replies))
    groups = by_lease(holds)
    return present_hold(holds, quorum=size) if groups and len(groups[0]) >= size else None


def present_hold(holds: Sequence[Held], *, quorum: int) -> Held | None:
    """Return the hold that most nodes report, for a human to read; None if there is no hold.

    If it is on a quorum, its token is never the one of an earlier lease; `_shows` gives the reason. The
    returned hold is closed if the hold is closed on a node, and live on fewer nodes than a quorum.
    """
    groups = by_lease(holds)
    if not groups:
        return None
    group = groups[0]
    tokens = [hold.token for hold in group]
    token = next((each for each in tokens if tokens.count(each) >= quorum), max(tokens))
    closed = [hold for hold in group if hold.closed]
    decisive = closed if closed and len(group) - len(closed) < quorum else group
    last = max(decisive, key=lambda hold: hold.remaining_ms)
    return Held(group[0].digest, token, group[0].holder, last.remaining_ms, last.lock_delay_ms)
