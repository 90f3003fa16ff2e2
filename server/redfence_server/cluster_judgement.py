"""What a lock server would make of the nodes, were it to look at all of them at once. Pure; for operators' commands.

A server that runs may know more: what nodes have told it and forgot since. It has quarantined them for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from redfence_server import node_admission, quorum
from redfence_server.cluster_memory import ClusterMemory
from redfence_server.node_admission import Admitted, Expectation, Judgement
from redfence_server.node_examination import Identity
from redfence_server.node_visit import Look


class ClusterJudgement:
    """The nodes of one cluster, and what each of them knows of the others.

    Attributes:
        cluster_id: which most of the nodes belong to; empty if none has an identity.
        ttl_ms_max: the greatest that any of them tells; 0 if none does.
        members: the identities of that cluster, by the place of the node that showed it.

    Args:
        looks: one for each place, by index.
        assume_durable: whether the servers have the operator's word that a node which restarted has forgotten nothing.
    """

    def __init__(self, looks: Sequence[Look], *, assume_durable: bool) -> None:
        self.looks = looks
        self._assume_durable = assume_durable
        shown = dict(_identities(looks))
        most = Counter(identity.cluster_id for identity in shown.values()).most_common(1)
        self.cluster_id = most[0][0] if most else ""
        self.members: Mapping[int, Identity] = {
            index: identity
            for index, identity in shown.items()
            if identity.cluster_id == self.cluster_id and identity.node_count == len(looks)
        }
        self.ttl_ms_max = max((identity.max_ttl_ms for identity in self.members.values()), default=0)
        self._memory = ClusterMemory(len(looks))
        for look in looks:
            if look.known is not None and look.index in self.members:
                self._memory.learn(look.known)

    def judge(self, look: Look) -> Judgement | None:
        """Return what comes of a node at its place; None if it could not be looked at.

        Of two looks at one process the later one is found to be the same.
        """
        if look.found is None:
            return None
        place = self._memory.places[look.index]
        expected = Expectation(
            index=look.index,
            node_count=len(self.looks),
            cluster_id=self.cluster_id or None,
            assume_durable=self._assume_durable,
            floor=place.floor,
            changes=place.changes,
            # Whoever is older or empty has forgotten, for the operator has named it.
            familiar=True,
            runs=self._runs_before(look),
        )
        return node_admission.judge(expected, look.found)

    def _runs_before(self, look: Look) -> Mapping[str, int]:
        runs: dict[str, int] = {}
        for other in self.looks:
            if other is look:
                break
            if other.found is not None and other.index != look.index:
                runs.setdefault(other.found.run_id, other.index)
        return runs

    def voting(self) -> tuple[int, ...]:
        """Return which nodes a server would let vote."""
        return tuple(look.index for look in self.looks if isinstance(self.judge(look), Admitted))

    @property
    def quorum(self) -> int:
        """How many nodes must vote."""
        return quorum.majority(len(self.looks))


def _identities(looks: Sequence[Look]) -> Iterator[tuple[int, Identity]]:
    for look in looks:
        # A replica shows its primary's.
        if look.found is not None and look.found.identity is not None and not look.found.is_replica:
            yield look.index, look.found.identity
