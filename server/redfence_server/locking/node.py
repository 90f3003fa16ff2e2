"""Define the commands to one node and its replies: the seam between the quorum and the wire.

`NodeLink` implements `LockNode` over the wire, the tests' fake node in memory. tests/contract tests both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from enum import Enum, auto
from typing import Final, Protocol

from redfence_server.values import value


@value
class Release:
    """End the hold of a lease. A node that cannot be reached gets the command later, as with `Undo`."""

    resource: str
    digest: str
    expires_at_ms: float


@value
class ForceRelease(Release):
    """End the hold of a lease for an operator, unless its token is greater; `Renew` then answers FORCED.

    With a lock delay, the lock stays closed for the delay.
    """

    token: int


@value
class Mint:
    """Take the lock for a lease, with the node's next token.

    Attributes:
        nonce: the attempt's id.
        release_first: a release of the same resource, done in the same step; it makes the mint a handover.
        watch_blocking_hold: send this server a `Notice` when the hold that refuses the mint ends.
        watch_own_hold: send this server a `Notice` when the new hold ends, because others wait here.
        lock_delay_ms: how long the lock stays closed if the lease is lost.
    """

    resource: str
    digest: str
    nonce: str
    holder: str
    ttl_ms: int
    release_first: Release | None = None
    watch_blocking_hold: bool = False
    watch_own_hold: bool = False
    lock_delay_ms: int = 0


@value
class Commit:
    """Raise the hold with this nonce to the token of the grant.

    Attributes:
        admission_id: the one under which the node answered the mint. A node with a new one was fenced since,
            and an attempt from before the fence must not be granted after it.
    """

    resource: str
    digest: str
    nonce: str
    token: int
    admission_id: str = field(default="", repr=False)


@value
class Undo:
    """Delete the hold that the attempt `nonce` made, unless a retry shares it; no lock delay follows.

    A node that cannot be reached gets the command when it is back. After `expires_at_ms` on the server's
    clock it does not, because the hold has expired.
    """

    resource: str
    nonce: str
    expires_at_ms: float


@value
class Renew:
    """Restart the ttl of a lease, if it holds the lock."""

    resource: str
    digest: str


@value
class Inspect:
    """Return the hold of the lock."""

    resource: str


Command = Mint | Commit | Undo | Renew | Release | ForceRelease | Inspect
"""Each Lua script of the algorithm has one command."""


@value
class Granted:
    """The lease holds the lock on this node; a retry gets the nonce and the token of the existing hold.

    Attributes:
        contended: other servers want a notice when this hold ends.
        released: in a handover, the released lease held the lock here.
        counts: the vote counts, because the node's clock was not set lately.
        admission_id: the one under which the node granted.
    """

    nonce: str
    token: int
    contended: bool = False
    released: bool = False
    counts: bool = True
    admission_id: str = field(default="", repr=False, compare=False)


@value
class Held:
    """Another lease holds the lock on this node; in a summary of several answers, on most nodes.

    Attributes:
        remaining_ms: how long the lock stays taken without a renewal: for the rest of ttl and lock delay.
        lock_delay_ms: how long the lock stays closed if the lease is lost.
    """

    digest: str
    token: int
    holder: str
    remaining_ms: int
    lock_delay_ms: int = 0

    @property
    def closed(self) -> bool:
        """Whether the lease was lost, and its lock delay keeps the lock closed."""
        return 0 < self.lock_delay_ms >= self.remaining_ms


@value
class Renewed:
    """The lease still holds the lock on this node, and its ttl has restarted."""

    token: int
    ttl_ms: int


class Status(Enum):
    """Replies without further values."""

    COMMITTED = auto()
    """The hold lasted without a gap from its mint to this commit."""
    LOST = auto()
    """The hold to commit does not exist any more."""
    UNDONE = auto()
    """Only this attempt had the hold, and the hold has ended."""
    KEPT = auto()
    """The attempt has no hold here, or a retry shares it."""
    NOT_HELD = auto()
    """The lease does not hold the lock on this node."""
    FORCED = auto()
    """The lease does not hold the lock on this node, because an operator ended it."""
    RELEASED = auto()
    """The lease held the lock on this node until this release."""
    FREE = auto()
    """The lock is free on this node."""


class NoReply(Enum):
    """Why no reply counts. The node may have run the command, except where a member says otherwise."""

    TIMED_OUT = auto()
    """No reply came within the node timeout."""
    UNREACHABLE = auto()
    """The command was not run: there is no admitted connection, or too many commands on it are unanswered."""
    QUARANTINED = auto()
    """The command was not run: the node answers, but must not vote."""
    DISCONNECTED = auto()
    """The connection broke before the reply came."""
    REFUSED = auto()
    """The node answered with an error."""
    NOT_ADMITTED = auto()
    """This server must examine the node again, and will do so at once. A mint or a commit changed nothing, or
    only what an undo finds. Repeat a command to several nodes as a whole: replies from before and after an
    examination must not be combined."""
    CLOCK_SET = auto()
    """The node's clock was set lately, so its vote for a new grant does not count."""


Reply = Granted | Held | Renewed | Status | NoReply


@value
class Notice:
    """The hold with this token has ended on a node before its ttl was over.

    A notice is a hint: it may be lost, and another lease may hold the lock by now.
    """

    node: int
    resource: str
    token: int


class Durability(Enum):
    """Whether a node's present run survives a crash without loss, and so votes again without a quarantine."""

    UNKNOWN = auto()
    """The server has not examined the node yet."""
    PROVEN = auto()
    """Its settings prove it since the start of the run."""
    DECLARED = auto()
    """Only the operator declares it."""
    NONE = auto()
    """A restart leads to quarantine."""


REVALIDATION_MS_MAX: Final = 800
"""How long a node under re-examination is not lost yet. An examination takes about ten round trips."""


class NodeState(Enum):
    """Whether a node votes."""

    JOINING = auto()
    """The server is connecting to it for the first time."""
    READY = auto()
    """It votes."""
    QUARANTINED = auto()
    """It is reachable, but must not vote."""
    UNREACHABLE = auto()
    """The server has no connection to it."""


@value
class NodeReport:
    """The knowledge of this server about one node.

    Attributes:
        address: HOST:PORT or a socket's path, never with a password.
        detail: why it does not vote, or what is wrong although it votes; empty when all is well.
        run_id: the id of its present run; empty until the server first reaches it.
        latency_ms: how long the last answered command took, with up to 2 ms for the batch before it. None
            before the first.
        since_ms: for how long it has been in this state.
        max_token: the greatest token that the server knows it minted or learnt.
        clock_offset_ms: its wall clock minus this machine's; None until the server first reads it.
        clock_distrusted_ms: how much longer its votes for new grants do not count, because its clock was set.
        state_changes: how many there were since the server's start.
        grant_refusal: why a node that votes would not grant: the error with which it would refuse a mint, or
            that it answers heartbeats too late. Empty if it would grant.
        unanswered: how many commands it has not answered yet.
        failures: how many commands got no reply that counts since the server's start, by cause.
    """

    address: str
    state: NodeState
    detail: str
    run_id: str
    latency_ms: float | None
    since_ms: float
    durability: Durability = Durability.UNKNOWN
    max_token: int = 0
    clock_offset_ms: float | None = None
    clock_distrusted_ms: float = 0.0
    state_changes: int = 0
    grant_refusal: str = ""
    unanswered: int = 0
    failures: Mapping[NoReply, int] = field(default_factory=dict)

    @property
    def grants(self) -> bool:
        """Whether the node would run a mint now and in time, and its vote for the new grant would count."""
        return self.state is NodeState.READY and not self.clock_distrusted_ms and not self.grant_refusal


@value
class ScannedKeys:
    """The keys of one look into a node's key table, and the cursor of the next look; 0 after the last."""

    next_cursor: int
    keys: Sequence[bytes]


class LockNode(Protocol):
    """One node of the cluster; `index` is its node index."""

    index: int

    def send(self, command: Command, on_reply: Callable[[Reply], None] | None = None) -> bool:
        """Send `command`, and call `on_reply` exactly once within the node timeout, but not before returning.

        Return whether the command is on its way. If not, the node gets an undo or a release when it votes
        again. A node runs commands in the order in which they were sent.
        """
        ...

    def listen(self, on_notice: Callable[[Notice], None]) -> None:
        """Pass the notices for this server to `on_notice`, in order with the node's replies."""
        ...

    def report(self) -> NodeReport:
        """Return what this server knows about the node, without asking it."""
        ...
