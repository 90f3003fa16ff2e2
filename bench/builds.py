"""Builds the programs in other languages below `.bench/`; a later run builds only what changed."""

from __future__ import annotations

import asyncio
import shutil
import sys
from pathlib import Path

from bench.cluster import FOLDER, ServiceError

_GO = Path(__file__).resolve().parent / "go"
_BUF = Path(sys.executable).with_name("buf")
# etcd is built from a module of its own: so its dependencies have the versions that etcd was tested with.
_ETCD_PACKAGE = "go.etcd.io/etcd/server/v3"


async def go_client() -> Path:
    """Return the load program for redfence, etcd and redsync.

    Raises:
        ServiceError: Go is missing, or the build failed.
    """
    await _run([str(_BUF), "generate"], folder=_GO)
    return await _built("pairs", package=".", folder=_GO)


async def etcd() -> Path:
    """Return the etcd server.

    Raises:
        ServiceError: Go is missing, or the build failed.
    """
    return await _built("etcd", package=_ETCD_PACKAGE, folder=_GO / "etcd")


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
        raise ServiceError(f"`{' '.join(command[:2])}` failed in {folder.name}/: {lines[-1]}")
