"""Nodes as a user with few rights sees them: by default with the access list that operators copy."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from harness.processes.redis_nodes import RedisNode

OPERATIONS = Path(__file__).parents[3] / "docs" / "operations.md"


def documented_rules(*, without: Sequence[str] = ()) -> list[str]:
    """Return the rules as an operator would copy them, but for some."""
    found = re.search(r"^ACL SETUSER redfence on >PASSWORD (.*)$", OPERATIONS.read_text(), re.MULTILINE)
    assert found
    rules = found[1].split()
    assert set(without) <= set(rules)
    return [rule for rule in rules if rule not in without]


@asynccontextmanager
async def restricted(nodes: Sequence[RedisNode], *, without: Sequence[str] = ()) -> AsyncIterator[list[str]]:
    """Give each node a user with these rights, and yield the URLs for that user."""
    rules = documented_rules(without=without)
    for node in nodes:
        assert await node.call("ACL", "SETUSER", "redfence", "reset", "on", ">secret", *rules) == b"OK"
    try:
        yield [f"redis://redfence:secret@127.0.0.1:{node.port}" for node in nodes]
    finally:
        for node in nodes:
            await node.call("ACL", "DELUSER", "redfence")
