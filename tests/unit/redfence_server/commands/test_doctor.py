"""What `redfence doctor` prints: for people and for programs."""

from __future__ import annotations

import json
from dataclasses import replace

from harness.doubles.findings import findings, identity
from redfence_server.commands.doctor import as_json, as_table
from redfence_server.diagnosis.checkup import Checkup
from redfence_server.diagnosis.finding import Diagnosis, Finding, Kind, Severity
from redfence_server.membership.examination import ClockReading

INFO = {"valkey_version": "9.1.2", "run_id": "run-0", "used_memory": "7", "maxmemory": "100"}
WELL = Checkup(
    index=0,
    address="10.0.0.1:6379",
    found=findings(0, identity(0), version="9.1.2", info=INFO),
    readings=[
        ClockReading(sent_ms=at_ms, received_ms=at_ms + trip_ms, node_ms=at_ms - 7.5)
        for at_ms, trip_ms in ((0.0, 2.0), (10.0, 2.25), (20.0, 2.5), (30.0, 4.0))
    ],
)
AWAY = Checkup(index=1, address="10.0.0.2:6379")
NODES = (WELL, AWAY, Checkup(index=2, address="10.0.0.3:6379"))


def finding(node: int | None, severity: Severity, kind: Kind, words: str = "") -> Finding:
    what, advice = f"{kind.value} is found {words}".rstrip(), f"mend {kind.value}"
    return Finding(severity, kind, what, advice, node=node)


def diagnosis(*findings: Finding, cluster_id: str = "c") -> Diagnosis:
    return Diagnosis(findings, cluster_id, quorum=2, voters=frozenset({0}))


def test_each_node_has_a_line_and_what_is_not_known_a_dash() -> None:
    away = finding(1, Severity.SERIOUS, Kind.UNREACHABLE)
    slow = finding(2, Severity.WARNING, Kind.SLOW)
    lines = as_table(NODES, diagnosis(away, slow), width=80).splitlines()
    assert [line.split() for line in lines[:4]] == [
        ["NODE", "VERDICT", "VOTE", "SERVER", "LATENCY", "CLOCK", "ADDRESS"],
        ["0", "well", "yes", "valkey", "9.1.2", "2.5ms", "-8.5ms", "10.0.0.1:6379"],
        ["1", "SERIOUS", "no", "-", "-", "-", "10.0.0.2:6379"],
        ["2", "warning", "no", "-", "-", "-", "10.0.0.3:6379"],
    ]


def test_clocks_that_agree_are_not_told_apart_by_a_sign() -> None:
    behind = replace(WELL, readings=[ClockReading(sent_ms=0.0, received_ms=0.0, node_ms=-0.04)])
    assert "+0.0ms" in as_table((behind,), diagnosis(), width=80)


def test_no_findings_are_told_as_all_being_well() -> None:
    text = as_table(NODES, diagnosis(), width=80)
    assert text.splitlines()[-1] == "cluster c: 1 of 3 nodes can vote (quorum 2); all is well"
    assert len(text.splitlines()) == 6
    note = finding(0, Severity.NOTE, Kind.NO_MEMORY_LIMIT)
    assert as_table(NODES, diagnosis(note), width=80).endswith("; all is well")
    slow = finding(0, Severity.WARNING, Kind.SLOW)
    assert as_table(NODES, diagnosis(slow), width=80).endswith("; found: 1 warning")


def test_findings_stand_under_their_node_with_what_to_do_and_are_counted() -> None:
    told = diagnosis(
        finding(None, Severity.SERIOUS, Kind.NO_QUORUM),
        finding(2, Severity.SERIOUS, Kind.REPLICA),
        finding(1, Severity.WARNING, Kind.SLOW),
        finding(2, Severity.WARNING, Kind.HAS_REPLICAS),
        finding(2, Severity.NOTE, Kind.NO_MEMORY_LIMIT),
        cluster_id="",
    )
    blocks = as_table(NODES, told, width=80).split("\n\n")[1:]
    assert blocks == [
        "the cluster\n  serious no_quorum is found\n          -> mend no_quorum",
        (
            "node 2 (10.0.0.3:6379)\n"
            "  serious replica is found\n          -> mend replica\n"
            "  warning has_replicas is found\n          -> mend has_replicas\n"
            "  note    no_memory_limit is found\n          -> mend no_memory_limit"
        ),
        "node 1 (10.0.0.2:6379)\n  warning slow is found\n          -> mend slow",
        "cluster (not formed): 1 of 3 nodes can vote (quorum 2); found: 2 serious, 2 warnings, 1 note",
    ]


def test_what_is_the_same_on_several_nodes_is_said_once() -> None:
    told = diagnosis(
        finding(None, Severity.NOTE, Kind.NO_MEMORY_LIMIT),
        finding(0, Severity.NOTE, Kind.NO_MEMORY_LIMIT),
        finding(1, Severity.NOTE, Kind.NO_MEMORY_LIMIT),
        finding(1, Severity.NOTE, Kind.SLOW, "1 ms"),
        finding(2, Severity.NOTE, Kind.SLOW, "2 ms"),
    )
    blocks = as_table(NODES, told, width=80).split("\n\n")[1:-1]
    assert [block.splitlines()[0] for block in blocks] == [
        "the cluster",
        "nodes 0, 1",
        "node 1 (10.0.0.2:6379)",
        "node 2 (10.0.0.3:6379)",
    ]


def test_long_sentences_are_broken_to_the_width_and_stay_indented() -> None:
    url = "redis://" + "long-name." * 7
    told = diagnosis(finding(1, Severity.WARNING, Kind.SLOW, "word " * 40 + url))
    lines = as_table(NODES, told, width=60).split("\n\n")[1].splitlines()[2:]
    assert all(line.startswith(" " * 10) for line in lines)
    assert [line.strip() for line in lines if len(line) > 60] == [url]


def test_programs_get_the_same_and_null_for_what_is_not_known() -> None:
    told = json.loads(as_json((WELL, AWAY), diagnosis(finding(None, Severity.SERIOUS, Kind.NO_QUORUM))))
    shown = told["nodes"][0]
    assert told == {
        "serious": True,
        "cluster_id": "c",
        "quorum": 2,
        "nodes": [
            {
                "index": 0,
                "address": "10.0.0.1:6379",
                "can_vote": True,
                "well": True,
                "state": "ready",
                "engine": "valkey",
                "version": "9.1.2",
                "run_id": "run-0",
                "memory_used_bytes": 7,
                "memory_max_bytes": 100,
                "latency_ms": {"median": 2.5, "worst": 4.0},
                "clock_offset_ms": {"offset": -8.5, "unsure": 1.0},
            },
            {**dict.fromkeys(shown), "index": 1, "address": "10.0.0.2:6379", "can_vote": False, "well": True},
        ],
        "findings": [
            {
                "node": None,
                "severity": "serious",
                "kind": "no_quorum",
                "what": "no_quorum is found",
                "advice": "mend no_quorum",
                "keeps_out": False,
            }
        ],
    }
    assert json.loads(as_json((), diagnosis(cluster_id="")))["cluster_id"] is None
