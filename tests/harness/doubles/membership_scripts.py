"""The scripts of a visit, which change or read a node's identity, as decisions over its memory."""

from __future__ import annotations

from harness.doubles.joining_commands import (
    DistrustClock,
    JoiningAnswer,
    JoiningCommand,
    Quarantine,
    RaiseFloor,
    ReadIdentity,
    ReserveFloor,
    RestoreVote,
    Sight,
    Step,
)
from harness.doubles.node_memory import NodeMemory
from redfence_server.membership.examination import Identity, Phase


def join(node: NodeMemory, command: JoiningCommand, now_ms: float) -> JoiningAnswer:
    """Carry out one script."""
    match command:
        case ReadIdentity():
            numbers = (node.high, node.distrusted_until_ms, node.waited_floor)
            return Sight(_identity(node), _key_count(node), *numbers)
        case Quarantine():
            return _quarantine(node, command)
        case ReserveFloor():
            return _reserve_floor(node, command)
        case RaiseFloor():
            return _raise_floor(node, command)
        case RestoreVote():
            return _restore_vote(node, command)
        case DistrustClock():
            return _distrust_clock(node, command, now_ms)


def _identity(node: NodeMemory) -> Identity | None:
    if not node.admission:
        return None
    place = node.formation
    return Identity(
        *(place.cluster_id, place.index, place.node_count, place.max_ttl_ms),
        *(node.admission, node.run_id, node.durable, node.phase),
        *(node.floor, node.voted_floor, node.reserved, node.evicted),
        known_floors=node.known_floors.copy(),
        known_fences=node.known_fences.copy(),
        predecessor=node.predecessor,
    )


def _key_count(node: NodeMemory) -> int:
    many = len(node.holds) + len(node.counters) + len(node.forced)
    return many + (node.high is not None) + (node.admission != "")


def _is_without_vote(node: NodeMemory, quarantine: str) -> bool:
    return node.admission != "" and node.admission == quarantine and node.phase is not Phase.READY


def _quarantine(node: NodeMemory, quarantine: Quarantine) -> Step:
    if (node.admission, node.run_id) != (quarantine.known.admission, quarantine.known.run_id):
        return Step.CHANGED
    if not node.admission and _key_count(node):
        return Step.NOT_EMPTY
    if node.run_id != quarantine.run_id:
        node.evicted = 0
    if node.admission and node.formation.cluster_id != quarantine.formation.cluster_id:
        node.predecessor, node.voted_floor = node.formation.cluster_id, 0
    node.formation, node.phase = quarantine.formation, quarantine.phase
    node.admission, node.run_id = quarantine.quarantine, quarantine.run_id
    node.durable, node.reserved = quarantine.durable, 0
    node.floor = max(node.floor, quarantine.floor)
    return Step.DONE


def _reserve_floor(node: NodeMemory, reserve: ReserveFloor) -> Step:
    if not _is_without_vote(node, reserve.quarantine) or reserve.floor <= node.floor:
        return Step.CHANGED
    node.floor = node.reserved = reserve.floor
    return Step.DONE


def _raise_floor(node: NodeMemory, fence: RaiseFloor) -> Step:
    has_forgotten = node.high is None and node.phase is Phase.READY
    if not node.admission or node.admission != fence.known or has_forgotten:
        return Step.NOT_ADMITTED
    if (node.high or 0) >= fence.floor:
        return Step.GREATER
    node.high = node.known_floors[fence.index] = fence.floor
    node.known_fences[fence.index] = fence.quarantine
    if node.phase is Phase.READY:
        node.admission = fence.admission
    return Step.DONE


def _restore_vote(node: NodeMemory, restore: RestoreVote) -> Step:
    is_reserved = node.reserved != 0 and node.reserved == restore.floor
    if not _is_without_vote(node, restore.quarantine) or not is_reserved:
        return Step.CHANGED
    if node.phase is not Phase.RESTARTED:
        node.waited_floor = restore.floor
    node.high, node.reserved = max(node.high or 0, restore.floor), 0
    node.voted_floor = restore.floor
    for index, (floor, fence_id) in enumerate(zip(restore.floors, restore.fence_ids, strict=True)):
        if floor > node.known_floors.get(index, 0):
            node.known_floors[index], node.known_fences[index] = floor, fence_id
            if not fence_id:
                del node.known_fences[index]
    node.admission, node.phase = restore.admission, Phase.READY
    node.run_id, node.durable, node.evicted = restore.run_id, restore.durable, restore.evicted
    return Step.DONE


def _distrust_clock(node: NodeMemory, distrust: DistrustClock, now_ms: float) -> Step:
    if not node.admission or node.admission != distrust.known:
        return Step.NOT_ADMITTED
    left_ms = node.distrusted_until_ms - int(now_ms)
    if not distrust.left_ms <= left_ms <= distrust.most_ms:
        node.distrusted_until_ms = int(now_ms) + distrust.left_ms
    return Step.DONE
