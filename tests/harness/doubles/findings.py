"""Builds the findings of an examination of three nodes; a test changes some of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from redfence_server.membership.admin import NodeSnapshot
from redfence_server.membership.examination import Findings, Identity, Phase

TTL_MS = 300_000


def identity(index: int, /, **changes: Any) -> Identity:
    """Return the identity of a durable node that votes, with these changes."""
    usual = Identity("c", index, 3, TTL_MS, "a" * 32, f"run-{index}", durable=True, phase=Phase.READY)
    return replace(usual, **changes)


def identity_fields(index: int, /) -> dict[str, str]:
    """Return the same identity as a node stores it."""
    place = {"cluster_id": "c", "index": f"{index}", "nodes": "3", "max_ttl_ms": f"{TTL_MS}"}
    return place | {"admission": "a" * 32, "run_id": f"run-{index}", "durable": "1", "state": "ready"}


def findings(index: int, who: Identity | None, /, **changes: Any) -> Findings:
    """Return what is found of a node with this identity, or of an empty node, with these changes."""
    keeps: dict[str, Any] = {"max_token": 5, "key_count": 3} if who else {"max_token": None}
    return Findings(**{"identity": who, "run_id": f"run-{index}", "version": "7.2.4", **keeps, **changes})


def look(index: int, who: Identity | None, /, *, address: str = "", **changes: Any) -> NodeSnapshot:
    return NodeSnapshot(index, address or f"n{index}:6379", findings(index, who, **changes))


def away(index: int, address: str = "") -> NodeSnapshot:
    return NodeSnapshot(index, address or f"n{index}:6379", None, "connection refused")
