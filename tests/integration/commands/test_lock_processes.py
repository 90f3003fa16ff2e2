"""`redfence lock` and what shells do with processes: open files, ignored signals, daemons, closed streams."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.doubles.grpc_fake import GrpcFake
from harness.processes.commands import CommandProcess, CommandProcesses
from harness.processes.process_look import is_alive

Shell = Callable[[str], CommandProcess]

pytestmark = pytest.mark.slow


@pytest.fixture
def shell(fake: GrpcFake, commands: CommandProcesses) -> Shell:
    """Runs a line of bash, in which `$lock` is `redfence lock r`."""
    lock = f"{Path(sys.executable).with_name('redfence')} lock r"
    environment = {"REDFENCE_SERVER": fake.address, "lock": lock}
    return lambda line: commands.start("/bin/bash", "-c", line, environment=environment)


async def test_the_command_inherits_open_files(shell: Shell) -> None:
    """Process substitution, and the descriptors that make's jobserver passes."""
    assert (
        await shell("exec 9<<<nine; $lock -- cat <(echo substituted) /dev/fd/9").ended()
        == "substituted\nnine\n"
    )


async def test_a_closed_standard_stream_breaks_nothing(shell: Shell, tmp_path: Path) -> None:
    for closed in ("<&-", ">&-", "2>&-", "<&- >&- 2>&-"):
        run = shell(f"$lock -- sh -c 'test $REDFENCE_TOKEN -gt 0 && touch {tmp_path}/done' {closed}")
        assert await run.ended() == ""
        assert run.stderr == ""
        (tmp_path / "done").unlink()


@pytest.mark.parametrize("start", ["setsid $daemon &", "(setsid $daemon &) &", "nohup $daemon >/dev/null &"])
async def test_processes_that_left_the_command_are_ended_before_the_release(
    fake: GrpcFake, shell: Shell, tmp_path: Path, start: str
) -> None:
    pid_file = tmp_path / "pid"
    (tmp_path / "daemon").write_text(f"echo $$ > {pid_file}; exec sleep 100")
    (tmp_path / "command").write_text(
        f"daemon='sh {tmp_path}/daemon'; {start}\nwhile ! test -s {pid_file}; do sleep 0.01; done"
    )
    assert await shell(f"$lock -- bash -im {tmp_path}/command 2>/dev/null").ended() == ""
    assert not is_alive(int(pid_file.read_text()))
    assert fake.server.hold_of("r") is None


async def test_an_ignored_signal_stays_ignored(shell: Shell) -> None:
    run = shell("trap '' HUP INT; exec $lock -- sh -c 'echo up; sleep 1; echo still'")
    await run.wait_for_line("up")
    for number in (signal.SIGHUP, signal.SIGINT):
        run.send_signal(number)
    assert await run.ended() == "up\nstill\n"


async def test_ctrl_z_is_answered_with_a_word(shell: Shell) -> None:
    run = shell("exec $lock -- sh -c 'echo up; kill -TSTP $$; echo on'")
    said = "redfence lock: the command goes on: a suspended command would lose its lock"
    assert await run.ended() == f"up\non\n{said}\n"


async def test_processes_that_were_there_before_are_let_alone(shell: Shell, tmp_path: Path) -> None:
    """They are children of the process, because a shell has replaced itself with `redfence lock`."""
    run = shell(f"sleep 100 & echo $! > {tmp_path}/pid; exec $lock -- true")
    assert await run.ended() == ""
    pid = int((tmp_path / "pid").read_text())
    assert is_alive(pid)
    os.kill(pid, signal.SIGKILL)


async def test_a_kernel_that_lists_no_children_is_enough(shell: Shell, tmp_path: Path) -> None:
    script = tmp_path / "lock.py"
    script.write_text(
        "from redfence._cli import child, main\n"
        "child._children = lambda: None  # as without CONFIG_PROC_CHILDREN\n"
        "raise SystemExit(main.main())\n"
    )
    run = shell(f"exec {sys.executable} {script} lock r sh -c 'sleep 0.2 & wait; echo done; exit 7'")
    assert await run.ended(status=7) == "done\n"
