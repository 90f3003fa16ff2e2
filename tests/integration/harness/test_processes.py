"""Commands of the harness fail a test and end as tests need."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from harness.processes.commands import CommandProcesses

_SERVER = """
import signal
print("ready", flush=True)
signal.pause()
"""


async def test_a_command_that_ends_or_stays_silent_is_a_failure_with_its_output(
    commands: CommandProcesses,
) -> None:
    process = commands.start(sys.executable, "-c", "import sys; print('reddy'); sys.exit('broken')")
    with pytest.raises(AssertionError, match=r"(?s)ended with status 1 without .*reddy.*broken"):
        await process.wait_for_line("ready")
    silent = commands.start(sys.executable, "-c", _SERVER)
    with pytest.raises(AssertionError, match=r"wrote no line like 'never' in 0.1 s"):
        await silent.wait_for_line("never", timeout_s=0.1)
    with pytest.raises(AssertionError, match=r"had not ended after 0.1 s"):
        await silent.wait(timeout_s=0.1)


async def test_a_frozen_command_is_killed_all_the_same(tmp_path: Path) -> None:
    commands = CommandProcesses(tmp_path)
    process = commands.start(sys.executable, "-c", _SERVER)
    await process.wait_for_line("ready")
    process.send_signal(signal.SIGSTOP)
    commands.close()
    assert process.exit_status == -signal.SIGKILL
    commands.close()
