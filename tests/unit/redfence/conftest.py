"""A session in a world of plain values."""

from __future__ import annotations

import pytest
from unit.redfence.core_world import World


@pytest.fixture
def world() -> World:
    """A connected session."""
    return World().connected()
