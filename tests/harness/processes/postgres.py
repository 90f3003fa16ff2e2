"""A real PostgreSQL server of this test run, on a Unix socket; it ends with the run, however that ends."""

from __future__ import annotations

import itertools
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, Self

import psycopg

from harness.processes.scratch import memory_folder

_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 20.0
_POLL_INTERVAL_S = 0.02
# PostgreSQL refuses to run as root; either account will do.
_ACCOUNTS = ("postgres", "nobody")


class NoPostgresError(Exception):
    """The programs of PostgreSQL are missing, or this user cannot run them."""


def _binary(name: str) -> str:
    """Return the path of a program; Debian keeps those of the server away from PATH."""
    versions = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"), key=lambda path: path.parts[4])
    if found := (str(versions[-1]) if versions else shutil.which(name)):
        return found
    raise NoPostgresError(f"no {name} on this machine")


def _account() -> pwd.struct_passwd | None:
    """Return the account that runs the server; None means the present user, who is not root."""
    if os.geteuid() != 0:
        return None
    for name in _ACCOUNTS:
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    raise NoPostgresError("PostgreSQL does not run as root, and there is no account postgres or nobody")


class PostgresServer:
    """One server, whose databases are empty; use it as a context manager."""

    def __init__(self) -> None:
        postgres, initdb = _binary("postgres"), _binary("initdb")
        self._names = itertools.count()
        # The folders of pytest are closed to other accounts, and too deep for the path of a socket.
        self._folder = Path(tempfile.mkdtemp(prefix="redfence-pg-", dir=memory_folder()))
        account = _account()
        as_account: dict[str, Any] = {}
        if account is not None:
            os.chown(self._folder, account.pw_uid, account.pw_gid)
            as_account = {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}
        quiet = {"stdin": subprocess.DEVNULL, "cwd": "/", **as_account}
        data = self._folder / "data"
        options = ("--auth=trust", "--username=redfence", "--encoding=UTF8", "--no-locale", "--no-sync")
        made = subprocess.run(
            [initdb, "-D", str(data), *options], capture_output=True, text=True, check=False, **quiet
        )
        if made.returncode:
            shutil.rmtree(self._folder)
            raise AssertionError(f"initdb failed: {made.stderr}")
        command = [postgres, "-D", str(data), "-F", "-c", "listen_addresses="]
        command += ["-c", f"unix_socket_directories={self._folder}", "-c", "max_connections=50"]
        if dies_with_us := shutil.which("setpriv"):
            # Set by the child itself: a change of the account before would clear it.
            command = [dies_with_us, "--pdeathsig", "QUIT", *command]
        self._log = self._folder / "log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, **quiet)

    def __enter__(self) -> Self:
        try:
            self._wait_until_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        # SIGINT ends it at once and cleanly, whatever clients are connected.
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._folder)

    @property
    def folder(self) -> Path:
        """Where its socket is."""
        return self._folder

    def new_database(self) -> str:
        """Create an empty database, and return its name."""
        name = f"test{next(self._names)}"
        with psycopg.connect(self.conninfo("postgres"), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}".encode())
        return name

    def conninfo(self, database: str) -> str:
        """Return the words by which libpq finds a database."""
        return f"host={self._folder} user=redfence dbname={database}"

    def _wait_until_ready(self) -> None:
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while True:
            try:
                psycopg.connect(self.conninfo("postgres")).close()
            except psycopg.OperationalError as error:
                if self._process.poll() is not None or time.monotonic() > deadline_s:
                    raise AssertionError(f"postgres did not start: {self._log.read_text()}") from error
                time.sleep(_POLL_INTERVAL_S)
            else:
                return
