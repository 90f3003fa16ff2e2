"""Count the cores that this process may use."""

from __future__ import annotations

import os
from pathlib import Path


def usable_cores() -> int:
    """Return how many cores the affinity and the CPU quota of the control group allow, at least 1."""
    return max(1, min(len(os.sched_getaffinity(0)), _quota_cores() or os.cpu_count() or 1))


def _quota_cores() -> int | None:
    """Return the whole cores of the quota (cgroup v2), or None without one."""
    try:
        # "0::PATH"; a container sees its own group as the root.
        group = Path("/proc/self/cgroup").read_text().rpartition("0::/")[2].strip()
        quota, period = (Path("/sys/fs/cgroup") / group / "cpu.max").read_text().split()
        return None if quota == "max" else max(1, int(quota) // int(period))
    except (OSError, ValueError):
        return None
