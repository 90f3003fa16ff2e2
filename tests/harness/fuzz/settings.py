"""The number of examples: few fixed ones in CI, many random ones with `REDFENCE_FUZZ_FACTOR`.

A failure prints the blob that repeats it; `make fuzz` sets the factor.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

FACTOR = "REDFENCE_FUZZ_FACTOR"

settings.register_profile(
    "ci",
    derandomize=True,
    deadline=None,
    database=None,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)
settings.register_profile("fuzz", settings.get_profile("ci"), derandomize=False)


def factor() -> int:
    """Return how many times the examples of CI are to be tried; 1 unless the environment says more."""
    wanted = int(os.environ.get(FACTOR, "1"))
    assert wanted >= 1, f"{FACTOR} is {wanted}; it has to be at least 1"
    return wanted


def tried(examples: int, *, steps: int = 50) -> settings:
    """Return settings that try so many examples, times the factor."""
    profile = settings.get_profile("ci" if factor() == 1 else "fuzz")
    return settings(profile, max_examples=examples * factor(), stateful_step_count=steps)
