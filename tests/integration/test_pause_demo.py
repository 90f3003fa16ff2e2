"""`redfence demo gc-pause`: two real processes, one really stopped past its lease."""

from __future__ import annotations

import re

import pytest

from harness.processes.commands import CommandProcesses


def told(pattern: str, story: str) -> re.Match[str]:
    """Find a line of the story; that it was told is part of the test."""
    found = re.search(pattern, story)
    assert found, story
    return found


async def addresses(commands: CommandProcesses) -> tuple[str, str]:
    """A lock server and a storage of this test's own."""
    dev = commands.start_redfence("dev", "--listen", "127.0.0.1:0", "--storage-listen", "127.0.0.1:0")
    ready = await dev.wait_for_line(r"lock server on (\S+), storage on (\S+),", timeout_s=30)
    return ready.group(1), ready.group(2)


@pytest.mark.slow
async def test_with_fencing_the_stale_write_of_a_paused_holder_is_refused(commands: CommandProcesses) -> None:
    """The story ends with B's balance in the storage, and exit status 0."""
    server, storage = await addresses(commands)
    demo = commands.start_redfence("demo", "gc-pause", "--server", server, "--storage", storage)
    assert await demo.wait(timeout_s=30) == 0, demo.stderr
    token_a = int(told(r"A  got the lock .* with token (\d+)", demo.stdout)[1])
    token_b = int(told(r"B  .* got the lock with token (\d+)", demo.stdout)[1])
    assert token_b > token_a
    refused = told(r"refused A's write: token (\d+) is stale, it has seen (\d+)", demo.stdout)
    assert (int(refused[1]), int(refused[2])) == (token_a, token_b)
    # 100 + B's 5: A's 110 is nowhere.
    assert "The account holds 105" in demo.stdout
    paused_s = float(told(r"wakes up after ([0-9.]+) s", demo.stdout)[1])
    assert paused_s > 1.5, "it was stopped past its lease"


@pytest.mark.slow
async def test_without_fencing_the_late_write_corrupts_the_file(commands: CommandProcesses) -> None:
    """The negative control: the same story over a file loses B's deposit, and exits 1."""
    server, storage = await addresses(commands)
    demo = commands.start_redfence(
        *("demo", "gc-pause", "--no-fencing", "--server", server, "--storage", storage)
    )
    assert await demo.wait(timeout_s=30) == 1, demo.stderr
    told(r"now says 110\b", demo.stdout)
    assert "CORRUPTED" in demo.stdout


@pytest.mark.slow
async def test_the_demo_says_when_it_cannot_be_played(commands: CommandProcesses) -> None:
    """No lock server where one was named: status 2 and one line, no traceback."""
    demo = commands.start_redfence("demo", "gc-pause", "--server", "127.0.0.1:1", "--storage", "127.0.0.1:1")
    assert await demo.wait(timeout_s=60) == 2
    assert "Traceback" not in demo.stderr
    assert demo.stderr.startswith("redfence demo: A:")
