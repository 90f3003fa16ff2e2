"""What the single calls answer, as frozen values; read from the contract's messages. Pure."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from redfence._requests import duration_ms
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
        detail: why it does not.
        run_id: the id of its present run.
        latency: seconds that its last command took; None before the first.
        since: seconds in this state.
    """

    index: int
    address: str
    state: NodeState
    detail: str
    run_id: str
    latency: float | None
    since: float


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
        """Whether enough nodes vote for locks to be granted."""
        return sum(node.state is NodeState.READY for node in self.nodes) >= self.quorum > 0


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
    return NodeReport(
        node.index,
        node.address,
        NodeState(node.state) if known else NodeState.UNKNOWN,
        node.detail,
        node.run_id,
        duration_ms(node.latency) / 1000 if node.HasField("latency") else None,
        duration_ms(node.since) / 1000,
    )


def _node_answer(answer: int) -> NodeAnswer:
    return NodeAnswer(answer) if answer in lock_pb2.NodeAnswer.values() else NodeAnswer.UNKNOWN
