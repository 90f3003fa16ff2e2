"""Faults between servers and nodes: partitions, slow or reset connections, and one address with two nodes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import product
from random import Random
from typing import TypeAlias

from harness.chaos.fault_injection import (
    TTL_S,
    FaultInjection,
    FaultInjector,
    for_each,
    lock_of_network,
    lock_of_node,
    locks_of_servers,
    names,
    some_node,
    some_server,
    wait_until_seen_by_all,
)
from harness.processes.node_data import copy_data
from harness.processes.servers import until
from harness.processes.tcp_proxy import TcpProxy

NODE_COPIED = "node doubled: copy"
_RESETS_MAX = 20
# After a reset a server connects again at once, or after a pause if the first try fails.
_CONNECTED_S = 10.0
# The indices of a server and a node.
_Pair: TypeAlias = tuple[int, int]
# The pairs that a fault affects, what it does to the proxy of each, and a detail for people.
_Break: TypeAlias = tuple[Iterable[_Pair], Callable[[TcpProxy], None], str]


def _one_node(injector: FaultInjector, random: Random) -> _Break:
    """Cut one node off; what the servers send arrives after the end of the fault."""
    return _all_to(injector, [some_node(injector, random)]), TcpProxy.hold, ""


def _halves(injector: FaultInjector, random: Random) -> _Break:
    """Let each server reach only its part of the nodes; only one part is a quorum."""
    nodes = _shuffled(injector, random)
    cut = [nodes[: len(nodes) // 2], nodes[len(nodes) // 2 :]]
    servers = range(len(injector.cluster.servers))
    return [(server, node) for server in servers for node in cut[server % 2]], TcpProxy.hold, ""


def _ring(injector: FaultInjector, random: Random) -> _Break:
    """Let each server reach a quorum, but each another one."""
    nodes = _shuffled(injector, random)
    pairs = [
        (server, nodes[(server + step) % len(nodes)])
        for server in range(len(injector.cluster.servers))
        for step in range(injector.cluster.minority)
    ]
    return pairs, TcpProxy.hold, ""


def _one_way(injector: FaultInjector, random: Random) -> _Break:
    """Hold back either the answers of a node or the requests to it."""
    index, answers = some_node(injector, random), random.random() < 0.7
    hold = partial(TcpProxy.hold, requests=not answers, replies=answers)
    return _all_to(injector, [index]), hold, "no answers" if answers else "no requests"


def _never_answers(injector: FaultInjector, random: Random) -> _Break:
    """Let a node accept every connection and never answer; what the servers send is lost."""
    return _all_to(injector, [some_node(injector, random)]), TcpProxy.drop, ""


def _delay(injector: FaultInjector, random: Random) -> _Break:
    """Delay everything to and from one node, or all nodes."""
    nodes = _one_or_all(injector, random)
    most_ms = 40.0 if len(nodes) > 1 else 300.0
    there_ms, back_ms = random.uniform(1.0, most_ms), random.uniform(1.0, most_ms)
    delay = partial(TcpProxy.delay, requests_ms=there_ms, replies_ms=back_ms)
    return _all_to(injector, nodes), delay, f"{there_ms:.0f} ms there, {back_ms:.0f} ms back"


def _sliced(injector: FaultInjector, random: Random) -> _Break:
    """Deliver everything between one server and one node in small pieces."""
    pair = (some_server(injector, random), some_node(injector, random))
    # Smaller pieces, or pieces on every path, would use all of this process's time and slow the other paths.
    size = random.randrange(16, 200)
    return [pair], partial(TcpProxy.slice, slice_bytes=size), f"{size} bytes"


def _replies_lost(injector: FaultInjector, random: Random) -> _Break:
    """Lose a few replies of one node and reset their connections; the node has carried the commands out."""
    index, count = some_node(injector, random), random.randrange(1, 6)

    def lose(proxy: TcpProxy) -> None:
        proxy.lose_replies(count)

    return _all_to(injector, [index]), lose, f"{count} of each server"


def _network_fault(
    breaks: Callable[[FaultInjector, Random], _Break], injector: FaultInjector, random: Random
) -> FaultInjection:
    unsorted, break_proxy, detail = breaks(injector, random)
    pairs = sorted(unsorted)
    proxies = _proxies(injector, pairs)
    return FaultInjection(
        f"{_names(pairs)}: {detail}" if detail else _names(pairs),
        random.uniform(0.3, 5.0),
        begin=for_each(break_proxy, proxies),
        end=for_each(TcpProxy.heal, proxies),
        locks={lock_of_network(node) for _, node in pairs},
    )


def _reset(injector: FaultInjector, random: Random) -> FaultInjection:
    """Reset the connections of one node, or of all nodes, again and again."""
    nodes = _one_or_all(injector, random)
    reset_all = for_each(TcpProxy.reset, _proxies(injector, _all_to(injector, nodes)))
    pauses_s = [random.uniform(0.02, 0.5) for _ in range(random.randrange(1, _RESETS_MAX))]

    async def begin() -> None:
        for pause_s in pauses_s:
            await reset_all()
            await asyncio.sleep(pause_s)

    return FaultInjection(
        f"{names(nodes, lock_of_network)}: {len(pauses_s)} times",
        0.0,
        begin=begin,
        locks=set(map(lock_of_network, nodes)),
    )


def _node_doubled(copies: bool, injector: FaultInjector, random: Random) -> FaultInjection:  # noqa: FBT001
    """For some servers, lead a node's address to a second process beside the node; then end one of the two.

    The second process is empty, or starts from a copy of the node's data and looks like a restarted node.
    """
    cluster = injector.cluster
    index = some_node(injector, random)
    servers = random.sample(range(len(cluster.servers)), len(cluster.servers))
    moved = [servers.pop() for _ in range(random.randrange(1, len(servers)))]
    others = [each for each in _shuffled(injector, random) if each != index]
    near, far = others[: cluster.minority], others[cluster.minority :]
    # In the second form the old process decides each grant of its servers. In the third form the new process
    # does so too, if its servers believe it.
    cut = random.choice(((), (servers,), (servers,), (servers, moved if copies else ())))
    pairs = [pair for side, nodes in zip(cut, (near, far), strict=False) for pair in product(side, nodes)]
    quiet, old_ends = copies and random.random() < 0.7, random.random() < 0.5
    node = cluster.nodes[index]
    second = node.beside()
    moved_pairs = list(product(moved, [index]))
    to_node, to_second = _proxies(injector, _all_to(injector, [index])), _proxies(injector, moved_pairs)
    cut_off = _proxies(injector, pairs)

    async def begin() -> None:
        await wait_until_seen_by_all(injector, index)
        if copies:
            # Writes after the copy would show that the process is one.
            for proxy in to_node if quiet else to_second:
                proxy.hold()
            await asyncio.to_thread(copy_data, node, second.folder)
        await second.start()
        for proxy in cut_off:
            proxy.hold()
        for proxy in to_second:
            proxy.forward_to(second.port)
        for proxy in to_node:
            await proxy.heal()

    async def is_connected() -> bool:
        # Before it connects, a server may take the node for the earlier process.
        return all(proxy.connection_count for proxy in to_node)

    async def end() -> None:
        ended = node if old_ends and second.is_running else second
        ended.kill()
        ended.wipe()
        if ended is node:
            node.become(second)
        for proxy in to_node:
            proxy.forward_to(node.port)
        for proxy in (*to_node, *cut_off):
            await proxy.heal()
        await until(is_connected, timeout_s=_CONNECTED_S)

    which = "old" if old_ends else "new"
    return FaultInjection(
        f"{lock_of_node(index)} for {_names(moved_pairs)}; the {which} process ends; "
        f"cut off: {_names(pairs) or 'none'}",
        # Mostly longer than a quarantine.
        random.uniform(0.7, 2.5) * TTL_S,
        begin=begin,
        end=end,
        # A server that starts meanwhile has never seen the node.
        locks={
            *(lock_of_node(index), lock_of_network(index)),
            *(lock_of_network(each) for _, each in pairs),
            *locks_of_servers(injector),
        },
        forgets=[index],
        # A copy seems to prove that it has lost nothing, as a restarted node does.
        overlaps_s=TTL_S if copies else None,
    )


def _shuffled(injector: FaultInjector, random: Random) -> list[int]:
    return random.sample(range(len(injector.cluster.nodes)), len(injector.cluster.nodes))


def _one_or_all(injector: FaultInjector, random: Random) -> list[int]:
    return _shuffled(injector, random)[: random.choice((1, 1, len(injector.cluster.nodes)))]


def _all_to(injector: FaultInjector, nodes: Iterable[int]) -> list[_Pair]:
    return list(product(range(len(injector.cluster.servers)), nodes))


def _names(pairs: Iterable[_Pair]) -> str:
    return ", ".join(f"server {server} - node {node}" for server, node in pairs)


def _proxies(injector: FaultInjector, pairs: Iterable[_Pair]) -> list[TcpProxy]:
    return [injector.cluster.servers[server].proxies[node] for server, node in pairs]


NETWORK_FAULTS: Mapping[str, Callable[[FaultInjector, Random], FaultInjection]] = {
    "partition: one node": partial(_network_fault, _one_node),
    "partition: halves": partial(_network_fault, _halves),
    "partition: ring": partial(_network_fault, _ring),
    "partition: one way": partial(_network_fault, _one_way),
    "node never answers": partial(_network_fault, _never_answers),
    "delay": partial(_network_fault, _delay),
    "sliced bytes": partial(_network_fault, _sliced),
    "replies lost": partial(_network_fault, _replies_lost),
    "connections reset": _reset,
    "node doubled: empty": partial(_node_doubled, False),
    NODE_COPIED: partial(_node_doubled, True),
}
