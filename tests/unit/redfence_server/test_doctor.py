"""What the doctor finds in every state of a node, and of a cluster: all findings of a case, not only the expected one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import pytest

from redfence_proto import bounds
from redfence_server import doctor, quorum
from redfence_server.cluster_judgement import ClusterJudgement
from redfence_server.doctor import OFFSET_MS_NOTE, diagnose
from redfence_server.finding import Diagnosis, Finding, Kind, Severity
from redfence_server.node_admission import Reason
from redfence_server.node_ailments import LATENCY_MS_WARNING, Limits
from redfence_server.node_examination import DURABLE_SETTINGS, Findings, Identity, Phase
from redfence_server.node_facts import ClockSample, NodeFacts, Process, Trouble

LIMITS = Limits(node_timeout_ms=500)
GAP = "appendfsync is everysec, not always"
SETTINGS = {**DURABLE_SETTINGS, "save": "", "stop-writes-on-bgsave-error": "yes"}
MIB = 2**20


def sample(
    *, at_ms: float = 0.0, trip_ms: float = 1.0, offset_ms: float = 0.0, gained_ms: float = 0.0
) -> ClockSample:
    """A look at a clock: `offset_ms` ahead of this machine's wall clock, plus what it gained since the first look."""
    wall_ms = 1_700_000_000_000.0 + at_ms
    return ClockSample(
        sent_ms=at_ms,
        received_ms=at_ms + trip_ms,
        node_ms=wall_ms + trip_ms / 2 + offset_ms + gained_ms,
        wall_ms=wall_ms,
    )


def well(index: int, *, count: int = 3) -> NodeFacts:
    """A node that nothing is the matter with."""
    run_id = f"run-{index}"
    identity = Identity(
        cluster_id="c",
        index=index,
        node_count=count,
        max_ttl_ms=300_000,
        admission="a" * 32,
        run_id=run_id,
        durable=True,
        phase=Phase.READY,
    )
    return NodeFacts(
        index=index,
        address=f"10.0.0.{index}:6379",
        process=Process(
            engine="redis", version="7.2.4", run_id=run_id, memory_used=MIB, memory_max=100 * MIB
        ),
        known=identity,
        found=Findings(identity=identity, run_id=run_id, version="7.2.4", high=5, key_count=2),
        settings=SETTINGS,
        clock=(sample(), sample(at_ms=1_000)),
        pings_ms=(0.2, 0.3, 0.9),
    )


def changed(
    node: NodeFacts,
    *,
    process: Mapping[str, Any] | None = None,
    found: Mapping[str, Any] | None = None,
    identity: Mapping[str, Any] | None = None,
    settings: Mapping[str, str] | None = None,
    **facts: Any,
) -> NodeFacts:
    """The same node with other facts, given by the part they are in."""
    assert node.process
    assert node.found
    assert node.found.identity
    if process:
        facts["process"] = replace(node.process, **process)
    if identity:
        found = {"identity": replace(node.found.identity, **identity), **(found or {})}
    if found:
        facts["found"] = replace(node.found, **found)
        facts.setdefault("known", facts["found"].identity)
    if settings:
        facts["settings"] = {**SETTINGS, **settings}
    return replace(node, **facts)


def unlooked(index: int, trouble: Trouble) -> NodeFacts:
    """A node that could not be looked at."""
    return NodeFacts(index=index, address=f"10.0.0.{index}:6379", trouble=trouble, reason="the reason")


EMPTY: Mapping[str, Any] = {"found": {"identity": None, "high": None, "key_count": 0}}
EVERYSEC: Mapping[str, Any] = {"found": {"durability_gap": GAP}, "settings": {"appendfsync": "everysec"}}
HIDDEN = replace(
    changed(
        well(1), found={"durability_gap": "hidden", "settings_hidden": True}, identity={"durable": False}
    ),
    settings=None,
)
OUT = True
SERIOUS, WARNING, NOTE = Severity


@dataclass(frozen=True)
class Case:
    """Changes to the nodes of a well cluster, by index, and all that must be found: node, severity, kind, keeps out.

    Attributes:
        words: which must stand in what is found or in the advice, by kind.
    """

    name: str
    changes: Mapping[int, Mapping[str, Any] | NodeFacts]
    found: Sequence[tuple[int | None, Severity, Kind, bool]]
    words: Mapping[Kind, Sequence[str]] = field(default_factory=dict)
    count: int = 3
    limits: Limits = LIMITS

    def diagnose(self) -> Diagnosis:
        """What the doctor says."""
        nodes = []
        for index in range(self.count):
            change = self.changes.get(index, {})
            node = (
                change if isinstance(change, NodeFacts) else changed(well(index, count=self.count), **change)
            )
            nodes.append(node)
        return diagnose(nodes, self.limits)


CASES = [
    Case("nothing", {}, []),
    Case("nothing, alone", {}, [], count=1),
    Case("nothing, five", {}, [], count=5),
    # --- reach
    Case(
        "unreachable",
        {1: unlooked(1, Trouble.UNREACHABLE)},
        [(1, SERIOUS, Kind.UNREACHABLE, OUT)],
        {Kind.UNREACHABLE: ["the reason"]},
    ),
    Case(
        "lost midway",
        {1: {"trouble": Trouble.UNREACHABLE, "reason": "it broke"}},
        [(1, SERIOUS, Kind.UNREACHABLE, OUT)],
        {Kind.UNREACHABLE: ["it broke"]},
    ),
    Case(
        "denied",
        {0: unlooked(0, Trouble.DENIED)},
        [(0, SERIOUS, Kind.DENIED, OUT)],
        {Kind.DENIED: ["the reason", "password", "ACL LIST", "+client|setname"]},
    ),
    Case(
        "unintelligible",
        {2: unlooked(2, Trouble.UNINTELLIGIBLE)},
        [(2, SERIOUS, Kind.UNINTELLIGIBLE, OUT)],
        {Kind.UNINTELLIGIBLE: ["the reason", "Redis or Valkey"]},
    ),
    Case(
        "loading",
        {
            2: replace(
                changed(well(2), process={"loading": True}), found=None, settings=None, clock=(), pings_ms=()
            )
        },
        [(2, WARNING, Kind.LOADING, OUT)],
    ),
    Case(
        "INFO refused",
        {0: replace(well(0), refused={"INFO": "INFO: no"}, process=None, found=None)},
        [(0, SERIOUS, Kind.REFUSED, OUT)],
        {Kind.REFUSED: ["INFO: no", "no server can admit it", "+info", "~redfence:*"]},
    ),
    Case(
        "keys refused",
        {0: replace(well(0), refused={"HGETALL": "HGETALL: no"}, found=None)},
        [(0, SERIOUS, Kind.REFUSED, OUT)],
        {Kind.REFUSED: ["+hgetall"]},
    ),
    Case(
        "the look refused",
        {0: replace(well(0), refused={"EVAL": "EVAL: no"}, found=None)},
        [(0, SERIOUS, Kind.REFUSED, OUT)],
        {Kind.REFUSED: ["+eval +get +hgetall +dbsize"]},
    ),
    Case(
        "TIME refused",
        {0: {"refused": {"TIME": "TIME: no"}, "clock": ()}},
        [(0, WARNING, Kind.REFUSED, False)],
        {Kind.REFUSED: ["a step of its clock cannot be seen", "+time"]},
    ),
    Case(
        "PING refused",
        {0: {"refused": {"PING": "PING: no"}, "pings_ms": ()}},
        [(0, NOTE, Kind.REFUSED, False)],
        {Kind.REFUSED: ["+ping"]},
    ),
    Case(
        "settings hidden",
        {1: replace(HIDDEN, refused={"CONFIG": "CONFIG: no"})},
        [(1, WARNING, Kind.SETTINGS_HIDDEN, False)],
        {Kind.SETTINGS_HIDDEN: ["may not read", "after each restart", "+config|get"]},
    ),
    Case(
        "settings hidden of a node that was durable",
        {1: changed(HIDDEN, identity={"durable": True})},
        [(1, SERIOUS, Kind.SETTINGS_HIDDEN, OUT)],
        {Kind.SETTINGS_HIDDEN: ["may not read", "+config|get"]},
    ),
    Case(
        "settings hidden of a node that was durable, and has restarted",
        {1: changed(HIDDEN, identity={"durable": True}, found={"run_id": "run-9"})},
        [(1, SERIOUS, Kind.SETTINGS_HIDDEN, OUT)],
        {Kind.SETTINGS_HIDDEN: ["may not read", "+config|get"]},
    ),
    Case(
        "settings hidden of a node that was never durable, and has restarted",
        {1: changed(HIDDEN, found={"run_id": "run-9"})},
        [(1, WARNING, Kind.SETTINGS_HIDDEN, False), (1, WARNING, Kind.FORGOT, OUT)],
    ),
    Case(
        "settings hidden, and the last snapshot failed: an unchanged configuration stops writes then",
        {1: changed(HIDDEN, process={"snapshot_ok": False})},
        [(1, WARNING, Kind.SETTINGS_HIDDEN, False), (1, SERIOUS, Kind.SNAPSHOT_FAILED, OUT)],
    ),
    # --- process
    Case(
        "too old",
        {1: {"process": {"version": "6.0.16"}, "found": {"version": "6.0.16"}}},
        [(1, SERIOUS, Kind.TOO_OLD, OUT)],
        {Kind.TOO_OLD: ["redis 6.0.16", "6.2"]},
    ),
    Case("old enough", {1: {"process": {"version": "6.2.0"}, "found": {"version": "6.2.0"}}}, []),
    Case("cluster mode", {1: {"process": {"cluster_mode": True}}}, [(1, SERIOUS, Kind.CLUSTER_MODE, OUT)]),
    Case(
        "a replica, which shows the identity of its primary",
        {
            1: {
                "process": {"primary": "10.0.0.0:6379"},
                "found": {"is_replica": True, "durability_gap": GAP},
                "identity": {"index": 0, "max_ttl_ms": 9_000},
            }
        },
        [(1, SERIOUS, Kind.REPLICA, OUT)],
        {Kind.REPLICA: ["10.0.0.0:6379", "REPLICAOF NO ONE", "FLUSHALL", "redfence cluster replace 1 URL"]},
    ),
    Case(
        "one replica follows",
        {1: {"process": {"replica_count": 1}}},
        [(1, WARNING, Kind.HAS_REPLICAS, False)],
        {Kind.HAS_REPLICAS: ["1 replica follows it", "failover"]},
    ),
    Case(
        "two replicas follow",
        {1: {"process": {"replica_count": 2}}},
        [(1, WARNING, Kind.HAS_REPLICAS, False)],
        {Kind.HAS_REPLICAS: ["2 replicas follow it"]},
    ),
    Case(
        "promoted, and admitted since",
        {1: {"found": {"promoted": True}}},
        [(1, NOTE, Kind.PROMOTED, False)],
    ),
    Case(
        "promoted, and not admitted since",
        {1: {"found": {"promoted": True, "run_id": "run-1/history"}}},
        [(1, WARNING, Kind.FORGOT, OUT)],
        {Kind.FORGOT: ["it was a replica in this run"]},
    ),
    Case(
        "the same process twice",
        {2: {"process": {"run_id": "run-0"}}},
        [(2, SERIOUS, Kind.SAME_PROCESS, OUT)],
        {Kind.SAME_PROCESS: ["node 0 (10.0.0.0:6379)"]},
    ),
    Case(
        "the same process three times",
        {1: {"process": {"run_id": "run-0"}}, 2: {"process": {"run_id": "run-0"}}},
        [
            (None, SERIOUS, Kind.NO_QUORUM, False),
            (1, SERIOUS, Kind.SAME_PROCESS, OUT),
            (2, SERIOUS, Kind.SAME_PROCESS, OUT),
        ],
    ),
    # --- durability
    Case(
        "never was durable",
        {1: {**EVERYSEC, "identity": {"durable": False}}},
        [(1, WARNING, Kind.NOT_DURABLE, False)],
        {
            Kind.NOT_DURABLE: [
                GAP,
                "after each restart",
                "quarantine (300 s",
                "set appendfsync always, in",
                "cluster recover",
            ]
        },
    ),
    Case(
        "never was durable, and there is no other",
        {0: {**EVERYSEC, "identity": {"durable": False}}},
        [(0, SERIOUS, Kind.NOT_DURABLE, False)],
        {Kind.NOT_DURABLE: ["no other node remembers", "cluster recover", "three nodes"]},
        count=1,
    ),
    Case(
        "stopped being durable",
        {1: EVERYSEC},
        [(1, SERIOUS, Kind.NOT_DURABLE, OUT)],
        {Kind.NOT_DURABLE: ["must not vote like this"]},
    ),
    Case(
        "stopped being durable, and there is the operator's word",
        {1: EVERYSEC},
        [(1, NOTE, Kind.NOT_DURABLE, False)],
        {Kind.NOT_DURABLE: ["assume_durable"]},
        limits=replace(LIMITS, assume_durable=True),
    ),
    Case(
        "durable since it began",
        {1: {"identity": {"durable": False}}},
        [(1, NOTE, Kind.NOT_YET_DURABLE, False)],
        {Kind.NOT_YET_DURABLE: ["quarantine (300 s", "next restart"]},
    ),
    Case(
        "all settings wrong",
        {
            1: {
                "found": {"durability_gap": "all"},
                "identity": {"durable": False},
                "settings": dict.fromkeys(DURABLE_SETTINGS, "other"),
            }
        },
        [(1, WARNING, Kind.NOT_DURABLE, False)],
        {
            Kind.NOT_DURABLE: [
                "set appendonly yes, appendfsync always, no-appendfsync-on-rewrite no, aof-load-truncated no, in its"
            ]
        },
    ),
    Case("restarted, and durable", {1: {"found": {"run_id": "run-9"}}}, []),
    Case(
        "restarted, and not durable before",
        {1: {"found": {"run_id": "run-9"}, "identity": {"durable": False}}},
        [(1, WARNING, Kind.FORGOT, OUT)],
        {Kind.FORGOT: ["it restarted and cannot prove", "quarantine (300 s", "brings it back"]},
    ),
    Case(
        "restarted, and not durable now",
        {1: {"found": {"run_id": "run-9", "durability_gap": GAP}, "settings": {"appendfsync": "everysec"}}},
        [(1, WARNING, Kind.NOT_DURABLE, False), (1, WARNING, Kind.FORGOT, OUT)],
    ),
    Case(
        "restarted, and there is no other",
        {0: {"found": {"run_id": "run-9"}, "identity": {"durable": False}}},
        [(None, SERIOUS, Kind.NO_QUORUM, False), (0, WARNING, Kind.FORGOT, OUT)],
        {Kind.NO_QUORUM: ["0 of 1 nodes", "redfence cluster recover"]},
        count=1,
    ),
    # --- disk
    Case(
        "the last write failed",
        {1: {"process": {"log_write_ok": False}}},
        [(1, SERIOUS, Kind.LOG_WRITE_FAILED, OUT)],
        {Kind.LOG_WRITE_FAILED: ["refuses all writes", "free space"]},
    ),
    Case(
        "the last rewrite failed",
        {1: {"process": {"log_rewrite_ok": False}}},
        [(1, WARNING, Kind.LOG_REWRITE_FAILED, False)],
    ),
    Case(
        "the last snapshot failed, and none is to be made",
        {1: {"process": {"snapshot_ok": False}}},
        [(1, WARNING, Kind.SNAPSHOT_FAILED, False)],
    ),
    Case(
        "the last snapshot failed, and writes go on",
        {
            1: {
                "process": {"snapshot_ok": False},
                "settings": {"save": "60 1", "stop-writes-on-bgsave-error": "no"},
            }
        },
        [(1, WARNING, Kind.SNAPSHOT_FAILED, False)],
    ),
    Case(
        "the last snapshot failed, and writes stop",
        {1: {"process": {"snapshot_ok": False}, "settings": {"save": "60 1"}}},
        [(1, SERIOUS, Kind.SNAPSHOT_FAILED, OUT)],
        {Kind.SNAPSHOT_FAILED: ["refuses all writes", 'save ""']},
    ),
    Case(
        "writes waited for the disk",
        {1: {"process": {"fsync_delays": 1}}},
        [(1, WARNING, Kind.SLOW_DISK, False)],
        {Kind.SLOW_DISK: ["1 time in"]},
    ),
    Case(
        "writes refused, and PING with them",
        {1: {"process": {"log_write_ok": False}, "refused": {"PING": "PING: MISCONF no"}, "pings_ms": ()}},
        [(1, SERIOUS, Kind.LOG_WRITE_FAILED, OUT)],
    ),
    # --- memory
    Case(
        "may evict",
        {1: {"process": {"eviction_policy": "volatile-lru"}, "found": {"eviction": "some"}}},
        [(1, SERIOUS, Kind.EVICTS, OUT)],
        {Kind.EVICTS: ["volatile-lru", "100.0 MiB", "maxmemory-policy noeviction"]},
    ),
    Case(
        "would evict with a limit",
        {1: {"process": {"eviction_policy": "allkeys-lru", "memory_max": 0}}},
        [(1, WARNING, Kind.EVICTION_POLICY, False), (1, NOTE, Kind.NO_MEMORY_LIMIT, False)],
    ),
    Case(
        "evicted, and admitted since",
        {1: {"found": {"evicted": 3}, "identity": {"evicted": 3}}},
        [(1, NOTE, Kind.EVICTED, False)],
        {Kind.EVICTED: ["3 keys", "made up for"]},
    ),
    Case(
        "evicted, and not admitted since",
        {1: {"found": {"evicted": 3}, "identity": {"evicted": 1}}},
        [(1, WARNING, Kind.FORGOT, OUT)],
        {Kind.FORGOT: ["dropped 2 keys"]},
    ),
    Case(
        "evicts, and has",
        {1: {"process": {"eviction_policy": "allkeys-lru"}, "found": {"eviction": "some", "evicted": 3}}},
        [(1, SERIOUS, Kind.EVICTS, OUT), (1, WARNING, Kind.EVICTED, False)],
    ),
    Case("no limit", {1: {"process": {"memory_max": 0}}}, [(1, NOTE, Kind.NO_MEMORY_LIMIT, False)]),
    Case("79 % used", {1: {"process": {"memory_used": 79 * MIB}}}, []),
    Case(
        "80 % used",
        {1: {"process": {"memory_used": 80 * MIB}}},
        [(1, WARNING, Kind.MEMORY_SHORT, False)],
        {Kind.MEMORY_SHORT: ["80.0 MiB of its 100.0 MiB", "80%", "maxmemory", "counter_idle_ms"]},
    ),
    Case("94 % used", {1: {"process": {"memory_used": 94 * MIB}}}, [(1, WARNING, Kind.MEMORY_SHORT, False)]),
    Case("95 % used", {1: {"process": {"memory_used": 95 * MIB}}}, [(1, SERIOUS, Kind.MEMORY_SHORT, False)]),
    Case("all used", {1: {"process": {"memory_used": 100 * MIB}}}, [(1, SERIOUS, Kind.MEMORY_SHORT, OUT)]),
    # --- identity
    Case(
        "nothing formed",
        dict.fromkeys(range(3), EMPTY),
        [(None, SERIOUS, Kind.NOT_FORMED, False)],
        {Kind.NOT_FORMED: ["redfence cluster init", "redfence:"]},
    ),
    Case(
        "nothing formed, and one cannot be looked at",
        {0: EMPTY, 1: EMPTY, 2: unlooked(2, Trouble.UNREACHABLE)},
        [(None, SERIOUS, Kind.NOT_FORMED, False), (2, SERIOUS, Kind.UNREACHABLE, OUT)],
    ),
    Case(
        "nothing formed, and one holds keys",
        {0: EMPTY, 1: EMPTY, 2: {"found": {"identity": None, "high": None, "key_count": 7}}},
        [(None, SERIOUS, Kind.NOT_FORMED, False), (2, SERIOUS, Kind.NOT_EMPTY, OUT)],
        {Kind.NOT_EMPTY: ["7 keys", "FLUSHALL", "URL"]},
    ),
    Case(
        "wiped",
        {1: EMPTY},
        [(1, SERIOUS, Kind.EMPTY, OUT)],
        {Kind.EMPTY: ["wiped", "redfence cluster replace 1 URL"]},
    ),
    Case(
        "two of three wiped",
        {1: EMPTY, 2: EMPTY},
        [
            (None, SERIOUS, Kind.NO_QUORUM, False),
            (1, SERIOUS, Kind.EMPTY, OUT),
            (2, SERIOUS, Kind.EMPTY, OUT),
        ],
        {Kind.NO_QUORUM: ["1 of 3 nodes can vote and 2 are needed", "redfence cluster recover"]},
    ),
    Case(
        "its greatest number lost",
        {1: {"found": {"high": None}}},
        [(1, WARNING, Kind.FORGOT, OUT)],
        {Kind.FORGOT: ["`high`"]},
    ),
    Case(
        "an old snapshot restored",
        {0: {"identity": {"known_changes": {1: 50}}}, 1: {"identity": {"changes": 49}}},
        [(1, WARNING, Kind.FORGOT, OUT)],
        {Kind.FORGOT: ["49 changes of at least 50"]},
    ),
    Case(
        "as many changes as the others know of",
        {0: {"identity": {"known_changes": {1: 50}}}, 1: {"identity": {"changes": 50}}},
        [],
    ),
    Case(
        "what another node has learnt since is not held against it",
        {
            0: {"identity": {"known_changes": {1: 50}}, "known": well(0).known},
            1: {"identity": {"changes": 49}},
        },
        [],
    ),
    Case(
        "what another node told before it broke off still counts",
        {
            0: replace(
                changed(well(0), identity={"known_changes": {1: 50}}),
                found=None,
                trouble=Trouble.UNREACHABLE,
                reason="it broke",
            ),
            1: {"identity": {"changes": 49}},
        },
        [
            (None, SERIOUS, Kind.NO_QUORUM, False),
            (0, SERIOUS, Kind.UNREACHABLE, OUT),
            (1, WARNING, Kind.FORGOT, OUT),
        ],
    ),
    Case(
        "replaced",
        {2: {"identity": {"known_floors": {1: 8}}}, 1: {"identity": {"floor": 7}}},
        [(1, SERIOUS, Kind.REPLACED, OUT)],
        {Kind.REPLACED: ["taken its place", "redfence cluster replace 1 URL"]},
    ),
    Case("retired", {1: {"identity": {"phase": Phase.RETIRED}}}, [(1, SERIOUS, Kind.REPLACED, OUT)]),
    Case(
        "half formed",
        {index: {"identity": {"phase": Phase.FORMING}} for index in range(3)},
        [
            (None, SERIOUS, Kind.NO_QUORUM, False),
            (0, SERIOUS, Kind.FORMING, OUT),
            (1, SERIOUS, Kind.FORMING, OUT),
            (2, SERIOUS, Kind.FORMING, OUT),
        ],
        {Kind.FORMING: ["redfence cluster init"]},
    ),
    Case(
        "half recovered",
        {1: {"identity": {"phase": Phase.RECOVERING}}},
        [(1, SERIOUS, Kind.RECOVERING, OUT)],
        {Kind.RECOVERING: ["redfence cluster recover"]},
    ),
    Case(
        "quarantined",
        {1: {"identity": {"phase": Phase.QUARANTINED}}},
        [(1, WARNING, Kind.QUARANTINED, OUT)],
        {Kind.QUARANTINED: ["300 s", "redfence cluster status"]},
    ),
    Case(
        "quarantined after evicting",
        {1: {"identity": {"phase": Phase.QUARANTINED}, "found": {"evicted": 2}}},
        [(1, NOTE, Kind.EVICTED, False), (1, WARNING, Kind.QUARANTINED, OUT)],
    ),
    Case(
        "of another cluster",
        {1: {"identity": {"cluster_id": "other"}}},
        [(1, SERIOUS, Kind.OTHER_CLUSTER, OUT)],
        {Kind.OTHER_CLUSTER: ["other", "to c", "FLUSHALL", "redfence cluster replace 1 URL"]},
    ),
    Case(
        "what a node of another cluster knows is about other nodes",
        {1: {"identity": {"cluster_id": "other", "known_changes": {0: 50}, "known_floors": {2: 50}}}},
        [(1, SERIOUS, Kind.OTHER_CLUSTER, OUT)],
    ),
    Case(
        "the first is of another cluster than most",
        {0: {"identity": {"cluster_id": "other"}}},
        [(0, SERIOUS, Kind.OTHER_CLUSTER, OUT)],
    ),
    Case(
        "two swapped",
        {1: {"identity": {"index": 2}}, 2: {"identity": {"index": 1}}},
        [
            (None, SERIOUS, Kind.NO_QUORUM, False),
            (1, SERIOUS, Kind.WRONG_PLACE, OUT),
            (2, SERIOUS, Kind.WRONG_PLACE, OUT),
        ],
        {Kind.WRONG_PLACE: ["order"]},
    ),
    Case(
        "of a cluster of another size",
        {1: {"identity": {"node_count": 5}}},
        [(1, SERIOUS, Kind.WRONG_PLACE, OUT)],
        {Kind.WRONG_PLACE: ["one of 5 nodes", "3 are configured"]},
    ),
    Case(
        "all of a cluster of another size",
        {0: {"identity": {"node_count": 3}}},
        [(None, SERIOUS, Kind.NO_QUORUM, False), (0, SERIOUS, Kind.WRONG_PLACE, OUT)],
        count=1,
    ),
    Case(
        "another greatest ttl",
        {1: {"identity": {"max_ttl_ms": 299_999}}},
        [(1, SERIOUS, Kind.TTL_DIFFERS, False)],
        {Kind.TTL_DIFFERS: ["299999", "HSET redfence:node max_ttl_ms 300000"]},
    ),
    Case(
        "a greater greatest ttl is what the others lack",
        {1: {"identity": {"max_ttl_ms": 300_001}}},
        [(0, SERIOUS, Kind.TTL_DIFFERS, False), (2, SERIOUS, Kind.TTL_DIFFERS, False)],
    ),
    Case(
        "another greatest ttl of another cluster",
        {1: {"identity": {"max_ttl_ms": 1_000, "cluster_id": "other"}}},
        [(1, SERIOUS, Kind.OTHER_CLUSTER, OUT)],
    ),
    # --- clocks: over a second, 1 % and 2 ms are allowed, and a round trip of 1 ms leaves as much unsure at either end
    Case(
        "a clock as fast as is allowed", {1: {"clock": (sample(), sample(at_ms=1_000, gained_ms=11.9))}}, []
    ),
    Case(
        "a fast clock",
        {1: {"clock": (sample(at_ms=5_000), sample(at_ms=6_000, gained_ms=14.1))}},
        [(1, SERIOUS, Kind.CLOCK_STEPS, OUT)],
        {Kind.CLOCK_STEPS: ["within 1.0 s", "forward", "slewed"]},
    ),
    Case(
        "a clock as slow as is allowed", {1: {"clock": (sample(), sample(at_ms=1_000, gained_ms=-11.9))}}, []
    ),
    Case(
        "a slow clock",
        {1: {"clock": (sample(), sample(at_ms=1_000, gained_ms=-14.1))}},
        [(1, SERIOUS, Kind.CLOCK_STEPS, OUT)],
        {Kind.CLOCK_STEPS: ["back"]},
    ),
    Case(
        "a clock that may have stepped during a slow round trip",
        {1: {"clock": (sample(), sample(at_ms=1_000, trip_ms=300, gained_ms=150))}},
        [],
    ),
    Case(
        "of several steps the greatest is told",
        {
            1: {
                "clock": (
                    sample(),
                    sample(at_ms=500, gained_ms=100),
                    sample(at_ms=1_000, gained_ms=-900),
                    sample(at_ms=1_500, gained_ms=-800),
                )
            }
        },
        [(1, SERIOUS, Kind.CLOCK_STEPS, OUT)],
        {Kind.CLOCK_STEPS: ["within 1.5 s", "ms back"]},
    ),
    Case(
        "clocks apart, by no more than may be without it being told",
        {
            0: {"clock": (sample(offset_ms=0.0, trip_ms=2),)},
            1: {"clock": (sample(offset_ms=OFFSET_MS_NOTE + 2, trip_ms=2),)},
            2: {"clock": ()},
        },
        [(1, NOTE, Kind.CLOCK_OFFSET, False)],
    ),
    Case(
        "a clock no further from this machine's than may be without it being told",
        {
            1: {"clock": (sample(offset_ms=-OFFSET_MS_NOTE - 1, trip_ms=2),)},
            0: {"clock": ()},
            2: {"clock": ()},
        },
        [],
    ),
    Case(
        "one clock ahead",
        {1: {"clock": (sample(offset_ms=3_000),)}},
        [(None, NOTE, Kind.CLOCK_SPREAD, False), (1, NOTE, Kind.CLOCK_OFFSET, False)],
        {
            Kind.CLOCK_SPREAD: ["node 1 is 3.000 s ahead of that of node 0"],
            Kind.CLOCK_OFFSET: ["3.000 s ahead of this machine's", "slewed"],
        },
    ),
    Case(
        "one clock behind",
        {2: {"clock": (sample(offset_ms=-3_000),)}},
        [(None, NOTE, Kind.CLOCK_SPREAD, False), (2, NOTE, Kind.CLOCK_OFFSET, False)],
        {
            Kind.CLOCK_SPREAD: ["ahead of that of node 2"],
            Kind.CLOCK_OFFSET: ["3.000 s behind this machine's"],
        },
    ),
    Case(
        "two clocks apart, neither far from this machine's",
        {0: {"clock": (sample(offset_ms=-100),)}, 1: {"clock": (sample(offset_ms=100),)}},
        [(None, NOTE, Kind.CLOCK_SPREAD, False)],
    ),
    Case(
        "this machine's clock is wrong",
        {index: {"clock": (sample(offset_ms=-3_000),)} for index in range(3)},
        [(None, NOTE, Kind.CLOCK_OFFSET, False)],
        {Kind.CLOCK_OFFSET: ["this machine's clock is 3.000 s ahead of theirs"]},
    ),
    Case(
        "this machine's clock is wrong, as two nodes say",
        {0: {"clock": (sample(offset_ms=500),)}, 1: {"clock": (sample(offset_ms=500),)}, 2: {"clock": ()}},
        [(None, NOTE, Kind.CLOCK_OFFSET, False)],
        {Kind.CLOCK_OFFSET: ["this machine's clock is 0.500 s behind theirs"]},
    ),
    Case(
        "one node alone cannot tell whose clock is wrong",
        {0: {"clock": (sample(offset_ms=-3_000),)}},
        [(0, NOTE, Kind.CLOCK_OFFSET, False)],
        count=1,
    ),
    Case(
        "a slow round trip leaves the offset unsure, and a fast one tells it",
        {1: {"clock": (sample(offset_ms=900, trip_ms=2_000), sample(at_ms=3_000, offset_ms=0))}},
        [],
    ),
    Case("no clock told", {index: {"clock": ()} for index in range(3)}, []),
    # --- latency
    Case("as slow as is well", {1: {"pings_ms": (LATENCY_MS_WARNING, LATENCY_MS_WARNING, 499.0)}}, []),
    Case(
        "slow",
        {1: {"pings_ms": (10.1, 10.1, 1.0)}},
        [(1, WARNING, Kind.SLOW, False)],
        {Kind.SLOW: ["10.1 ms", "no ttl below 202 ms"]},
    ),
    Case(
        "seldom too slow to count",
        {1: {"pings_ms": (1.0, 1.0, 500.0)}},
        [(1, WARNING, Kind.UNSTEADY, False)],
        {Kind.UNSTEADY: ["500.0 ms", "node_timeout_ms (500)"]},
    ),
    Case(
        "slow, and at times too slow to count",
        {1: {"pings_ms": (400.0, 400.0, 600.0)}},
        [(1, WARNING, Kind.SLOW, False), (1, WARNING, Kind.UNSTEADY, False)],
    ),
    Case(
        "too slow to count",
        {1: {"pings_ms": (500.0, 500.0, 1.0)}},
        [(1, SERIOUS, Kind.SLOW, OUT)],
        {Kind.SLOW: ["raise node_timeout_ms"]},
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_of_each_state_everything_is_found_and_nothing_else(case: Case) -> None:
    """Node, severity and kind, whether it votes, and the words that matter."""
    diagnosis = case.diagnose()
    found = {(each.node, each.severity, each.kind, each.keeps_out) for each in diagnosis.findings}
    assert found == set(case.found)
    assert len(diagnosis.findings) == len(case.found)
    assert diagnosis.serious == any(severity is SERIOUS for _, severity, _, _ in case.found)
    for kind, words in case.words.items():
        texts = [f"{each.what}\n{each.advice}" for each in diagnosis.findings if each.kind is kind]
        for word in words:
            assert any(word in text for text in texts), (word, texts)


def test_every_kind_of_finding_has_a_case() -> None:
    """Nobody adds one that was never seen."""
    shown = {kind for case in CASES for _, _, kind, _ in case.found}
    assert shown == set(Kind)


def test_every_reason_for_which_servers_reject_a_node_has_a_finding() -> None:
    """Also one that is added later."""
    judged = ClusterJudgement([well(index) for index in range(3)], assume_durable=False, familiar=False)
    for reason in Reason:
        told = (
            list(doctor._rejected(well(1), judged, reason, "detail"))
            if reason not in doctor._TOLD_ELSEWHERE
            else []
        )
        assert [each.keeps_out for each in told] == [True] * len(told)
        assert bool(told) != (reason in doctor._TOLD_ELSEWHERE)


def test_every_finding_says_what_to_do() -> None:
    """Also that there is nothing to do."""
    for case in CASES:
        for finding in case.diagnose().findings:
            assert finding.what
            assert finding.advice


def test_the_worst_comes_first_and_then_the_cluster_before_its_nodes() -> None:
    """So it is read in the order in which it is to be mended."""
    for case in CASES:
        findings = case.diagnose().findings
        order = [
            (list(Severity).index(each.severity), -1 if each.node is None else each.node) for each in findings
        ]
        assert order == sorted(order)


@pytest.mark.parametrize("count", quorum.NODE_COUNTS)
def test_too_few_nodes_are_told_for_every_set_of_nodes_that_are_up(count: int) -> None:
    """A quorum is a majority of those configured, whichever they are."""
    for up in product([True, False], repeat=count):
        nodes = [
            well(index, count=count) if here else unlooked(index, Trouble.UNREACHABLE)
            for index, here in enumerate(up)
        ]
        diagnosis = diagnose(nodes, LIMITS)
        assert diagnosis.voters == {index for index, here in enumerate(up) if here}
        assert diagnosis.quorum == quorum.majority(count)
        told = [each for each in diagnosis.findings if each.kind is Kind.NO_QUORUM]
        assert bool(told) == (sum(up) < quorum.majority(count))
        assert not any("recover" in each.advice for each in told)


def test_a_node_that_cannot_vote_has_a_finding_that_says_why_and_one_that_can_has_none() -> None:
    """Whatever comes together, the doctor and the judgement of the servers do not part."""
    phases = [*Phase, None]
    flaws = ("is_replica", "eviction", "old", "restarted", "gap", "forgot", "denied")
    for phase in phases:
        for has in product([False, True], repeat=len(flaws)):
            flawed = {name for name, here in zip(flaws, has, strict=True) if here}
            diagnosis = diagnose([well(0), _flawed(phase, flawed), well(2)], LIMITS)
            out = [each for each in diagnosis.findings if each.node == 1 and each.keeps_out]
            assert (1 in diagnosis.voters) != bool(out), (phase, flawed, out)
            fit = phase is Phase.READY and not flawed - {"restarted"}
            assert (1 in diagnosis.voters) == fit, (phase, flawed)


def _flawed(phase: Phase | None, flaws: set[str]) -> NodeFacts:
    process: dict[str, Any] = {}
    found: dict[str, Any] = {}
    if "is_replica" in flaws:
        process["primary"], found["is_replica"] = "10.0.0.9:6379", True
    if "eviction" in flaws:
        process["eviction_policy"], found["eviction"] = "allkeys-lru", "some"
    if "old" in flaws:
        process["version"] = found["version"] = "6.0.0"
    if "restarted" in flaws:
        process["run_id"] = found["run_id"] = "run-9"
    if "gap" in flaws:
        found["durability_gap"] = GAP
    if "forgot" in flaws:
        found["high"] = None
    node = changed(well(1), process=process, found=found, identity={"phase": phase} if phase else None)
    if phase is None:
        node = changed(node, **EMPTY)
    # A node can break off at any step.
    return replace(node, trouble=Trouble.UNREACHABLE, reason="gone") if "denied" in flaws else node


def test_the_cluster_is_the_one_that_most_nodes_belong_to() -> None:
    """Whoever stands first."""
    nodes = [changed(well(0), identity={"cluster_id": "other"}), well(1), well(2)]
    assert diagnose(nodes, LIMITS).cluster_id == "c"
    assert diagnose([unlooked(0, Trouble.DENIED)], LIMITS).cluster_id == ""


def test_what_a_diagnosis_tells_of_one_node_leaves_out_the_others() -> None:
    """A node that is well stays so beside one that is not."""
    diagnosis = Diagnosis(
        (
            Finding(None, SERIOUS, Kind.NO_QUORUM, "what", "advice"),
            Finding(1, NOTE, Kind.EVICTED, "what", "advice"),
            Finding(1, WARNING, Kind.SLOW, "what", "advice"),
        ),
        cluster_id="c",
        quorum=2,
        voters=frozenset(),
    )
    assert [diagnosis.worst_of(index) for index in range(3)] == [NOTE, WARNING, NOTE]
    assert [diagnosis.count(severity) for severity in Severity] == [1, 1, 1]
    assert diagnosis.serious
    assert not replace(diagnosis, findings=diagnosis.findings[1:]).serious


def test_the_limit_of_latency_is_a_tenth_of_the_shortest_ttl() -> None:
    """What a grant takes off a lease is felt from there on."""
    assert LATENCY_MS_WARNING * 10 == bounds.TTL_MS_MIN
