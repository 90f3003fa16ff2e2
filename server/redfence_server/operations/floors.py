"""Choose the floor above which the tokens of a cluster begin, or go on after nodes forgot them. Pure.

The operator, who can ask the storage, gives a number or leaves it to the clock.

The clock will do, because tokens grow more slowly than the microseconds since 1970. Each token takes a script
on a node, about ten microseconds, and is one above the greatest that this node knows. Each floor that is
reserved for a node adds 2^20, about a second. Assume that nodes come back less often than once a second on
average. Then the tokens minted since the last recovery, at t0, are fewer than the microseconds from t0 to
now. So every token is below now + 2^20. A new cluster begins at 0, half a century behind the clock.

The argument fails if the clock is behind its time at the last recovery, or if a floor given by hand is still
ahead of the clock. It also fails if processes restart, or fences fail, more than once a second for long. But
each token that a node still shows counts as well, so harm needs the loss of every node that knows.
"""

from __future__ import annotations

from typing import Final

from redfence_proto import bounds
from redfence_server.errors import ConfigError
from redfence_server.membership.fence import TOKENS_JUMP

FLOOR_MAX: Final = bounds.FENCING_TOKEN_MAX - 2**20 * TOKENS_JUMP
"""A greater floor leaves no room for tokens above it: each return of a node takes a jump."""
WALL_US_MIN: Final = 1_735_689_600_000_000
"""The beginning of 2025. A clock before it was never set, and may be behind that of a former recovery."""


def floor_of(asked: int | None, *, known: int, begun: int, wall_us: int) -> int:
    """Return the floor that was asked for; None takes it from the clock, `wall_us` after 1970.

    `known` is the greatest number that the nodes show, and `begun` the floor of a command that broke off.

    Raises:
        ConfigError: it is not above what is known or leaves no tokens; or this machine's clock was never set.
    """
    if asked is None:
        if wall_us < WALL_US_MIN:
            raise ConfigError(
                "floor: this machine's clock was never set, so it is no measure; set it, or give a number"
            )
        asked = max(known, wall_us) + TOKENS_JUMP
    if asked <= known == begun:
        asked = known + 1  # the same command once more: what it has reserved is in its own way
    if asked <= known:
        raise ConfigError(
            f"floor: {asked} is not above {known}, the greatest number that the nodes show; give "
            f"{known + 1} at the least, and more than the highest token that any storage has seen"
        )
    if asked > FLOOR_MAX:
        raise ConfigError(f"floor: {asked} leaves too few of the numbers below 2^53; {FLOOR_MAX} is the most")
    return asked
