"""How long to pause before trying again: exponential, with jitter, bounded. Pure."""

from __future__ import annotations

# 2^10 times the base is past every cap in use; without a bound a long outage would overflow the power.
_DOUBLINGS_MAX = 10


def backoff_ms(failures: int, *, base_ms: float, cap_ms: float, fraction: float) -> float:
    """Return a pause that doubles with each failure and never exceeds `cap_ms`.

    Args:
        failures: how many tries failed in a row, ≥ 1.
        base_ms: the greatest pause after the first failure.
        cap_ms: the greatest pause ever.
        fraction: chance in [0, 1): the pause lies between half of its greatest value and the whole, so that
            clients that failed together do not return together.
    """
    doubled = base_ms * 2.0 ** min(max(failures, 1) - 1, _DOUBLINGS_MAX)
    return min(doubled, cap_ms) * (0.5 + 0.5 * fraction)
