"""Judge all nodes of a cluster at once, as a lock server would. Pure; for operators' commands and the doctor.

A running server may know more: what a node told it and has forgotten since. That server has quarantined the node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Protocol

from redfence_proto import bounds
from redfence_server.locking import quorum
from redfence_server.membership import admission
from redfence_server.membership.admission import Admitted, Expectation, Judgement, Restarted
from redfence_server.membership.cluster_memory import ClusterMemory
from redfence_server.membership.examination import Findings, Identity
from redfence_server.membership.fence import fence_size


class Shown(Protocol):
    """What was seen of the node at one index; `found` is None if it could not be examined to the end."""

    @property
    def index(self) -> int: ...  # noqa: D102
    @property
    def found(self) -> Findings | None: ...  # noqa: D102


class ClusterJudgement:
    """The nodes of one cluster, and what each of them knows of the others.

    Attributes:
        cluster_id: of most nodes; empty if no node has an identity.
        ttl_ms_max: the greatest that any member tells: a node that forgot must not stay out for less.
        members: the identities of that cluster, by the index of the node that showed it.

    Args:
        nodes: one for each index.
        assume_durable: the operator's word that a node which restarted has forgotten nothing.
        previously_admitted: these nodes voted last at these indices, so an older or empty node has forgotten. Without it, each node
            is judged as by a server that has just been started.
    """

    def __init__(self, nodes: Sequence[Shown], *, assume_durable: bool, previously_admitted: bool) -> None:
        self._nodes = nodes
        self._assume_durable = assume_durable
        self._familiar = previously_admitted
        shown = {node.index: identity for node in nodes if (identity := _identity(node)) is not None}
        most = Counter(identity.cluster_id for identity in shown.values()).most_common(1)
        self.cluster_id = most[0][0] if most else ""
        self.members: Mapping[int, Identity] = {
            index: identity
            for index, identity in shown.items()
            if identity.cluster_id == self.cluster_id and identity.node_count == len(nodes)
        }
        ttls = [identity.max_ttl_ms for identity in self.members.values()]
        self.ttl_ms_max = max(ttls, default=bounds.TTL_MS_MAX_DEFAULT)
        self._memory = ClusterMemory(len(nodes))
        for identity in self.members.values():
            self._memory.learn(identity)

    def judge(self, node: Shown) -> Judgement | None:
        """Judge the node at its index; None if it could not be examined.

        If two indices show one process, the later index is rejected.
        """
        if node.found is None:
            return None
        place = self._memory.places[node.index]
        expected = Expectation(
            index=node.index,
            node_count=len(self._nodes),
            cluster_id=self.cluster_id or None,
            assume_durable=self._assume_durable,
            floor=place.floor,
            previously_admitted=self._familiar,
            runs=self._runs_before(node),
        )
        return admission.judge(expected, node.found)

    def _runs_before(self, node: Shown) -> Mapping[str, int]:
        runs: dict[str, int] = {}
        for other in self._nodes:
            if other is node:
                break
            if other.found is not None and other.index != node.index:
                runs.setdefault(other.found.run_id, other.index)
        return runs

    def voting(self, *, returning: int = 0) -> tuple[int, ...]:
        """Return the nodes that vote, or will vote without an operator: a restart with proof needs peers for the fence.

        `returning` more nodes are counted as peers: they could not be examined, and will come back with their memory.
        """
        judged = {node.index: self.judge(node) for node in self._nodes}
        votes = [index for index, each in judged.items() if isinstance(each, Admitted)]
        restarted = [index for index, each in judged.items() if isinstance(each, Restarted)]
        if len(votes) + len(restarted) + returning - 1 >= fence_size(len(self._nodes)):
            votes += restarted
        return tuple(sorted(votes))

    @property
    def node_count(self) -> int:
        """How many nodes are configured."""
        return len(self._nodes)

    @property
    def quorum(self) -> int:
        """How many nodes must vote."""
        return quorum.majority(len(self._nodes))


def _identity(node: Shown) -> Identity | None:
    # A replica shows its primary's.
    return None if node.found is None or node.found.is_replica else node.found.identity
