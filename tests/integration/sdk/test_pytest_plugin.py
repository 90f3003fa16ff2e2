"""The fixtures that a user's own test run gets, in a real pytest of its own folder."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from harness.processes.commands import CommandProcesses

_CONFTEST = """
import sys

def loaded():
    return sorted({"redfence", "grpc", "google.protobuf"} & set(sys.modules))

at_start = loaded()
"""

_TESTS = """
import asyncio
import sys

import conftest
import pytest

def test_a_run_without_the_fixtures_loads_nothing():
    assert conftest.at_start == conftest.loaded() == []

def test_threads(redfence_fake, redfence_client):
    with redfence_client.lock("r", ttl=10, holder="me", wait=0):
        assert redfence_fake.holder("r") == "me"

def test_each_test_has_a_server_of_its_own(redfence_fake, redfence_client):
    assert redfence_fake.token("r") is None
    lease = redfence_client.acquire("r", ttl=10, wait=0)
    assert lease.token == 1
    assert lease.release()

def test_asyncio_without_a_plugin(redfence_async_client, redfence_fake):
    async def use():
        async with redfence_async_client() as client, client.lock("r", ttl=10):
            assert redfence_fake.token("r") == 1
    asyncio.run(use())

class TestClock:
    @pytest.fixture
    def redfence_clock(self):
        from redfence.testing import ManualClock
        return ManualClock()

    def test_time_passes_by_hand(self, redfence_fake, redfence_client):
        lease = redfence_client.acquire("r", ttl=300)
        redfence_fake.clock.advance(301)
        assert lease.lost.is_set()
"""


@pytest.mark.slow
async def test_a_users_tests_get_the_fixtures_and_others_pay_nothing(
    tmp_path: Path, commands: CommandProcesses
) -> None:
    """Warnings are errors, no async plugin is loaded, and pytest itself imports neither redfence nor gRPC."""
    (tmp_path / "conftest.py").write_text(_CONFTEST)
    (tmp_path / "test_user.py").write_text(_TESTS)
    arguments = ["-W", "error", "-p", "no:asyncio", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    process = commands.start(sys.executable, "-m", "pytest", *arguments, str(tmp_path))
    assert await process.wait(timeout_s=60) == 0, process.stdout
    assert "5 passed" in process.stdout
