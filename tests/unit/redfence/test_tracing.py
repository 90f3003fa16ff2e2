"""Client spans beside a program that is just importing OpenTelemetry."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from redfence._tracing import client_span


def test_a_module_that_another_thread_is_importing_makes_no_span(monkeypatch: pytest.MonkeyPatch) -> None:
    """A release would otherwise fail, and leave the lock held."""
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", ModuleType("opentelemetry.trace"))
    with client_span("release", "orders/1") as traceparent:
        assert traceparent == ""
