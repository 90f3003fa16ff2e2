"""Lists all faults and injects them in a seeded order, a few at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from random import Random
from types import MappingProxyType
from typing import TypeAlias

import hiredis

from harness.chaos.fault_injection import FaultInjection, FaultInjector
from harness.chaos.limit_faults import CLOCK_STEPPED, LIMIT_FAULTS, SERVER_CLOCK
from harness.chaos.memory_faults import DISK_FULL, LOG_CUT, MEMORY_FAULTS
from harness.chaos.network_faults import NETWORK_FAULTS, NODE_COPIED
from harness.chaos.process_faults import PROCESS_FAULTS
from harness.history.records import MAJORITY_WIPED

Draw: TypeAlias = Callable[[FaultInjector, Random], FaultInjection]

FAULTS: Mapping[str, Draw] = MappingProxyType(
    {**PROCESS_FAULTS, **MEMORY_FAULTS, **NETWORK_FAULTS, **LIMIT_FAULTS}
)
# Every other fault has weight 2. A recovery keeps all other faults waiting.
_WEIGHTS: Mapping[str, int] = MappingProxyType({MAJORITY_WIPED: 1})
_HOLDER_PAUSED = "holder paused"
_MIXED_LANES = 3
_PAUSE_S_MAX = 0.6


def possible(
    *,
    clocks: bool,
    small_disk: bool,
    logs: bool = True,
    only: Collection[str] = (),
    without: Collection[str] = (),
) -> list[str]:
    """Return the requested faults that are possible with this machine and with nodes with or without logs."""
    missing = set(without)
    if not clocks:
        missing |= {CLOCK_STEPPED, SERVER_CLOCK}
    if not small_disk:
        missing |= {DISK_FULL}
    if not logs:
        missing |= {DISK_FULL, LOG_CUT, NODE_COPIED}
    return [name for name in FAULTS if name not in missing and (not only or name in only)]


def draw(kind: str, injector: FaultInjector, random: Random) -> FaultInjection:
    """Return a fault of this kind with a random target and length."""
    return replace(FAULTS[kind](injector, random), kind=kind)


def deck(names: Collection[str], random: Random) -> list[str]:
    """Return a random order in which each fault comes as often as its weight says."""
    cards = [name for name in names for _ in range(_WEIGHTS.get(name, 2))]
    random.shuffle(cards)
    return cards


async def inject_faults(
    injector: FaultInjector, names: Collection[str], *, seed: str, lasts_s: float
) -> None:
    """Inject faults for this long, a few at once; return when the last fault has ended.

    The seed alone decides what is drawn. The machine decides as well when a fault begins.
    """
    random = Random(seed)
    holders = Random(f"{seed}/holders")
    cards: list[str] = []

    def mixed() -> FaultInjection:
        if not cards:
            cards.extend(deck(names, random))
        return draw(cards.pop(), injector, random)

    def of_holders() -> FaultInjection:
        return draw(_HOLDER_PAUSED, injector, holders)

    async with asyncio.TaskGroup() as lanes:
        # The storage must receive late writes all the time, however long the other faults last.
        first = of_holders if _HOLDER_PAUSED in names else mixed
        lanes.create_task(_lane(injector, first, holders))
        for _ in range(_MIXED_LANES):
            lanes.create_task(_lane(injector, mixed, random))
        await asyncio.sleep(lasts_s)
        await injector.end()


async def _lane(injector: FaultInjector, draw_next: Callable[[], FaultInjection], random: Random) -> None:
    while not injector.ending.is_set():
        injection, pause_s = draw_next(), random.uniform(0.0, _PAUSE_S_MAX)
        try:
            await injector.inject(injection)
        except (AssertionError, OSError, RuntimeError, hiredis.HiredisError) as error:
            # The run goes on, for it can still find violations; but it cannot pass.
            injector.unhealed.append(f"{injection.kind} of {injection.target}: {error!r}")
        await asyncio.sleep(pause_s)
