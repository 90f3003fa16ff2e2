"""Builds the programs in other languages below `.bench/`; a later run builds only what changed."""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

from bench.cluster import FOLDER, ServiceError

_GO = Path(__file__).resolve().parent / "go"
_BUF = Path(sys.executable).with_name("buf")
# etcd is built from a module of its own: so its dependencies have the versions that etcd was tested with.
_ETCD_PACKAGE = "go.etcd.io/etcd/server/v3"
_NODE = Path(__file__).resolve().parent / "node"
_AIOREDLOCK = "aioredlock==0.7.3"


def _once(build: Callable[[], Awaitable[Path]]) -> Callable[[], Awaitable[Path]]:
    """Let a run build a program once; a failure fails every later call, too."""
    builds: list[asyncio.Future[Path]] = []

    async def built() -> Path:
        if not builds:
            builds.append(asyncio.ensure_future(build()))
        return await builds[0]

    return built


@_once
async def go_client() -> Path:
    """Return the load program for redfence, etcd and redsync.

    Raises:
        ServiceError: Go is missing, or the build failed.
    """
    await _run(["go", "version"], folder=_GO)
    await _run([str(_BUF), "generate"], folder=_GO)
    return await _built("pairs", package=".", folder=_GO)


@_once
async def etcd() -> Path:
    """Return the etcd server.

    Raises:
        ServiceError: Go is missing, or the build failed.
    """
    return await _built("etcd", package=_ETCD_PACKAGE, folder=_GO / "etcd")


@_once
async def node_redlock() -> Path:
    """Return the load program for node-redlock.

    Raises:
        ServiceError: Node.js or npm is missing, or the installation failed.
    """
    await _run(["node", "--version"], folder=_NODE)
    await _run(["npm", "ci", "--silent", "--prefer-offline"], folder=_NODE)
    return _NODE / "load.js"


@_once
async def aioredlock() -> Path:
    """Return a Python that has aioredlock, which wants older packages than redfence does.

    Raises:
        ServiceError: the installation failed.
    """
    environment = FOLDER / "aioredlock"
    python = environment / "bin" / "python"
    FOLDER.mkdir(exist_ok=True)
    await _run([sys.executable, "-m", "venv", str(environment)], folder=FOLDER)
    await _run([str(python), "-m", "pip", "install", "--quiet", _AIOREDLOCK], folder=FOLDER)
    return python


async def _built(name: str, *, package: str, folder: Path) -> Path:
    FOLDER.mkdir(exist_ok=True)
    program = FOLDER / name
    await _run(["go", "build", "-o", str(program), package], folder=folder)
    return program


async def _run(command: list[str], *, folder: Path) -> None:
    if shutil.which(command[0]) is None:
        raise ServiceError(f"{command[0]} is not installed")
    process = await asyncio.create_subprocess_exec(
        *command, cwd=folder, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
    )
    _, errors = await process.communicate()
    if process.returncode:
        lines = errors.decode().strip().splitlines() or ["it said nothing"]
        raise ServiceError(f"`{Path(command[0]).name} {command[1]}` failed in {folder.name}/: {lines[-1]}")
