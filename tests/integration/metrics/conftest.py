"""Every test of this folder runs on both transports."""

from __future__ import annotations

import pytest

from redfence_server.http2.settings import Transport


@pytest.fixture(autouse=True, params=list(Transport))
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Transport:
    """The transport of the servers that the test starts, in its own process or in others."""
    chosen: Transport = request.param
    monkeypatch.setenv("REDFENCE_TRANSPORT", chosen)
    return chosen
