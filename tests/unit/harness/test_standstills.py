"""What a failure is told of the machine: that this process could not run for a while."""

from __future__ import annotations

import os
import subprocess
import time

from harness.time.stalls import StallWatch


def test_a_stop_of_this_process_is_told_to_watches_that_began_before_it() -> None:
    watch = StallWatch()
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
