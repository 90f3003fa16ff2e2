"""Keeps one alarm per item for a single timer. Setting takes logarithmic time, clearing constant time. Pure.

A client has one such object for all its leases and calls, instead of one task or timer for each.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable
from itertools import count
from typing import Generic, TypeVar

ItemT = TypeVar("ItemT", bound=Hashable)

# Below this size, stale entries are cheaper to keep than to sweep.
_SWEEP_AT_LEAST = 64


class Alarms(Generic[ItemT]):
    """Keeps the next alarm of each item. Memory grows only with the number of items that have one."""

    __slots__ = ("_at_ms", "_heap", "_order")

    def __init__(self) -> None:
        self._at_ms: dict[ItemT, float] = {}
        # An entry is stale when `_at_ms` has another instant for its item. Stale entries are skipped at
        # the top.
        self._heap: list[tuple[float, int, ItemT]] = []
        self._order = count()

    def __len__(self) -> int:
        return len(self._at_ms)

    def set(self, item: ItemT, at_ms: float) -> None:
        """Set the alarm of `item` to `at_ms`, replacing the earlier one."""
        if self._at_ms.get(item) == at_ms:
            return
        self._at_ms[item] = at_ms
        heapq.heappush(self._heap, (at_ms, next(self._order), item))
        if len(self._heap) > _SWEEP_AT_LEAST + 2 * len(self._at_ms):
            self._sweep()

    def clear(self, item: ItemT) -> None:
        """Remove the alarm of `item`, if it has one."""
        self._at_ms.pop(item, None)

    def next_at_ms(self) -> float:
        """Return the instant of the earliest alarm; infinite if there is none."""
        heap = self._heap
        while heap and self._at_ms.get(heap[0][2]) != heap[0][0]:
            heapq.heappop(heap)
        return heap[0][0] if heap else math.inf

    def take_due(self, now_ms: float) -> list[ItemT]:
        """Return the items whose alarm is due, earliest first, and remove their alarms."""
        due = []
        while self.next_at_ms() <= now_ms:
            item = heapq.heappop(self._heap)[2]
            del self._at_ms[item]
            due.append(item)
        return due

    def _sweep(self) -> None:
        self._heap = [entry for entry in self._heap if self._at_ms.get(entry[2]) == entry[0]]
        heapq.heapify(self._heap)
