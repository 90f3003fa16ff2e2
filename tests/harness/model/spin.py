"""Run the model checker Spin on a Promela model: all reachable states, or the first broken assertion."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

SPIN_MISSING = (
    "the model checker is missing: install Spin and a C compiler (Debian: apt-get install spin gcc libc6-dev)"
)

_MEMORY_MB_MAX = 4_000
_DEPTH_MAX = 10_000
_TIMEOUT_S = 110
# A higher level makes the largest searches faster, but its compilation takes longer than it saves.
_OPTIMIZATION = "-Og"
# The slots of the hash table, as powers of two. To clear a large table takes longer than a short search.
_SMALL, _LARGE = 20, 24


@dataclass(frozen=True, slots=True)
class Search:
    """The result of a search; `violated` is empty if every assertion holds in all states."""

    violated: str
    states: int
    steps: tuple[str, ...] = ()
    seen: frozenset[str] = frozenset()


def is_spin_here() -> bool:
    return shutil.which("spin") is not None and _compiler() is not None


def search(
    model: Path,
    defines: Mapping[str, str | int],
    folder: Path,
    *,
    is_large: bool = False,
    checks_bounds: bool = True,
) -> Search:
    """Search the whole of a model, or until an assertion fails.

    Args:
        model: its file.
        defines: preprocessor symbols that make up the configuration.
        folder: an empty one, for what the checker writes.
        is_large: there are many states, so a faster checker is worth its compilation.
        checks_bounds: fail also if an index is out of bounds, which takes time.

    Raises:
        AssertionError: the search was not carried out to the end, so it tells nothing.
    """
    flags = [f"-D{name}={value}" for name, value in defines.items()]
    _run(["spin", "-a", *flags, str(model)], folder)
    compiler = _compiler()
    assert compiler is not None, SPIN_MISSING
    # Every step matters to an assertion, so there is nothing that partial order reduction could leave out.
    checker = ["-DSAFETY", "-DNOREDUCE", f"-DMEMLIM={_MEMORY_MB_MAX}"]
    checker += [_OPTIMIZATION if is_large else "-O0"]
    checker += [] if checks_bounds else ["-DNOBOUNDCHECK"]
    _run([compiler, *checker, "-o", "pan", "pan.c"], folder)
    said = _run(["./pan", f"-m{_DEPTH_MAX}", f"-w{_LARGE if is_large else _SMALL}"], folder)
    states = re.search(r"^ *(\S+) states, stored", said, re.MULTILINE)
    assert states is not None, said
    count = int(float(states[1]))
    violation = re.search(r"^pan:\d+: (.*) \(at depth \d+\)$", said, re.MULTILINE)
    if violation is None:
        assert "errors: 0" in said, said
        assert "Search not completed" not in said, said
        return Search("", count, seen=frozenset(re.findall(r"^seen: (\w+)$", said, re.MULTILINE)))
    assert violation[1].startswith("assertion violated "), said
    violated = violation[1].removeprefix("assertion violated ").strip()
    (trail,) = folder.glob("*.trail")
    replay = _run(["spin", "-t", "-k", trail.name, *flags, str(model)], folder)
    steps = tuple(line.strip() for line in replay.partition("\nspin: ")[0].splitlines())
    return Search(violated, count, steps)


def _compiler() -> str | None:
    return shutil.which("gcc") or shutil.which("cc")


def _run(command: list[str], folder: Path) -> str:
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
    )
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout
