"""The commands of a visit to a node: one value for each script that changes or reads the identity."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from redfence_server.membership.examination import Identity, Phase


@dataclass(frozen=True, slots=True)
class Formation:
    """Which index of which cluster a node has."""

    cluster_id: str
    index: int
    node_count: int
    max_ttl_ms: int


@dataclass(frozen=True, slots=True)
class Known:
    """By which identity a decision was made; both empty for none."""

    admission: str = ""
    run_id: str = ""


@dataclass(frozen=True, slots=True)
class ReadIdentity:
    """read_identity.lua."""


@dataclass(frozen=True, slots=True)
class Quarantine:
    """quarantine.lua."""

    known: Known
    quarantine: str
    formation: Formation
    run_id: str
    phase: Phase = Phase.QUARANTINED
    floor: int = 0
    durable: bool = False


@dataclass(frozen=True, slots=True)
class ReserveFloor:
    """reserve_floor.lua."""

    quarantine: str
    floor: int


@dataclass(frozen=True, slots=True)
class RaiseFloor:
    """raise_floor.lua."""

    known: str
    admission: str
    index: int
    floor: int
    quarantine: str


@dataclass(frozen=True, slots=True)
class RestoreVote:
    """restore_vote.lua."""

    quarantine: str
    admission: str
    floor: int
    run_id: str
    floors: tuple[int, ...]
    fence_ids: tuple[str, ...] = ("", "", "")
    durable: bool = False
    evicted: int = 0


@dataclass(frozen=True, slots=True)
class DistrustClock:
    """distrust_clock.lua."""

    known: str
    left_ms: int
    most_ms: int


JoiningCommand = ReadIdentity | Quarantine | ReserveFloor | RaiseFloor | RestoreVote | DistrustClock


@dataclass(frozen=True, slots=True)
class Sight:
    """What `ReadIdentity` shows, but for the node's clock."""

    identity: Identity | None
    key_count: int
    high: int | None
    distrusted_until_ms: int = 0
    waited_floor: int = 0


class Step(Enum):
    """What came of a script that changes the identity."""

    DONE = auto()
    CHANGED = auto()
    """The identity is not the one by which it was decided."""
    NOT_EMPTY = auto()
    """There is no identity, and yet there are keys."""
    GREATER = auto()
    """The node has a token that is not below the floor."""
    NOT_ADMITTED = auto()
    """The id is not the node's, or the node has lost its `high`."""


JoiningAnswer = Sight | Step
