"""Measure how late the event loop runs its timers: a busy or blocked loop delays every answer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from prometheus_client.core import HistogramMetricFamily, Metric

from redfence_server.metrics.histogram import Histogram

_INTERVAL_S = 0.1


class LoopLag:
    """Sets a timer every 100 ms, and counts how late it comes."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._lags = Histogram()
        self._timer = self._loop.call_later(_INTERVAL_S, self._on_timer, self._loop.time() + _INTERVAL_S)

    def _on_timer(self, due_s: float) -> None:
        now_s = self._loop.time()
        self._lags.observe(now_s - due_s)
        self._timer = self._loop.call_at(now_s + _INTERVAL_S, self._on_timer, now_s + _INTERVAL_S)

    def close(self) -> None:
        """Set no more timers."""
        self._timer.cancel()

    def collect(self) -> Iterator[Metric]:
        """Yield the metric, as a collector of prometheus_client."""
        family = HistogramMetricFamily(
            "redfence_loop_lag_seconds", "How late the event loop ran a timer, every 100 ms."
        )
        family.add_metric([], self._lags.cumulated(), self._lags.sum_s)
        yield family
