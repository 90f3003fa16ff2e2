"""The doctor's findings in every state of a node and of a cluster, each case with all its findings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import product
from typing import Any

import pytest

from harness.doubles.findings import findings, identity
from redfence_server import config
from redfence_server.config import ServeConfig
from redfence_server.diagnosis.checkup import Checkup
from redfence_server.diagnosis.doctor import ADVICE, LATENCY_MS_WARNING, diagnose
from redfence_server.diagnosis.finding import Diagnosis, Finding, Kind, Severity
from redfence_server.locking import quorum
from redfence_server.membership.admission import Reason
from redfence_server.membership.examination import ClockReading, ExaminationRefusedError, Findings, Phase
from redfence_server.redis_io.dial import (
    DialAnswerError,
    DialDeniedError,
    DialError,
    DialLoadingError,
    DialRefusedError,
)

SETTINGS = config.load({"nodes": ()})
MIB = 2**20
INFO = {
    "redis_version": "7.2.4",
    "role": "master",
    "used_memory": str(MIB),
    "maxmemory": str(100 * MIB),
    "maxmemory_policy": "noeviction",
    "rdb_last_bgsave_status": "ok",
    "aof_last_write_status": "ok",
    "aof_last_bgrewrite_status": "ok",
    "aof_delayed_fsync": "0",
}
WALL_MS = 1_700_000_000_000.0

Change = Mapping[str, Any]
# The fields of a checkup and of its findings; every other change is one of the identity.
FIELDS = [{each.name for each in fields(kind)} - {"index"} for kind in (Checkup, Findings)]


def reading(
    at_ms: float = 0.0, *, trip_ms: float = 1.0, offset_ms: float = 0.0, gained_ms: float = 0.0
) -> ClockReading:
    """A reading of a clock: `offset_ms` ahead of this machine's, plus what it gained since the first."""
    node_ms = WALL_MS + at_ms + trip_ms / 2 + offset_ms + gained_ms
    return ClockReading(at_ms, at_ms + trip_ms, node_ms)


def trips(*trips_ms: float) -> Change:
    later = [reading(1_000.0 * (number + 1), trip_ms=trip_ms) for number, trip_ms in enumerate(trips_ms)]
    return {"readings": [reading(), *later]}


def node(
    index: int,
    *,
    count: int = 3,
    info: Mapping[str, str] | None = None,
    admitted_with: Change | None = None,
    **changes: Any,
) -> Checkup:
    """A node that is well, but for these fields of its checkup, findings and identity, and of INFO."""
    of_node, of_found = ({name: changes.pop(name) for name in names & changes.keys()} for names in FIELDS)
    who = identity(index, **({"node_count": count} | changes | dict(admitted_with or {})))
    checkup = Checkup(
        index,
        f"10.0.0.{index}:6379",
        findings(index, who, **({"info": {**INFO, **(info or {})}} | of_found)),
        readings=[reading(), reading(1_000.0)],
        wall_ms=WALL_MS,
    )
    return replace(checkup, **of_node)


def used(percent: int) -> Change:
    return {"info": {"used_memory": str(percent * MIB)}}


def away(error: DialError | None = None) -> Change:
    return {"found": None, "error": error or DialError("the reason"), "readings": []}


def refused(text: str, **info: str) -> Change:
    return away(ExaminationRefusedError(text, {**INFO, **info}))


@dataclass(frozen=True)
class Case:
    """Changes to the nodes of a well cluster, by index, and all that must be found.

    Attributes:
        found: weight, kind and words of each finding, by index; None for the cluster.
    """

    name: str
    changes: Mapping[int, Change]
    found: Mapping[int | None, Sequence[tuple[Any, ...]]] = field(default_factory=dict)
    count: int = 3
    settings: ServeConfig = SETTINGS

    def diagnose(self) -> Diagnosis:
        nodes = [node(index, count=self.count, **self.changes.get(index, {})) for index in range(self.count)]
        return diagnose(nodes, self.settings)


def one(name: str, change: Change, *found: tuple[Any, ...], **more: Any) -> Case:
    """A case of which only node 1 is affected."""
    return Case(name, {1: change}, {1: found}, **more)


def alone(name: str, change: Change, *found: tuple[Any, ...]) -> Case:
    return Case(name, {0: change}, {0: found}, count=1)


SERIOUS, WARNING, NOTE = Severity
# Severity, and whether the node is out of the quorum.
OUT, HARM, RETURNS, WARN, TELL = (
    *((SERIOUS, True), (SERIOUS, False)),
    *((WARNING, True), (WARNING, False), (NOTE, False)),
)
NO_QUORUM = [(HARM, Kind.NO_QUORUM)]
NOT_FORMED = [(HARM, Kind.NOT_FORMED)]
GAP = {"durability_gap": "appendfsync is everysec, not always"}
HIDDEN = {"durability_gap": "it does not show its settings", "settings_hidden": True}
NEW_RUN = {"run_id": "run-9"}
EMPTY: Change = {"identity": None, "max_token": None, "key_count": 0}
REPLACE_1 = "redfence cluster replace 1 URL"
RECOVER = "redfence cluster recover"
QUARANTINE = "quarantine (300 s"

CASES = [
    Case("nothing", {}),
    Case("nothing, alone", {}, count=1),
    Case("nothing, five", {}, count=5),
    # --- reach
    one("unreachable", away(), (OUT, Kind.UNREACHABLE, "the reason")),
    one("timed out", away(DialError("")), (OUT, Kind.UNREACHABLE, "no answer in time")),
    one("lost midway", {"error": DialError("it broke")}, (OUT, Kind.UNREACHABLE, "it broke")),
    one(
        "denied",
        away(DialDeniedError("the reason")),
        (OUT, Kind.DENIED, "the reason", "password", "ACL LIST", "+select"),
    ),
    one(
        "unintelligible",
        away(DialAnswerError("the reason")),
        (OUT, Kind.UNINTELLIGIBLE, "the reason", "Redis or Valkey"),
    ),
    one("loading", away(DialLoadingError("EVAL: loading")), (RETURNS, Kind.LOADING, "wait")),
    one(
        "INFO refused",
        away(DialRefusedError("INFO: NOPERM")),
        (OUT, Kind.REFUSED, "INFO: NOPERM", "no server can admit it", "+info", "~redfence:*"),
    ),
    one(
        "the script refused, and more is wrong",
        refused("EVAL: NOPERM", connected_slaves="1", maxmemory="0"),
        (OUT, Kind.REFUSED, "+eval +get +hgetall +dbsize +time"),
        (WARN, Kind.HAS_REPLICAS),
        (TELL, Kind.NO_MEMORY_LIMIT),
    ),
    # --- process
    one("too old", {"version": "6.0.16"}, (OUT, Kind.TOO_OLD, "6.0.16", "6.2")),
    one("cluster mode", refused("it runs in cluster mode", cluster_enabled="1"), (OUT, Kind.CLUSTER_MODE)),
    one(
        "a replica, which shows the identity of its primary",
        {
            **GAP,
            "is_replica": True,
            "admitted_with": {"index": 0, "max_ttl_ms": 9_000},
            "info": {"master_host": "10.0.0.0", "master_port": "6379"},
        },
        (OUT, Kind.REPLICA, "10.0.0.0:6379", "REPLICAOF NO ONE", "FLUSHALL", REPLACE_1),
    ),
    one("replicas", {"info": {"connected_slaves": "2"}}, (WARN, Kind.HAS_REPLICAS, "(2)", "failover")),
    Case(
        "the same process three times",
        {1: {"run_id": "run-0"}, 2: {"run_id": "run-0"}},
        {
            None: NO_QUORUM,
            1: [(OUT, Kind.SAME_PROCESS, "as node 0", "machine of its own")],
            2: [(OUT, Kind.SAME_PROCESS, "as node 0")],
        },
    ),
    Case(
        "the run ids of two are hidden",
        {1: {"run_id": ""}, 2: {"run_id": ""}},
        {None: NO_QUORUM, 1: [(OUT, Kind.NO_RUN_ID, "INFO")], 2: [(OUT, Kind.NO_RUN_ID)]},
    ),
    # --- durability
    one(
        "never was durable",
        {**GAP, "durable": False},
        (
            *(WARN, Kind.NOT_DURABLE, GAP["durability_gap"], "after each restart", QUARANTINE),
            *("CONFIG REWRITE", "one node at a time", RECOVER),
        ),
    ),
    alone(
        "never was durable, and there is no other",
        {**GAP, "durable": False},
        (HARM, Kind.NOT_DURABLE, "single node", RECOVER, "three nodes"),
    ),
    one("stopped being durable", GAP, (OUT, Kind.NOT_DURABLE, GAP["durability_gap"], "CONFIG SET")),
    one(
        "stopped being durable, and there is the operator's word",
        GAP,
        (TELL, Kind.NOT_DURABLE, "assume_durable"),
        settings=config.load({"nodes": (), "assume_durable": True}),
    ),
    one(
        "durable since it began",
        {"durable": False},
        (TELL, Kind.NOT_YET_DURABLE, QUARANTINE, "next restart", "one node at a time"),
    ),
    one(
        "settings hidden",
        {**HIDDEN, "durable": False},
        (WARN, Kind.SETTINGS_HIDDEN, HIDDEN["durability_gap"], "after each restart", "+config|get"),
    ),
    one(
        "settings hidden of a node that was durable",
        HIDDEN,
        (OUT, Kind.SETTINGS_HIDDEN, "may not read", "+config|get"),
    ),
    one(
        "restarted, and not durable before",
        {**NEW_RUN, "durable": False},
        (RETURNS, Kind.FORGOT, "it restarted and cannot prove", QUARANTINE),
    ),
    one(
        "restarted, and not durable now", {**NEW_RUN, **GAP}, (WARN, Kind.NOT_DURABLE), (RETURNS, Kind.FORGOT)
    ),
    Case(
        "restarted without proof, and there is no other",
        {0: {**NEW_RUN, "durable": False}},
        {None: [(HARM, Kind.NO_QUORUM, "0 of 1 nodes", RECOVER)], 0: [(RETURNS, Kind.FORGOT)]},
        count=1,
    ),
    Case("restarted with proof", {1: NEW_RUN, 2: {"phase": Phase.RESTARTED}}),
    Case("all restarted with proof", {index: {"run_id": f"later-{index}"} for index in range(3)}),
    Case(
        "restarted with proof, and another node is away",
        {1: NEW_RUN, 2: away()},
        {
            None: NO_QUORUM,
            1: [
                (
                    OUT,
                    Kind.RESTARTED,
                    "needs 2 of the other nodes",
                    "bring the other nodes back first",
                    RECOVER,
                )
            ],
            2: [(OUT, Kind.UNREACHABLE)],
        },
    ),
    alone("a single node restarted with proof", NEW_RUN),
    one(
        "refuses a command of a mint",
        {"grant_refusal": "ERR the user can't run this command (MGET)"},
        (OUT, Kind.GRANTS_REFUSED, "refuses new grants: ERR the user", "(MGET)", "grant the right"),
    ),
    # --- disk
    one(
        "the last write failed",
        {
            "info": {"aof_last_write_status": "err"},
            "refuses_writes": True,
            "grant_refusal": "MISCONF errors writing to the AOF file (SET)",
        },
        (OUT, Kind.LOG_WRITE_FAILED, "refuses all writes", "free space"),
    ),
    one(
        "the last rewrite failed",
        {"info": {"aof_last_bgrewrite_status": "err"}},
        (WARN, Kind.LOG_REWRITE_FAILED),
    ),
    one(
        "the last snapshot failed, and writes go on",
        {"info": {"rdb_last_bgsave_status": "err"}},
        (WARN, Kind.SNAPSHOT_FAILED),
    ),
    one(
        "the last snapshot failed, and writes stop",
        {"info": {"rdb_last_bgsave_status": "err"}, "refuses_writes": True},
        (OUT, Kind.SNAPSHOT_FAILED, "refuses all writes", 'save ""'),
    ),
    one("a slow disk", {"info": {"aof_delayed_fsync": "3"}}, (WARN, Kind.SLOW_DISK, "3 times")),
    # --- memory
    one(
        "may evict",
        {"eviction": "maxmemory 9, maxmemory-policy volatile-lru", "evicted": 3},
        (OUT, Kind.EVICTS, "maxmemory 9, maxmemory-policy volatile-lru", "noeviction", "CONFIG REWRITE"),
    ),
    one(
        "would evict with a limit",
        {"info": {"maxmemory_policy": "allkeys-lru", "maxmemory": "0"}},
        (WARN, Kind.EVICTION_POLICY, "allkeys-lru"),
        (TELL, Kind.NO_MEMORY_LIMIT),
    ),
    one("no limit", {"info": {"maxmemory": "0"}}, (TELL, Kind.NO_MEMORY_LIMIT)),
    one(
        "what is not counted against the limit",
        {"info": {"used_memory": str(99 * MIB), "mem_not_counted_for_evict": str(20 * MIB)}},
    ),
    one("79 % used", used(79)),
    one(
        "80 % used",
        used(80),
        (WARN, Kind.MEMORY_SHORT, "80% of its 100.0 MiB", "maxmemory", "counter_idle_ms"),
    ),
    one("94 % used", used(94), (WARN, Kind.MEMORY_SHORT)),
    one("95 % used", used(95), (HARM, Kind.MEMORY_SHORT)),
    one("all used", used(100), (OUT, Kind.MEMORY_SHORT)),
    # --- identity
    Case(
        "nothing formed",
        dict.fromkeys(range(3), EMPTY),
        {None: [(HARM, Kind.NOT_FORMED, "redfence cluster init", "redfence:")]},
    ),
    Case(
        "nothing formed, one cannot be looked at, and one holds keys",
        {0: {**EMPTY, "key_count": 7}, 1: EMPTY, 2: away()},
        {
            None: NOT_FORMED,
            0: [(OUT, Kind.NOT_EMPTY, "7 keys", "FLUSHALL", "URL")],
            2: [(OUT, Kind.UNREACHABLE)],
        },
    ),
    one("wiped", EMPTY, (OUT, Kind.EMPTY, "wiped", REPLACE_1)),
    Case(
        "two of three wiped",
        {1: EMPTY, 2: EMPTY},
        {
            None: [(HARM, Kind.NO_QUORUM, "1 of 3 nodes can vote and 2 are needed", RECOVER)],
            1: [(OUT, Kind.EMPTY)],
            2: [(OUT, Kind.EMPTY)],
        },
    ),
    Case(
        "replaced",
        {2: {"known_floors": {1: 8}}, 1: {"floor": 7}},
        {1: [(OUT, Kind.REPLACED, "another process", REPLACE_1)]},
    ),
    Case(
        "half formed",
        {index: {"phase": Phase.FORMING} for index in range(3)},
        {None: NO_QUORUM, **{index: [(OUT, Kind.FORMING, "redfence cluster init")] for index in range(3)}},
    ),
    one(
        "quarantined",
        {"phase": Phase.QUARANTINED},
        (RETURNS, Kind.QUARANTINED, "300 s", "redfence cluster status"),
    ),
    one(
        "of another cluster; what it knows is about other nodes",
        {"cluster_id": "other", "max_ttl_ms": 1_000, "known_floors": {2: 50}},
        (OUT, Kind.OTHER_CLUSTER, "other", "to c", "FLUSHALL", REPLACE_1),
    ),
    one(
        "left the cluster when it was resized",
        {"cluster_id": "later", "predecessor": "c", "phase": Phase.RETIRED},
        (OUT, Kind.RESIZED, "goes on as cluster later", "name the new list of nodes"),
    ),
    Case(
        "the first is of another cluster than most",
        {0: {"cluster_id": "other"}},
        {0: [(OUT, Kind.OTHER_CLUSTER)]},
    ),
    Case(
        "two swapped",
        {1: {"admitted_with": {"index": 2}}, 2: {"admitted_with": {"index": 1}}},
        {None: NO_QUORUM, 1: [(OUT, Kind.WRONG_PLACE, "order")], 2: [(OUT, Kind.WRONG_PLACE)]},
    ),
    one(
        "another greatest ttl",
        {"max_ttl_ms": 299_999},
        (HARM, Kind.TTL_DIFFERS, "299999", "HSET redfence:node max_ttl_ms 300000"),
    ),
    # --- clocks: over a second 1 % and 2 ms are allowed; a round trip of 1 ms leaves 1 ms unsure at each end
    one(
        "a fast clock",
        {"readings": [reading(5_000), reading(6_000, gained_ms=14.1)]},
        (OUT, Kind.CLOCK_STEPS, "within 1.0 s", "forward", "slew"),
    ),
    one(
        "of several steps the greatest is told",
        {
            "readings": [
                *(reading(), reading(500, gained_ms=100)),
                *(reading(1_000, gained_ms=-900), reading(1_500, gained_ms=-800)),
            ]
        },
        (OUT, Kind.CLOCK_STEPS, "within 1.5 s", "ms back"),
    ),
    Case("clocks apart", {1: {"readings": [reading(offset_ms=3_000)]}}),
    Case("no clock told", {index: {"readings": []} for index in range(3)}),
    # --- latency
    one("as slow as is well", trips(LATENCY_MS_WARNING, LATENCY_MS_WARNING, 499.0)),
    one("slow", trips(10.1, 10.1, 1.0), (WARN, Kind.SLOW, "10.1 ms", "no ttl below 202 ms")),
    one(
        "seldom too slow to count",
        trips(1.0, 1.0, 500.0),
        (WARN, Kind.UNSTEADY, "500.0 ms", "node_timeout_ms (500)"),
    ),
    one(
        "slow, and at times too slow to count",
        trips(400.0, 400.0, 600.0),
        (WARN, Kind.SLOW),
        (WARN, Kind.UNSTEADY),
    ),
    one("too slow to count", trips(500.0, 500.0, 1.0), (OUT, Kind.SLOW, "raise node_timeout_ms")),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_in_each_state_everything_is_found_and_nothing_else(case: Case) -> None:
    """Compare node, severity, kind, vote and the words that matter."""
    diagnosis = case.diagnose()
    expected = {(index, each[0], each[1]): each[2:] for index, told in case.found.items() for each in told}
    found = {(each.node, (each.severity, each.keeps_out), each.kind): each for each in diagnosis.findings}
    assert found.keys() == expected.keys()
    assert len(diagnosis.findings) == len(expected)
    assert diagnosis.cluster_id == ("" if Kind.NOT_FORMED in {kind for _, _, kind in expected} else "c")
    assert diagnosis.serious == any(weight[0] is SERIOUS for _, weight, _ in expected)
    for key, words in expected.items():
        assert found[key].what
        assert found[key].advice
        text = f"{found[key].what}\n{found[key].advice}"
        assert "{" not in text
        assert [word for word in words if word not in text] == [], text


def test_every_kind_of_finding_has_a_case_and_every_reason_to_reject_has_advice() -> None:
    assert {each.kind for case in CASES for each in case.diagnose().findings} == set(Kind)
    assert ADVICE.keys() == set(Reason) - {Reason.NOT_FORMED}
    assert {reason.name for reason in ADVICE} <= {kind.name for kind in Kind}


def test_the_worst_comes_first_and_then_the_cluster_before_its_nodes() -> None:
    for case in CASES:
        findings = case.diagnose().findings
        order = [
            (list(Severity).index(each.severity), -1 if each.node is None else each.node) for each in findings
        ]
        assert order == sorted(order)


@pytest.mark.parametrize("count", quorum.NODE_COUNTS)
def test_too_few_nodes_are_told_for_every_set_of_nodes_that_are_up(count: int) -> None:
    for up in product([True, False], repeat=count):
        changes = [{} if here else away() for here in up]
        diagnosis = diagnose(
            [node(index, count=count, **each) for index, each in enumerate(changes)], SETTINGS
        )
        assert diagnosis.voters == {index for index, here in enumerate(up) if here}
        assert diagnosis.quorum == quorum.majority(count)
        told = [each for each in diagnosis.findings if each.kind is Kind.NO_QUORUM]
        assert bool(told) == (sum(up) < quorum.majority(count))
        assert not any("recover" in each.advice for each in told)


FLAWS: Mapping[str, Change] = {
    "is_replica": {"is_replica": True},
    "eviction": {"eviction": "some"},
    "old": {"version": "6.0.0"},
    "restarted": NEW_RUN,
    "gap": GAP,
    "forgot": {"max_token": None},
    # A node can break off at any step.
    "denied": {"error": DialError("gone")},
}


def test_exactly_the_nodes_that_cannot_vote_have_a_finding_that_says_why() -> None:
    """The doctor and the admission of the servers agree on every combination of flaws."""
    for phase in [*Phase, None]:
        for has in product([False, True], repeat=len(FLAWS)):
            flaws = {name for name, here in zip(FLAWS, has, strict=True) if here}
            change = {name: value for flaw in flaws for name, value in FLAWS[flaw].items()}
            change.update({"phase": phase} if phase else EMPTY)
            diagnosis = diagnose([node(0), node(1, **change), node(2)], SETTINGS)
            out = [each for each in diagnosis.findings if each.node == 1 and each.keeps_out]
            assert (1 in diagnosis.voters) != bool(out), (phase, flaws, out)
            fit = phase in {Phase.READY, Phase.RESTARTED} and not flaws - {"restarted"}
            assert (1 in diagnosis.voters) == fit, (phase, flaws)


def test_what_a_diagnosis_tells_of_one_node_leaves_out_the_others() -> None:
    diagnosis = Diagnosis(
        (
            Finding(SERIOUS, Kind.NO_QUORUM, "what", "advice"),
            Finding(NOTE, Kind.NO_MEMORY_LIMIT, "what", "advice", node=1),
            Finding(WARNING, Kind.SLOW, "what", "advice", node=1),
        ),
        cluster_id="c",
        quorum=2,
        voters=frozenset(),
    )
    assert [diagnosis.worst_of(index) for index in range(3)] == [NOTE, WARNING, NOTE]
    assert [diagnosis.count(severity) for severity in Severity] == [1, 1, 1]
    assert diagnosis.serious
    assert not replace(diagnosis, findings=diagnosis.findings[1:]).serious
