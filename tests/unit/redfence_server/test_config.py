"""Settings that need more than a check of their bounds."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from redfence_proto import variables
from redfence_server import config, cores
from redfence_server.cores import usable_cores
from redfence_server.errors import ConfigError


@pytest.fixture
def one_core() -> Iterator[None]:
    """Let this thread use one core only."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    yield
    os.sched_setaffinity(0, allowed)


def processes(value: str) -> int:
    return config.load({"nodes": (), "processes": value}).processes


@pytest.mark.usefixtures("one_core")
def test_auto_starts_one_process_on_one_core() -> None:
    assert processes("auto") == 1


def test_auto_starts_a_process_for_each_core_that_the_quota_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container of a large machine may have a small part of each core."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(200)))
    for quota, count in ((None, 64), (3, 3), (1, 1)):
        monkeypatch.setattr(cores, "_quota_cores", lambda quota=quota: quota)
        monkeypatch.setattr(os, "cpu_count", lambda: 200)
        assert processes("auto") == count
    assert usable_cores() == 1
    assert processes("5") == 5


def test_a_word_that_is_not_auto_is_refused_with_the_fix() -> None:
    with pytest.raises(ConfigError, match="processes: 'autto' is not a number from 1 to 64 or auto"):
        processes("autto")


def test_a_password_in_the_environment_may_have_a_comma(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDFENCE_NODES", "redis://:a,b@one:1,rediss://two:2, redis://u:,@three:3")
    assert config.load({}).nodes == ("redis://:a,b@one:1", "rediss://two:2", "redis://u:,@three:3")


def test_every_program_knows_the_variables_of_the_server() -> None:
    assert {name.upper() for name in config.ServeConfig.model_fields} == variables.SERVER
