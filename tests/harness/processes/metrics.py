"""What a process says over HTTP on its metrics port."""

from __future__ import annotations

import asyncio
import urllib.error
import urllib.request
from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

from harness.processes.ports import HOST

Samples = Mapping[tuple[str, frozenset[tuple[str, str]]], float]


async def get(port: int, path: str) -> tuple[int, str]:
    """Return the status and the body of a page."""
    return await asyncio.to_thread(_get, f"http://{HOST}:{port}{path}")


def _get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=10) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


async def scrape(port: int) -> Samples:
    """Return every sample of `/metrics`, read by the parser of Prometheus' own client."""
    status, text = await get(port, "/metrics")
    assert status == 200, text
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(samples: Samples, name: str, **labels: str) -> float:
    """Return the sum of the samples with this name and these labels; 0 without one."""
    wanted = set(labels.items())
    return sum(number for (each, own), number in samples.items() if each == name and wanted <= own)
