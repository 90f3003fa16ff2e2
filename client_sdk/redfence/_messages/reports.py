"""Converts the answers of unary calls into frozen values for callers. Pure."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from redfence._messages.requests import duration_ms
from redfence_proto.v1 import lock_pb2


class NodeAnswer(enum.Enum):
    """Whether a node answered, and if not, why."""

    UNKNOWN = lock_pb2.NODE_ANSWER_UNSPECIFIED
    """The server sent a value that this version does not know."""
    ANSWERED = lock_pb2.NODE_ANSWER_ANSWERED
    """The node answered."""
    TIMED_OUT = lock_pb2.NODE_ANSWER_TIMED_OUT
    """The node did not answer in time."""
    UNREACHABLE = lock_pb2.NODE_ANSWER_UNREACHABLE
    """The server has no connection to the node, or the node is not ready."""
    REFUSED = lock_pb2.NODE_ANSWER_REFUSED
    """The node no longer admits the server, or it answered with an error."""


class NodeState(enum.Enum):
    """Whether a node votes, and if not, why."""

    UNKNOWN = lock_pb2.NODE_STATE_UNSPECIFIED
    """The server sent a state that this version does not know."""
    JOINING = lock_pb2.NODE_STATE_JOINING
    """The server is connecting to the node and checking its identity."""
    READY = lock_pb2.NODE_STATE_READY
    """The node votes."""
    QUARANTINED = lock_pb2.NODE_STATE_QUARANTINED
    """The node is reachable but not trusted, so it does not vote."""
    UNREACHABLE = lock_pb2.NODE_STATE_UNREACHABLE
    """The server has no connection to the node."""


class Durability(enum.Enum):
    """Whether a node keeps all its data in a crash, so that it votes again at once after a restart."""

    UNKNOWN = lock_pb2.DURABILITY_UNSPECIFIED
    """The server does not know yet, or it sent a value that this version does not know."""
    PROVEN = lock_pb2.DURABILITY_PROVEN
    """The node's settings prove it."""
    DECLARED = lock_pb2.DURABILITY_DECLARED
    """The operator declared it; nothing proves it."""
    NONE = lock_pb2.DURABILITY_NONE
    """The node may lose data. After a restart it does not vote for the greatest ttl."""


@dataclass(frozen=True, slots=True)
class Hold:
    """The present lease of a resource.

    Attributes:
        holder: the holder's label; may be "".
        token: the fencing token.
        remaining: seconds until the lease ends unless it is renewed; if `closed`, until the lock opens.
        lock_delay: seconds for which the lock stays closed if the lease is lost.
        closed: whether the lease was lost, and its lock delay keeps the lock closed.
    """

    holder: str
    token: int
    remaining: float
    lock_delay: float = 0.0
    closed: bool = False


@dataclass(frozen=True, slots=True)
class NodeHold:
    """The state of a resource on one node.

    Attributes:
        index: the node's index in the cluster.
        answer: whether the node answered, and if not, why.
        hold: the hold on that node, or None.
    """

    index: int
    answer: NodeAnswer
    hold: Hold | None


@dataclass(frozen=True, slots=True)
class QueuedAcquire:
    """One acquire that waits for a resource.

    Attributes:
        holder: the waiter's label; may be "".
        waited: how many seconds it has waited.
    """

    holder: str
    waited: float


@dataclass(frozen=True, slots=True)
class LockReport:
    """The state of a resource when the server answered; it may have changed since.

    Attributes:
        resource: the name of the resource.
        current: the lease that holds it on a quorum of nodes, or None.
        waiters: how many acquires wait for it at the server that answered.
        queue: the first 100 of those acquires, the next to be granted first.
        position: the place of this client's first acquire in that queue; 1 is next, 0 means that
            none waits there.
        nodes: the state on each node.
    """

    resource: str
    current: Hold | None
    waiters: int
    queue: tuple[QueuedAcquire, ...]
    position: int
    nodes: tuple[NodeHold, ...]


@dataclass(frozen=True, slots=True)
class TokenReport:
    """Whether a fencing token belonged to the present lease when the server answered.

    Attributes:
        live: whether the lease with this token held the resource.
        current: the present lease, or None.
    """

    live: bool
    current: Hold | None


@dataclass(frozen=True, slots=True)
class NodeReport:
    """One node, as the server that answered sees it.

    Attributes:
        index: the node's index in the cluster.
        address: HOST:PORT, or the path of a socket.
        state: whether the node votes.
        detail: why it does not vote, or a problem of a node that votes; "" when there is none.
        run_id: the id of the node's present process; it changes at every restart.
        latency: seconds that the last command took; None before the first.
        since: seconds in this state.
        clock_offset: seconds that the node's clock is ahead of the server's; negative if behind,
            None if unknown.
        high: the greatest token that the node is known to have minted or learned.
        durability: whether the node votes again at once after a restart.
        clock_distrusted_for: seconds for which its votes for new grants do not count, because its
            clock was set.
        state_changes: how often the state has changed since the server started.
        grant_refusal: why it would not grant now: the error with which it refuses new grants, or
            that it answers too late; "" if it would grant.
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
    grant_refusal: str = ""

    @property
    def grants(self) -> bool:
        """Whether it accepts new grants in time, and its votes for them count."""
        votes = self.state is NodeState.READY and not self.grant_refusal
        return votes and self.clock_distrusted_for <= 0


@dataclass(frozen=True, slots=True)
class ClusterReport:
    """The cluster, as the server that answered sees it.

    Attributes:
        cluster_id: the id of the cluster; "" while no node is admitted.
        quorum: how many ready nodes a decision needs.
        nodes: every configured node.
        max_ttl: the greatest ttl in seconds.
        server_version: the version of the server that answered.
    """

    cluster_id: str
    quorum: int
    nodes: tuple[NodeReport, ...]
    max_ttl: float
    server_version: str

    @property
    def ready(self) -> bool:
        """Whether a quorum of nodes would grant now; see `NodeReport.grants`."""
        return sum(node.grants for node in self.nodes) >= self.quorum > 0


def read_lock(response: lock_pb2.GetLockResponse) -> LockReport:
    """Return the answer of GetLock as a report."""
    nodes = tuple(
        NodeHold(
            node.node_index,
            _node_answer(node.answer),
            read_hold(node.hold) if node.HasField("hold") else None,
        )
        for node in response.nodes
    )
    current = read_hold(response.current) if response.HasField("current") else None
    queue = tuple(QueuedAcquire(each.holder, duration_ms(each.waited) / 1000) for each in response.queue)
    return LockReport(response.resource, current, response.waiters, queue, response.position, nodes)


def read_token(response: lock_pb2.CheckTokenResponse) -> TokenReport:
    """Return the answer of CheckToken as a report."""
    current = read_hold(response.current) if response.HasField("current") else None
    return TokenReport(response.state == lock_pb2.TOKEN_STATE_LIVE, current)


def read_cluster(response: lock_pb2.ClusterStatusResponse) -> ClusterReport:
    """Return the answer of ClusterStatus as a report."""
    return ClusterReport(
        response.cluster_id,
        response.quorum,
        tuple(_node(node) for node in response.nodes),
        duration_ms(response.max_ttl) / 1000,
        response.server_version,
    )


def read_hold(hold: lock_pb2.CurrentHold) -> Hold:
    """Return a hold of the contract as a value."""
    seconds = (duration_ms(hold.remaining) / 1000, duration_ms(hold.lock_delay) / 1000)
    return Hold(hold.holder, hold.fencing_token, *seconds, hold.closed)


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
        grant_refusal=node.grant_refusal,
    )


def _node_answer(answer: int) -> NodeAnswer:
    return NodeAnswer(answer) if answer in lock_pb2.NodeAnswer.values() else NodeAnswer.UNKNOWN
