"""What INFO tells of a process, and what samples tell of a clock."""

from __future__ import annotations

import pytest

from redfence_server.node_facts import ClockSample, Latency, NodeFacts, Process, read_process

INFO = {
    "redis_version": "7.0.15",
    "run_id": "run-1",
    "role": "master",
    "connected_slaves": "0",
    "cluster_enabled": "0",
    "loading": "0",
    "async_loading": "0",
    "aof_last_write_status": "ok",
    "aof_last_bgrewrite_status": "ok",
    "rdb_last_bgsave_status": "ok",
    "aof_delayed_fsync": "0",
    "used_memory": "1000",
    "mem_not_counted_for_evict": "100",
    "maxmemory": "5000",
    "maxmemory_policy": "noeviction",
    "evicted_keys": "0",
}
PLAIN = Process(engine="redis", version="7.0.15", run_id="run-1", memory_used=900, memory_max=5_000)


def test_an_idle_healthy_process_is_read_as_one() -> None:
    """What is not counted against the memory limit is left out of what is used."""
    assert read_process(INFO) == PLAIN


@pytest.mark.parametrize(
    ("told", "field", "value"),
    [
        ({"valkey_version": "9.1.2"}, "engine", "valkey"),
        ({"valkey_version": "9.1.2"}, "version", "9.1.2"),
        ({"role": "slave", "master_host": "10.0.0.7", "master_port": "6379"}, "primary", "10.0.0.7:6379"),
        ({"role": "slave"}, "primary", "unknown:0"),
        ({"connected_slaves": "2"}, "replica_count", 2),
        ({"cluster_enabled": "1"}, "cluster_mode", True),
        ({"loading": "1"}, "loading", True),
        ({"aof_last_write_status": "err"}, "log_write_ok", False),
        ({"aof_last_bgrewrite_status": "err"}, "log_rewrite_ok", False),
        ({"rdb_last_bgsave_status": "err"}, "snapshot_ok", False),
        ({"aof_delayed_fsync": "3"}, "fsync_delays", 3),
        ({"maxmemory": "0"}, "memory_max", 0),
        ({"maxmemory_policy": "allkeys-lru"}, "eviction_policy", "allkeys-lru"),
        ({"evicted_keys": "4"}, "evicted", 4),
        ({"evicted_keys": "many"}, "evicted", 0),
    ],
)
def test_each_field_is_read_from_where_a_node_tells_it(
    told: dict[str, str], field: str, value: object
) -> None:
    """Valkey also tells which Redis it is like; that is not its version."""
    process = read_process({**INFO, **told})
    assert getattr(process, field) == value
    assert getattr(PLAIN, field) != value or told["evicted_keys"] == "many"


def test_a_process_that_does_not_say_that_it_is_a_primary_is_taken_for_a_replica() -> None:
    """As node_examination.py takes it; the rest that is missing is taken for well."""
    process = read_process({})
    assert process.primary
    assert process == Process(engine="redis", version="0", run_id="", primary=process.primary)


def test_the_offset_of_a_clock_lies_in_the_middle_of_what_its_round_trip_allows() -> None:
    """Whenever the node read it, the true offset is no further away than half of the round trip."""
    for read_at_ms in (100.0, 104.0, 110.0):
        sample = ClockSample(sent_ms=100.0, received_ms=110.0, node_ms=read_at_ms + 7_000, wall_ms=2_100.0)
        assert sample.unsure_ms == 5.0
        # This machine's steady clock is 2,000 ms behind its wall clock.
        assert abs(sample.offset_ms - 5_000.0) <= sample.unsure_ms


def test_of_several_samples_the_one_with_the_shortest_round_trip_is_told() -> None:
    """It leaves least unsure."""
    slow, fast = (
        ClockSample(sent_ms=0.0, received_ms=trip_ms, node_ms=0.0, wall_ms=0.0) for trip_ms in (9.0, 1.0)
    )
    assert NodeFacts(0, "a", clock=(slow, fast, slow)).clock_sample is fast
    assert NodeFacts(0, "a").clock_sample is None


def test_latency_is_told_by_its_median_and_its_worst() -> None:
    """A single slow answer does not make a node slow."""
    assert NodeFacts(0, "a", pings_ms=(9.0, 1.0, 2.0)).latency == Latency(median_ms=2.0, worst_ms=9.0)
    assert NodeFacts(0, "a").latency is None
