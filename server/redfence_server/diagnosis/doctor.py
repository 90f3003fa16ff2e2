"""Turn the checkups of a cluster's nodes into findings with advice. Pure.

membership/admission.py decides whether a node may vote, through membership/cluster_judgement.py, as for a
server that has just started. The doctor adds advice to each verdict, and finds problems that do no harm yet.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Final

from redfence_proto import bounds
from redfence_server.config import ServeConfig
from redfence_server.diagnosis.checkup import Checkup
from redfence_server.diagnosis.finding import Diagnosis, Finding, Kind, Severity
from redfence_server.membership.admission import (
    Admitted,
    Forgot,
    Judgement,
    Quarantined,
    Reason,
    Rejected,
    Restarted,
)
from redfence_server.membership.cluster_judgement import ClusterJudgement
from redfence_server.membership.examination import Findings
from redfence_server.membership.fence import fence_size
from redfence_server.membership.node_clock import NodeClock
from redfence_server.redis_io.dial import DialAnswerError, DialDeniedError, DialLoadingError, DialRefusedError

MEMORY_RATIO_WARNING: Final = 0.80
"""The share of the memory limit. At the limit a node refuses to mint, so warn while there is time."""
MEMORY_RATIO_SERIOUS: Final = 0.95
LATENCY_MS_WARNING: Final = bounds.TTL_MS_MIN / 10
"""For the median round trip. A grant takes one or two, and its lease is valid for less by their length."""

_serious = partial(Finding, Severity.SERIOUS, keeps_out=True)
_warning = partial(Finding, Severity.WARNING)
_note = partial(Finding, Severity.NOTE)


def diagnose(nodes: Sequence[Checkup], settings: ServeConfig) -> Diagnosis:
    """Return the findings about the nodes, the worst first; `settings` are those of the lock servers."""
    shown = [node.found for node in nodes]
    judged = ClusterJudgement(shown, assume_durable=settings.assume_durable, previously_admitted=False)
    found = [replace(each, node=node.index) for node in nodes for each in _node(node, judged, settings)]
    found += _ttls(judged, settings)
    voters = frozenset(judged.voting()) - {finding.node for finding in found if finding.keeps_out}
    found += _quorum(nodes, judged, settings, voters)
    # At equal severity, the cluster comes first and then the nodes in their configured order.
    found.sort(key=lambda each: (list(Severity).index(each.severity), -1 if each.node is None else each.node))
    return Diagnosis(tuple(found), judged.cluster_id, judged.quorum, voters)


def _node(node: Checkup, judged: ClusterJudgement, settings: ServeConfig) -> Iterator[Finding]:
    """Yield the findings about one node."""
    # _process has the advice for a node in cluster mode, which refuses the examination.
    if node.error is not None and not _in_cluster_mode(node):
        yield _unreached(node, settings)
    judgement = judged.judge(node.index, node.found)
    if node.found is not None and judgement is not None:
        yield from _verdict(node.index, node.found, judged, judgement)
        yield from _durability(node.found, judgement, judged, settings)
        yield from _grants(node.found)
    if node.info:
        yield from _process(node)
        yield from _disk(node)
        yield from _memory(node)
    yield from _clock(node)
    if node.trips_ms:
        yield from _latency(node.trips_ms, settings)


def _grants(found: Findings) -> Iterator[Finding]:
    # Other findings say more about a full memory, a failed disk and a replica.
    if found.grant_refusal and not found.grant_refusal.startswith(("OOM", "MISCONF", "READONLY")):
        what = f"it refuses new grants: {found.grant_refusal}"
        advice = "remove the cause, for example grant the right to the command; it then grants by itself"
        yield _serious(Kind.GRANTS_REFUSED, what, advice)


def _unreached(node: Checkup, settings: ServeConfig) -> Finding:
    reason = str(node.error)
    match node.error:
        case DialDeniedError():
            advice = "compare user and password in its URL with its ACL LIST; a database there needs +select"
            return _serious(Kind.DENIED, f"it does not let this user in: {reason}", advice)
        case DialLoadingError():
            advice = "wait and look again: it votes after that, if it has forgotten nothing"
            return _warning(Kind.LOADING, "it is loading its data from disk", advice, keeps_out=True)
        case DialRefusedError():
            rights = f"+info +eval +get +hgetall +dbsize +time ~{settings.key_prefix}*"
            advice = f"if a right is missing, grant this user {rights}; docs/operations.md has the whole list"
            return _serious(
                Kind.REFUSED, f"no server can admit it, for it refuses a command: {reason}", advice
            )
        case DialAnswerError():
            advice = "check that its URL names a Redis or Valkey server; only redfence may write its keys"
            return _serious(Kind.UNINTELLIGIBLE, f"it answers as no node does: {reason}", advice)
    advice = "start it, or repair network or address; a stopped process accepts connections and never answers"
    return _serious(Kind.UNREACHABLE, f"it does not answer: {reason}", advice)


_REPLACE: Final = "`redfence cluster replace {index} URL`"
_SET: Final = "use CONFIG SET, then CONFIG REWRITE so that its configuration file says the same"
_SHOW_CONFIG: Final = (
    "grant this user +config|get; if the node's file renames or disables CONFIG (rename-command), delete "
    "that line and restrict users by access lists"
)
# Advice for each reason why servers reject a node. The reason is also the kind; admission words the finding.
ADVICE: Final[Mapping[Reason, str]] = {
    Reason.REPLICA: "it follows {primary}; name an independent primary. To make it one: REPLICAOF NO ONE, "
    f"then FLUSHALL (it holds another node's memory), then {_REPLACE}",
    Reason.TOO_OLD: "install Redis 6.2 or later, or Valkey",
    Reason.EVICTS: _SET,
    Reason.NO_RUN_ID: "use Redis 6.2 or later, or Valkey, and do not filter INFO",
    Reason.SAME_PROCESS: "start a server for it on a machine of its own: one crash would take both",
    Reason.FORMING: "name the same nodes as before",
    Reason.OTHER_CLUSTER: f"name the right node. To take this one: FLUSHALL, then {_REPLACE}",
    Reason.RESIZED: "name the new list of nodes; if the resize broke off, repeat `redfence cluster resize`",
    Reason.WRONG_PLACE: "name all nodes in the order in which they were formed; empty one that was a replica",
    Reason.REPLACED: f"to give this one the index again: {_REPLACE}",
    Reason.NOT_DURABLE: _SET,
    Reason.SETTINGS_HIDDEN: _SHOW_CONFIG,
}


def _verdict(
    index: int, found: Findings, judged: ClusterJudgement, judgement: Judgement
) -> Iterator[Finding]:
    match judgement:
        case Rejected(Reason.NOT_FORMED, detail) if found.key_count:
            advice = "check first which program wrote them, and the URL and the key prefix"
            yield _serious(Kind.NOT_EMPTY, detail, advice)
        case Rejected(Reason.NOT_FORMED):
            if judged.cluster_id:  # if there is none, _quorum says so once for all nodes
                what = "it is empty, and other nodes belong to a cluster: it was wiped, or is new"
                advice = f"a running server that knew it brings it back by itself; else {_REPLACE}"
                yield _serious(Kind.EMPTY, what, advice.format(index=index))
        case Rejected(reason, detail):
            primary = f"{found.info.get('master_host')}:{found.info.get('master_port')}"
            yield _serious(Kind[reason.name], detail, ADVICE[reason].format(index=index, primary=primary))
        case Forgot(detail):
            what = f"it may have forgotten locks and tokens: {detail}"
            advice = f"wait: a server takes it through {_quarantine(judged)} if enough others vote"
            yield _warning(Kind.FORGOT, what, advice, keeps_out=True)
        case Quarantined():
            what = "it is in quarantine: it may have forgotten locks and tokens"
            advice = f"wait {judged.ttl_ms_max / 1000:g} s; `redfence cluster status` says what it waits for"
            yield _warning(Kind.QUARANTINED, what, advice, keeps_out=True)
        case Restarted() if index not in judged.voting():
            needed = fence_size(judged.node_count)
            what = f"it restarted and forgot nothing, but needs {needed} of the other nodes to vote again"
            advice = "bring the other nodes back first; if they are lost, `redfence cluster recover`"
            yield _serious(Kind.RESTARTED, what, advice)


def _durability(
    found: Findings, judgement: Judgement, judged: ClusterJudgement, settings: ServeConfig
) -> Iterator[Finding]:
    """Yield what a crash would cost; `_verdict` covers a node that must not vote because of its settings."""
    match judgement:
        case Rejected(Reason.REPLICA | Reason.NOT_DURABLE | Reason.SETTINGS_HIDDEN):
            return
    if not found.durability_gap:
        if isinstance(judgement, Admitted) and not judgement.identity.durable:
            what = "its settings lose nothing at a crash, but it did not begin this run with them"
            advice = "restart one node at a time: after its next restart it goes through "
            advice += f"{_quarantine(judged)} once more"
            yield _note(Kind.NOT_YET_DURABLE, what, advice)
        return
    kind, mend = Kind.NOT_DURABLE, _SET
    what = f"a crash may lose what it has answered: {found.durability_gap}"
    if found.settings_hidden:
        kind, mend = Kind.SETTINGS_HIDDEN, _SHOW_CONFIG
        what = f"{found.durability_gap}, so it cannot prove that a crash loses nothing"
    if settings.assume_durable:
        what = f"{what}; servers take your word for it (assume_durable)"
        yield _note(kind, what, f"{mend}. Then remove assume_durable")
    elif judged.quorum == 1:
        what = f"{what}; after a restart a single node grants nothing before `redfence cluster recover`"
        advice = f"{mend}. Do so before the cluster is formed, or use three nodes"
        yield _serious(kind, what, advice, keeps_out=False)
    else:
        what = f"{what}; after each restart it goes through {_quarantine(judged)} before it votes again"
        advice = f"{mend}. If possible, do so before the cluster is formed. Until then restart one node at "
        advice += "a time: after a power cut of a majority, nothing is granted before "
        advice += "`redfence cluster recover`"
        yield _warning(kind, what, advice)


def _quarantine(judged: ClusterJudgement) -> str:
    return f"quarantine ({judged.ttl_ms_max / 1000:g} s, the greatest ttl)"


def _process(node: Checkup) -> Iterator[Finding]:
    if _in_cluster_mode(node):
        what = "it runs in cluster mode, which spreads the keys of one script over several servers"
        advice = (
            "set cluster-enabled no in its configuration file, and restart it: CONFIG SET cannot change it"
        )
        yield _serious(Kind.CLUSTER_MODE, what, advice)
    if replicas := node.number("connected_slaves"):
        what = f"replicas follow it ({replicas}): a failover would forget what was not copied yet"
        advice = (
            "disable automatic failover (sentinel), or remove the replicas: the other nodes are the copies"
        )
        yield _warning(Kind.HAS_REPLICAS, what, advice)


def _in_cluster_mode(node: Checkup) -> bool:
    return node.info.get("cluster_enabled") == "1"


def _disk(node: Checkup) -> Iterator[Finding]:
    info = node.info
    mend = "free space on its disk, and read its own log"
    refused = "; it refuses all writes until one succeeds"
    if info.get("aof_last_write_status", "ok") != "ok":
        what = f"its last write to the append-only file failed{refused}"
        yield _serious(Kind.LOG_WRITE_FAILED, what, mend)
    if info.get("aof_last_bgrewrite_status", "ok") != "ok":
        what = "its last rewrite of the append-only file failed; the file grows until the disk is full"
        yield _warning(Kind.LOG_REWRITE_FAILED, what, mend)
    if info.get("rdb_last_bgsave_status", "ok") != "ok":
        what = f"its last snapshot failed{refused if node.refuses_writes else ''}"
        advice = f'{mend}; with an append-only file it needs no snapshots (save "")'
        tell = _serious if node.refuses_writes else _warning
        yield tell(Kind.SNAPSHOT_FAILED, what, advice, keeps_out=node.refuses_writes)
    # Counted with `appendfsync everysec` alone.
    if delays := node.number("aof_delayed_fsync"):
        what = f"writes waited for its disk for 2 s or more ({delays} times in this run)"
        yield _warning(Kind.SLOW_DISK, what, "give it a disk of its own that syncs in milliseconds")


def _memory(node: Checkup) -> Iterator[Finding]:
    used, limit = node.memory_bytes
    policy = node.info.get("maxmemory_policy", "noeviction")
    if not limit:
        what = "it has no memory limit: when its machine has no memory left, the kernel kills it"
        yield _note(Kind.NO_MEMORY_LIMIT, what, "set maxmemory to what its machine can spare")
        if policy != "noeviction":
            what = f"its maxmemory-policy is {policy}: once it gets a memory limit, servers refuse it"
            yield _warning(Kind.EVICTION_POLICY, what, "set maxmemory-policy noeviction")
    elif used >= MEMORY_RATIO_WARNING * limit:
        what = f"{used / limit:.0%} of its {limit / 2**20:.1f} MiB are used; a full node grants nothing"
        advice = "raise maxmemory, keep unused counters for less time (counter_idle_ms), or find other data"
        tell = _serious if used >= MEMORY_RATIO_SERIOUS * limit else _warning
        yield tell(Kind.MEMORY_SHORT, what, advice, keeps_out=used >= limit)


def _clock(node: Checkup) -> Iterator[Finding]:
    clock = NodeClock(distrust_ms=1)  # only for its steps
    steps = [
        clock.note(sent_ms=each.sent_ms, received_ms=each.received_ms, node_ms=each.node_ms)
        for each in node.readings
    ]
    by_ms = max((step.by_ms for step in steps if step is not None), key=abs, default=0.0)
    if by_ms:
        watched_s = (node.readings[-1].received_ms - node.readings[0].sent_ms) / 1000
        way = "forward" if by_ms > 0 else "back"
        what = (
            f"within {watched_s:.1f} s its clock went {abs(by_ms):.0f} ms {way} beyond what a clock may drift"
        )
        advice = "slew its machine's clock, never set it (chrony without makestep, ntpd -x); "
        advice += "its votes do not count until the greatest ttl is over"
        yield _serious(Kind.CLOCK_STEPS, what, advice)


def _latency(trips_ms: Sequence[float], settings: ServeConfig) -> Iterator[Finding]:
    median_ms, worst_ms = median(trips_ms), max(trips_ms)
    measured = f"{len(trips_ms)} round trips took {median_ms:.1f} ms (median), the worst {worst_ms:.1f} ms"
    timeout = f"node_timeout_ms ({settings.node_timeout_ms})"
    nearer = "bring it and the servers closer together, and see what else keeps it busy (SLOWLOG GET)"
    if median_ms >= settings.node_timeout_ms:
        what = f"{measured}: it seldom answers within {timeout}, and then does not count"
        yield _serious(Kind.SLOW, what, f"{nearer}; or raise node_timeout_ms")
    elif median_ms > LATENCY_MS_WARNING:
        what = f"{measured}: a grant takes one or two, which come off the validity of each lease"
        yield _warning(Kind.SLOW, what, f"{nearer}; or ask for no ttl below {20 * median_ms:.0f} ms")
    if median_ms < settings.node_timeout_ms <= worst_ms:
        what = f"{measured}: whenever it takes longer than {timeout}, it does not count"
        yield _warning(Kind.UNSTEADY, what, f"{nearer}; or raise node_timeout_ms")


def _ttls(judged: ClusterJudgement, settings: ServeConfig) -> Iterator[Finding]:
    """Yield a finding for each node with a smaller greatest ttl, which sets how long a node must stay out."""
    for index, identity in judged.members.items():
        if identity.max_ttl_ms != judged.ttl_ms_max:
            what = f"it allows a ttl of {identity.max_ttl_ms} ms, and another node {judged.ttl_ms_max} ms: "
            what += "after a loss, a node could vote again before the last lease has ended"
            setting = f"HSET {settings.key_prefix}node max_ttl_ms {judged.ttl_ms_max}"
            advice = f"stop the servers, {setting} on it, and start them again"
            yield replace(_serious(Kind.TTL_DIFFERS, what, advice, keeps_out=False), node=index)


def _quorum(
    nodes: Sequence[Checkup], judged: ClusterJudgement, settings: ServeConfig, voters: frozenset[int]
) -> Iterator[Finding]:
    count, needed = len(nodes), judged.quorum
    judgements = [judgement for node in nodes if (judgement := judged.judge(node.index, node.found))]
    if not judged.cluster_id and judgements:
        what = f"no node that answers belongs to a cluster, with the key prefix {settings.key_prefix}"
        advice = "repair the other findings, then run `redfence cluster init`. If there was a cluster, "
        advice += "these are not its nodes, or all were wiped: `redfence cluster recover`"
        yield _serious(Kind.NOT_FORMED, what, advice, keeps_out=False)
    elif len(voters) < needed:
        advice = "repair the serious findings, the easiest node first"
        forgot = sum(
            isinstance(each, Forgot | Quarantined) or getattr(each, "reason", None) is Reason.NOT_FORMED
            for each in judgements
        )
        if forgot > count - needed:
            advice += f". {forgot} nodes may have forgotten, which is too many: `redfence cluster recover`"
        what = f"{len(voters)} of {count} nodes can vote and {needed} are needed: nothing is granted"
        yield _serious(Kind.NO_QUORUM, what, advice, keeps_out=False)
