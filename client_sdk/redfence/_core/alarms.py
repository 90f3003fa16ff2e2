"""One timer's worth of alarms: at most one instant per item, moved and cleared in constant time. Pure.

A client has one of these for all its leases and calls, instead of a task or a timer for each.
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
    """When each item wants to be woken. Memory is bounded by twice the number of items with an alarm."""

    __slots__ = ("_at_ms", "_heap", "_order")

    def __init__(self) -> None:
        self._at_ms: dict[ItemT, float] = {}
        # Entries that are no longer in `_at_ms` with the same instant are stale and skipped when they surface.
        self._heap: list[tuple[float, int, ItemT]] = []
        self._order = count()

    def __len__(self) -> int:
        return len(self._at_ms)

    def set(self, item: ItemT, at_ms: float) -> None:
        """Wake `item` at `at_ms`, and no longer at the instant set before."""
        if self._at_ms.get(item) == at_ms:
            return
        self._at_ms[item] = at_ms
        heapq.heappush(self._heap, (at_ms, next(self._order), item))
        if len(self._heap) > _SWEEP_AT_LEAST + 2 * len(self._at_ms):
            self._sweep()

    def clear(self, item: ItemT) -> None:
        """Never wake `item`; harmless if it has no alarm."""
        self._at_ms.pop(item, None)

    def next_at_ms(self) -> float:
        """Return the earliest instant at which an item wants to be woken; infinite if there is none."""
        heap = self._heap
        while heap and self._at_ms.get(heap[0][2]) != heap[0][0]:
            heapq.heappop(heap)
        return heap[0][0] if heap else math.inf

    def take_due(self, now_ms: float) -> list[ItemT]:
        """Return the items whose instant has come, in its order, and forget their alarms."""
        due = []
        while self.next_at_ms() <= now_ms:
            item = heapq.heappop(self._heap)[2]
            del self._at_ms[item]
            due.append(item)
        return due

    def _sweep(self) -> None:
        self._heap = [entry for entry in self._heap if self._at_ms.get(entry[2]) == entry[0]]
        heapq.heapify(self._heap)
