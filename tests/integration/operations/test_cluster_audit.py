"""Each command that changes a cluster writes one line to the audit log, on real nodes."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from harness.processes.commands import CommandProcess, CommandProcesses, node_flags
from harness.processes.fixture_types import FlushedNodes
from harness.processes.servers import memories

pytestmark = pytest.mark.slow


class Audited:
    """Starts commands that write to one audit log."""

    def __init__(self, commands: CommandProcesses, log: Path) -> None:
        self._commands = commands
        self._log = log

    def start(self, action: str, *flags: str) -> CommandProcess:
        flags = (*flags, "--audit-log", str(self._log), "--dial-timeout-ms", "5000")
        return self._commands.start_redfence("cluster", action, *flags)

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._log.read_text().splitlines()]


@pytest.fixture
def audited(commands: CommandProcesses, tmp_path: Path) -> Audited:
    return Audited(commands, tmp_path / "audit.jsonl")


async def test_each_change_of_a_cluster_is_one_line_with_its_outcome(
    audited: Audited, flushed_nodes: FlushedNodes
) -> None:
    """Also a command that fails or that Ctrl-C breaks off; only a printed plan leaves no line."""
    *old, new = await flushed_nodes(4)
    addresses, flags = [f"127.0.0.1:{node.port}" for node in (*old, new)], node_flags(old)
    last = [*addresses[:2], addresses[3]]
    flags_of_last = node_flags([*old[:2], new])
    to = ("--to", old[0].url)

    formed = await audited.start("init", *flags, "--max-ttl", "1s", "--floor", "7").ended()
    await audited.start("init", *flags, "--max-ttl", "2s").ended(status=2)
    await audited.start("replace", "2", new.url, *flags).ended(status=2)
    await audited.start("replace", "2", new.url, *flags, "--yes").ended()
    for node in old[:2]:
        await node.call("FLUSHALL")
    await audited.start("recover", *flags_of_last, "--floor", "auto").ended(status=2)
    broken_off = audited.start("recover", *flags_of_last, "--floor", "auto", "--yes")
    await broken_off.wait_for_line("^taken out; waiting")
    broken_off.send_signal(signal.SIGINT)
    await broken_off.ended(status=130)
    await audited.start("recover", *flags_of_last, "--floor", "auto", "--yes").ended()
    await audited.start("resize", *flags_of_last, *to).ended(status=2)
    resized = await audited.start("resize", *flags_of_last, *to, "--yes").ended()

    lines = audited.lines
    assert [(line["event"], line["outcome"], line["nodes"]) for line in lines] == [
        ("cluster_init", "done", addresses[:3]),
        ("cluster_init", "not_done", addresses[:3]),
        ("cluster_replace", "not_done", last),
        ("cluster_replace", "done", last),
        ("cluster_recover", "not_done", last),
        ("cluster_recover", "done", last),
        ("cluster_resize", "done", addresses[:1]),
    ]
    cluster_id, successor_id = lines[0]["cluster_id"], lines[-1]["cluster_id"]
    assert f"cluster {cluster_id}: formed" in formed
    assert f"cluster {successor_id} has 1 nodes" in resized
    assert [line["cluster_id"] for line in lines[3:-1]] == [cluster_id] * 3
    assert lines[0]["floor"] == 7
    # Each floor is above the ones before.
    floors = [line["floor"] for line in lines[4:]]
    assert floors == sorted(set(floors))
    problems = [line.get("problem", "") for line in lines]
    assert problems[1].startswith("max_ttl: ")
    assert "add --yes" in problems[2]
    assert problems[4] == "broken off"
    assert not any(problems[index] for index in (0, 3, 5, 6))


async def test_a_command_that_cannot_write_the_audit_log_changes_nothing(
    commands: CommandProcesses, flushed_nodes: FlushedNodes, tmp_path: Path
) -> None:
    nodes = await flushed_nodes(1)
    before = await memories(nodes)
    told = (
        await Audited(commands, tmp_path / "absent/audit").start("init", *node_flags(nodes)).ended(status=2)
    )
    assert told.startswith("redfence cluster init: audit_log: cannot write ")
    assert "or - for standard error" in told
    assert await memories(nodes) == before
