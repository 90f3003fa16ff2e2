"""`redfence lock` with real processes: it passes signals and status on, and nothing outlives the lease."""

from __future__ import annotations

import asyncio
import os
import pty
import resource
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.doubles.grpc_fake import GrpcFake
from harness.processes.commands import CommandProcess, CommandProcesses
from harness.processes.ports import free_port
from harness.processes.process_look import is_alive
from harness.time.eventually import eventually

Lock = Callable[..., CommandProcess]

# A process that writes its pid, ignores every polite request, and notes the time for as long as it lives.
_STUBBORN = """
import os, signal, sys, time
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
with open(sys.argv[1], "w") as file:
    while True:
        file.seek(0)
        file.write(f"{os.getpid()} {time.clock_gettime(time.CLOCK_BOOTTIME):.3f}\\n")
        file.flush()
        time.sleep(0.005)
"""


@pytest.fixture
def lock(fake: GrpcFake, commands: CommandProcesses) -> Lock:
    """Starts `redfence lock r … -- COMMAND`."""

    def start(*command: str, options: tuple[str, ...] = ()) -> CommandProcess:
        return commands.start_redfence(
            "lock", "r", *options, "--", *command, environment={"REDFENCE_SERVER": fake.address}
        )

    return start


@pytest.fixture
def stubborn(tmp_path: Path) -> str:
    """The start of a shell command that runs the stubborn process; its argument is the file to write to."""
    script = tmp_path / "stubborn.py"
    script.write_text(_STUBBORN)
    return f"{sys.executable} {script}"


async def _pid_in(path: Path) -> int:
    await eventually(
        lambda: path.exists() and path.read_text().endswith("\n"), timeout_s=10, interval_s=0.005
    )
    return int(path.read_text().split()[0])


@pytest.mark.slow
async def test_the_command_finds_name_and_token_in_its_environment(fake: GrpcFake, lock: Lock) -> None:
    run = lock("sh", "-c", "echo $REDFENCE_RESOURCE $REDFENCE_TOKEN")
    assert await run.ended() == "r 1\n"
    assert fake.server.hold_of("r") is None
    assert fake.server.counts["release"] == 1


@pytest.mark.slow
async def test_the_commands_status_is_passed_through_as_a_shell_gives_it(
    fake: GrpcFake, lock: Lock, tmp_path: Path
) -> None:
    """128 + n for signal n, 127 for no such command, and 126 for a folder or a file without the right."""
    file = tmp_path / "script"
    file.write_text("#!/bin/sh\n")
    for command, status, told in (
        (("sh", "-c", "exit 7"), 7, ""),
        (("sh", "-c", "kill -9 $$"), 137, ""),
        (("sh", "-c", "kill -15 $$"), 143, ""),
        (("no-such-command", "--flag"), 127, "no-such-command: No such file or directory"),
        ((str(file),), 126, f"{file}: Permission denied"),
        ((str(tmp_path),), 126, f"{tmp_path}: Permission denied"),
    ):
        assert await lock(*command).ended(status=status) == (f"redfence lock: {told}\n" if told else "")
        assert fake.server.hold_of("r") is None


@pytest.mark.slow
async def test_a_held_lock_gives_75_with_nonblock_and_after_the_wait(
    fake: GrpcFake, lock: Lock, tmp_path: Path
) -> None:
    """The command is not run, and the message names the holder."""
    fake.server.grant("r", holder="them", ttl_ms=60_000)
    for options in (("--nonblock",), ("--wait", "100ms")):
        told = await lock("touch", str(tmp_path / "ran"), options=options).ended(status=75)
        assert told.startswith("redfence lock: 'r' ")
        assert "held by 'them'" in told
    assert not (tmp_path / "ran").exists()


@pytest.mark.slow
async def test_a_command_line_in_the_style_of_flock_works(
    fake: GrpcFake, commands: CommandProcesses, tmp_path: Path
) -> None:
    """Without `--`, as a shell text, and with the status that the caller chose for a held lock."""

    async def run(*words: str, status: int = 0) -> str:
        environment = {"REDFENCE_SERVER": fake.address}
        return await commands.start_redfence("lock", *words, environment=environment).ended(status=status)

    assert await run("r", "--ttl", "5", "echo", "--ttl", "hi") == "--ttl hi\n"
    assert await run("-n", "r", "-c", "echo $REDFENCE_TOKEN; exit 7", status=7) == "2\n"
    fake.server.grant("r", holder="them", ttl_ms=60_000)
    ran = str(tmp_path / "ran")
    assert "held by 'them'" in await run("-en", "-E", "9", "r", "touch", ran, status=9)
    assert "held by 'them'" in await run("-w", ".1", "-E", "0", "r", "-c", f"touch {ran}")
    assert not Path(ran).exists()


@pytest.mark.slow
async def test_without_a_server_it_gives_69(commands: CommandProcesses, tmp_path: Path) -> None:
    server = f"127.0.0.1:{free_port()}"
    run = commands.start_redfence("lock", "r", "--server", server, "--", "touch", str(tmp_path / "ran"))
    assert (await run.ended(status=69)).startswith("redfence lock: no server could be reached")
    assert run.stderr.count("\n") == 1
    assert not (tmp_path / "ran").exists()


@pytest.mark.slow
@pytest.mark.parametrize("options", [("-n",), ("--wait", "1s")])
async def test_a_short_wait_is_short_without_a_server_too(
    commands: CommandProcesses, options: tuple[str, ...]
) -> None:
    """It tries for less than the SDK's 5 s, and still names the reason."""
    run = commands.start_redfence("lock", *options, "--server", f"127.0.0.1:{free_port()}", "r", "true")
    assert "refused the connection" in await run.ended(status=69, timeout_s=4.5)


@pytest.mark.slow
async def test_an_acquire_that_is_given_up_at_a_silent_server_is_released(
    fake: GrpcFake, commands: CommandProcesses
) -> None:
    """The server may grant it later, so the Release goes out before the program ends."""
    fake.server.frozen = True
    run = commands.start_redfence("lock", "-n", "--server", fake.address, "r", "true")
    await eventually(lambda: _release_is_held_back(fake), timeout_s=4.5, interval_s=0.01)
    assert "a longer --wait gives the server more time" in await run.ended(status=69)
    fake.server.thaw()
    assert fake.server.hold_of("r") is None


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("r", "no command given; write it after NAME"),
        ("r -s true", "argument -s: redfence has no shared locks"),
        ("-- true", "NAME"),
        ("r --ttl soon -- true", "argument --ttl: "),
        ("r --ttl 1s --kill-after 900ms -- true", "--kill-after "),
        ("a{b -- true", "argument NAME: "),
        ("r --ttl 1ms -- true", "argument --ttl: "),
        ("r --holder a\tb -- true", "argument --holder: "),
        ("r --wait 1 --nonblock -- true", "--nonblock"),
    ],
)
async def test_wrong_usage_gives_2_without_a_traceback_and_names_what_was_written(
    commands: CommandProcesses, arguments: str, named: str
) -> None:
    told = await commands.start_redfence("lock", *arguments.split(" ")).ended(status=2)
    assert "redfence lock: " in told
    assert named in told


_HEEDING = """
import os, signal, sys, time
number = signal.Signals[sys.argv[1]]
child = os.fork()
def heed(*_):
    if child:
        os.waitpid(child, 0)
        os._exit(42)
    os.write(1, b"child\\n")
    os._exit(0)
signal.signal(number, heed)
os.write(1, b"ready\\n")
while True:
    time.sleep(0.1)  # a signal right before a sleep is handled after it
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2"])
async def test_signals_are_forwarded_to_the_whole_group(fake: GrpcFake, lock: Lock, name: str) -> None:
    """The command and its child get them, and the command's answer to them counts."""
    run = lock(sys.executable, "-c", _HEEDING, name)
    await eventually(lambda: run.stdout.count("ready") == 2, timeout_s=10, interval_s=0.01)
    run.send_signal(signal.Signals[name])
    assert await run.wait() == 42
    assert run.stdout.endswith("child\n")
    assert fake.server.hold_of("r") is None


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_a_signal_while_waiting_for_the_lock_ends_the_wait(
    fake: GrpcFake, lock: Lock, number: signal.Signals
) -> None:
    """There is no command yet: the status is 128 + n, nothing was run, and no waiter is left."""
    fake.server.grant("r", holder="them", ttl_ms=60_000)
    run = lock("echo", "ran")
    await eventually(lambda: fake.server.waiters("r") == 1, timeout_s=10, interval_s=0.01)
    run.send_signal(number)
    assert await run.ended(status=128 + number, timeout_s=5) == ""
    assert fake.server.waiters("r") == 0


@pytest.mark.slow
async def test_the_lock_is_held_for_as_long_as_the_command_runs(fake: GrpcFake, lock: Lock) -> None:
    """The lease is renewed for three times its ttl; the holder's label is visible."""
    # Long enough for a machine that stands still for a second.
    run = lock("sleep", "6", options=("--ttl", "2s", "--holder", "nightly"))
    await eventually(lambda: fake.server.hold_of("r"), timeout_s=10)
    hold = fake.server.hold_of("r")
    assert hold is not None
    assert hold.holder == "nightly"
    assert await run.wait(timeout_s=30) == 0
    assert fake.server.counts["renew"] >= 5


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["taken away", "paused"])
async def test_a_lease_that_is_lost_kills_at_once(
    fake: GrpcFake, lock: Lock, tmp_path: Path, fault: str
) -> None:
    """A command that ignores SIGTERM is dead as soon as the wrapper knows, also after a pause."""
    mark = tmp_path / "mark"
    run = lock(sys.executable, "-c", _STUBBORN, str(mark), options=("--ttl", "3s"))
    pid = await _pid_in(mark)
    if fault == "taken away":
        fake.server.grant("r", holder="them", ttl_ms=60_000)
    else:
        run.send_signal(signal.SIGSTOP)
        await eventually(lambda: fake.server.hold_of("r") is None, timeout_s=5, interval_s=0.01)
        run.send_signal(signal.SIGCONT)
    assert (await run.ended(status=122)).startswith(
        "redfence lock: the lease is lost: stopping the command\n"
    )
    assert not is_alive(pid)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["frozen", "no quorum", "gone"])
async def test_every_process_of_the_group_is_dead_before_the_validity_ends(
    fake: GrpcFake, lock: Lock, tmp_path: Path, stubborn: str, fault: str
) -> None:
    """Command, child and grandchild ignore SIGTERM, and write nothing past the deadline."""
    marks = [tmp_path / name for name in ("command", "child", "grandchild")]
    script = f"{stubborn} {marks[1]} & (sh -c '{stubborn} {marks[2]} &'); exec {stubborn} {marks[0]}"
    # The shortest ttl with the greatest margin, half a second: the machine may stand still for less.
    ttl_s = 5.0
    run = lock("sh", "-c", script, options=("--ttl", f"{ttl_s}s", "--kill-after", "300ms"))
    pids = [await _pid_in(mark) for mark in marks]
    if fault == "gone":
        await asyncio.to_thread(fake.stop)
    else:
        setattr(fake.server, "frozen" if fault == "frozen" else "quorum_lost", True)
    hold = fake.server.hold_of("r")
    assert hold is not None
    told = await run.ended(status=122)
    assert not any(map(is_alive, pids))
    last_written_s = [float(mark.read_text().split("\n")[0].split()[1]) for mark in marks]
    assert max(last_written_s) < hold.expires_at_ms / 1000 - ttl_s / 100
    assert "the lease cannot be renewed: stopping the command" in told


@pytest.mark.slow
async def test_sigterm_comes_before_sigkill(fake: GrpcFake, lock: Lock) -> None:
    """A command that heeds SIGTERM ends in its own way; the status still tells that the lease was lost."""
    script = "trap 'echo bye; exit 0' TERM; echo ready; while :; do sleep 0.01; done"
    run = lock("sh", "-c", script, options=("--ttl", "3s", "--kill-after", "1500ms"))
    await run.wait_for_line("ready")
    fake.server.quorum_lost = True
    assert await run.wait() == 122
    assert run.stdout == "ready\nbye\n"


@pytest.mark.slow
async def test_a_process_that_the_command_leaves_running_is_ended_before_the_release(
    fake: GrpcFake, lock: Lock, tmp_path: Path, stubborn: str
) -> None:
    """A background process that ignores SIGTERM gets the grace and then SIGKILL, before the lock is free."""
    mark = tmp_path / "mark"
    script = f"{stubborn} {mark} & while ! test -s {mark}; do sleep 0.01; done; exit 5"
    run = lock("sh", "-c", script, options=("--kill-after", "300ms"))
    assert await run.wait() == 5
    assert not is_alive(await _pid_in(mark))
    assert fake.server.hold_of("r") is None


async def test_a_command_dies_with_a_wrapper_that_was_killed(
    fake: GrpcFake, lock: Lock, tmp_path: Path
) -> None:
    """After kill -9 of the wrapper the lease is not renewed, so the command must not go on."""
    mark = tmp_path / "mark"
    run = lock(sys.executable, "-c", _STUBBORN, str(mark))
    pid = await _pid_in(mark)
    run.kill()
    await eventually(lambda: not is_alive(pid), timeout_s=2)


async def test_the_command_owns_the_terminal_and_gives_it_back(fake: GrpcFake, tmp_path: Path) -> None:
    """The command reads from the terminal, Ctrl-C reaches it alone, and the shell has it afterwards."""
    redfence = Path(sys.executable).with_name("redfence")
    command = 'trap "echo caught; exit 9" INT; echo up; read line; sleep 5'
    script = tmp_path / "session.sh"
    script.write_text(
        f"{redfence} lock r --server {fake.address} -- sh -c '{command}'\n"
        "echo status $?\nread after\necho got $after\n"
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    master, slave = pty.openpty()
    shell = _shell_in_terminal(script, slave)
    os.close(slave)
    seen = b""

    async def until(text: bytes) -> None:
        nonlocal seen
        async with asyncio.timeout(10):
            while text not in seen:
                seen += await asyncio.to_thread(os.read, master, 1024)

    try:
        await until(b"up")
        os.write(master, b"a line\n")
        await asyncio.sleep(0.1)
        os.write(master, b"\x03")
        await until(b"status 9")
        os.write(master, b"hello\n")
        await until(b"got hello")
        assert b"caught" in seen
    finally:
        shell.kill()
        shell.wait()
        os.close(master)


def _shell_in_terminal(script: Path, slave: int) -> subprocess.Popen[bytes]:
    # Only the new process itself can become the leader of the terminal's session.
    return subprocess.Popen(["sh", str(script)], preexec_fn=lambda: os.login_tty(slave))  # noqa: PLW1509


@pytest.mark.slow
@pytest.mark.parametrize("signalled", [False, True], ids=["left alone", "signalled"])
async def test_a_server_that_falls_silent_before_the_release_does_not_keep_the_command(
    fake: GrpcFake, lock: Lock, tmp_path: Path, *, signalled: bool
) -> None:
    """The release is given up after the rpc timeout, or sooner at a signal."""
    run = lock("sh", "-c", f"echo up; while ! test -e {tmp_path}/go; do sleep 0.01; done; exit 7")
    await run.wait_for_line("up")
    fake.server.frozen = True
    (tmp_path / "go").touch()
    if signalled:
        await eventually(lambda: _release_is_held_back(fake), interval_s=0.01)
        run.send_signal(signal.SIGTERM)
        # The time-out of the release itself is 5 s.
        await run.ended(status=143, timeout_s=4)
    else:
        assert "release not confirmed" in await run.ended(status=7)


def _release_is_held_back(fake: GrpcFake) -> bool:
    requests = [request for session in fake.server._sessions for request in session.held_requests]
    return any(command.HasField("release") for request in requests for command in request.commands)


@pytest.mark.slow
async def test_starting_costs_little(fake: GrpcFake, lock: Lock) -> None:
    """All of `redfence lock -- true` takes well under two seconds of a core."""

    def used_s() -> float:
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        return ended.ru_utime + ended.ru_stime

    lasted_s = []
    before_s = used_s()
    for _ in range(3):
        started_at_s = time.monotonic()
        assert await lock("true").wait() == 0
        lasted_s.append(time.monotonic() - started_at_s)
    assert 0 < used_s() - before_s < 3 * 2
    # It waits for nothing of its own either.
    assert min(lasted_s) < 2


@pytest.mark.slow
async def test_it_waits_for_a_quorum_as_for_a_held_lock_and_not_longer(fake: GrpcFake, lock: Lock) -> None:
    """A blip of the nodes does not fail a job that asked to wait; one that did not is told at once."""
    fake.server.quorum_lost = True
    assert await lock("true", options=("--nonblock",)).wait() == 69
    assert await lock("true", options=("--wait", "1s")).wait() == 69
    patient, forever = lock("true", options=("--wait", "60s")), lock("true")
    await eventually(lambda: "waiting: " in patient.stderr and "waiting: " in forever.stderr, timeout_s=10)
    fake.server.quorum_lost = False
    assert await patient.wait() == 0
    assert await forever.wait() == 0
    assert patient.stderr.count("\n") == 1
