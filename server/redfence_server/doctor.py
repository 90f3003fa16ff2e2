"""What is the matter with the nodes of a cluster, and what to do about it: facts in, findings out. Pure.

Whether a node may vote is asked of cluster_judgement.py, on behalf of a server that has just been started: it has seen no node before,
and knows of each what the others tell. The rules here and in node_ailments.py name the cause, and find what does no harm yet.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from redfence_server.cluster_judgement import ClusterJudgement
from redfence_server.finding import Diagnosis, Finding, Kind, note, serious, warning
from redfence_server.node_admission import Admitted, Forgot, Quarantined, Reason, Rejected
from redfence_server.node_ailments import Limits, ailments
from redfence_server.node_examination import DURABLE_SETTINGS
from redfence_server.node_facts import NodeFacts

OFFSET_MS_NOTE: Final = 128.0
"""Beyond it the common time daemon (ntpd) no longer slews a clock but sets it; and to be set is what does harm."""


def diagnose(nodes: Sequence[NodeFacts], limits: Limits) -> Diagnosis:
    """Return everything that is the matter, the worst first.

    Args:
        nodes: all that are configured, by index.
        limits: what they are measured by.
    """
    judged = ClusterJudgement(nodes, assume_durable=limits.assume_durable, familiar=False)
    found = []
    for node in nodes:
        found += [*ailments(node, limits), *_same_process(node, nodes)]
        found += [*_durability(node, judged, limits), *_evicted(node, judged)]
        found += [*_place_and_memory(node, judged)]
    found += [*_ttls(judged, limits), *_wall_clocks(nodes)]
    voters = frozenset(judged.voting()) - {finding.node for finding in found if finding.keeps_out}
    found += _quorum(nodes, judged, limits, voters)
    # Stable: of equal weight, the cluster comes first and the nodes as they are configured.
    found.sort(key=lambda finding: (finding.rank, -1 if finding.node is None else finding.node))
    return Diagnosis(tuple(found), judged.cluster_id, judged.quorum, voters)


def _quarantine(judged: ClusterJudgement) -> str:
    """For how long a node that forgot stays out."""
    return f"quarantine ({judged.ttl_ms_max / 1000:g} s, the greatest ttl)"


def _same_process(node: NodeFacts, nodes: Sequence[NodeFacts]) -> Iterator[Finding]:
    if node.process is None:
        return
    for other in nodes[: node.index]:
        if other.process is not None and other.process.run_id == node.process.run_id:
            yield serious(
                node.index,
                Kind.SAME_PROCESS,
                f"it is the same process as node {other.index} ({other.address}): one crash would take both",
                "give every node a server of its own, on a machine of its own",
            )
            return


def _durability(node: NodeFacts, judged: ClusterJudgement, limits: Limits) -> Iterator[Finding]:
    if node.found is None or node.found.is_replica:
        return
    gap, identity = node.found.durability_gap, judged.members.get(node.index)
    as_admitted = identity is not None and identity.run_id == node.found.run_id
    durable = identity is not None and identity.durable
    if not gap:
        if as_admitted and not durable:
            yield note(
                node.index,
                Kind.NOT_YET_DURABLE,
                "its settings lose nothing at a crash, but it did not begin this run with them",
                f"nothing: it goes through {_quarantine(judged)} once more, after its next restart",
            )
        return
    if node.settings is None:
        kind = Kind.SETTINGS_HIDDEN
        what = "this user may not read its settings, so it cannot prove that a crash loses nothing"
        mend = "grant this user +config|get"
    else:
        kind = Kind.NOT_DURABLE
        what = f"a crash may lose what it has answered: {gap}"
        wrong = [
            f"{name} {wanted}"
            for name, wanted in DURABLE_SETTINGS.items()
            if node.settings.get(name) != wanted
        ]
        mend = f"set {', '.join(wrong)}, in its configuration file as well (CONFIG REWRITE)"
    if limits.assume_durable:
        yield note(
            node.index,
            kind,
            f"{what}; servers take your word for it (assume_durable)",
            f"{mend}, and take it back",
        )
    elif durable and (as_admitted or node.found.settings_hidden):
        yield serious(
            node.index,
            kind,
            f"{what}; it was admitted as one that loses nothing, and must not vote like this",
            mend,
        )
    elif judged.quorum == 1:
        yield serious(
            node.index,
            kind,
            f"{what}; and no other node remembers: after a restart nothing is granted before `redfence cluster recover`",
            f"{mend}, before the cluster is formed; or have three nodes",
            keeps_out=False,
        )
    else:
        yield warning(
            node.index,
            kind,
            f"{what}; so after each restart it must go through {_quarantine(judged)} before it votes again",
            f"{mend}, and before the cluster is formed if it is not yet. Until then restart one node at a time: should more than a "
            "minority restart at once (a power cut), nothing is granted before `redfence cluster recover`",
        )


def _evicted(node: NodeFacts, judged: ClusterJudgement) -> Iterator[Finding]:
    judgement = judged.judge(node)
    # A node that forgot for this reason says so: _place_and_memory.
    if node.found is None or not node.found.evicted or isinstance(judgement, Forgot):
        return
    what = f"it has dropped {node.found.evicted} keys in this run, because its memory was full"
    if isinstance(judgement, Rejected) and judged.cluster_id:
        advice = f"mend the rest; if it may have dropped what it promised, a server then puts it into {_quarantine(judged)}"
        yield warning(node.index, Kind.EVICTED, what, advice)
    else:
        yield note(
            node.index, Kind.EVICTED, what, "nothing: when it came to the cluster that was made up for"
        )


# --- whether it votes -------------------------------------------------------------------------------------------------

# What the other rules tell better.
_TOLD_ELSEWHERE: Final = frozenset(
    {
        *(Reason.REPLICA, Reason.TOO_OLD, Reason.EVICTS, Reason.SAME_PROCESS),
        *(Reason.NOT_DURABLE, Reason.SETTINGS_HIDDEN),
    }
)


def _place_and_memory(node: NodeFacts, judged: ClusterJudgement) -> Iterator[Finding]:
    judgement = judged.judge(node)
    match judgement:
        case Forgot(detail):
            yield warning(
                node.index,
                Kind.FORGOT,
                f"it may have forgotten what it promised: {detail}",
                f"nothing, if that was expected: a server puts it into {_quarantine(judged)} and then brings it back, if a quorum of "
                "others votes",
                keeps_out=True,
            )
        case Quarantined():
            yield warning(
                node.index,
                Kind.QUARANTINED,
                "it is in quarantine, for it may have forgotten what it promised",
                f"wait: a server brings it back after {judged.ttl_ms_max / 1000:g} s, if a quorum of others votes; "
                "`redfence cluster status` tells what it waits for",
                keeps_out=True,
            )
        case Rejected(reason, detail) if reason not in _TOLD_ELSEWHERE:
            yield from _rejected(node, judged, reason, detail)
        case Admitted() if node.found is not None and node.found.promoted:
            yield note(
                node.index,
                Kind.PROMOTED,
                "it was a replica earlier in this run, and has come to the cluster since",
                "let nothing fail over to a replica by itself: it always costs a quarantine",
            )


def _rejected(node: NodeFacts, judged: ClusterJudgement, reason: Reason, detail: str) -> Iterator[Finding]:
    assert node.found is not None, "nobody rejects what was not looked at"
    replace = f"`redfence cluster replace {node.index} URL`"
    match reason:
        case Reason.NOT_FORMED if node.found.key_count:
            yield serious(
                node.index,
                Kind.NOT_EMPTY,
                f"it belongs to no cluster, and yet holds {node.found.key_count} keys",
                "see whose they are, and whether the URL and the key prefix are right; if nobody needs them: FLUSHALL",
            )
        case Reason.NOT_FORMED if judged.cluster_id:
            yield serious(
                node.index,
                Kind.EMPTY,
                "it is empty, and others belong to a cluster: it was wiped, or is new",
                f"a running server that knew it brings it back by itself; if none does, {replace}",
            )
        case Reason.NOT_FORMED:
            return  # told once for all: _quorum
        case Reason.FORMING:
            yield serious(
                node.index,
                Kind.FORMING,
                "its cluster was not formed to the end",
                "run `redfence cluster init` again, with the same nodes",
            )
        case Reason.RECOVERING:
            yield serious(
                node.index,
                Kind.RECOVERING,
                "its cluster is being recovered, or was not recovered to the end",
                "if nobody is at it, run `redfence cluster recover` again",
            )
        case Reason.OTHER_CLUSTER:
            yield serious(
                node.index,
                Kind.OTHER_CLUSTER,
                detail,
                f"name the right one; to have this one: FLUSHALL, then {replace}",
            )
        case Reason.WRONG_PLACE:
            yield serious(
                node.index,
                Kind.WRONG_PLACE,
                detail,
                "empty it (FLUSHALL)"
                if node.found is not None and node.found.promoted
                else "name all nodes of the cluster, in the order in which it was formed",
            )
        case Reason.REPLACED:
            yield serious(
                node.index,
                Kind.REPLACED,
                "another node, or a later state of this one, has taken its place",
                f"name that one; only if this one is to take the place again: {replace}",
            )
        case _:
            raise AssertionError(reason)


# --- the cluster ------------------------------------------------------------------------------------------------------


def _ttls(judged: ClusterJudgement, limits: Limits) -> Iterator[Finding]:
    """Tell of nodes that do not agree on how long one that forgot must stay out."""
    for index, identity in judged.members.items():
        if identity.max_ttl_ms != judged.ttl_ms_max:
            yield serious(
                index,
                Kind.TTL_DIFFERS,
                f"it allows a ttl of {identity.max_ttl_ms} ms, and another node {judged.ttl_ms_max} ms: after a loss, a node could vote "
                "again before the last lease has ended",
                f"somebody has changed its identity by hand. Stop the servers, HSET {limits.key_prefix}node max_ttl_ms "
                f"{judged.ttl_ms_max} on it, and start them again",
                keeps_out=False,
            )


def _wall_clocks(nodes: Sequence[NodeFacts]) -> Iterator[Finding]:
    """Tell of clocks that are apart. That harms nobody, but whoever puts them right in one step does."""
    advice = "nothing, as long as it is slewed and not set while the node runs"
    samples = {node.index: sample for node in nodes if (sample := node.clock_sample) is not None}
    if not samples:
        return
    off = {
        index: sample
        for index, sample in samples.items()
        if abs(sample.offset_ms) - sample.unsure_ms > OFFSET_MS_NOTE
    }
    first = min(samples, key=lambda index: samples[index].offset_ms)
    last = max(samples, key=lambda index: samples[index].offset_ms)
    spread_ms = samples[last].offset_ms - samples[first].offset_ms
    unsure_ms = samples[last].unsure_ms + samples[first].unsure_ms
    if spread_ms - unsure_ms > OFFSET_MS_NOTE:
        yield note(
            None,
            Kind.CLOCK_SPREAD,
            f"the clock of node {last} is {_seconds(spread_ms)} ahead of that of node {first} (± {_seconds(unsure_ms)})",
            advice,
        )
    elif len(off) == len(samples) > 1:
        yield note(
            None,
            Kind.CLOCK_OFFSET,
            f"all nodes agree, and this machine's clock is {_apart(-samples[first].offset_ms)} theirs",
            "nothing: redfence does not go by it",
        )
        return
    for index, sample in off.items():
        yield note(
            index,
            Kind.CLOCK_OFFSET,
            f"its clock is {_apart(sample.offset_ms)} this machine's (± {_seconds(sample.unsure_ms)})",
            advice,
        )


def _quorum(
    nodes: Sequence[NodeFacts], judged: ClusterJudgement, limits: Limits, voters: frozenset[int]
) -> Iterator[Finding]:
    count, needed = len(nodes), judged.quorum
    judgements = [judgement for node in nodes if (judgement := judged.judge(node)) is not None]
    if not judged.cluster_id and judgements:
        yield serious(
            None,
            Kind.NOT_FORMED,
            f"no node that answers belongs to a cluster, with the key prefix {limits.key_prefix}",
            "mend what else is found here, then form one: `redfence cluster init`. If there was one: these are not its nodes, or they were "
            "all wiped (`redfence cluster recover`)",
            keeps_out=False,
        )
        return
    if len(voters) >= needed:
        return
    forgot = sum(
        isinstance(judgement, Forgot | Quarantined)
        or (isinstance(judgement, Rejected) and judgement.reason is Reason.NOT_FORMED)
        for judgement in judgements
    )
    advice = "mend what is serious, the node that is easiest to mend first"
    if forgot > count - needed:
        advice += f". {forgot} nodes may have forgotten, so too few are left to bring them back: `redfence cluster recover`"
    yield serious(
        None,
        Kind.NO_QUORUM,
        f"{len(voters)} of {count} nodes can vote and {needed} are needed: nothing is granted",
        advice,
        keeps_out=False,
    )


def _apart(offset_ms: float) -> str:
    return f"{_seconds(abs(offset_ms))} {'ahead of' if offset_ms > 0 else 'behind'}"


def _seconds(ms: float) -> str:
    return f"{ms / 1000:.3f} s"
