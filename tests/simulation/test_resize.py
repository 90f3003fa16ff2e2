"""A cluster that gets another number of nodes under faults: every seed is well, every mutant is not."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import pytest

from harness.simulation import resizing as world_of_resizes
from harness.simulation.history import letters
from harness.simulation.network import Network
from harness.simulation.nodes import Nodes
from harness.simulation.processes import Chance, Process, ProcessClock, now_ms, on_processes
from harness.simulation.resizing import ResizedWorld
from harness.simulation.servers import ServerHost
from harness.simulation.world import Rules, simulate
from redfence_server import config
from redfence_server.commands import cluster_resize
from redfence_server.errors import NoQuorumError
from redfence_server.membership.admin import AdminSettings
from redfence_server.membership.examination import Phase
from redfence_server.model import AcquireCall, Lease, LeaseId
from redfence_server.nodes.cluster import check_urls
from redfence_server.operations import recovery_plan, resizing
from redfence_server.redis_io.dial import DialledNode, NodeUrl
from redfence_server.redis_io.scripts import Keyspace

_SEEDS_PER_TEST = 50
_MUTANT_SEEDS = 200
TTL_MS_MAX = 10_000
WAIT_MS = TTL_MS_MAX * 1.01 + 2
# A server without a quorum examines the nodes again after so long at most.
_RECHECK_MS = 2_000
# The steps of the command and of a server take less than this on the network of these tests.
_STEPS_MS = 200


async def _retires_no_node(*_: object) -> None:
    """Leave the old cluster as it is."""


def _shows_no_token(_: object) -> int:
    return 0


MUTANTS = {
    "the old cluster goes on": Rules(
        patches=((resizing.ClusterResize, "_retire", _retires_no_node),), breaks="T1 T2 L"
    ),
    "no wait": Rules(patches=((world_of_resizes, "wait_ms", lambda _: 0.0),), breaks="L"),
    "the successor begins at 0": Rules(
        patches=((recovery_plan, "greatest_number", _shows_no_token), (resizing, "TOKENS_JUMP", 0)),
        breaks="T1 T2",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 200, _SEEDS_PER_TEST))
def test_a_resize_keeps_every_promise_through_faults_and_interruptions(first: int) -> None:
    """Tokens are unique and ordered, leases exclude, storage is fenced, and the successor grants."""
    counts: Counter[str] = Counter()
    for seed in range(first, first + _SEEDS_PER_TEST):
        report = simulate(seed, make=ResizedWorld)
        assert not report.problems, (seed, *report.problems[:10])
        counts += report.counts
    assert counts["resized"] == _SEEDS_PER_TEST
    assert counts["grants"] > 10 * _SEEDS_PER_TEST


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_resize_that_leaves_a_rule_out_is_caught(mutant: str) -> None:
    rules = MUTANTS[mutant]
    for seed in range(_MUTANT_SEEDS):
        report = simulate(seed, rules, make=ResizedWorld)
        if letters(report.problems) & set(rules.breaks.split()):
            return
    pytest.fail(f"{mutant}: not caught in {_MUTANT_SEEDS} seeds")


async def _instants_of_grants(servers: Sequence[ServerHost], chance: Chance, told: list[float]) -> None:
    """Ask every server for the lock without pause, and note when it was granted, until cancelled."""
    while True:
        for server in servers:
            if server.service is not None:
                lease = LeaseId(chance.hex_id())
                call = AcquireCall("one", lease, TTL_MS_MAX, "caller", 0, server.clock.now_ms())
                try:
                    outcome = await server.service.acquire(call)
                    if isinstance(outcome, Lease):
                        told.append(now_ms())
                        await server.service.release("one", lease)
                except NoQuorumError:
                    pass
        await asyncio.sleep(0.005)


@pytest.mark.parametrize(("before", "after"), [(3, 5), (5, 3), (1, 3)])
@on_processes
async def test_the_service_stops_for_the_wait_and_one_look_at_the_nodes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], before: int, after: int
) -> None:
    """The command itself runs, on virtual time. A server with the new list starts while the command waits."""
    chance, operator = Chance(before), Process("operator")
    network = Network(chance, latency_ms=(0.1, 1.0))
    nodes = Nodes(chance, count=before, durability="always", ttl_ms_max=TTL_MS_MAX, new_state=Rules().node)
    old = ServerHost("old", list(nodes.hosts), network, chance)
    await old.until_serving()
    while len(nodes.hosts) < after:
        nodes.add()

    async def dial(node: NodeUrl, *, timeout_ms: int) -> DialledNode:
        del timeout_ms
        index = int(node.address.removeprefix("node-").partition(":")[0])
        return await network.dial(operator, operator, nodes.hosts[index], {})

    def settings_of_admin(keyspace: Keyspace, timeout_ms: int) -> AdminSettings:
        return AdminSettings(keyspace, timeout_ms, ProcessClock(), dial)

    monkeypatch.setattr(cluster_resize, "AdminSettings", settings_of_admin)
    lists = [[f"redis://node-{index}:6379" for index in range(count)] for count in (before, after)]
    settings = config.load({"nodes": lists[0], "listen": "127.0.0.1:0"})
    told: list[float] = []
    servers = [old]
    calling = old.process.spawn(_instants_of_grants(servers, chance, told))
    await asyncio.sleep(1)
    command = operator.spawn(cluster_resize._resize(settings, check_urls(lists[1]), confirmed=True))
    moved = nodes.hosts[:after]
    while any(host.redis.state.phase is not Phase.QUARANTINED for host in moved):  # noqa: ASYNC110  (on virtual time)
        await asyncio.sleep(0.001)
    servers.append(ServerHost("new", moved, network, chance))
    assert await command == 0
    await asyncio.sleep(2 * _RECHECK_MS / 1000)
    calling.cancel()
    assert re.findall(r"^taken out; waiting (.+) s", capsys.readouterr().out, re.MULTILINE) == [
        f"{WAIT_MS / 1000:.1f}"
    ]
    pause_ms = max(later - earlier for earlier, later in pairwise(told))
    assert WAIT_MS <= pause_ms <= WAIT_MS + _RECHECK_MS + _STEPS_MS
