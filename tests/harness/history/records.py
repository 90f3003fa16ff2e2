"""What a chaos run leaves behind: one line of JSON for each call of a client and each fault, and nothing that a server said of itself.

Instants are seconds of the machine's clock since its boot, which all processes share and which counts while it sleeps, as a holder's does.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

# The kind of the fault that lasts from the instant when the last of f + 1 nodes was empty until `redfence cluster recover` was begun.
MAJORITY_WIPED = "majority wiped"


class Kind(StrEnum):
    """What was called."""

    ACQUIRE = "acquire"
    RENEW = "renew"
    """One beat of a keepalive stream: from its request to its answer."""
    RELEASE = "release"
    CHECK = "check"
    """CheckToken: OK if it was told live, and failed if not."""
    GET_LOCK = "get lock"
    """GetLock; its token is the present holder's."""
    READ = "read"
    """A fenced read of the storage."""
    APPEND = "append"
    """A fenced write of the list that was read, with one more entry."""


class Outcome(StrEnum):
    """What the caller may conclude."""

    OK = "ok"
    FAILED = "failed"
    """It has had no effect and never will."""
    UNKNOWN = "unknown"
    """It may have had its effect, or may still have it."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One call of one client.

    Attributes:
        client: the name of the process.
        lease: one word per lease, the same for every call that is made for it.
        invoked_s: before the request was sent.
        completed_s: after the answer was read; None if the client died before.
        token: that was granted, was shown to the storage, or was asked about or seen; 0 if there was none.
        until_s: of a grant or a renewal: until when the holder counts on the lease, which is `invoked_s` and the answered validity.
        ttl_s: that was asked for, of an acquire.
        entry: what was appended; unique in the run.
        detail: why it failed; for people.
        stale: the storage refused it because of its token.
        lost: of a renewal, a release or a check: the server told that the lease does not hold.
        admission_refused: it failed without having been judged: no quorum, no room, or a server that is about to end.
        server: which lock server was called; empty if the caller does not know.
    """

    client: str
    kind: Kind
    resource: str
    lease: str
    invoked_s: float
    completed_s: float | None
    outcome: Outcome
    token: int = 0
    until_s: float = 0.0
    ttl_s: float = 0.0
    entry: str = ""
    detail: str = ""
    stale: bool = False
    lost: bool = False
    admission_refused: bool = False
    server: str = ""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    Attributes:
        kind: its name in the list of faults.
        target: what it struck; for people.
        began_s: before it was injected.
        ended_s: after it was healed.
        moves_clocks: exclusion is not promised while it lasts, nor until every lease that was granted meanwhile has ended.
        overlaps_s: two leases may begin to overlap while it lasts, and for so long after its end; None if they may not.
    """

    kind: str
    target: str
    began_s: float
    ended_s: float
    moves_clocks: bool = False
    overlaps_s: float | None = None


@dataclass(frozen=True, slots=True)
class History:
    """Everything that is judged.

    Attributes:
        seed: of the run.
        operations: of all clients, in the order of their invocation.
        faults: in the order of their beginning.
        began_s: when the load began.
        healed_s: when the last fault was over and everything was set right.
        ended_s: when the last client had ended.
        kept: what the storage shows in the end: the list of entries of each resource.
        asked: the kinds of faults that the run was to have; one of them that never struck makes it invalid.
    """

    seed: int
    operations: tuple[Operation, ...]
    faults: tuple[Fault, ...]
    began_s: float
    healed_s: float
    ended_s: float
    kept: dict[str, tuple[str, ...]]
    asked: tuple[str, ...] = ()


def line(record: Operation | Fault) -> str:
    """Return a record as a line of JSON."""
    return json.dumps(asdict(record), separators=(",", ":")) + "\n"


def read_operations(path: Path) -> Iterator[Operation]:
    """Yield what a client has written; a last line that was cut off by its death is skipped."""
    for text in path.read_text("utf-8").splitlines(keepends=True):
        if text.endswith("\n"):
            fields = json.loads(text)
            kind, outcome = Kind(fields.pop("kind")), Outcome(fields.pop("outcome"))
            yield Operation(kind=kind, outcome=outcome, **fields)


def in_order(operations: Iterable[Operation]) -> tuple[Operation, ...]:
    """Return them in the order of their invocation."""
    return tuple(sorted(operations, key=lambda each: each.invoked_s))
