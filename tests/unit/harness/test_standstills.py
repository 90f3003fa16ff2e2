"""What a failure is told of the machine: that this process could not run for a while."""

from __future__ import annotations

import os
import subprocess
import time

from harness.time.stalls import StandstillWatch


def test_a_stop_of_this_process_is_told_to_what_began_before_it_and_not_to_what_began_after() -> None:
    """By another process that stops this one for half a second."""
    watch = StandstillWatch()
    watch.start()
    try:
        before = watch.mark()
        script = f"kill -STOP {os.getpid()}; sleep 0.5; kill -CONT {os.getpid()}"
        subprocess.run(["sh", "-c", script], check=True)
        while "nothing ran for" not in watch.told_since(before):
            time.sleep(0.01)
        after = watch.mark()
        assert "nothing ran for" not in watch.told_since(after)
    finally:
        watch.stop()
