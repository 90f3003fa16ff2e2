"""Faults between servers and nodes: partitions of every form, and connections that are slow, cut into pieces, or reset."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from random import Random

from harness.chaos.strike import Stage, Strike, network_of
from harness.tcp_proxy import TcpProxy

_RESETS_MAX = 20
# (server, node) by index.
_Pair = tuple[int, int]


def one_cut_off(stage: Stage, random: Random) -> Strike:
    """Draw: no server reaches one node; what is sent arrives when it is over."""
    place = random.randrange(len(stage.cluster.nodes))
    return _network(stage, random, "partition: one node", _all_to(stage, [place]), lambda proxy: proxy.hold())


def halves(stage: Stage, random: Random) -> Strike:
    """Draw: each server reaches its part of the nodes alone, and only one part is a quorum."""
    places = _shuffled(stage, random)
    cut = [places[: len(places) // 2], places[len(places) // 2 :]]
    pairs = [(server, place) for server in range(len(stage.cluster.servers)) for place in cut[server % 2]]
    return _network(stage, random, "partition: halves", pairs, lambda proxy: proxy.hold())


def ring(stage: Stage, random: Random) -> Strike:
    """Draw: each server reaches a quorum, but another one."""
    places = _shuffled(stage, random)
    pairs = [
        (server, places[(server + step) % len(places)])
        for server in range(len(stage.cluster.servers))
        for step in range(stage.cluster.minority)
    ]
    return _network(stage, random, "partition: ring", pairs, lambda proxy: proxy.hold())


def one_way(stage: Stage, random: Random) -> Strike:
    """Draw: what is sent to a node arrives, and no answer comes back; or the other way round."""
    place = random.randrange(len(stage.cluster.nodes))
    answers = random.random() < 0.7
    return _network(
        stage,
        random,
        "partition: one way",
        _all_to(stage, [place]),
        lambda proxy: proxy.hold(requests=not answers, replies=answers),
        detail="no answers" if answers else "no requests",
    )


def swallowed(stage: Stage, random: Random) -> Strike:
    """Draw: a node that takes every connection and never answers; what is sent is lost."""
    place = random.randrange(len(stage.cluster.nodes))
    return _network(stage, random, "node never answers", _all_to(stage, [place]), lambda proxy: proxy.drop())


def delayed(stage: Stage, random: Random) -> Strike:
    """Draw: one node is far away, or all are."""
    places = _shuffled(stage, random)[: random.choice((1, 1, len(stage.cluster.nodes)))]
    most_ms = 40.0 if len(places) > 1 else 300.0
    there_ms, back_ms = random.uniform(1.0, most_ms), random.uniform(1.0, most_ms)
    return _network(
        stage,
        random,
        "delay",
        _all_to(stage, places),
        lambda proxy: proxy.delay(requests_ms=there_ms, replies_ms=back_ms),
        detail=f"{there_ms:.0f} ms there, {back_ms:.0f} ms back",
    )


def sliced(stage: Stage, random: Random) -> Strike:
    """Draw: what goes between one server and one node arrives in pieces of some bytes."""
    pair = (random.randrange(len(stage.cluster.servers)), random.randrange(len(stage.cluster.nodes)))
    # Smaller ones, or on every path at once, take all of this process' time, and with it that of all other paths.
    size = random.randrange(16, 200)
    return _network(
        stage,
        random,
        "sliced bytes",
        [pair],
        lambda proxy: proxy.slice(slice_bytes=size),
        detail=f"{size} bytes",
    )


def replies_lost(stage: Stage, random: Random) -> Strike:
    """Draw: a few replies of one node are lost and their connections reset: carried out, but never told."""
    place = random.randrange(len(stage.cluster.nodes))
    count = random.randrange(1, 6)
    return _network(
        stage,
        random,
        "replies lost",
        _all_to(stage, [place]),
        lambda proxy: proxy.lose_replies(count),
        detail=f"{count} of each server",
    )


def reset(stage: Stage, random: Random) -> Strike:
    """Draw: the connections of one node, or of all, are reset again and again."""
    places = _shuffled(stage, random)[: random.choice((1, 1, len(stage.cluster.nodes)))]
    proxies = _proxies(stage, _all_to(stage, places))
    pauses_s = [random.uniform(0.02, 0.5) for _ in range(random.randrange(1, _RESETS_MAX))]

    async def begin() -> None:
        for pause_s in pauses_s:
            for proxy in proxies:
                proxy.reset()
            await asyncio.sleep(pause_s)

    return Strike(
        "connections reset",
        f"{', '.join(map(network_of, places))}: {len(pauses_s)} times",
        0.0,
        begin=begin,
        takes=set(map(network_of, places)),
    )


def _network(
    stage: Stage,
    random: Random,
    kind: str,
    pairs: Iterable[_Pair],
    break_it: Callable[[TcpProxy], None],
    *,
    detail: str = "",
) -> Strike:
    pairs = sorted(pairs)
    proxies = _proxies(stage, pairs)

    async def begin() -> None:
        for proxy in proxies:
            break_it(proxy)

    async def heal() -> None:
        for proxy in proxies:
            await proxy.heal()

    names = ", ".join(f"server {server} - node {place}" for server, place in pairs)
    return Strike(
        kind,
        f"{names}: {detail}" if detail else names,
        random.uniform(0.3, 5.0),
        begin=begin,
        heal=heal,
        takes={network_of(place) for _, place in pairs},
    )


def _shuffled(stage: Stage, random: Random) -> list[int]:
    return random.sample(range(len(stage.cluster.nodes)), len(stage.cluster.nodes))


def _all_to(stage: Stage, places: Iterable[int]) -> list[_Pair]:
    return [(server, place) for place in places for server in range(len(stage.cluster.servers))]


def _proxies(stage: Stage, pairs: Iterable[_Pair]) -> list[TcpProxy]:
    return [stage.cluster.servers[server].proxies[place] for server, place in pairs]
