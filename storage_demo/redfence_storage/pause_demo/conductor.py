"""Plays the story: holder A is stopped past its lease, holder B takes over, then A continues and writes."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from redfence_storage.pause_demo.account import OPENING_BALANCE, PlainAccount

TTL_S = 2.0
# B waits until A's lease ends. A longer wait means that the lock server does not work.
_TAKE_OVER_S = 10.0
_DEPOSIT_A, _DEPOSIT_B = 10, 5


class DemoError(Exception):
    """The pause demo could not run; the message has the reason."""


@dataclass(frozen=True, slots=True)
class Stage:
    """The servers and files that the story uses.

    Attributes:
        servers: the addresses of the lock servers.
        storage: the address of the storage that checks tokens; None uses a plain file.
        credentials: the flags of TLS and of a token, for server and storage.
        environment: the variables of the workers.
        folder: the folder of the plain file.
        narrate: prints one line of the story.
    """

    servers: Sequence[str]
    storage: str | None
    credentials: Sequence[str]
    environment: Mapping[str, str]
    folder: Path
    narrate: Callable[[str], None]


class Worker:
    """Runs a worker process; leaving its `with` ends the process."""

    def __init__(self, stage: Stage, *, name: str, resource: str, amount: int, wait_s: float) -> None:
        where = (
            ["--storage", stage.storage] if stage.storage else ["--file", str(stage.folder / "balance.txt")]
        )
        self._name = name
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "redfence_storage.pause_demo.worker", "--name", name),
                *("--resource", resource, "--ttl", str(TTL_S), "--wait", str(wait_s)),
                *("--amount", str(amount), *where, *stage.credentials),
                *(word for address in stage.servers for word in ("--server", address)),
            ],
            env=stage.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    def read_event(self, *expected: str) -> dict[str, Any]:
        """Return the worker's next event.

        Raises:
            DemoError: the event is not one of the expected ones.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        event: dict[str, Any] = json.loads(line) if line else {"event": "nothing", "message": "it ended"}
        if event["event"] not in expected:
            raise DemoError(f"{self._name}: {event.get('message', event)}")
        return event

    def let_write(self) -> None:
        """Tell the worker to write."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop all threads of the process, as a garbage collector or a hypervisor can."""
        os.kill(self.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.pid, signal.SIGCONT)


def play(stage: Stage) -> bool:
    """Play the story; return whether the data is still correct.

    Raises:
        DemoError: a worker did something unexpected.
    """
    resource = f"demo/account-{secrets.token_hex(4)}"
    guard = "a storage that checks fencing tokens" if stage.storage else "a plain file, which checks nothing"
    stage.narrate(f"The account {resource} holds {OPENING_BALANCE}, kept in {guard}.")
    with Worker(stage, name="A", resource=resource, amount=_DEPOSIT_A, wait_s=0) as a:
        before = a.read_event("ready_to_write")
        stage.narrate(
            f"A  got the lock for {TTL_S:g} s with token {before['token']}, read {before['balance']} "
            f"and is about to write {before['balance'] + _DEPOSIT_A}. "
            f"Its lease is valid for another {before['remaining']} s."
        )
        started = time.monotonic()
        with a.stopped():
            stage.narrate(
                f"A  is stopped before its write (SIGSTOP to process {a.pid}), "
                "as by a long garbage collection."
            )
            after = _take_over(stage, resource)
            # A reads this order when it wakes up, and continues exactly where it was stopped.
            a.let_write()
        stage.narrate(
            f"A  wakes up after {time.monotonic() - started:.1f} s (SIGCONT), does not know that it was "
            f"stopped, and writes {before['balance'] + _DEPOSIT_A} with token {before['token']}."
        )
        end = a.read_event("refused", "written")
    return _judge(stage, end, token=before["token"], expected=after)


def _take_over(stage: Stage, resource: str) -> int:
    """Let B deposit its amount while A is stopped; return the balance that B wrote."""
    with Worker(stage, name="B", resource=resource, amount=_DEPOSIT_B, wait_s=_TAKE_OVER_S) as b:
        ready = b.read_event("ready_to_write")
        stage.narrate(f"B  waited until A's lease had expired, and got the lock with token {ready['token']}.")
        b.let_write()
        written = b.read_event("written")
        stage.narrate(
            f"B  read {ready['balance']}, deposited {_DEPOSIT_B}, wrote {written['balance']}, "
            "and released the lock."
        )
        balance: int = written["balance"]
        return balance


def _judge(stage: Stage, end: dict[str, Any], *, token: int, expected: int) -> bool:
    if end["event"] == "refused":
        stage.narrate(
            f"OK  The storage refused A's write: token {token} is stale, it has seen {end['highest_token']}. "
            f"The account holds {expected}, as B left it."
        )
        return True
    found = end["balance"]
    if stage.storage is None:
        found = PlainAccount(stage.folder / "balance.txt").read(token)
        stage.narrate(f"The file {stage.folder / 'balance.txt'} now says {found}.")
    stage.narrate(
        f"CORRUPTED  A's late write went through: the account holds {found}, "
        f"and B's deposit of {_DEPOSIT_B} is lost."
    )
    return False
