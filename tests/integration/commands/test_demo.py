"""`redfence demo gc-pause`: two real processes, one really stopped past its lease."""

from __future__ import annotations

import re

import pytest

from harness.processes.commands import CommandProcesses

pytestmark = pytest.mark.slow


def told(pattern: str, story: str) -> re.Match[str]:
    """Return the part of the story that the pattern finds; fail without one."""
    found = re.search(pattern, story)
    assert found, story
    return found


async def test_with_fencing_the_stale_write_of_a_paused_holder_is_refused(commands: CommandProcesses) -> None:
    """The story ends with B's balance in the storage, and exit status 0."""
    _, ready = await commands.start_dev()
    demo = commands.start_redfence("demo", "gc-pause", "--server", ready[1], "--storage", ready[2])
    await demo.ended()
    token_a = int(told(r"A  got the lock .* with token (\d+)", demo.stdout)[1])
    token_b = int(told(r"B  .* got the lock with token (\d+)", demo.stdout)[1])
    assert token_b > token_a
    refused = told(r"refused A's write: token (\d+) is stale, it has seen (\d+)", demo.stdout)
    assert (int(refused[1]), int(refused[2])) == (token_a, token_b)
    # 100 + B's 5: A's 110 is nowhere.
    assert "The account holds 105" in demo.stdout
    paused_s = float(told(r"wakes up after ([0-9.]+) s", demo.stdout)[1])
    assert paused_s > 1.5, "it was stopped past its lease"


async def test_without_fencing_the_late_write_corrupts_the_file(commands: CommandProcesses) -> None:
    """The negative control: the same story over a file loses B's deposit, and exits 1."""
    _, ready = await commands.start_dev()
    servers = ("--server", ready[1], "--storage", ready[2])
    demo = commands.start_redfence("demo", "gc-pause", "--no-fencing", *servers)
    await demo.ended(status=1)
    told(r"now says 110\b", demo.stdout)
    assert "CORRUPTED" in demo.stdout


async def test_the_demo_says_when_it_cannot_be_played(commands: CommandProcesses) -> None:
    demo = commands.start_redfence("demo", "gc-pause", "--server", "127.0.0.1:1", "--storage", "127.0.0.1:1")
    await demo.ended(status=2, timeout_s=60)
    assert demo.stderr.startswith("redfence demo: A:")
