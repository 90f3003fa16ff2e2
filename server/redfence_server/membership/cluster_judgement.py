"""Judge all nodes of a cluster at once, as a lock server would. Pure; for operators' commands and the doctor.

A running server may know more: it quarantines a node that forgot tokens which it showed to that server.
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
    """Judges the nodes of one cluster by their own findings and by the floors that they know of each other.

    Attributes:
        cluster_id: of most nodes; empty if no node has an identity.
        ttl_ms_max: the greatest of all members; a node that forgot must stay out at least as long.
        members: the identities of that cluster, by the index of the node that showed it.

    Args:
        nodes: the findings at each index; None if the examination failed.
        assume_durable: the operator asserts that a restarted node has forgotten nothing.
        previously_admitted: these nodes voted last at these indices, so an older or empty node has forgotten.
    """

    def __init__(
        self, nodes: Sequence[Findings | None], *, assume_durable: bool, previously_admitted: bool
    ) -> None:
        self._nodes = nodes
        self._assume_durable = assume_durable
        self._previously_admitted = previously_admitted
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
        """Judge the findings at an index; None if the node could not be examined.

        If two indices show one process, reject the later index.
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
            floor=self._memory.nodes[index].floor,
            previously_admitted=self._previously_admitted,
            runs=dict(reversed(runs)),
        )
        return admission.judge(expected, found)

    def voting(self, *, returning: int = 0) -> tuple[int, ...]:
        """Return the nodes that vote or will vote without an operator.

        A node that restarted with proof needs peers for its fence. Count as peers `returning` more nodes:
        they could not be examined, and will come back with their memory.
        """
        judged = [self.judge(index, found) for index, found in enumerate(self._nodes)]
        votes = [index for index, each in enumerate(judged) if isinstance(each, Admitted)]
        restarted = [index for index, each in enumerate(judged) if isinstance(each, Restarted)]
        if len(votes) + len(restarted) + returning - 1 >= fence_size(len(self._nodes)):
            votes += restarted
        return tuple(sorted(votes))

    @property
    def node_count(self) -> int:
        """The number of configured nodes."""
        return len(self._nodes)

    @property
    def quorum(self) -> int:
        """The number of nodes that must vote."""
        return quorum.majority(len(self._nodes))
