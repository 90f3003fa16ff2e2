"""A die_with_parent process dies with its parent."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from redfence_server.embedded import parent_death

_PARENT = """
import signal, subprocess
from redfence_server.embedded.parent_death import die_with_parent
subprocess.Popen(die_with_parent(["/bin/sh", "-c", "echo up; exec sleep 100"]))
signal.pause()
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a child with its parent")


def test_the_process_is_the_program_itself_with_its_arguments() -> None:
    command = parent_death.die_with_parent(["/bin/sh", "-c", 'echo "$$ $1"', "sh", "an argument"])
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert child.communicate()[0] == f"{child.pid} an argument\n"


def test_a_parent_that_is_already_gone_starts_nothing() -> None:
    command = parent_death.die_with_parent(["/bin/echo", "started"])
    # Any process but this one is a parent that the child does not have.
    command[command.index(str(os.getpid()))] = str(os.getppid())
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (finished.returncode, finished.stdout) == (1, "")
    assert "the parent is gone" in finished.stderr


def test_a_process_is_killed_when_its_parent_is() -> None:
    # The child holds the pipe's only other writing end: reading ends when both are dead.
    parent = subprocess.Popen([sys.executable, "-c", _PARENT], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"up\n"
    parent.kill()
    assert parent.communicate(timeout=5)[0] == b""
