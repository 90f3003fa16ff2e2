"""`python -m harness.chaos.upgrade` replaces servers of an earlier version by this one under load, and back.

It exits with 0 if clients saw nothing but what a drain permits and every promise held, with 1 otherwise, and
with 2 if the run proves nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from harness.chaos.cluster import Plan
from harness.chaos.fault_injection import FaultInjector
from harness.chaos.recorder import now_s
from harness.chaos.run import Run, Schedule, run
from harness.chaos.services import Installation
from harness.history.checker import check
from harness.history.records import Fault, Kind, Operation, Outcome
from harness.processes.servers import until

# The last commit before the work on 0.2.0's operations: the stand-in for a release until there is a tag.
_FIRST: Final = "cc7cfba2f349fb920305d6fcd718304831aa0376"
_REPOSITORY: Final = Path(__file__).resolve().parents[3]
# Neighbours of one workload run different versions.
_MIX: Final = tuple(name for name in ("sdk", "threads", "append", "race", "keep") for _ in range(2))
_OF_SDK: Final = ("sdk", "threads")
# How long clients work with each pair of versions. It exceeds the ttl of every lease.
_STAGE_S: Final = 4.0
_READY_S: Final = 30.0
# A client's connection to a restarted server comes back within its longest backoff.
_BACKOFF_S: Final = 1.5
# Callers of the stubs may see this of a server that drains or starts: its own words, or the transport's.
# gRPC cancels a call that meets the stop of its server, and answers INTERNAL to a write to an ended stream.
_OF_A_RESTART: Final = re.compile(
    "(ERROR_REASON_)?DRAINING|UNAVAILABLE|CANCELLED|INTERNAL|the stream ended|QUORUM_UNAVAILABLE .*=joining.*"
)
_SHOWN_MAX: Final = 20


def main() -> int:
    """Install the earlier version, run, and print what clients saw."""
    parser = argparse.ArgumentParser(prog="python -m harness.chaos.upgrade", description=__doc__)
    parser.add_argument(
        "--from", dest="revision", metavar="REVISION", help="default: the last v* tag below HEAD"
    )
    revision = _full(parser.parse_args().revision or last_tag() or _FIRST)
    with tempfile.TemporaryDirectory(prefix="redfence-upgrade-") as name:
        folder = Path(name)
        _say(f"installing {revision} in a folder of its own")
        before = _install(revision, folder / "before")
        (folder / "run").mkdir()
        ran = asyncio.run(_upgrade(before, folder / "run"))
    verdict = check(ran.history)
    complaints = [
        *(f"{each.invariant}: {each.words}" for each in verdict.violations),
        *ran.defects,
        *_errors(ran.history.operations, ran.history.faults),
    ]
    invalid = [*ran.wrong, *verdict.invalid]
    for line in [*complaints, *invalid][:_SHOWN_MAX]:
        _say(line)
    grants = verdict.counts.operations[Kind.ACQUIRE][Outcome.OK]
    _say(
        f"{len(ran.history.faults)} servers replaced; {len(ran.history.operations)} calls, {grants} grants, "
        f"longest time without a grant {verdict.counts.longest_gap_s:.2f} s; {len(complaints)} errors"
    )
    _say("broken" if complaints else "invalid" if invalid else "passed")
    return 1 if complaints else 2 if invalid else 0


async def _upgrade(before: Installation, folder: Path) -> Run:
    plan = Plan(server_program=before.redfence)
    schedule = Schedule(
        seed=1, lasts_s=0.0, faults=(), client_count=len(_MIX), mix=_MIX, clients=(before, Installation())
    )

    async def replace_servers(injector: FaultInjector) -> None:
        for name, installation in (("this version", Installation()), ("the earlier version", before)):
            for number in range(plan.server_count):
                await _replace(injector, number, installation, name)
                await asyncio.sleep(_STAGE_S)

    return await run(plan, schedule, folder=folder, say=_say, disturb=replace_servers)


async def _replace(injector: FaultInjector, number: int, installation: Installation, name: str) -> None:
    began_s, server = now_s(), injector.cluster.servers[number]
    status = await server.replace(installation.redfence)
    if status != 0:
        injector.broken.append(f"the drain of server {number} ended with status {status}")
    await until(server.is_ready, timeout_s=_READY_S)
    injector.record(Fault(f"replaced by {name}", f"server {number}", began_s, now_s()))
    _say(f"  server {number} runs {name} after {now_s() - began_s:.1f} s")


def _errors(operations: Sequence[Operation], replacements: Sequence[Fault]) -> Iterator[str]:
    """Yield every call that failed beyond what the documentation permits while a server is replaced."""
    for call in operations:
        if not (call.admission_refused or call.stale or call.lost or _is_unknown(call)):
            continue
        ended_s = call.completed_s or call.invoked_s
        if not call.client.startswith(_OF_SDK):
            near = any(each.began_s <= ended_s <= each.ended_s + _BACKOFF_S for each in replacements)
            if near and _OF_A_RESTART.fullmatch(call.detail):
                continue
            # These callers also release what was not granted, and check what they have released.
            if call.lost and call.kind is not Kind.RENEW:
                continue
        yield f"{call.client}: {call.kind} of {call.resource!r} failed: {call.detail or 'no answer'}"


def _is_unknown(call: Operation) -> bool:
    """Tell whether the outcome of a call is unknown; the SDK's `lock()` never reports its release."""
    return call.outcome is Outcome.UNKNOWN and (call.kind is not Kind.RELEASE or bool(call.detail))


def _install(revision: str, folder: Path) -> Installation:
    """Install a revision with the packages that it locks, or those of this version if it locks none.

    pip checks each package by its hash.
    """
    folder.mkdir()
    archive = subprocess.run(["git", "archive", revision], cwd=_REPOSITORY, check=True, capture_output=True)
    subprocess.run(["tar", "-x"], cwd=folder, check=True, input=archive.stdout)
    locks = next(
        each / "locks/dev.txt" for each in (folder, _REPOSITORY) if (each / "locks/dev.txt").exists()
    )
    python = folder / ".venv/bin/python"
    subprocess.run([sys.executable, "-m", "venv", folder / ".venv"], check=True)
    for command in (
        ("install", "--quiet", "--require-hashes", "--requirement", locks),
        ("install", "--quiet", "--no-deps", "--no-build-isolation", "--editable", folder),
        # The packages of another version may not fit.
        ("check",),
    ):
        subprocess.run([python, "-m", "pip", "--disable-pip-version-check", *command], check=True)
    return Installation(python, folder / "tests")


def last_tag(repository: Path = _REPOSITORY) -> str:
    """Return the newest v* tag below HEAD, or an empty text.

    A tag at HEAD names this version itself, so it does not count.
    """
    below = ("--merged=HEAD", "--no-contains=HEAD")
    named = ("for-each-ref", "--count=1", *below, "--sort=-creatordate", "--format=%(refname:short)")
    return _git(*named, "refs/tags/v[0-9]*", folder=repository)


def _full(revision: str) -> str:
    try:
        return _git("rev-parse", "--verify", f"{revision}^{{commit}}")
    except subprocess.CalledProcessError:
        sys.exit(f"upgrade-check: this clone has no commit {revision!r}; fetch it, or name another by FROM")


def _git(*arguments: str, folder: Path = _REPOSITORY) -> str:
    done = subprocess.run(["git", *arguments], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
