"""What can be the matter with a node by itself: reach, process, disk, memory, clock, latency. Pure.

Each rule takes the facts of one node and tells what it finds. doctor.py has the rules that need the other nodes as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from redfence_proto import bounds
from redfence_server import scripts
from redfence_server.finding import Finding, Kind, Severity, note, serious, warning
from redfence_server.node_clock import NodeClock
from redfence_server.node_examination import version_number
from redfence_server.node_facts import NodeFacts, Trouble

MEMORY_RATIO_WARNING: Final = 0.80
"""Of the memory limit. At the limit a node refuses to mint, so it must be told while there is time to act."""
MEMORY_RATIO_SERIOUS: Final = 0.95
LATENCY_MS_WARNING: Final = bounds.TTL_MS_MIN / 10
"""For the median round trip. Validity counts from the request, so this is what a grant takes off every lease, and a commit, where one
is needed, as much again. Beyond a tenth of the shortest ttl it is felt."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What nodes are measured by, from the settings of the servers.

    Attributes:
        node_timeout_ms: how long a node may take to answer before it does not count.
        assume_durable: the operator's word that a node which restarted has forgotten nothing.
        key_prefix: what every key on the nodes starts with.
    """

    node_timeout_ms: int
    assume_durable: bool = False
    key_prefix: str = "redfence:"


def ailments(node: NodeFacts, limits: Limits) -> Iterator[Finding]:
    """Tell everything that is the matter with a node by itself."""
    yield from _reach(node)
    yield from _refusals(node, limits)
    yield from _process(node)
    yield from _disk(node)
    yield from _memory(node)
    yield from _clock(node)
    yield from _latency(node, limits)


def _reach(node: NodeFacts) -> Iterator[Finding]:
    match node.trouble:
        case Trouble.UNREACHABLE:
            yield serious(
                node.index,
                Kind.UNREACHABLE,
                f"it does not answer: {node.reason}",
                "start it, or mend the network or the address; a process that hangs or is stopped takes connections and says nothing",
            )
        case Trouble.DENIED:
            yield serious(
                node.index,
                Kind.DENIED,
                f"it does not let this user in: {node.reason}",
                "compare the user and the password in its URL with its access list (ACL LIST); every connection needs +client|setname, and "
                "+select where the URL names a database",
            )
        case Trouble.UNINTELLIGIBLE:
            yield serious(
                node.index,
                Kind.UNINTELLIGIBLE,
                f"it answers what no node does: {node.reason}",
                "see whether the URL names a Redis or Valkey server, and who else writes keys with this prefix",
            )
    if node.process is not None and node.process.loading:
        yield warning(
            node.index,
            Kind.LOADING,
            "it is loading its data from disk",
            "wait, and look again: it votes when it is through, if it has forgotten nothing",
            keeps_out=True,
        )


# What follows if a command is refused. CONFIG is missing: what follows from that is for doctor.py.
_CONSEQUENCES: Final[Mapping[str, tuple[Severity, str]]] = {
    "TIME": (Severity.WARNING, "a step of its clock cannot be seen"),
    "PING": (Severity.NOTE, "its latency was not measured"),
}


# What it takes to be allowed a command, where that is not the command alone: what is inside of a script is checked as well.
_RIGHTS: Final[Mapping[str, str]] = {"EVAL": "+eval +get +hgetall +dbsize"}


def _refusals(node: NodeFacts, limits: Limits) -> Iterator[Finding]:
    for command, answer in node.refused.items():
        # A node that refuses writes because of its disk refuses PING as well: _disk tells of it.
        if command == "CONFIG" or (command == "PING" and "MISCONF" in answer):
            continue
        severity, consequence = _CONSEQUENCES.get(command, (Severity.SERIOUS, "no server can admit it"))
        yield Finding(
            node.index,
            severity,
            Kind.REFUSED,
            f"it refuses a command, so {consequence}: {answer}",
            f"if it is a matter of rights, grant this user {_RIGHTS.get(command, f'+{command.lower()}')}, and ~{limits.key_prefix}* for the "
            "keys; docs/operations.md has the whole list",
            keeps_out=severity is Severity.SERIOUS,
        )


def _process(node: NodeFacts) -> Iterator[Finding]:
    process = node.process
    if process is None:
        return
    if version_number(process.version) < scripts.REDIS_VERSION_MIN:
        least = ".".join(map(str, scripts.REDIS_VERSION_MIN))
        yield serious(
            node.index,
            Kind.TOO_OLD,
            f"it is {process.engine} {process.version}; the scripts need {least}",
            f"install Redis {least} or later, or Valkey",
        )
    if process.cluster_mode:
        yield serious(
            node.index,
            Kind.CLUSTER_MODE,
            "it runs in cluster mode, which spreads the keys of one script over several servers",
            "set cluster-enabled no: every node is a server of its own",
        )
    if process.primary:
        yield serious(
            node.index,
            Kind.REPLICA,
            f"it is a replica of {process.primary}, and stores what that one says",
            "name an independent primary; to make one of it: REPLICAOF NO ONE, and FLUSHALL, for what it holds is another node's memory; "
            f"then `redfence cluster replace {node.index} URL`",
        )
    if process.replica_count:
        replicas = _count(process.replica_count, "replica follows it", "replicas follow it")
        yield warning(
            node.index,
            Kind.HAS_REPLICAS,
            f"{replicas}: a failover would forget what had not been copied yet",
            "let nothing fail over by itself (sentinel), or do without replicas: the other nodes are the copies",
        )


def _disk(node: NodeFacts) -> Iterator[Finding]:
    process = node.process
    if process is None:
        return
    mend = "free space on its disk, and read its own log"
    if not process.log_write_ok:
        yield serious(
            node.index,
            Kind.LOG_WRITE_FAILED,
            "its last write to the append-only file failed; it refuses all writes until one succeeds",
            mend,
        )
    if not process.log_rewrite_ok:
        yield warning(
            node.index,
            Kind.LOG_REWRITE_FAILED,
            "its last rewrite of the append-only file failed; the file grows until the disk is full",
            mend,
        )
    if not process.snapshot_ok:
        # If they are hidden: as in a configuration that nobody has changed.
        settings = node.settings or {}
        refuses = settings.get("stop-writes-on-bgsave-error") != "no" and settings.get("save") != ""
        yield Finding(
            node.index,
            Severity.SERIOUS if refuses else Severity.WARNING,
            Kind.SNAPSHOT_FAILED,
            f"its last snapshot failed{'; it refuses all writes until one succeeds' if refuses else ''}",
            f'{mend}; with an append-only file, it needs no snapshots (save "")',
            keeps_out=refuses,
        )
    if process.fsync_delays:
        yield warning(
            node.index,
            Kind.SLOW_DISK,
            f"writes had to wait for its disk {_count(process.fsync_delays, 'time', 'times')} in this run, for 2 s or more",
            "give it a disk that syncs in milliseconds, and that nobody else writes to",
        )


def _memory(node: NodeFacts) -> Iterator[Finding]:
    process = node.process
    if process is None:
        return
    if process.eviction_policy != "noeviction":
        policy, mend = f"its maxmemory-policy is {process.eviction_policy}", "set maxmemory-policy noeviction"
        if process.memory_max:
            full = f"when its {_size(process.memory_max)} are full it drops locks and numbers"
            yield serious(node.index, Kind.EVICTS, f"{policy}: {full}, so servers refuse it", mend)
        else:
            yield warning(
                node.index,
                Kind.EVICTION_POLICY,
                f"{policy}: once it gets a memory limit, servers refuse it",
                mend,
            )
    if not process.memory_max:
        yield note(
            node.index,
            Kind.NO_MEMORY_LIMIT,
            "it has no memory limit: when its machine has no memory left, the kernel kills it",
            "set maxmemory to what its machine can spare",
        )
        return
    used = process.memory_used / process.memory_max
    if used >= MEMORY_RATIO_WARNING:
        yield Finding(
            node.index,
            Severity.SERIOUS if used >= MEMORY_RATIO_SERIOUS else Severity.WARNING,
            Kind.MEMORY_SHORT,
            f"{_size(process.memory_used)} of its {_size(process.memory_max)} are used ({used:.0%}); when they are full it grants nothing",
            "raise maxmemory, keep unused counters for a shorter time (counter_idle_ms), or see who else stores there",
            keeps_out=used >= 1,
        )


def _clock(node: NodeFacts) -> Iterator[Finding]:
    clock = NodeClock(distrust_ms=1)  # asked for its steps alone
    told = [
        clock.note(sent_ms=sample.sent_ms, received_ms=sample.received_ms, node_ms=sample.node_ms)
        for sample in node.clock
    ]
    steps = [step.by_ms for step in told if step is not None]
    if not steps:
        return
    by_ms = max(steps, key=abs)
    watched_s = (node.clock[-1].received_ms - node.clock[0].sent_ms) / 1000
    yield serious(
        node.index,
        Kind.CLOCK_STEPS,
        f"within {watched_s:.1f} s its clock went {abs(by_ms):.0f} ms {'forward' if by_ms > 0 else 'back'} beyond what a clock may gain or "
        "lose: it was set, or runs wrong",
        "have the clock of its machine slewed and never set while it runs (chrony without makestep, ntpd -x), and see whether the machine "
        "was suspended; its votes do not count until the greatest ttl is over",
    )


def _latency(node: NodeFacts, limits: Limits) -> Iterator[Finding]:
    if (latency := node.latency) is None:
        return
    median_ms, worst_ms = latency.median_ms, latency.worst_ms
    measured = (
        f"of {len(node.pings_ms)} round trips the median took {median_ms:.1f} ms, the worst {worst_ms:.1f} ms"
    )
    nearer = "put it and the servers nearer together, and see what else keeps it busy (SLOWLOG GET)"
    if median_ms >= limits.node_timeout_ms:
        yield serious(
            node.index,
            Kind.SLOW,
            f"{measured}: it seldom answers within node_timeout_ms ({limits.node_timeout_ms}), and then does not count",
            f"{nearer}; or raise node_timeout_ms",
        )
        return
    if median_ms > LATENCY_MS_WARNING:
        yield warning(
            node.index,
            Kind.SLOW,
            f"{measured}: a grant takes so long, or twice, which comes off the validity of each lease",
            f"{nearer}; or ask for no ttl below {20 * median_ms:.0f} ms",
        )
    if worst_ms >= limits.node_timeout_ms:
        yield warning(
            node.index,
            Kind.UNSTEADY,
            f"{measured}: whenever it takes longer than node_timeout_ms ({limits.node_timeout_ms}), it does not count",
            f"{nearer}; or raise node_timeout_ms",
        )


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def _size(byte_count: int) -> str:
    return f"{byte_count / 2**20:.1f} MiB"
