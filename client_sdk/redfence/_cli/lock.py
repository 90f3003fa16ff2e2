"""Runs a command while it holds a lock, and stops the command before the lease ends: `redfence lock`."""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

from redfence._cli import lock_arguments, servers
from redfence._cli.child import Child
from redfence._cli.lock_plan import Plan, Stage, Step, make_plan, next_step
from redfence._clock import SystemClock
from redfence._config import ClientOptions
from redfence._errors import (
    AccessDeniedError,
    InvalidArgumentError,
    LeaseLostError,
    NotAcquiredError,
    OutcomeUnknownError,
    RedfenceError,
    UnavailableError,
)
from redfence._threads.client import Client
from redfence._threads.lease import Lease

HELP = "run a command while holding a lock"

EXIT_USAGE = 2
EXIT_UNREACHABLE = 69
EXIT_NOT_ACQUIRED = 75
EXIT_DENIED = 77
EXIT_LEASE_LOST = 122
EXIT_NOT_EXECUTABLE = 126
EXIT_NOT_FOUND = 127

# The most specific class comes first.
_EXIT_BY_ERROR: dict[type[Exception], int] = {
    InvalidArgumentError: EXIT_USAGE,
    ValueError: EXIT_USAGE,
    NotAcquiredError: EXIT_NOT_ACQUIRED,
    LeaseLostError: EXIT_LEASE_LOST,
    AccessDeniedError: EXIT_DENIED,
    RedfenceError: EXIT_UNREACHABLE,
}

# The argument on the command line, by the name of the contract's field.
_ARGUMENT_BY_FIELD = {
    "ttl": "--ttl",
    "lock_delay": "--lock-delay",
    "wait": "--wait",
    "holder": "--holder",
    "resource": "NAME",
}

# The lease of a stopped command is nearly over, so do not wait longer for a server that does not answer.
_CLOSE_TIMEOUT_S = 1.0
# How long a caller gives each server to accept a connection, and to answer. The first is enough for two
# round trips of 400 ms. In the second a server can tell that its nodes did not answer (twice 500 ms).
_CONNECT_TIMEOUT_S = 0.8
_SERVER_TIMEOUT_S = 1.5
# How long a caller with a longer wait looks for a server that answers, if there are up to three.
_RPC_TIMEOUT_S = 5.0
# The pause between two tries while no quorum is reachable or the queue is full, unless the server
# asks for a longer one. A person can wait this long, and such tries cost the server almost nothing.
_OUTAGE_PAUSE_S = 0.5

_FORWARDED = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)


class _Interrupted(BaseException):
    """Raised when a signal comes while `redfence lock` waits for the lock."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    lock_arguments.configure(parser)


def run(arguments: argparse.Namespace) -> int:
    """Acquire the lock, run the command, release the lock; return the exit status."""
    kill_after_ms = None if arguments.kill_after is None else arguments.kill_after * 1000
    try:
        command = lock_arguments.command_of(arguments)
        plan = make_plan(ttl_ms=arguments.ttl * 1000, kill_after_ms=kill_after_ms)
        return _hold_and_run(arguments, command, plan)
    except _Interrupted as interrupted:
        return 128 + interrupted.number
    except tuple(_EXIT_BY_ERROR) as error:
        status = next(status for kind, status in _EXIT_BY_ERROR.items() if isinstance(error, kind))
        if status == EXIT_NOT_ACQUIRED and arguments.conflict_exit_code is not None:
            status = arguments.conflict_exit_code
        if isinstance(error, OutcomeUnknownError) and arguments.wait is not None:
            return _print_error(f"{error}; a longer --wait gives the server more time", status)
        return _print_error(_describe(error), status)


def _hold_and_run(arguments: argparse.Namespace, command: list[str], plan: Plan) -> int:
    addresses = servers.addresses(arguments)
    options = client_options(wait_s=arguments.wait, server_count=len(addresses))
    # Closing the client releases the lease, or tries to, however this block ends.
    credentials = servers.credentials(arguments)
    with (
        Client(*addresses, holder=arguments.holder, options=options, **credentials) as client,
        _interruptible(),
    ):
        lease = _acquire(client, arguments)
        status = _run_under(lease, command, plan)
        if not lease.lost.is_set() and status != EXIT_LEASE_LOST:
            _release(lease)
        return status


def client_options(*, wait_s: float | None, server_count: int) -> ClientOptions:
    """Return timeouts that give up after the wait or 5 s, whichever is shorter, if no server answers.

    Each server has the time for one try, so that silent ones do not hide the next.
    """
    wait_s = _RPC_TIMEOUT_S if wait_s is None else min(wait_s, _RPC_TIMEOUT_S)
    return ClientOptions(
        rpc_timeout=max(wait_s, _SERVER_TIMEOUT_S * server_count),
        connect_timeout=_CONNECT_TIMEOUT_S,
        close_timeout=_CLOSE_TIMEOUT_S,
    )


def _acquire(client: Client, arguments: argparse.Namespace) -> Lease:
    """Acquire the lock; while the server reports no quorum or a full queue, wait as for a held lock.

    The first such report is printed.
    """
    clock = SystemClock()
    started_ms = clock.now_ms()
    wait: float | None = arguments.wait
    waiting_announced = False
    pause = threading.Event()  # never set; a signal ends the wait by an exception
    while True:
        try:
            return client.acquire(
                arguments.name, ttl=arguments.ttl, wait=wait, lock_delay=arguments.lock_delay
            )
        except UnavailableError as error:
            if arguments.wait is not None:
                wait = arguments.wait - (clock.now_ms() - started_ms) / 1000
            # If no server answered, its address may be wrong, so report the error and do not wait.
            if not error.error_reason or (wait is not None and wait <= 0):
                raise
            if not waiting_announced:
                _print_error(f"waiting: {error}", 0)
                waiting_announced = True
            pause_s = max(_OUTAGE_PAUSE_S, error.retry_after or 0.0)
            pause.wait(pause_s if wait is None else min(pause_s, wait))


def _run_under(lease: Lease, command: list[str], plan: Plan) -> int:
    environment = dict(os.environ, REDFENCE_RESOURCE=lease.resource, REDFENCE_TOKEN=str(lease.token))
    with _wake_ups(lease) as wake_ups:
        try:
            child = Child(command, environment=environment)
        except OSError as error:
            found = error.errno not in {errno.ENOENT, errno.ENOTDIR}
            return _print_error(
                f"{command[0]}: {error.strerror}", EXIT_NOT_EXECUTABLE if found else EXIT_NOT_FOUND
            )
        try:
            return _supervise(child, lease, plan, wake_ups)
        finally:
            child.give_back_terminal()


def _supervise(child: Child, lease: Lease, plan: Plan, wake_ups: int) -> int:
    """Wait until the group has ended; forward signals, and stop the group before the lease ends."""
    stage = Stage.RUNNING
    clock = SystemClock()
    terminated_at_ms = 0.0
    in_danger = False
    while not _have_ended(child):
        now_ms = clock.now_ms()
        terminated_for_ms = now_ms - terminated_at_ms if stage is Stage.TERMINATED else 0.0
        remaining_ms, lost = lease.remaining() * 1000, lease.lost.is_set()
        step = next_step(
            plan, stage=stage, lost=lost, remaining_ms=remaining_ms, terminated_for_ms=terminated_for_ms
        )
        if step.stage is Stage.RUNNING and child.status is not None:
            # The command has ended but its group has not. Stop the group, because it must end
            # before the release.
            step = Step(Stage.TERMINATED, plan.kill_after_ms)
        elif step.stage is not stage and child.status is None and not in_danger:
            in_danger = True
            what = "the lease is lost" if lost else "the lease cannot be renewed"
            _print_error(f"{what}: stopping the command", 0)
        if step.stage is not stage:
            if step.stage is Stage.TERMINATED:
                child.end(signal.SIGTERM)
                # A stopped process receives SIGTERM only after SIGCONT.
                child.end(signal.SIGCONT)
                terminated_at_ms = now_ms
            stage = step.stage
        if stage is Stage.KILLED:
            # Each time, because an orphan is adopted only when its parent has ended.
            child.end(signal.SIGKILL)
        for number in _wait(wake_ups, step.wait_ms):
            if number in _FORWARDED:
                child.signal(number)
    if in_danger or lease.lost.is_set():
        return EXIT_LEASE_LOST
    assert child.status is not None, "the group has ended, so the command has too"
    return child.status


def _have_ended(child: Child) -> bool:
    ended = child.reap()
    if child.was_suspended:
        _print_error("the command goes on: a suspended command would lose its lock", 0)
    return ended


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Raise an exception for each forwarded signal while no command runs that could receive it."""

    def interrupt(number: int, _frame: FrameType | None) -> None:
        raise _Interrupted(number)

    before = {number: signal.signal(number, interrupt) for number in _forwarded()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _wake_ups(lease: Lease) -> Iterator[int]:
    """Yield a file descriptor that receives the number of each signal, and 0 when the lease is lost."""
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    os.set_blocking(write_end, False)
    before = {number: signal.signal(number, _ignore) for number in (*_forwarded(), signal.SIGCHLD)}
    fd_before = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)

    def report_loss() -> None:
        lease.lost.wait()
        with contextlib.suppress(OSError):  # a full pipe wakes the reader too
            os.write(write_end, b"\0")

    # The thread is a daemon because it waits until the process ends if the lease is never lost.
    threading.Thread(target=report_loss, name="redfence-lock-loss", daemon=True).start()
    try:
        yield read_end
    finally:
        # The pipe stays open because the thread may still write. This process is about to end.
        signal.set_wakeup_fd(fd_before)
        for number, handler in before.items():
            signal.signal(number, handler)


def _forwarded() -> list[signal.Signals]:
    """Return the signals to forward; one that this program was told to ignore (nohup, `&`) stays ignored."""
    return [number for number in _FORWARDED if signal.getsignal(number) is not signal.SIG_IGN]


def _wait(wake_ups: int, wait_ms: float) -> bytes:
    """Wait at most `wait_ms` for a wake-up; return the numbers of the signals that came."""
    ready, _, _ = select.select([wake_ups], [], [], wait_ms / 1000)
    return os.read(wake_ups, 4096) if ready else b""


def _ignore(_number: int, _frame: FrameType | None) -> None:
    """Do nothing, because the wake-up descriptor has received the signal."""


def _release(lease: Lease) -> None:
    try:
        lease.release()
    except RedfenceError as error:
        _print_error(f"release not confirmed; the lock is free after its ttl at the latest: {error}", 0)


def _describe(error: Exception) -> str:
    """Return the error's text; for a wrong argument, begin with its name on the command line."""
    argument = _ARGUMENT_BY_FIELD.get(error.field) if isinstance(error, InvalidArgumentError) else None
    return str(error) if argument is None else f"argument {argument}: {error}"


def _print_error(message: str, status: int) -> int:
    print(f"redfence lock: {message}", file=sys.stderr, flush=True)
    return status
