"""The list of faults, and in which order they come: drawn by seed, alone or mixed, a few at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from functools import partial
from random import Random
from types import MappingProxyType
from typing import TypeAlias

import hiredis

from harness.chaos import limit_faults, memory_faults, network_faults, process_faults
from harness.chaos.fault_injection import FaultInjection, FaultInjector
from harness.history.records import MAJORITY_WIPED

Draw: TypeAlias = Callable[[FaultInjector, Random], FaultInjection]

CLOCK_STEPPED = "clock stepped"
SERVER_CLOCK = "server clock wrong"
DISK_FULL = "disk full"
LOG_CUT = "log cut"
NODE_COPIED = "node doubled: copy"
FAULTS: Mapping[str, Draw] = MappingProxyType(
    {
        "holder paused": process_faults.holder_paused,
        "holder killed": process_faults.holder_killed,
        "server paused": process_faults.server_paused,
        "server killed": process_faults.server_killed,
        "server drained": process_faults.server_drained,
        "storage paused": process_faults.storage_paused,
        "storage killed": process_faults.storage_killed,
        "node paused": process_faults.node_paused,
        "node killed": process_faults.node_killed,
        "node wiped": memory_faults.node_wiped,
        LOG_CUT: memory_faults.log_cut,
        DISK_FULL: memory_faults.disk_full,
        "settings changed": memory_faults.settings_changed,
        MAJORITY_WIPED: memory_faults.majority_wiped,
        "partition: one node": network_faults.one_cut_off,
        "partition: halves": network_faults.halves,
        "partition: ring": network_faults.ring,
        "partition: one way": network_faults.one_way,
        "node never answers": network_faults.swallowed,
        "delay": network_faults.delayed,
        "sliced bytes": network_faults.sliced,
        "replies lost": network_faults.replies_lost,
        "connections reset": network_faults.reset,
        "node doubled: empty": partial(network_faults.node_doubled, copies=False),
        NODE_COPIED: partial(network_faults.node_doubled, copies=True),
        "maxclients": limit_faults.clients_limited,
        "maxmemory noeviction": limit_faults.memory_limited,
        "no more files": limit_faults.files_limited,
        CLOCK_STEPPED: limit_faults.clock_stepped,
        SERVER_CLOCK: limit_faults.server_clock_wrong,
    }
)
# The ones not named have weight 2. A recovery keeps all others waiting.
_WEIGHTS: Mapping[str, int] = MappingProxyType({MAJORITY_WIPED: 1})
_HOLDER_PAUSED = "holder paused"
_LANES = 3
_PAUSE_S_MAX = 0.6


def possible(
    *,
    clocks: bool,
    small_disk: bool,
    logs: bool = True,
    only: Collection[str] = (),
    without: Collection[str] = (),
) -> list[str]:
    """Return the faults that this machine, and nodes with or without logs, can bring about, of those asked for."""
    missing = set(without)
    if not clocks:
        missing |= {CLOCK_STEPPED, SERVER_CLOCK}
    if not small_disk:
        missing |= {DISK_FULL}
    if not logs:
        missing |= {DISK_FULL, LOG_CUT, NODE_COPIED}
    return [name for name in FAULTS if name not in missing and (not only or name in only)]


def deck(names: Collection[str], random: Random) -> list[str]:
    """Return an order in which each fault comes as often as its weight says, so that none is left out by chance."""
    cards = [name for name in names for _ in range(_WEIGHTS.get(name, 2))]
    random.shuffle(cards)
    return cards


async def inject_faults(
    injector: FaultInjector, names: Collection[str], *, seed: str, lasts_s: float
) -> None:
    """Let faults come, up to a few at once, for so long; return when the last one is healed.

    What is drawn depends on the seed alone. When it injections depends on the machine as well.
    """
    random = Random(seed)
    cards: list[str] = []

    def mixed() -> FaultInjection:
        if not cards:
            cards.extend(deck(names, random))
        return FAULTS[cards.pop()](injector, random)

    holders = Random(f"{seed}/holders")

    def of_holders() -> FaultInjection:
        return FAULTS[_HOLDER_PAUSED](injector, holders)

    # However long the others last, late writes have to come at a storage all the time.
    draws = [of_holders if _HOLDER_PAUSED in names else mixed, *[mixed] * _LANES]
    async with asyncio.TaskGroup() as lanes:
        for draw, chance in zip(draws, (holders, *[random] * _LANES), strict=True):
            lanes.create_task(_lane(injector, draw, chance))
        await asyncio.sleep(lasts_s)
        await injector.end()


async def _lane(injector: FaultInjector, draw: Callable[[], FaultInjection], random: Random) -> None:
    while not injector.ending.is_set():
        injection, pause_s = draw(), random.uniform(0.0, _PAUSE_S_MAX)
        try:
            await injector.inject(injection)
        except (AssertionError, OSError, RuntimeError, hiredis.HiredisError) as error:
            # The run goes on, for what it shows; but it is not what it was to be.
            injector.unhealed.append(f"{injection.kind} of {injection.target}: {error!r}")
        await asyncio.sleep(pause_s)
