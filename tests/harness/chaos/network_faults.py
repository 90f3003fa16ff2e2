"""Faults between servers and nodes: partitions of every form, connections that are slow or reset, and an address that leads to two processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from itertools import product
from random import Random

from harness.chaos.cluster import TTL_MS_MAX
from harness.chaos.fault_injection import (
    FaultInjection,
    FaultInjector,
    every_server,
    network_of,
    node_of,
    until_seen_by_all,
)
from harness.processes.node_data import copy_data
from harness.processes.servers import until
from harness.processes.tcp_proxy import TcpProxy

_RESETS_MAX = 20
_TTL_S = TTL_MS_MAX / 1000
# A server whose connection was reset connects again at once, or after a pause if it could not.
_CONNECTED_S = 10.0
# (server, node) by index.
_Pair = tuple[int, int]


def one_cut_off(injector: FaultInjector, random: Random) -> FaultInjection:
    """Draw: no server reaches one node; what is sent arrives when it is over."""
    place = random.randrange(len(injector.cluster.nodes))
    return _network(
        injector, random, "partition: one node", _all_to(injector, [place]), lambda proxy: proxy.hold()
    )


def halves(injector: FaultInjector, random: Random) -> FaultInjection:
    """Draw: each server reaches its part of the nodes alone, and only one part is a quorum."""
    places = _shuffled(injector, random)
    cut = [places[: len(places) // 2], places[len(places) // 2 :]]
    pairs = [(server, place) for server in range(len(injector.cluster.servers)) for place in cut[server % 2]]
    return _network(injector, random, "partition: halves", pairs, lambda proxy: proxy.hold())


def ring(injector: FaultInjector, random: Random) -> FaultInjection:
    """Draw: each server reaches a quorum, but another one."""
    places = _shuffled(injector, random)
    pairs = [
        (server, places[(server + step) % len(places)])
        for server in range(len(injector.cluster.servers))
        for step in range(injector.cluster.minority)
    ]
    return _network(injector, random, "partition: ring", pairs, lambda proxy: proxy.hold())


def one_way(injector: FaultInjector, random: Random) -> FaultInjection:
    """Draw: what is sent to a node arrives, and no answer comes back; or the other way round."""
    place = random.randrange(len(injector.cluster.nodes))
    answers = random.random() < 0.7
    return _network(
        injector,
        random,
        "partition: one way",
        _all_to(injector, [place]),
        lambda proxy: proxy.hold(requests=not answers, replies=answers),
        detail="no answers" if answers else "no requests",
    )


def swallowed(injector: FaultInjector, random: Random) -> FaultInjection:
    """Draw: a node that takes every connection and never answers; what is sent is lost."""
    place = random.randrange(len(injector.cluster.nodes))
    return _network(
        injector, random, "node never answers", _all_to(injector, [place]), lambda proxy: proxy.drop()
    )


def delayed(injector: FaultInjector, random: Random) -> FaultInjection:
    """Draw: one node is far away, or all are."""
    places = _shuffled(injector, random)[: random.choice((1, 1, len(injector.cluster.nodes)))]
    most_ms = 40.0 if len(places) > 1 else 300.0
    there_ms, back_ms = random.uniform(1.0, most_ms), random.uniform(1.0, most_ms)
    return _network(
        injector,
        random,
        "delay",
        _all_to(injector, places),
        lambda proxy: proxy.delay(requests_ms=there_ms, replies_ms=back_ms),
        detail=f"{there_ms:.0f} ms there, {back_ms:.0f} ms back",
    )


def sliced(injector: FaultInjector, random: Random) -> FaultInjection:
    """Draw: what goes between one server and one node arrives in pieces of some bytes."""
    pair = (random.randrange(len(injector.cluster.servers)), random.randrange(len(injector.cluster.nodes)))
    # Smaller ones, or on every path at once, take all of this process' time, and with it that of all other paths.
    size = random.randrange(16, 200)
    return _network(
        injector,
        random,
        "sliced bytes",
        [pair],
        lambda proxy: proxy.slice(slice_bytes=size),
        detail=f"{size} bytes",
    )


def replies_lost(injector: FaultInjector, random: Random) -> FaultInjection:
    """Draw: a few replies of one node are lost and their connections reset: carried out, but never told."""
    place = random.randrange(len(injector.cluster.nodes))
    count = random.randrange(1, 6)
    return _network(
        injector,
        random,
        "replies lost",
        _all_to(injector, [place]),
        lambda proxy: proxy.lose_replies(count),
        detail=f"{count} of each server",
    )


def reset(injector: FaultInjector, random: Random) -> FaultInjection:
    """Draw: the connections of one node, or of all, are reset again and again."""
    places = _shuffled(injector, random)[: random.choice((1, 1, len(injector.cluster.nodes)))]
    proxies = _proxies(injector, _all_to(injector, places))
    pauses_s = [random.uniform(0.02, 0.5) for _ in range(random.randrange(1, _RESETS_MAX))]

    async def begin() -> None:
        for pause_s in pauses_s:
            for proxy in proxies:
                proxy.reset()
            await asyncio.sleep(pause_s)

    return FaultInjection(
        "connections reset",
        f"{', '.join(map(network_of, places))}: {len(pauses_s)} times",
        0.0,
        begin=begin,
        takes=set(map(network_of, places)),
    )


def node_doubled(injector: FaultInjector, random: Random, *, copies: bool) -> FaultInjection:
    """Draw: for some servers the address of a node leads to another process, while the node lives on for the others; then one of the two ends.

    The other one is new and empty, or starts from a copy of the node's data and looks like the node after a restart.
    """
    place = random.randrange(len(injector.cluster.nodes))
    servers = random.sample(range(len(injector.cluster.servers)), len(injector.cluster.servers))
    moved = [servers.pop() for _ in range(random.randrange(1, len(servers)))]
    others = [each for each in _shuffled(injector, random) if each != place]
    near, far = others[: injector.cluster.minority], others[injector.cluster.minority :]
    # In the second form the old process decides about each grant of its servers; in the third the new one, if it is believed, does so too.
    cut = random.choice(((), (servers,), (servers,), (servers, moved if copies else ())))
    pairs = [pair for side, nodes in zip(cut, (near, far), strict=False) for pair in _between(side, nodes)]
    quiet, old_ends = copies and random.random() < 0.7, random.random() < 0.5
    node = injector.cluster.nodes[place]
    other = node.beside()
    new_pairs = _between(moved, [place])
    all_ways, new_ways = _proxies(injector, _all_to(injector, [place])), _proxies(injector, new_pairs)
    cut_ways = _proxies(injector, pairs)
    ends = f"{node_of(place)} for {_names(new_pairs)}; the {'old' if old_ends else 'new'} process ends"

    async def begin() -> None:
        await until_seen_by_all(injector, place)
        if copies:
            # What is written after the copy shows that it is one.
            for proxy in all_ways if quiet else new_ways:
                proxy.hold()
            await asyncio.to_thread(copy_data, node, other.folder)
        await other.start()
        for proxy in cut_ways:
            proxy.hold()
        for proxy in new_ways:
            proxy.forward_to(other.port)
        for proxy in all_ways:
            await proxy.heal()

    async def connected() -> bool:
        # Until then a server may take the node for that of before.
        return all(proxy.connection_count for proxy in all_ways)

    async def heal() -> None:
        gone = node if old_ends and other.is_running else other
        gone.kill()
        gone.wipe()
        if gone is node:
            node.become(other)
        for proxy in all_ways:
            proxy.forward_to(node.port)
        for proxy in (*all_ways, *cut_ways):
            await proxy.heal()
        await until(connected, timeout_s=_CONNECTED_S)

    return FaultInjection(
        f"node doubled: {'copy' if copies else 'empty'}",
        f"{ends}; cut off: {_names(pairs) or 'none'}",
        # Mostly longer than a quarantine.
        random.uniform(0.7, 2.5) * _TTL_S,
        begin=begin,
        heal=heal,
        # A server that starts meanwhile has not seen the node before.
        takes={
            node_of(place),
            *every_server(injector),
            *map(network_of, (place, *(each for _, each in pairs))),
        },
        forgets=[place],
        # A copy proves that it lost nothing, as a restart does.
        overlaps_s=_TTL_S if copies else None,
    )


def _network(
    injector: FaultInjector,
    random: Random,
    kind: str,
    pairs: Iterable[_Pair],
    break_it: Callable[[TcpProxy], None],
    *,
    detail: str = "",
) -> FaultInjection:
    pairs = sorted(pairs)
    proxies = _proxies(injector, pairs)

    async def begin() -> None:
        for proxy in proxies:
            break_it(proxy)

    async def heal() -> None:
        for proxy in proxies:
            await proxy.heal()

    names = _names(pairs)
    return FaultInjection(
        kind,
        f"{names}: {detail}" if detail else names,
        random.uniform(0.3, 5.0),
        begin=begin,
        heal=heal,
        takes={network_of(place) for _, place in pairs},
    )


def _shuffled(injector: FaultInjector, random: Random) -> list[int]:
    return random.sample(range(len(injector.cluster.nodes)), len(injector.cluster.nodes))


def _all_to(injector: FaultInjector, places: Iterable[int]) -> list[_Pair]:
    return _between(range(len(injector.cluster.servers)), places)


def _between(servers: Iterable[int], places: Iterable[int]) -> list[_Pair]:
    return list(product(servers, places))


def _names(pairs: Iterable[_Pair]) -> str:
    return ", ".join(f"server {server} - node {place}" for server, place in pairs)


def _proxies(injector: FaultInjector, pairs: Iterable[_Pair]) -> list[TcpProxy]:
    return [injector.cluster.servers[server].proxies[place] for server, place in pairs]
