"""What a server says to a node before it is admitted there: one value per script that node_joining.py runs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from redfence_server.node_examination import Identity, Phase


@dataclass(frozen=True, slots=True)
class Formation:
    """Which place of which cluster a node has."""

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
class Look:
    """look.lua."""


@dataclass(frozen=True, slots=True)
class NoteRun:
    """note_run.lua."""

    known: Known
    run_id: str
    durable: bool


@dataclass(frozen=True, slots=True)
class Quarantine:
    """quarantine.lua."""

    known: Known
    quarantine: str
    formation: Formation
    run_id: str
    phase: Phase = Phase.QUARANTINED
    floor: int = 0


@dataclass(frozen=True, slots=True)
class Claim:
    """claim.lua."""

    quarantine: str
    floor: int
    changes: int


@dataclass(frozen=True, slots=True)
class Readmit:
    """readmit.lua."""

    quarantine: str
    admission: str
    floor: int
    changes: int
    run_id: str
    floors: tuple[int, ...]
    durable: bool = False
    evicted: int = 0
    phase: Phase = Phase.QUARANTINED


JoiningCommand = Look | NoteRun | Quarantine | Claim | Readmit


@dataclass(frozen=True, slots=True)
class Sight:
    """What a look shows."""

    identity: Identity | None
    key_count: int
    high: int | None


class Step(Enum):
    """What came of a script that changes the identity."""

    DONE = auto()
    CHANGED = auto()
    """The identity is not the one by which it was decided."""
    NOT_EMPTY = auto()
    """There is no identity, and yet there are keys."""


JoiningAnswer = Sight | Step
