"""The records of a run: one for each call of a client and each fault; a server's own word is never recorded.

Instants are seconds of the machine's clock since its boot. All processes share that clock, and it counts
while the machine sleeps, as a holder's clock does.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from math import inf
from pathlib import Path

MAJORITY_WIPED = "majority wiped"
"""The fault from the wipe of the last of f + 1 nodes to the start of `redfence cluster recover`."""


class Kind(StrEnum):
    ACQUIRE = "acquire"
    RENEW = "renew"
    """One renewal over a keepalive stream, from its request to its answer."""
    RELEASE = "release"
    CHECK = "check"
    """CheckToken: it succeeds if the token is live."""
    GET_LOCK = "get lock"
    """GetLock; its token is that of the present holder."""
    READ = "read"
    """A fenced read of the storage."""
    APPEND = "append"
    """A fenced write to the storage: the list that was read, with one entry more."""


class Outcome(StrEnum):
    """The conclusion that a client may draw from the answer to a call."""

    OK = "ok"
    FAILED = "failed"
    """The call has had no effect and never will."""
    UNKNOWN = "unknown"
    """The call may have had its effect, or may still have it."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One call of one client.

    Attributes:
        lease: the id that all calls for one lease share.
        invoked_s: before the request was sent.
        completed_s: after the answer was read; None if the client died before.
        token: the token that was granted, presented or observed; 0 if there was none.
        until_s: until when the holder of a grant or a renewal counts on the lease; 0 for other calls.
        ttl_s: the ttl that an Acquire asked for.
        entry: the entry of an append; unique in the run.
        detail: why the call failed; for people.
        stale: the storage refused the call because of its token.
        lost: the server answered a renewal, a release or a check that the lease does not hold.
        admission_refused: the call failed before a decision: no quorum, no room, or a server that ends.
        server: the lock server that was called; empty if the client does not know it.
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
        moves_clocks: leases that are requested or valid meanwhile need not exclude each other.
        overlaps_s: leases may begin to overlap during the fault and this long after it; None if they may not.
        forgets: the indices of nodes that lost data by it.
        rejoined_s: when those nodes voted again; None if they did not before the end.
    """

    kind: str
    target: str
    began_s: float
    ended_s: float
    moves_clocks: bool = False
    overlaps_s: float | None = None
    forgets: tuple[int, ...] = ()
    rejoined_s: float | None = None


@dataclass(frozen=True, slots=True)
class History:
    """Everything that `check` judges. A suite that records only calls leaves the rest out.

    Attributes:
        operations: the calls of all clients, in the order of invocation.
        faults: in the order of their beginning.
        began_s: when the load began.
        healed_s: when the last fault had ended and everything was repaired.
        ended_s: when the last client had ended.
        kept: the entries of each resource in the storage at the end.
        asked: the kinds of faults without which the run is invalid.
        node_count: how many nodes the cluster has.
    """

    operations: tuple[Operation, ...]
    faults: tuple[Fault, ...] = ()
    began_s: float = 0.0
    healed_s: float = inf
    ended_s: float = inf
    kept: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    asked: tuple[str, ...] = ()
    node_count: int = 1
    seed: int = 0


def line(record: Operation | Fault) -> str:
    return json.dumps(asdict(record), separators=(",", ":")) + "\n"


def read_operations(path: Path) -> Iterator[Operation]:
    """Yield the records of a client, without a last line that its death cut off."""
    for text in path.read_text("utf-8").splitlines(keepends=True):
        if text.endswith("\n"):
            fields = json.loads(text)
            kind, outcome = Kind(fields.pop("kind")), Outcome(fields.pop("outcome"))
            yield Operation(kind=kind, outcome=outcome, **fields)


def in_order(operations: Iterable[Operation]) -> tuple[Operation, ...]:
    return tuple(sorted(operations, key=lambda each: each.invoked_s))
