"""What a checkup finds out about one node: facts, without judgement. node_checkup.py gathers them, doctor.py judges them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

from redfence_server.node_examination import Findings, Identity


class Trouble(Enum):
    """Why a node could not be looked at, or not to the end."""

    UNREACHABLE = auto()
    """There is no connection, or it broke, or the node took too long."""
    DENIED = auto()
    """It does not let this user in."""
    UNINTELLIGIBLE = auto()
    """It answers what no node would."""


@dataclass(frozen=True, slots=True)
class Process:
    """What the node's process says of itself.

    Attributes:
        engine: "redis" or "valkey".
        primary: the address of the primary that it follows; empty if it follows none.
        replica_count: how many replicas follow it.
        loading: it is still reading its data from disk, and answers nothing else.
        log_write_ok: whether the last write to the append-only file succeeded.
        log_rewrite_ok: whether the last rewrite of that file did.
        snapshot_ok: whether the last snapshot did.
        fsync_delays: how often a write had to wait because the disk was too slow (counted with `appendfsync everysec` alone).
        memory_used: what counts against the limit, in bytes.
        memory_max: the limit in bytes; 0 for none.
        evicted: how many keys it has evicted in this run.
    """

    engine: str
    version: str
    run_id: str
    primary: str = ""
    replica_count: int = 0
    cluster_mode: bool = False
    loading: bool = False
    log_write_ok: bool = True
    log_rewrite_ok: bool = True
    snapshot_ok: bool = True
    fsync_delays: int = 0
    memory_used: int = 0
    memory_max: int = 0
    eviction_policy: str = "noeviction"
    evicted: int = 0


@dataclass(frozen=True, slots=True)
class ClockSample:
    """One look at the node's clock, in ms.

    Attributes:
        sent_ms: when it was asked, on this machine's steady clock.
        received_ms: when it had answered, on the same.
        node_ms: what the node's clock showed in between.
        wall_ms: what this machine's wall clock showed between `sent_ms` and the sending.
    """

    sent_ms: float
    received_ms: float
    node_ms: float
    wall_ms: float

    @property
    def unsure_ms(self) -> float:
        """How far `offset_ms` may be off, either way: the node may have read its clock at any instant of the round trip."""
        return (self.received_ms - self.sent_ms) / 2

    @property
    def offset_ms(self) -> float:
        """By how much the node's clock is ahead of this machine's wall clock, give or take `unsure_ms`."""
        return self.node_ms - self.wall_ms - self.unsure_ms


@dataclass(frozen=True, slots=True)
class Latency:
    """How long the node took to answer, in ms."""

    median_ms: float
    worst_ms: float


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What is known of one node. What is missing was not answered, or not asked for after `trouble`.

    Attributes:
        index: its place in the configuration.
        address: never with a password.
        trouble: None if it could be looked at to the end.
        reason: of the trouble.
        refused: the commands that it refused, each with what it said; without the rest it was looked at all the same.
        known: its identity as it was before any node was judged. What it tells of the other nodes counts: what it learns later may be
            newer than what those show.
        found: what servers judge it by, seen after `known` was told by every node that answers.
        settings: by name; None if they may not be read.
        clock: samples, in the order in which they were taken.
        pings_ms: round trips, in the order in which they were made.
    """

    index: int
    address: str
    trouble: Trouble | None = None
    reason: str = ""
    refused: Mapping[str, str] = field(default_factory=dict)
    process: Process | None = None
    known: Identity | None = None
    found: Findings | None = None
    settings: Mapping[str, str] | None = None
    clock: tuple[ClockSample, ...] = ()
    pings_ms: tuple[float, ...] = ()

    @property
    def clock_sample(self) -> ClockSample | None:
        """The sample that leaves least unsure, or None."""
        return min(self.clock, key=lambda sample: sample.unsure_ms, default=None)

    @property
    def latency(self) -> Latency | None:
        """Of all round trips, or None if there were none."""
        return Latency(statistics.median(self.pings_ms), max(self.pings_ms)) if self.pings_ms else None


def read_process(info: Mapping[str, str]) -> Process:
    """Return what INFO tells; a field that it lacks is taken for what an idle, healthy node would say."""
    valkey = info.get("valkey_version")
    follows = info.get("role") != "master"
    return Process(
        engine="valkey" if valkey else "redis",
        version=valkey or info.get("redis_version", "0"),
        run_id=info.get("run_id", ""),
        primary=f"{info.get('master_host', 'unknown')}:{info.get('master_port', '0')}" if follows else "",
        replica_count=_number(info, "connected_slaves"),
        cluster_mode=info.get("cluster_enabled") == "1",
        # `async_loading` is a replica's, which goes on answering meanwhile.
        loading=info.get("loading") == "1",
        log_write_ok=info.get("aof_last_write_status", "ok") == "ok",
        log_rewrite_ok=info.get("aof_last_bgrewrite_status", "ok") == "ok",
        snapshot_ok=info.get("rdb_last_bgsave_status", "ok") == "ok",
        fsync_delays=_number(info, "aof_delayed_fsync"),
        memory_used=_number(info, "used_memory") - _number(info, "mem_not_counted_for_evict"),
        memory_max=_number(info, "maxmemory"),
        eviction_policy=info.get("maxmemory_policy", "noeviction"),
        evicted=_number(info, "evicted_keys"),
    )


def _number(info: Mapping[str, str], name: str) -> int:
    text = info.get(name, "")
    return int(text) if text.isdecimal() else 0
