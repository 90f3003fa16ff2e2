"""What the single calls answer, as frozen values; read from the contract's messages. Pure."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from redfence._messages.requests import duration_ms
from redfence_proto.v1 import lock_pb2


class NodeAnswer(enum.Enum):
    """How a node answered."""

    UNKNOWN = lock_pb2.NODE_ANSWER_UNSPECIFIED
    """In a way that this version does not know."""
    ANSWERED = lock_pb2.NODE_ANSWER_ANSWERED
    """It answered."""
    TIMED_OUT = lock_pb2.NODE_ANSWER_TIMED_OUT
    """Not in time."""
    UNREACHABLE = lock_pb2.NODE_ANSWER_UNREACHABLE
    """There is no connection to it, or it is not ready."""
    REFUSED = lock_pb2.NODE_ANSWER_REFUSED
    """The server is not admitted to it any more, or it answered with an error."""


class NodeState(enum.Enum):
    """Whether a node votes."""

    UNKNOWN = lock_pb2.NODE_STATE_UNSPECIFIED
    """In a state that this version does not know."""
    JOINING = lock_pb2.NODE_STATE_JOINING
    """The server is checking its identity."""
    READY = lock_pb2.NODE_STATE_READY
    """It votes."""
    QUARANTINED = lock_pb2.NODE_STATE_QUARANTINED
    """Reachable but not trusted."""
    UNREACHABLE = lock_pb2.NODE_STATE_UNREACHABLE
    """No connection."""


class Durability(enum.Enum):
    """Whether a node loses nothing at a crash, so that it votes again at once after a restart."""

    UNKNOWN = lock_pb2.DURABILITY_UNSPECIFIED
    """It is not known yet, or in a way that this version does not know."""
    PROVEN = lock_pb2.DURABILITY_PROVEN
    """By its settings."""
    DECLARED = lock_pb2.DURABILITY_DECLARED
    """By the operator's word alone."""
    NONE = lock_pb2.DURABILITY_NONE
    """After a restart it is kept out for the greatest ttl, and then comes back."""


@dataclass(frozen=True, slots=True)
class Hold:
    """Who holds a resource.

    Attributes:
        holder: its label; may be "".
        token: its fencing token.
        remaining: seconds until its lease ends unless renewed.
    """

    holder: str
    token: int
    remaining: float


@dataclass(frozen=True, slots=True)
class NodeHold:
    """What one node says of a resource.

    Attributes:
        index: the node's place in the cluster.
        answer: whether and why it did (not) answer.
        hold: the hold on that node, if there is one.
    """

    index: int
    answer: NodeAnswer
    hold: Hold | None


@dataclass(frozen=True, slots=True)
class QueuedAcquire:
    """One acquire that waits for a resource.

    Attributes:
        holder: its label; may be "".
        waited: seconds that it has been waiting.
    """

    holder: str
    waited: float


@dataclass(frozen=True, slots=True)
class LockReport:
    """The state of a resource when it was asked for; by now it may have changed.

    Attributes:
        resource: the name.
        current: who holds it by a quorum's word, or None.
        waiters: how many acquires wait for it at the server that answered.
        queue: those acquires, the next to be granted first; the first 100 of them.
        position: the place in that queue of this client's own acquire, of the first if it has several; 1 is the next to be
            granted, 0 means that none waits there.
        nodes: what each node says.
    """

    resource: str
    current: Hold | None
    waiters: int
    queue: tuple[QueuedAcquire, ...]
    position: int
    nodes: tuple[NodeHold, ...]


@dataclass(frozen=True, slots=True)
class TokenReport:
    """Whether a fencing token was the live one when it was asked for.

    Attributes:
        live: whether the lease with this token held the resource.
        current: who held it, or None.
    """

    live: bool
    current: Hold | None


@dataclass(frozen=True, slots=True)
class NodeReport:
    """One node, as the server that answered sees it.

    Attributes:
        index: its place in the cluster.
        address: HOST:PORT or a socket's path.
        state: whether it votes.
        detail: why it does not, or what is wrong with it although it does; "" when all is well.
        run_id: the id of its present run.
        latency: seconds that its last command took; None before the first.
        since: seconds in this state.
        clock_offset: seconds that its clock is ahead of the server's; negative if it is behind, None before it was asked.
        high: the greatest number that it is known to have minted or learnt.
        durability: whether it votes again at once after a restart.
        clock_distrusted_for: seconds for which its votes for new grants do not count, because its clock was set.
        state_changes: how often its state has changed since the server's start.
    """

    index: int
    address: str
    state: NodeState
    detail: str
    run_id: str
    latency: float | None
    since: float
    clock_offset: float | None = None
    high: int = 0
    durability: Durability = Durability.UNKNOWN
    clock_distrusted_for: float = 0.0
    state_changes: int = 0

    @property
    def grants(self) -> bool:
        """Whether its votes for new grants count."""
        return self.state is NodeState.READY and self.clock_distrusted_for <= 0


@dataclass(frozen=True, slots=True)
class ClusterReport:
    """The cluster, as the server that answered sees it.

    Attributes:
        cluster_id: "" while no node was admitted.
        quorum: how many ready nodes a decision takes.
        nodes: every configured node.
        max_ttl: the greatest ttl in seconds.
        server_version: of the server that answered.
    """

    cluster_id: str
    quorum: int
    nodes: tuple[NodeReport, ...]
    max_ttl: float
    server_version: str

    @property
    def ready(self) -> bool:
        """Whether enough nodes vote for locks to be granted. One whose clock was set lately does not count."""
        return sum(node.grants for node in self.nodes) >= self.quorum > 0


def read_lock(response: lock_pb2.GetLockResponse) -> LockReport:
    """Read the answer to GetLock."""
    nodes = tuple(
        NodeHold(
            node.node_index, _node_answer(node.answer), _hold(node.hold) if node.HasField("hold") else None
        )
        for node in response.nodes
    )
    current = _hold(response.current) if response.HasField("current") else None
    queue = tuple(QueuedAcquire(each.holder, duration_ms(each.waited) / 1000) for each in response.queue)
    return LockReport(response.resource, current, response.waiters, queue, response.position, nodes)


def read_token(response: lock_pb2.CheckTokenResponse) -> TokenReport:
    """Read the answer to CheckToken."""
    current = _hold(response.current) if response.HasField("current") else None
    return TokenReport(response.state == lock_pb2.TOKEN_STATE_LIVE, current)


def read_cluster(response: lock_pb2.ClusterStatusResponse) -> ClusterReport:
    """Read the answer to ClusterStatus."""
    return ClusterReport(
        response.cluster_id,
        response.quorum,
        tuple(_node(node) for node in response.nodes),
        duration_ms(response.max_ttl) / 1000,
        response.server_version,
    )


def _hold(hold: lock_pb2.CurrentHold) -> Hold:
    return Hold(hold.holder, hold.fencing_token, duration_ms(hold.remaining) / 1000)


def _node(node: lock_pb2.NodeStatus) -> NodeReport:
    known = node.state in lock_pb2.NodeState.values()
    durability_known = node.durability in lock_pb2.Durability.values()
    return NodeReport(
        index=node.index,
        address=node.address,
        state=NodeState(node.state) if known else NodeState.UNKNOWN,
        detail=node.detail,
        run_id=node.run_id,
        latency=duration_ms(node.latency) / 1000 if node.HasField("latency") else None,
        since=duration_ms(node.since) / 1000,
        clock_offset=duration_ms(node.clock_offset) / 1000 if node.HasField("clock_offset") else None,
        high=node.high,
        durability=Durability(node.durability) if durability_known else Durability.UNKNOWN,
        clock_distrusted_for=duration_ms(node.clock_distrusted_for) / 1000,
        state_changes=node.state_changes,
    )


def _node_answer(answer: int) -> NodeAnswer:
    return NodeAnswer(answer) if answer in lock_pb2.NodeAnswer.values() else NodeAnswer.UNKNOWN
