"""What embedded nodes refuse before they start anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from redfence_server.embedded.nodes import EmbeddedNodes
from redfence_server.embedded.process import NodeConf
from redfence_server.errors import ConfigError


@pytest.mark.parametrize("count", [-1, 0, 2, 4, 6, 8, 9])
def test_only_one_three_five_or_seven_nodes_are_accepted(tmp_path: Path, count: int) -> None:
    with pytest.raises(ConfigError, match=f"^{count} nodes were asked for"):
        EmbeddedNodes(count=count, data_dir=tmp_path)


def test_the_configuration_is_durable_private_and_local(tmp_path: Path) -> None:
    conf = NodeConf(tmp_path / "node", 7000, "00ff")
    conf.write()
    lines = (tmp_path / "node" / "node.conf").read_text().splitlines()
    assert {
        "bind 127.0.0.1",
        "protected-mode yes",
        "requirepass 00ff",
        "appendonly yes",
        "appendfsync always",
        "aof-load-truncated no",
        'save ""',
        "maxmemory-policy noeviction",
        "daemonize no",
    } <= set(lines)


def test_the_password_is_in_no_file_that_others_may_read_and_in_no_representation(tmp_path: Path) -> None:
    left_over = tmp_path / "node" / "node.conf"
    left_over.parent.mkdir(mode=0o755)
    left_over.touch(mode=0o644)
    conf = NodeConf(tmp_path / "node", 7000, "00ff")
    conf.write()
    assert left_over.stat().st_mode & 0o777 == 0o600
    assert "00ff" not in repr(conf)
    assert conf.url == "redis://:00ff@127.0.0.1:7000"
