"""What can happen to a node's disk: an older copy is put back, or the end of its log is lost."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from harness.processes.redis_nodes import RedisNode
from redfence_server.embedded.binary import RedisBinary

_TOOL_TIMEOUT_S = 10.0
_Command = tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Transaction:
    """What a node logs in one piece: a command, or all that a script has written.

    Attributes:
        starts_at, ends_at: places in the file, in bytes.
    """

    starts_at: int
    ends_at: int
    commands: tuple[_Command, ...]


def transactions(log: bytes) -> list[Transaction]:
    """Return the complete transactions of an append-only file, which holds nothing else."""
    found: list[Transaction] = []
    commands: list[_Command] = []
    place = started_at = 0
    while (read := _read_command(log, place)) is not None:
        command, place = read
        commands.append(command)
        if commands[0][0].upper() != b"MULTI" or command[0].upper() == b"EXEC":
            found.append(Transaction(started_at, place, tuple(commands)))
            commands, started_at = [], place
    return found


def _read_command(log: bytes, place: int) -> tuple[_Command, int] | None:
    """Return the command that begins at `place` and where it ends, or None if it is cut off."""

    def number(sign: bytes) -> int | None:
        nonlocal place
        end = log.find(b"\r\n", place)
        if end < 0:
            return None
        assert log[place : place + 1] == sign, f"no {sign!r} at byte {place} of the log"
        value, place = int(log[place + 1 : end]), end + 2
        return value

    count = number(b"*")
    if count is None:
        return None
    words = []
    for _ in range(count):
        size = number(b"$")
        if size is None or len(log) < place + size + 2:
            return None
        words.append(log[place : place + size])
        place += size + 2
    return tuple(words), place


def log_file(node: RedisNode) -> Path:
    """Return the file that the node appends to."""
    # Redis 6.2 keeps one file; later ones keep a folder, whose last increment is what grows.
    files = [*node.folder.glob("appendonly.aof"), *sorted(node.folder.glob("appendonlydir/*.incr.aof"))]
    return files[-1]


def lose_last(node: RedisNode, count: int, is_counted: Callable[[Transaction], bool]) -> list[Transaction]:
    """Cut the log before the last `count` transactions of a kind, and return the lost ones.

    The cut is clean: under any settings the node starts and finds nothing wrong. It must be down.
    """
    assert not node.is_running, "end the node first"
    path = log_file(node)
    logged = transactions(path.read_bytes())
    first = [place for place, each in enumerate(logged) if is_counted(each)][-count]
    os.truncate(path, logged[first].starts_at)
    return logged[first:]


def raises_greatest_token(each: Transaction) -> bool:
    """Tell whether the node has minted or learnt its greatest token here."""
    return any(command[:2] == (b"SET", b"redfence:high") for command in each.commands)


def repair_log(node: RedisNode) -> None:
    """Drop the part of a transaction at the log's end. The node must be down."""
    assert not node.is_running, "end the node first"
    # The server's program is the tool as well, by the name it is called.
    tool = [f"{node.binary.engine}-check-aof", "--fix", str(log_file(node))]
    done = subprocess.run(
        tool,
        executable=node.binary.path,
        input=b"y\n",
        capture_output=True,
        check=False,
        timeout=_TOOL_TIMEOUT_S,
    )
    assert done.returncode == 0, (done.stdout, done.stderr)


def copy_data(node: RedisNode, to: Path) -> Path:
    """Copy the running node's data at one instant, as a snapshot of its disk does. Return `to`."""
    node.pause()
    try:
        shutil.copytree(node.folder, to)
    finally:
        node.resume()
    return to


def put_back(node: RedisNode, copy: Path) -> None:
    """Replace the node's data by a copy that was made earlier. It must be down."""
    node.wipe()
    shutil.copytree(copy, node.folder)


def with_settings(binary: RedisBinary, *settings: str, wrapper: Path) -> RedisBinary:
    """Return `binary` with settings that win over the node's file, e.g. `"--appendonly", "no"`.

    Args:
        binary: the program.
        settings: as on its command line.
        wrapper: where to write the program.
    """
    words = " ".join(map(shlex.quote, settings))
    wrapper.parent.mkdir(parents=True, exist_ok=True)
    wrapper.write_text(f'#!/bin/sh\nexec {shlex.quote(str(binary.path))} "$@" {words}\n')
    wrapper.chmod(0o700)
    return replace(binary, path=wrapper)
