"""The access list in docs/operations.md is enough."""

from __future__ import annotations

import re
from pathlib import Path

import grpc
import pytest

from harness.fixture_types import FlushedNodes
from harness.servers import acquire_request
from redfence_proto import bounds
from redfence_proto.v1 import lock_pb2, lock_pb2_grpc
from redfence_server import cluster_forming, composition, config
from redfence_server.node_cluster import check_urls
from redfence_server.randomness import SystemRandomness
from redfence_server.scripts import Keyspace

OPERATIONS = Path(__file__).parents[2] / "docs" / "operations.md"


def documented_rules() -> list[str]:
    """The rules as an operator would copy them."""
    found = re.search(r"^ACL SETUSER redfence on >PASSWORD (.*)$", OPERATIONS.read_text(), re.MULTILINE)
    assert found
    return found[1].split()


@pytest.mark.slow
async def test_the_documented_access_list_is_enough_for_forming_serving_and_every_call(
    flushed_nodes: FlushedNodes,
) -> None:
    """A user with exactly those rights forms a cluster and carries every command of the algorithm."""
    nodes = await flushed_nodes(3)
    for node in nodes:
        assert (
            await node.call("ACL", "SETUSER", "redfence", "reset", "on", ">secret", *documented_rules())
            == b"OK"
        )
    urls = tuple(f"redis://redfence:secret@127.0.0.1:{node.port}" for node in nodes)
    try:
        await cluster_forming.form(
            check_urls(urls),
            keys=Keyspace(),
            ttl_ms_max=bounds.TTL_MS_MAX_DEFAULT,
            randomness=SystemRandomness(),
        )
        settings = config.load({"nodes": urls, "listen": "127.0.0.1:0"})
        async with (
            composition.lock_server(settings) as running,
            grpc.aio.insecure_channel(f"127.0.0.1:{running.port}") as channel,
        ):
            locks = lock_pb2_grpc.LockServiceStub(channel)
            lease = (await locks.Acquire(acquire_request("orders/42"))).lease
            assert lease.fencing_token == 1
            # No two nodes agree, so whichever answers first, the grant needs a commit.
            await nodes[0].call("SET", "redfence:counter:orders/43", 7)
            await nodes[1].call("SET", "redfence:counter:orders/43", 8)
            assert (await locks.Acquire(acquire_request("orders/43"))).lease.fencing_token in {8, 9}
            held = await locks.Acquire(acquire_request("orders/42"))
            assert held.outcome == lock_pb2.ACQUIRE_OUTCOME_HELD
            renewals = locks.KeepAlive()
            await renewals.write(lock_pb2.KeepAliveRequest(resource="orders/42", lease_id=lease.lease_id))
            renewed = await renewals.read()
            assert isinstance(renewed, lock_pb2.KeepAliveResponse)
            assert renewed.state == lock_pb2.LEASE_STATE_ACTIVE
            await renewals.done_writing()
            token = lock_pb2.CheckTokenRequest(resource="orders/42", fencing_token=1)
            assert (await locks.CheckToken(token)).state == lock_pb2.TOKEN_STATE_LIVE
            release = lock_pb2.ReleaseRequest(resource="orders/42", lease_id=lease.lease_id)
            assert (await locks.Release(release)).outcome == lock_pb2.RELEASE_OUTCOME_RELEASED
            status = await lock_pb2_grpc.AdminServiceStub(channel).ClusterStatus(
                lock_pb2.ClusterStatusRequest()
            )
            assert [node.state for node in status.nodes] == [lock_pb2.NODE_STATE_READY] * 3
    finally:
        for node in nodes:
            await node.call("ACL", "DELUSER", "redfence")
