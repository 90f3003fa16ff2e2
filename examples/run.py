"""Runs the example programs: each is built from protos/ and talks to a fresh `redfence dev`.

`make examples` runs all; `make examples ARGS="go rust"` runs some. A language whose tools are missing
is skipped. The exit status is 1 if a program does not build, or fails, or does not end.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from redfence_server.embedded.parent_death import die_with_parent

EXAMPLES = Path(__file__).resolve().parent
BIN = Path(sys.executable).parent
READY = re.compile(r"redfence ready: lock server on (\S+), storage on (\S+),")
START_TIMEOUT_S = 30
# A program takes about 10 s. One that hangs must fail.
PROGRAM_TIMEOUT_S = 60
MAVEN = ["mvn", "--quiet", "--batch-mode"]


@dataclass(frozen=True)
class Program:
    """How to build and run the program of one language, in its folder."""

    tools: dict[str, str]  # the commands it needs, and what to install if one is missing
    build: list[list[str]]
    run: list[str]


PROGRAMS = {
    "go": Program(
        tools={"go": "Go 1.26 or newer"},
        build=[[str(BIN / "buf"), "generate"], ["go", "build", "-o", "build/redfence-example"]],
        run=["build/redfence-example"],
    ),
    "node": Program(
        tools={"node": "Node.js 20 or newer", "npm": "npm (it comes with Node.js)"},
        build=[["npm", "ci", "--silent"]],
        run=["node", "main.js"],
    ),
    "java": Program(
        tools={"javac": "a JDK, 17 or newer", "mvn": "Maven 3.8.2 or newer"},
        build=[[*MAVEN, "compile"]],
        run=[*MAVEN, "exec:java"],
    ),
    "rust": Program(
        tools={"cargo": "Rust 1.89 or newer"},
        build=[["cargo", "build", "--quiet", "--locked"]],
        run=["target/debug/redfence-example"],
    ),
}


@contextmanager
def redfence_dev() -> Iterator[dict[str, str]]:
    """Start `redfence dev` on free ports; yield the environment that names them; end it."""
    with tempfile.TemporaryDirectory(prefix="redfence-examples-") as folder:
        log = Path(folder, "log")
        command = [str(BIN / "redfence"), "dev", "--listen", "127.0.0.1:0", "--storage-listen", "127.0.0.1:0"]
        # A full pipe would stop the server. A file does not.
        with log.open("wb") as output:
            server = subprocess.Popen(
                die_with_parent(command), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )
        try:
            give_up_at = time.monotonic() + START_TIMEOUT_S
            while not (ready := READY.search(log.read_text())):
                if server.poll() is not None or time.monotonic() > give_up_at:
                    sys.exit(f"`redfence dev` did not start within {START_TIMEOUT_S} s:\n{log.read_text()}")
                time.sleep(0.05)
            yield {**os.environ, "REDFENCE_SERVER": ready[1], "REDFENCE_STORAGE": ready[2]}
        finally:
            server.terminate()
            try:
                server.wait(timeout=15)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def build(language: str, program: Program) -> bool:
    """Build one program; return whether that succeeded. The build tool reports its errors itself."""
    started = time.monotonic()
    for command in program.build:
        if subprocess.run(command, cwd=EXAMPLES / language, stdin=subprocess.DEVNULL, check=False).returncode:
            return False
    print(f"{language}: built in {time.monotonic() - started:.0f} s", flush=True)
    return True


def run(language: str, program: Program, environment: dict[str, str]) -> bool:
    """Run one built program; return whether it exited with 0 in time."""
    try:
        ended = subprocess.run(
            program.run,
            cwd=EXAMPLES / language,
            env=environment,
            stdin=subprocess.DEVNULL,
            timeout=PROGRAM_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        print(f"{language}: killed the program, which did not end within {PROGRAM_TIMEOUT_S} s", flush=True)
        return False
    return ended.returncode == 0


def main() -> int:
    """Build and run the chosen programs; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "languages", nargs="*", metavar="LANGUAGE", help=f"{', '.join(PROGRAMS)} (default: all)"
    )
    chosen = parser.parse_args().languages or list(PROGRAMS)
    if unknown := set(chosen) - set(PROGRAMS):
        parser.error(f"no example for {', '.join(sorted(unknown))}; choose from {', '.join(PROGRAMS)}")
    failed, skipped, passed = [], [], []
    with redfence_dev() as environment:
        for language in chosen:
            program = PROGRAMS[language]
            missing = [what for tool, what in program.tools.items() if not shutil.which(tool)]
            if missing:
                print(f"{language}: skipped; install {' and '.join(missing)}", flush=True)
                skipped.append(language)
            elif build(language, program) and run(language, program, environment):
                passed.append(language)
            else:
                print(f"{language}: FAILED", flush=True)
                failed.append(language)
    print(f"{len(passed)} passed, {len(failed)} failed, {len(skipped)} skipped")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
