"""Examine nodes again and again: one without a vote must not change what a vote changes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import hiredis

from harness.processes.redis_nodes import RedisNode

# One atomic look. Each mint changes a counter, each commit a counter or a hold. The fence and the
# restored vote change `high`, but the identity in the same step.
_LOOK = """
local run = string.match(redis.call('INFO', 'server'), 'run_id:(%w+)')
local numbers = {'high', redis.call('GET', KEYS[2]) or ''}
for _, key in ipairs(redis.call('KEYS', KEYS[3])) do
  numbers[#numbers + 1] = key
  numbers[#numbers + 1] = redis.call('GET', key)
end
local locks = {}
for _, key in ipairs(redis.call('KEYS', KEYS[4])) do
  local token, nonce = string.match(redis.call('GET', key), '^%S+ (%d+) %d %d+ (%S+)')
  locks[#locks + 1] = key
  locks[#locks + 1] = nonce .. ' ' .. token
end
return {run, redis.call('HGETALL', KEYS[1]), numbers, locks}
"""
_KEYS = ("redfence:node", "redfence:high", "redfence:counter:*", "redfence:lock:*")
_INTERVAL_S = 0.05


@dataclass(frozen=True, slots=True)
class _Look:
    """One look at one node.

    Attributes:
        numbers: they stay as they are while the node has no vote.
        locks: holds end by themselves, but none begins while the node has no vote.
    """

    run: bytes
    identity: dict[bytes, bytes]
    numbers: dict[bytes, bytes]
    locks: dict[bytes, bytes]

    @property
    def votes(self) -> bool:
        admitted_run = self.identity.get(b"run_id", b"").partition(b"/")[0]
        return self.identity.get(b"state") == b"ready" and admitted_run == self.run


class VoteWatch:
    """Examines nodes within `async with`; fails at the exit if one without a vote granted anything.

    It reads the nodes themselves and asks no server.

    Attributes:
        quarantines: for each node, by index, the ids of the quarantines that were seen.
        unanswered: how many looks were not answered, for the node was down.
    """

    def __init__(self, nodes: Sequence[RedisNode]) -> None:
        self._nodes = nodes
        self._first: list[_Look | None] = [None] * len(nodes)
        self._tasks: list[asyncio.Task[None]] = []
        self.quarantines: list[set[bytes]] = [set() for _ in nodes]
        self.broken: list[str] = []
        self.looks = 0
        self.unanswered = 0

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._watch(place)) for place in range(len(self._nodes))]
        return self

    async def __aexit__(self, kind: object, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        outcomes = await asyncio.gather(*self._tasks, return_exceptions=True)
        if kind is None:
            assert not self.broken, self.broken
            for outcome in outcomes:
                if not isinstance(outcome, asyncio.CancelledError) and outcome is not None:
                    raise outcome

    async def _watch(self, place: int) -> None:
        while True:
            try:
                look = _read(await self._nodes[place].call("EVAL", _LOOK, len(_KEYS), *_KEYS))
            except (OSError, hiredis.ReplyError):
                self.unanswered += 1  # it is down, or loads its data
            else:
                self._compare(place, look)
                self.looks += 1
            await asyncio.sleep(_INTERVAL_S)

    def _compare(self, place: int, look: _Look) -> None:
        if look.identity.get(b"state") == b"quarantined":
            self.quarantines[place].add(look.identity[b"admission"])
        first = self._first[place]
        if look.votes or first is None or (first.run, first.identity) != (look.run, look.identity):
            self._first[place] = None if look.votes else look
            return
        new_locks = look.locks.items() - first.locks.items()
        if look.numbers != first.numbers or new_locks:
            changed = look.numbers.items() ^ first.numbers.items()
            self.broken.append(f"node {place} has no vote and changed {sorted(changed)}, locked {new_locks}")


def _read(answer: object) -> _Look:
    assert isinstance(answer, list)
    run, *lists = answer
    return _Look(run, *(dict(zip(flat[::2], flat[1::2], strict=True)) for flat in lists))
