"""Computes the pause before a retry: exponential, with jitter and an upper bound. Pure."""

from __future__ import annotations

# 2^10 times the base exceeds every cap in use. Without this bound the power would overflow in a long outage.
_DOUBLINGS_MAX = 10


def backoff_ms(failures: int, *, base_ms: float, cap_ms: float, fraction: float) -> float:
    """Return a pause that doubles with each failure and never exceeds `cap_ms`.

    Args:
        failures: how many attempts failed in a row, ≥ 1.
        base_ms: the longest pause after the first failure.
        cap_ms: the longest pause of all.
        fraction: a random number in [0, 1). It places the pause between half of its longest value and
            the whole. So clients that failed together do not return together.
    """
    doubled = base_ms * 2.0 ** min(max(failures, 1) - 1, _DOUBLINGS_MAX)
    return min(doubled, cap_ms) * (0.5 + 0.5 * fraction)
