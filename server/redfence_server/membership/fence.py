"""Fence, wait, restore the vote: how a process gets the vote at its node index. This module raises the fence.

No token may be granted twice: neither if the node that minted it forgets it, nor if another process at the
same index minted it. There are N = 2f + 1 nodes. The process that is to vote at index i is in quarantine (its
own random id), so no server counts it. Every grant has a quorum, so it stands on f or more of the 2f peers.

1. *Read* the greatest token of f + 1 trusted peers; R is the greatest + 2^20. Every grant stands on one of
   them. (f peers could all have missed it.) The process's own greatest token counts as well.
2. *Reserve* R on the process itself, in that very quarantine, unless another driver has reserved as much. So
   peers never know a floor for index i that the process there will not have.
3. *Raise the floor* of index i to R on f + 1 trusted peers, in one step each, if the peer's greatest token is
   below R. A peer that votes renews its admission id in that step. This is the fence. From here on no quorum
   contains an older process at index i, dead or alive. Such a quorum needs f peers, so one fenced peer. Each
   server must examine that peer again before its next command there, reads the floor and drops the older
   process. An attempt in flight fails there: its token is below R, and the peer refuses the old id.
4. *Wait* the greatest ttl and its drift, counted from the completed fence. Every lease that the older process
   supported was granted or renewed before the fence, so its validity has ended. A process with proof that it
   forgot nothing skips the wait: it still supports its leases. But it must be the last process that voted at
   its index. If a peer knows of a later fence for another process, this one waits as if it had forgotten.
5. *Restore the vote*, if the process is still in that quarantine and R is still the reserved floor.

Any server may drive, and two at once do no harm: the later reservation wins, and the other driver begins
anew. A driver that dies leaves the process in quarantine. The next one completes its fence: it raises R on
the peers that do not show R for this very quarantine, if their tokens are below R. So step 3 protects R.

*Trusted* are peers that vote. After a power loss no node votes; then those that restarted with proof may read
and fence each other. They remember every grant that stood on them, so step 1 holds. Their ids need not change
in step 3: no server sends commands to a node without a vote, and each server examines it again when it votes.

Nodes that restarted with proof and nodes that forgot could wait for each other for ever. So a process with
proof needs fewer than f + 1 trusted peers, if it and they are f + 1 that remember. *Every* other peer must be
examined, without a vote, and the newest process at its index, and takes the floor as well, in its quarantine.
An older quorum without a fenced peer would then need older processes at f + 1 indices: more than may fail.

A single node has no peers. It comes back alone with proof, and by `redfence cluster recover` without.
docs/model checks these rules with time and with two processes at one index.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Final

from redfence_proto import bounds
from redfence_server.errors import NodeRejectedError
from redfence_server.locking import quorum
from redfence_server.membership.admin import AdminConnection
from redfence_server.membership.examination import FENCE_ID_DIGITS, Identity, Phase
from redfence_server.randomness import Randomness

TOKENS_JUMP: Final = 2**20
"""The jump exceeds any token that is minted but not yet on a quorum. Each fence uses up so many of 2^53."""


class FenceError(Exception):
    """The fence is not complete. Trying again is harmless.

    Attributes:
        floor: the floor that some peers may know by now; 0 if they know nothing new.
    """

    def __init__(self, problem: str, *, floor: int = 0) -> None:
        super().__init__(problem)
        self.floor = floor


class TooFewPeersError(FenceError):
    """Fewer trusted peers answer than the fence needs."""


def fence_size(node_count: int) -> int:
    """Return how many peers a fence needs: f + 1 of the 2f, and none for a single node."""
    return min(quorum.majority(node_count), node_count - 1)


def quarantine_id(process: Identity, fresh: str) -> str:
    """Return the id of a quarantine for a process that restarted with proof, from a fresh random id.

    Peers record the floor under this id. So the process recognises its own fences after a further restart.
    """
    return process.admission[:FENCE_ID_DIGITS] + fresh[FENCE_ID_DIGITS:]


def is_superseded(process: Identity, peers: Iterable[Identity]) -> bool:
    """Tell whether a peer knows of a fence for another process at this index since this one voted last.

    The reserved floor of this process does not count as voted: a driver may have stopped before its fence.
    """
    fence_id = process.admission[:FENCE_ID_DIGITS]
    return any(
        peer.known_floors.get(process.index, 0) > process.voted_floor
        and peer.known_fences.get(process.index, "")[:FENCE_ID_DIGITS] != fence_id
        for peer in peers
    )


def wait_ms(ttl_ms_max: int) -> float:
    """Return the wait after a completed fence: every lease from before has ended by then."""
    return ttl_ms_max + ttl_ms_max * quorum.DRIFT_RATIO + quorum.DRIFT_FIXED_MS


async def raise_fence(
    process: AdminConnection,
    trusted: Sequence[AdminConnection],
    *,
    token_seen: int,
    randomness: Randomness,
    out: Sequence[AdminConnection] | None = None,
) -> int:
    """Complete the fence for a process in quarantine, and return its floor.

    Args:
        process: examined just now, and in quarantine.
        trusted: peers, examined just now.
        token_seen: the greatest token that the caller ever saw from a process at this index.
        randomness: for admission ids.
        out: the other peers except empty ones, if every peer was examined and these have no vote.

    Cancellation: the process stays in quarantine; the fence may be complete or not.

    Raises:
        TooFewPeersError: fewer than f + 1 peers are trusted.
        FenceError: another driver was faster, or no tokens are left.
        NodeRejectedError: the connection to the process broke.
    """
    index, identity = process.snapshot.index, process.identity
    fenced, needed = _peers_to_fence(identity, trusted, out)
    if max((peer.identity.known_floors.get(index, 0) for peer in fenced), default=0) > identity.floor:
        raise FenceError("another process was given its index meanwhile")
    floor, missing = identity.reserved, [peer for peer in fenced if not _is_raised_for(process, peer)]
    if floor and len(fenced) - len(missing) >= needed:
        return floor
    if not floor or max(token_seen, *map(_token, missing), 0) >= floor:
        floor = max(token_seen, identity.floor, *map(_token, (process, *fenced))) + TOKENS_JUMP
        missing = list(fenced)
        if floor >= bounds.FENCING_TOKEN_MAX:
            raise FenceError("the tokens below 2^53 are used up")
        if not await process.reserve_floor(floor):
            raise FenceError("another server is giving it its vote")
    outcomes = await asyncio.gather(
        *(peer.raise_floor(process, floor, admission=randomness.hex_id()) for peer in missing),
        return_exceptions=True,
    )
    for outcome in outcomes:
        if isinstance(outcome, BaseException) and not isinstance(outcome, NodeRejectedError):
            raise outcome
    raised = len(fenced) - len(missing) + outcomes.count(True)
    if raised < needed:
        raise FenceError(
            f"the floor {floor} is needed on {needed} other nodes, and {raised} took it", floor=floor
        )
    return floor


def _peers_to_fence(
    identity: Identity, trusted: Sequence[AdminConnection], out: Sequence[AdminConnection] | None
) -> tuple[Sequence[AdminConnection], int]:
    """Return the peers for the floor, and how many of them must take it.

    Raises:
        TooFewPeersError: there are fewer.
    """
    needed, is_proven = fence_size(identity.node_count), identity.phase is Phase.RESTARTED
    if needed == 0 and not is_proven:
        raise TooFewPeersError("it is the only node, so no other node knows the granted tokens")
    if len(trusted) >= needed:
        return trusted, needed
    if is_proven and out is not None and 1 + len(trusted) >= quorum.majority(identity.node_count):
        return [*trusted, *out], len(trusted) + len(out)
    votes = "answer" if is_proven else "vote"
    raise TooFewPeersError(f"it needs {needed} other nodes that {votes}, and found {len(trusted)}")


def _is_raised_for(process: AdminConnection, peer: AdminConnection) -> bool:
    """Tell whether a peer took the floor that is reserved on the process, in its present quarantine.

    The floor alone is ambiguous: another process at this index, fenced at the same moment, may have the same
    one.
    """
    index, known = process.snapshot.index, peer.identity
    raised_for = known.known_floors.get(index), known.known_fences.get(index)
    return raised_for == (process.identity.reserved, process.identity.admission)


def _token(node: AdminConnection) -> int:
    """Return the greatest token that a node showed."""
    return node.snapshot.found.max_token or 0 if node.snapshot.found is not None else 0
