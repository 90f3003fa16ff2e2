"""Fixtures of the fuzzing tests: one site for all tests of a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from harness.fuzz.site import FuzzSite, fuzz_site
from redfence_server.embedded.binary import RedisBinary


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, redis_binary: RedisBinary) -> Iterator[FuzzSite]:
    """A lock server and a storage over three nodes."""
    with fuzz_site(tmp_path_factory.mktemp("fuzz-site"), binary=redis_binary) as site:
        yield site
