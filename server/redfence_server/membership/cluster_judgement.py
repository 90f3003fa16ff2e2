"""Judge all nodes of a cluster at once, as a lock server would. Pure; for operators' commands and the doctor.

A running server may know more: what a node told it and has forgotten since. That server has quarantined the node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from redfence_proto import bounds
from redfence_server.locking import quorum
from redfence_server.membership import admission
from redfence_server.membership.admission import Admitted, Expectation, Judgement, Restarted
from redfence_server.membership.cluster_memory import ClusterMemory
from redfence_server.membership.examination import Findings, Identity
from redfence_server.membership.fence import fence_size


class ClusterJudgement:
    """The nodes of one cluster, and what each of them knows of the others.

    Attributes:
        cluster_id: of most nodes; empty if no node has an identity.
        ttl_ms_max: the greatest that any member tells: a node that forgot must not stay out for less.
        members: the identities of that cluster, by the index of the node that showed it.

    Args:
        nodes: what was found at each index; None if the node could not be examined to the end.
        assume_durable: the operator's word that a node which restarted has forgotten nothing.
        previously_admitted: these nodes voted last at these indices, so an older or empty node has forgotten. Without it, each node
            is judged as by a server that has just been started.
    """

    def __init__(
        self, nodes: Sequence[Findings | None], *, assume_durable: bool, previously_admitted: bool
    ) -> None:
        self._nodes = nodes
        self._assume_durable = assume_durable
        self._familiar = previously_admitted
        # A replica shows its primary's identity.
        own = [None if found is None or found.is_replica else found.identity for found in nodes]
        shown = {index: identity for index, identity in enumerate(own) if identity is not None}
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

    def judge(self, index: int, found: Findings | None) -> Judgement | None:
        """Judge what was found at an index; None if the node could not be examined.

        If two indices show one process, the later index is rejected.
        """
        if found is None:
            return None
        others = self._nodes if self._nodes[index] is None else self._nodes[:index]
        runs = [(other.run_id, at) for at, other in enumerate(others) if other is not None]
        expected = Expectation(
            index=index,
            node_count=len(self._nodes),
            cluster_id=self.cluster_id or None,
            assume_durable=self._assume_durable,
            floor=self._memory.places[index].floor,
            previously_admitted=self._familiar,
            runs=dict(reversed(runs)),
        )
        return admission.judge(expected, found)

    def voting(self, *, returning: int = 0) -> tuple[int, ...]:
        """Return the nodes that vote, or will vote without an operator: a restart with proof needs peers for the fence.

        `returning` more nodes are counted as peers: they could not be examined, and will come back with their memory.
        """
        judged = [self.judge(index, found) for index, found in enumerate(self._nodes)]
        votes = [index for index, each in enumerate(judged) if isinstance(each, Admitted)]
        restarted = [index for index, each in enumerate(judged) if isinstance(each, Restarted)]
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
