"""Every reply vector against the rule, written down a second time and independently."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest

from redfence_server.locking import quorum
from redfence_server.locking.node import Granted, Held, NoReply, Renewed, Reply, Status
from redfence_server.locking.quorum import ReleaseVerdict, RenewVerdict, TokenVerdict
from redfence_server.locking.tally import WAIT, Ask, Decision, Failure, Grant, Refusal, Tally

X = Held("x", 7, "holder x", 900)
Y = Held("y", 8, "holder y", 500)
COMMIT_REPLIES: tuple[Reply, ...] = (Status.COMMITTED, Status.LOST, NoReply.TIMED_OUT)


def granted(token: int, node: int = 0) -> Granted:
    """Return a mint's answer; the nonce names the node it came from."""
    return Granted(f"nonce-{node}", token)


def named(vector: Sequence[Reply]) -> list[Reply]:
    """Give every grant of a vector its node's own nonce."""
    return [granted(r.token, node) if isinstance(r, Granted) else r for node, r in enumerate(vector)]


# --- the rule, once more


class Oracle:
    """What an attempt may and must do, told from the plain list of what has happened to it."""

    def __init__(self, node_count: int) -> None:
        self.node_count = node_count
        self.quorum = {1: 1, 3: 2, 5: 3, 7: 4}[node_count]
        self.mints: dict[int, Reply] = {}
        self.commits: dict[int, list[tuple[int, Reply]]] = {}

    @property
    def greatest(self) -> int:
        return max((r.token for r in self.mints.values() if isinstance(r, Granted)), default=0)

    def is_lost(self, node: int) -> bool:
        return any(reply is not Status.COMMITTED for _, reply in self.commits.get(node, []))

    def alive(self) -> list[int]:
        """Nodes that granted and, as far as is known, still hold."""
        return [n for n, r in self.mints.items() if isinstance(r, Granted) and not self.is_lost(n)]

    def stands_at_greatest(self, node: int) -> bool:
        mint = self.mints[node]
        assert isinstance(mint, Granted)
        acknowledged = {token for token, _ in self.commits.get(node, [])}
        return mint.token == self.greatest or self.greatest in acknowledged

    @property
    def must_grant(self) -> bool:
        return sum(map(self.stands_at_greatest, self.alive())) >= self.quorum

    @property
    def must_refuse(self) -> bool:
        """No answer that may still come could make a grant, and a quorum has answered, or cannot."""
        hopeless = len(self.alive()) + self.node_count - len(self.mints) < self.quorum
        silent = sum(self.is_silent(node) for node in self.mints)
        is_told = len(self.mints) - silent >= self.quorum or silent > self.node_count - self.quorum
        return hopeless and is_told

    def is_silent(self, node: int) -> bool:
        replies = [self.mints[node], *(reply for _, reply in self.commits.get(node, []))]
        return any(isinstance(reply, NoReply) for reply in replies)


def check(oracle: Oracle, decision: Decision, asked: set[tuple[int, int]]) -> bool:
    """Compare one decision with the rule; tell whether the attempt is over."""
    match decision:
        case Grant(token):
            assert oracle.must_grant
            assert token == oracle.greatest
        case Refusal():
            assert oracle.must_refuse
            assert not oracle.must_grant
        case Ask(token, targets):
            assert not oracle.must_grant, "a slow node must not delay a grant"
            assert not oracle.must_refuse, "a slow node must not delay a refusal"
            for node, nonce in targets:
                mint = oracle.mints[node]
                assert isinstance(mint, Granted)
                assert nonce == mint.nonce, "a commit goes to the very hold that was answered"
                assert token == oracle.greatest > mint.token
                assert (node, token) not in asked, "a commit is asked for once"
                asked.add((node, token))
            if len(oracle.alive()) >= oracle.quorum:
                behind = {node for node in oracle.alive() if not oracle.stands_at_greatest(node)}
                assert all((node, oracle.greatest) in asked for node in behind), "every node behind is asked"
            return False
    return True


def play(
    vector: Sequence[Reply], order: Sequence[int], commit_replies: Iterator[Reply], *, eager: bool
) -> Decision:
    """Tell a tally the mints in this order and answer its commits; return how it ended.

    Args:
        vector: what each node answers to the mint.
        order: in which order the answers arrive.
        commit_replies: what the commits are answered, one after the other.
        eager: commits are answered before the next mint, or else after all of them.
    """
    tally, oracle = Tally(len(vector)), Oracle(len(vector))
    asked: set[tuple[int, int]] = set()
    commits: list[tuple[int, int]] = []
    mints = list(order)
    while mints or commits:
        if commits and (eager or not mints):
            node, token = commits.pop(0)
            reply = next(commit_replies)
            oracle.commits.setdefault(node, []).append((token, reply))
            decision = tally.committed(node, token, reply)
        else:
            node = mints.pop(0)
            oracle.mints[node] = vector[node]
            decision = tally.minted(node, vector[node])
        if check(oracle, decision, asked):
            return decision
        assert isinstance(decision, Ask)
        commits += [(node, decision.token) for node, _ in decision.targets]
    assert len({token for _, token in asked}) <= len(vector), "the token is raised at most once per node"
    pytest.fail("every answer is in and nothing was decided")


MINT_REPLIES_FEW: tuple[Reply, ...] = (granted(1), granted(2), granted(5), X, NoReply.TIMED_OUT)
MINT_REPLIES: tuple[Reply, ...] = (*MINT_REPLIES_FEW, Y, NoReply.REFUSED, NoReply.DISCONNECTED)


@pytest.mark.slow
@pytest.mark.parametrize("node_count", [1, 3])
def test_every_vector_in_every_order_is_decided_by_the_rule(node_count: int) -> None:
    """The oracle grants when a quorum stands at the greatest token, and refuses when none can."""
    ends: Counter[str] = Counter()
    for vector in itertools.product(MINT_REPLIES, repeat=node_count):
        for order in itertools.permutations(range(node_count)):
            for commits in itertools.product(COMMIT_REPLIES, repeat=2 if node_count == 3 else 0):
                for eager in (False, True):
                    answers = itertools.chain(commits, itertools.repeat(Status.COMMITTED))
                    ends[type(play(named(vector), order, answers, eager=eager)).__name__] += 1
    assert set(ends) == {"Grant", "Refusal"}


@pytest.mark.slow
def test_every_vector_of_five_is_decided_by_the_rule() -> None:
    """3,125 vectors, in four orders, with commits answered early or late, well or badly."""
    chance = random.Random(5)
    for vector in itertools.product(MINT_REPLIES_FEW, repeat=5):
        orders = [[*range(5)], [*range(4, -1, -1)], chance.sample(range(5), 5), chance.sample(range(5), 5)]
        for order in orders:
            for odds in ((1, 0, 0), (4, 1, 1)):
                answers = iter(chance.choices(COMMIT_REPLIES, odds, k=40))
                play(named(vector), order, answers, eager=chance.random() < 0.5)


def test_a_node_that_answers_after_the_grant_is_aligned_and_never_lowered() -> None:
    tally = Tally(5)
    for node in range(3):
        tally.minted(node, granted(4, node))
    assert tally.late(3, granted(1, 3)) == Ask(4, ((3, "nonce-3"),))
    assert tally.late(4, granted(9, 4)) == WAIT


@pytest.mark.parametrize(
    ("vector", "failure"),
    [
        ([X, X, granted(1)], Failure.HELD),
        ([X, Y, granted(1)], Failure.SPLIT),
        ([X, NoReply.TIMED_OUT, granted(1)], Failure.HELD),
        ([NoReply.TIMED_OUT, NoReply.REFUSED, granted(1)], Failure.NO_QUORUM),
        ([NoReply.TIMED_OUT, NoReply.UNREACHABLE, X], Failure.NO_QUORUM),
        ([X, Y, NoReply.TIMED_OUT, NoReply.TIMED_OUT, granted(1)], Failure.HELD),
        ([X, X, Y, Y, granted(1)], Failure.SPLIT),
        # Less than a quorum of answers does not tell that the lock is held.
        ([X, NoReply.NOT_ADMITTED, NoReply.QUARANTINED], Failure.NO_QUORUM),
        ([X, NoReply.NOT_ADMITTED, X], Failure.HELD),
        ([X, NoReply.NOT_ADMITTED, granted(1)], Failure.HELD),
    ],
)
def test_a_refusal_tells_why(vector: list[Reply], failure: Failure) -> None:
    tally = Tally(len(vector))
    decisions = [tally.minted(node, reply) for node, reply in enumerate(named(vector))]
    refusals = [decision for decision in decisions if isinstance(decision, Refusal)]
    assert refusals[-1].failure is failure


@pytest.mark.parametrize(
    ("reply", "failure"), [(Status.LOST, Failure.EXPIRED), (NoReply.TIMED_OUT, Failure.NO_QUORUM)]
)
def test_a_commit_that_failed_tells_expiry_from_silence(reply: Reply, failure: Failure) -> None:
    tally = Tally(3)
    tally.minted(0, granted(1, 0))
    tally.minted(1, granted(2, 1))
    tally.minted(2, NoReply.TIMED_OUT)
    refusal = tally.committed(0, 2, reply)
    assert isinstance(refusal, Refusal)
    assert refusal.failure is failure


@pytest.mark.parametrize("node_count", range(1, 10))
def test_two_quorums_share_a_node(node_count: int) -> None:
    if node_count not in quorum.NODE_COUNTS:
        with pytest.raises(AssertionError):
            quorum.majority(node_count)
        return
    size = quorum.majority(node_count)
    assert size == {1: 1, 3: 2, 5: 3, 7: 4}[node_count]
    for one, two in itertools.combinations_with_replacement(
        list(itertools.combinations(range(node_count), size)), 2
    ):
        assert set(one) & set(two)


def test_validity_is_the_ttl_less_what_passed_and_the_drift() -> None:
    assert quorum.validity_left_ms(10_000, 0) == 9_898
    assert quorum.validity_left_ms(10_000, 9_898) == 0
    assert quorum.validity_left_ms(100, 50) == 47


# --- renew, release, token: every vector, None included


RENEW: tuple[Reply, ...] = (
    *(Renewed(4, 1000), Renewed(5, 900)),
    *(Status.NOT_HELD, Status.FORCED, NoReply.TIMED_OUT),
)


@pytest.mark.slow
@pytest.mark.parametrize("node_count", [3, 5])
def test_every_renewal_is_active_on_a_quorum_lost_without_hope_and_else_at_risk(node_count: int) -> None:
    """The ttl is the shortest one, and a token needs a quorum that agrees on it."""
    need = node_count // 2 + 1
    for vector in itertools.product((*RENEW, None), repeat=node_count):
        renewal = quorum.judge_renew(vector)
        good = [reply for reply in vector if isinstance(reply, Renewed)]
        lost = vector.count(Status.NOT_HELD) + vector.count(Status.FORCED)
        if renewal is None:
            assert None in vector
            assert len(good) < need
            assert lost <= node_count - need
        elif renewal.verdict is RenewVerdict.ACTIVE:
            assert len(good) >= need
            assert renewal.ttl_ms == min(reply.ttl_ms for reply in good)
            agreed = [token for token, votes in Counter(r.token for r in good).items() if votes >= need]
            assert renewal.token == (agreed[0] if agreed else 0)
        elif renewal.verdict in (RenewVerdict.LOST, RenewVerdict.FORCED):
            assert lost > node_count - need
            assert (renewal.verdict is RenewVerdict.FORCED) == (Status.FORCED in vector)
        else:
            assert None not in vector
            assert len(good) < need
            assert lost <= node_count - need


@pytest.mark.parametrize("node_count", [3, 5])
def test_every_release_is_decided_by_a_quorum_of_answers(node_count: int) -> None:
    need = node_count // 2 + 1
    alphabet: tuple[Reply | None, ...] = (Status.RELEASED, Status.NOT_HELD, NoReply.TIMED_OUT, None)
    for vector in itertools.product(alphabet, repeat=node_count):
        verdict = quorum.judge_release(vector)
        released = vector.count(Status.RELEASED)
        answered = released + vector.count(Status.NOT_HELD)
        if answered >= need:
            assert verdict is (ReleaseVerdict.RELEASED if released else ReleaseVerdict.NOT_HELD)
        elif vector.count(NoReply.TIMED_OUT) > node_count - need:
            assert verdict is ReleaseVerdict.NO_QUORUM
        else:
            assert verdict is None


HOLDS = (Held("x", 4, "", 1), Held("x", 5, "", 1), Held("y", 5, "", 1))
TOKEN: tuple[Reply, ...] = (*HOLDS, Status.FREE, NoReply.TIMED_OUT)


def _is_proven(vector: Sequence[Reply | None], token: int, need: int) -> bool:
    """A quorum of nodes shows one lease, and among those the token is the greatest or shown by a quorum."""
    for digest in "xy":
        tokens = [r.token for r in vector if isinstance(r, Held) and r.digest == digest]
        if len(tokens) >= need and (token == max(tokens) or tokens.count(token) >= need):
            return True
    return False


@pytest.mark.slow
@pytest.mark.parametrize("node_count", [3, 5])
@pytest.mark.parametrize("token", [4, 5])
def test_every_token_is_live_only_when_proven_and_not_live_only_without_hope(
    node_count: int, token: int
) -> None:
    """A silent node may show anything, so it makes a token neither live nor stale."""
    need = node_count // 2 + 1
    for vector in itertools.product((*TOKEN, None), repeat=node_count):
        judgement = quorum.judge_token(vector, token)
        if _is_proven(vector, token, need):
            assert judgement is not None
            assert judgement.verdict is TokenVerdict.LIVE
            continue
        unheard = tuple(None if isinstance(reply, NoReply) else reply for reply in vector)
        # The best that can come is the token itself, from one lease or the other.
        best = [
            tuple(hold if r is None else r for r in unheard)
            for hold in (Held("x", token, "", 1), Held("y", token, "", 1))
        ]
        if not any(_is_proven(each, token, need) for each in best):
            assert judgement is not None
            assert judgement.verdict is TokenVerdict.NOT_LIVE
        elif None in vector:
            assert judgement is None
        else:
            assert judgement is not None
            assert judgement.verdict is TokenVerdict.NO_QUORUM


@pytest.mark.parametrize(
    ("reply", "part"),
    [
        (Granted("n", 1, released=True), Status.RELEASED),
        (Granted("n", 1, contended=True), Status.NOT_HELD),
        (X, Status.NOT_HELD),
        *[(silence, silence) for silence in NoReply],
    ],
)
def test_what_a_hand_over_was_answered_tells_what_became_of_the_release(reply: Reply, part: Reply) -> None:
    assert quorum.release_part(reply) is part


def test_the_present_hold_is_the_lease_on_most_nodes() -> None:
    holds = [Held("x", 4, "x", 100), Held("y", 9, "y", 900), Held("x", 4, "x", 300), Held("x", 6, "x", 200)]
    assert quorum.present_hold(holds, quorum=2) == Held("x", 4, "x", 300)
    assert quorum.present_hold(holds, quorum=3) == Held("x", 6, "x", 300)
    assert quorum.present_hold([], quorum=3) is None


def test_a_lease_that_is_closed_on_so_many_nodes_that_no_quorum_is_left_is_closed() -> None:
    """Its token is not live."""
    live, closed = Held("x", 4, "x", 900, 300), Held("x", 4, "x", 300, 300)
    for holds, is_closed in (
        ([live, live, live], False),
        ([live, live, closed], False),
        ([live, closed, closed], True),
        ([closed, closed, closed], True),
    ):
        shown = quorum.present_hold(holds, quorum=2)
        assert shown is not None
        assert shown.closed is is_closed
        judged = quorum.judge_token(holds, 4)
        assert judged is not None
        assert (judged.verdict is TokenVerdict.NOT_LIVE) is is_closed


def test_of_a_lease_that_is_on_a_quorum_no_earlier_leases_token_is_shown() -> None:
    """Before the commit, two lagging nodes may have minted a token that another lease had before."""
    x5, x7, y = Held("x", 5, "", 1), Held("x", 7, "", 1), Held("y", 6, "", 1)
    for replies in set(itertools.permutations([x7, x5, x5, y, y])):
        for token, verdict in ((7, TokenVerdict.LIVE), (5, TokenVerdict.NOT_LIVE)):
            told = quorum.judge_token(replies, token)
            assert told is not None
            assert told.verdict is verdict
            assert told.current is not None
            assert told.current.token == 7


@pytest.mark.parametrize("tokens", [(1, 2), (2, 1)])
def test_of_two_leases_on_as_many_nodes_the_later_one_is_the_present(tokens: tuple[int, int]) -> None:
    holds = [Held(str(token), token, "holder", 0) for token in tokens]
    present = quorum.present_hold(holds, quorum=2)
    assert present is not None
    assert present.token == 2
