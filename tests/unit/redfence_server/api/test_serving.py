"""Which transport serves, and what a wrong choice tells."""

from __future__ import annotations

import sys

import pytest

from redfence_server import config
from redfence_server.api.serving import new_server
from redfence_server.errors import ConfigError
from redfence_server.http2.settings import Transport

NODES = {"nodes": "redis://a"}


def test_the_transport_is_grpcio_unless_a_setting_says_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REDFENCE_TRANSPORT", raising=False)
    assert config.load(NODES).transport is Transport.GRPCIO
    monkeypatch.setenv("REDFENCE_TRANSPORT", "fast")
    assert config.load(NODES).transport is Transport.FAST
    with pytest.raises(ConfigError, match="transport: Input should be 'grpcio' or 'fast'"):
        config.load({**NODES, "transport": "quick"})


def test_the_fast_transport_without_its_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ngh2", None)
    for module in [name for name in sys.modules if name.startswith("redfence_server.http2.")]:
        monkeypatch.delitem(sys.modules, module)
    with pytest.raises(ConfigError, match=r"package ngh2.*: pip install 'redfence\[fast\]'"):
        new_server(Transport.FAST)
