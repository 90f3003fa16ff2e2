"""Runs a soak: a server over three nodes, the processes of the load, and samples every few seconds."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from harness.doubles.lua_node import Database
from harness.fuzz.site import FuzzSite, fuzz_site
from harness.processes.commands import CommandProcess, CommandProcesses
from harness.processes.process_look import look_at_process
from harness.soak.judge import Judgement, Sample, Status, Wanted, judge
from redfence_server.embedded.binary import RedisBinary

LOOK_INTERVAL_MAX_S: Final = 10.0
_PAIRS_PROCESSES: Final = 2
_LOOKS_LEAST: Final = 12
# The load ends and reopens twenty of a thousand streams each second.
_LIFE_MAX_S: Final = 50.0
_START_TIMEOUT_S: Final = 60.0
_POLL_S: Final = 0.1
_TESTS = Path(__file__).resolve().parents[2]


def soak(wanted: Wanted, *, folder: Path, binary: RedisBinary, say: Callable[[str], None]) -> Judgement:
    """Run a soak and return its result; only the logs are left.

    Args:
        wanted: the load.
        folder: for the nodes and the logs; empty.
        binary: the program of the nodes.
        say: prints a line.
    """
    commands = CommandProcesses(folder / "load")
    try:
        with fuzz_site(folder / "site", binary=binary, appendfsync="always") as site:
            pairs, streams = _start_load(commands, site, wanted)
            _wait_for_streams(streams, wanted.streams)
            judgement = judge(_watch(site, pairs, streams, wanted, say), wanted)
            commands.close()
            complaints = tuple(site.complaints())
    finally:
        commands.close()
    if complaints:
        return Judgement(Status.GREW, (*judgement.sentences, "the server's log:", *complaints[:20]))
    return judgement


def _start_load(
    commands: CommandProcesses, site: FuzzSite, wanted: Wanted
) -> tuple[list[CommandProcess], CommandProcess]:
    def start(*arguments: object) -> CommandProcess:
        words = ("-m", "harness.soak.load", site.server_address, *map(str, arguments))
        return commands.start(sys.executable, *words, environment={"PYTHONPATH": str(_TESTS)})

    life_s = min(_LIFE_MAX_S, wanted.seconds / 4)
    streams = start("streams", wanted.streams, life_s)
    share = wanted.pairs_per_second / _PAIRS_PROCESSES
    return [start("pairs", share, number) for number in range(_PAIRS_PROCESSES)], streams


def _wait_for_streams(streams: CommandProcess, count: int) -> None:
    end_s = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < end_s:
        if _told(streams).get("opened", 0) >= count:
            return
        time.sleep(_POLL_S)
    raise AssertionError(f"{count} streams were not opened in {_START_TIMEOUT_S:g} s: {_told(streams)}")


def _watch(
    site: FuzzSite,
    pairs: Sequence[CommandProcess],
    streams: CommandProcess,
    wanted: Wanted,
    say: Callable[[str], None],
) -> list[Sample]:
    interval_s = min(LOOK_INTERVAL_MAX_S, wanted.seconds / _LOOKS_LEAST)
    began_at_s = time.monotonic()
    samples = [_look(site, pairs, streams, 0.0)]
    while samples[-1].at_s < wanted.seconds:
        next_at_s = len(samples) * interval_s
        time.sleep(max(0.0, began_at_s + next_at_s - time.monotonic()))
        before = samples[-1]
        samples.append(_look(site, pairs, streams, time.monotonic() - began_at_s))
        say(_line(before, samples[-1], [_told(each) for each in (*pairs, streams)]))
    return samples


def _look(site: FuzzSite, pairs: Sequence[CommandProcess], streams: CommandProcess, at_s: float) -> Sample:
    server = look_at_process(site.server.pid)
    return Sample(
        at_s=at_s,
        pairs=sum(_told(each).get("finished", 0) for each in pairs),
        streams=_told(streams).get("open", 0),
        rss_bytes=server.rss_bytes,
        fd_count=server.fd_count,
        node_bytes=sum(map(_used_memory, site.databases)),
    )


def _told(process: CommandProcess) -> dict[str, int]:
    """Return the counts that a load process printed last; fail if it has ended."""
    assert process.exit_status is None, f"a load has ended: {process.stderr}"
    lines = process.stdout.splitlines(keepends=True)
    whole = [line for line in lines[-2:] if line.endswith("\n")]
    told: dict[str, int] = json.loads(whole[-1]) if whole else {}
    return told


def _used_memory(database: Database) -> int:
    info: bytes = database.call("INFO", "memory")
    return int(info.partition(b"used_memory:")[2].split()[0])


def _line(before: Sample, sample: Sample, told: Sequence[dict[str, int]]) -> str:
    pace = (sample.pairs - before.pairs) / (sample.at_s - before.at_s)
    wrong = {
        name: sum(each.get(name, 0) for each in told)
        for name in ("refused", "skipped", "failed")
        if any(each.get(name) for each in told)
    }
    return (
        f"{sample.at_s:6.0f} s  {pace:7,.0f} pairs/s  {sample.streams:5,} streams "
        f"({told[-1].get('opened', 0):,} opened)  server {sample.rss_bytes / 2**20:6.1f} MiB, "
        f"{sample.fd_count} files  nodes {sample.node_bytes / 2**20:6.1f} MiB"
        + "".join(f"  {name} {count:,}" for name, count in wrong.items())
    )
