"""Tell which build of redfence runs."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib.metadata import version

from prometheus_client.core import GaugeMetricFamily, Metric


class BuildInfo:
    """Shows the version of redfence, of Python, and the transport, as the labels of a metric that is 1."""

    def __init__(self, transport: str) -> None:
        self._labels = (version("redfence"), platform.python_version(), transport)

    def collect(self) -> Iterator[Metric]:
        """Yield the metric, as a collector of prometheus_client."""
        family = GaugeMetricFamily(
            "redfence_build_info",
            "Always 1; the labels name the version.",
            labels=("version", "python", "transport"),
        )
        family.add_metric(self._labels, 1)
        yield family
