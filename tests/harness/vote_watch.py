"""Looks at nodes from outside, again and again: one that must not vote must not change what a vote changes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import hiredis

from harness.redis_nodes import RedisNode

# One atomic look. Every mint and commit changes a counter, every vote that counts `changes`; `high` is what a rejoin gives back.
_LOOK = """
local node = redis.call('HMGET', KEYS[1], 'state', 'admission', 'run_id', 'changes', 'floor')
local run = string.match(redis.call('INFO', 'server'), 'run_id:(%w+)')
local kept = {'changes', node[4] or '', 'high', redis.call('GET', KEYS[2]) or ''}
for _, key in ipairs(redis.call('KEYS', KEYS[3])) do
  kept[#kept + 1] = key
  kept[#kept + 1] = redis.call('GET', key)
end
local locks = {}
for _, key in ipairs(redis.call('KEYS', KEYS[4])) do
  local hold = redis.call('HMGET', key, 'nonce', 'token')
  locks[#locks + 1] = key
  locks[#locks + 1] = hold[1] .. ' ' .. hold[2]
end
return {node[1] or '', node[2] or '', node[3] or '', node[5] or '', run, kept, locks}
"""
_KEYS = ("redfence:node", "redfence:high", "redfence:counter:*", "redfence:lock:*")
_INTERVAL_S = 0.05


@dataclass(frozen=True, slots=True)
class _Look:
    """What a node showed at one instant.

    Attributes:
        spell: the run of its process, its admission id, and the floor that it has or is to have.
        votes: whether it may: its identity is ready, and was given to it in this run.
        kept: numbers, which stay until something votes.
        locks: holds, which end by themselves but do not begin.
    """

    spell: tuple[bytes, bytes, bytes]
    state: bytes
    votes: bool
    kept: dict[bytes, bytes]
    locks: dict[bytes, bytes]


class VoteWatch:
    """Looks at nodes within `async with`, and fails at the exit if one that had no vote granted or renewed anything.

    It is not asked what a server thinks of the node, but what the node itself shows.

    Attributes:
        quarantines: of each node, by place, the ids of those that were seen.
        broken: what was seen that must not be.
        looks: how many there were.
        unanswered: how many there would have been, had the node not been down.
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

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
        if look.state == b"quarantined":
            self.quarantines[place].add(look.spell[1])
        first = self._first[place]
        if look.votes or first is None or first.spell != look.spell:
            self._first[place] = None if look.votes else look
            return
        new_locks = look.locks.items() - first.locks.items()
        if look.kept != first.kept or new_locks:
            changed = look.kept.items() ^ first.kept.items()
            self.broken.append(f"node {place} has no vote and changed {sorted(changed)}, locked {new_locks}")


def _read(answer: object) -> _Look:
    assert isinstance(answer, list)
    state, admission, admitted_run, floor, run, kept, locks = answer
    votes = state == b"ready" and admitted_run.partition(b"/")[0] == run
    pairs = [dict(zip(flat[::2], flat[1::2], strict=True)) for flat in (kept, locks)]
    return _Look((run, admission, floor), state, votes, *pairs)
