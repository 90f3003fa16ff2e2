"""Record all calls and answers, and judge from outside: tokens, exclusion and storage."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from harness.simulation.processes import now_ms
from redfence_storage.errors import StaleToken
from redfence_storage.store import NO_TOKEN, admit


@dataclass(slots=True)
class Grant:
    """One grant, as a server gave it and as its holder counts on it. Instants are true ones, in ms.

    Attributes:
        called_at_ms: before the call that was answered was sent.
        told_at_ms: when the holder had the answer.
        until_ms: when the holder stops to count on it: the end of its validity, or its release.
        delay_ms: how long the lock stays closed after `until_ms`; 0 once the holder sends its release.
    """

    resource: str
    lease: str
    token: int
    called_at_ms: float
    told_at_ms: float
    until_ms: float
    delay_ms: float = 0.0

    @property
    def opens_at_ms(self) -> float:
        """When another lease may begin: a node's clock may gain 1 % on the delay, too."""
        return self.until_ms + max(0.0, self.delay_ms * 0.99 - 2)


@dataclass(slots=True)
class History:
    """A record of one run.

    Attributes:
        problems: what must not be, in words.
        clocks_set_at_ms: when a node's clock has jumped: a lease that was there then may have ended by it.
        clocks_missed_at_ms: when a clock jumped and a vote may have counted before a server saw it;
            exclusion may fail then.
        clocks_were_set_back: a hold may last longer than its lease.
        lost_with_delay: how many grants came after a lease that was lost with a lock delay.
        copies: when a copy of a node's data was started, and when it had voted for the greatest ttl;
            exclusion may fail in between.
    """

    problems: list[str] = field(default_factory=list)
    clocks_set_at_ms: list[float] = field(default_factory=list)
    clocks_missed_at_ms: list[float] = field(default_factory=list)
    clocks_were_set_back: bool = False
    copies: list[tuple[float, float]] = field(default_factory=list)
    grants: dict[str, list[Grant]] = field(default_factory=dict)
    lost_with_delay: int = 0
    # By resource: the lease that the operator saw, the token that it named, and when.
    _forced: dict[str, list[tuple[str, int, float]]] = field(default_factory=dict)
    _leases_of_tokens: dict[tuple[str, int], str] = field(default_factory=dict)
    _greatest: dict[str, list[tuple[float, int, str]]] = field(default_factory=dict)
    _trace: hashlib._Hash = field(default_factory=hashlib.sha256)

    def event(self, *what: object) -> None:
        """Note something, for the hash of the run."""
        self._trace.update(repr((round(now_ms(), 6), *what)).encode())

    @property
    def trace_hash(self) -> str:
        """What two runs of one seed have in common."""
        return self._trace.hexdigest()

    def problem(self, words: str) -> None:
        self.problems.append(f"at {now_ms():.0f} ms: {words}")

    def minted(self, resource: str, lease: str, token: int) -> None:
        """Note that a server has granted, whoever hears of it: T1."""
        other = self._leases_of_tokens.setdefault((resource, token), lease)
        if other != lease:
            self.problem(f"T1: {resource}: token {token} for {other} and for {lease}")

    def granted(self, grant: Grant) -> None:
        """Note that a holder has heard of its grant: T2, L and X."""
        self.event("granted", grant.resource, grant.lease, grant.token)
        # An operator may have ended the lease before its holder has heard of the grant.
        grant.until_ms = min(grant.until_ms, self._forced_at_ms(grant))
        others = self.grants.setdefault(grant.resource, [])
        for other in others:
            if other.lease == grant.lease:
                continue
            if other.told_at_ms < grant.called_at_ms and other.token >= grant.token:
                self.problem(f"T2: {grant.resource}: token {grant.token} after {other.token} was told")
            self.lost_with_delay += other.delay_ms > 0
            if (
                other.until_ms <= grant.told_at_ms < other.opens_at_ms
                and other.token < grant.token
                and not self._is_excused(min(other.called_at_ms, grant.called_at_ms), grant.told_at_ms)
            ):
                self.problem(
                    f"X: {grant.resource}: token {grant.token} while {other.token} keeps the lock closed"
                    f" until {other.opens_at_ms:.0f} ms"
                )
            if (
                other.until_ms > grant.told_at_ms
                and grant.until_ms > other.told_at_ms
                and not self._is_excused(min(other.called_at_ms, grant.called_at_ms), grant.told_at_ms)
            ):
                self.problem(
                    f"L: {grant.resource}: token {grant.token} while {other.token} is valid"
                    f" until {other.until_ms:.0f} ms"
                )
        others.append(grant)

    def renewed(self, grant: Grant, until_ms: float) -> None:
        """Note that a holder has heard of a renewal: nobody has been granted the resource since."""
        self.event("renewed", grant.resource, grant.token)
        for other in self.grants[grant.resource]:
            is_later = other.lease != grant.lease and other.token > grant.token
            if is_later and not self._is_excused(grant.called_at_ms, now_ms()):
                self.problem(
                    f"L: {grant.resource}: token {grant.token} is renewed after {other.token} was granted"
                )
        grant.until_ms = min(max(grant.until_ms, until_ms), self._forced_at_ms(grant))

    def forcing(self, resource: str, lease: str, token: int) -> None:
        """Note that an operator is about to end a lease, up to this token: nobody counts on it any more.

        A node may show a greater token than the one that was granted. And the token that an operator saw on
        a minority may be granted to another lease before it is forced.
        """
        self.event("forcing", resource, lease, token)
        self._forced.setdefault(resource, []).append((lease, token, now_ms()))
        for grant in self.grants.get(resource, ()):
            grant.until_ms = min(grant.until_ms, self._forced_at_ms(grant))

    def _forced_at_ms(self, grant: Grant) -> float:
        forced = self._forced.get(grant.resource, ())
        return min(
            (
                at_ms
                for lease, token, at_ms in forced
                if grant.token == token or (grant.lease == lease and grant.token < token)
            ),
            default=math.inf,
        )

    def told_forced(self, grant: Grant) -> None:
        """Note that a holder heard that an operator ended its lease: D, if none did."""
        forced = self._forced.get(grant.resource, ())
        if not any(grant.lease == lease or grant.token == token for lease, token, _ in forced):
            self.problem(f"D: {grant.resource}: token {grant.token} is forced by nobody")

    def told_lost(self, grant: Grant) -> None:
        """Note that a holder heard of the end of its lease. It breaks D if the holder still counted on it."""
        self.event("lost", grant.resource, grant.token)
        excused = _within(self.clocks_set_at_ms, grant.called_at_ms, now_ms()) or self._is_copied(
            grant.called_at_ms, now_ms()
        )
        if now_ms() < grant.until_ms and not excused:
            left_ms = grant.until_ms - now_ms()
            self.problem(f"D: {grant.resource}: token {grant.token} is lost {left_ms:.0f} ms before its end")

    def _is_excused(self, since_ms: float, until_ms: float) -> bool:
        missed = _within(self.clocks_missed_at_ms, since_ms, until_ms)
        return missed or self._is_copied(since_ms, until_ms)

    def _is_copied(self, since_ms: float, until_ms: float) -> bool:
        return any(since_ms <= last_ms and first_ms <= until_ms for first_ms, last_ms in self.copies)


def _within(instants_ms: Sequence[float], since_ms: float, until_ms: float) -> bool:
    return any(since_ms <= at_ms <= until_ms for at_ms in instants_ms)


def letters(problems: Iterable[str]) -> set[str]:
    """Return the letters of the promises that problems are about: `at 17 ms: T1: …`."""
    return {problem.split(": ")[1] for problem in problems}


class FencedStorage:
    """Lists of entries behind the storage's own rule, with a judge beside it: F.

    Args:
        fenced: without it tokens are ignored, which a holder that was paused makes use of.
    """

    def __init__(self, history: History, *, fenced: bool) -> None:
        self._history = history
        self._fenced = fenced
        self._highest: dict[str, int] = {}
        self.entries: dict[str, tuple[str, ...]] = {}
        self.acknowledged: list[tuple[str, str]] = []
        self.refused = 0

    def read(self, resource: str, token: int) -> tuple[str, ...] | None:
        return self.entries.get(resource, ()) if self._admits(resource, token) else None

    def write(self, resource: str, token: int, entries: tuple[str, ...]) -> bool:
        if not self._admits(resource, token):
            return False
        self.entries[resource] = entries
        return True

    def _admits(self, resource: str, token: int) -> bool:
        highest = self._highest.get(resource, NO_TOKEN)
        try:
            self._highest[resource] = admit(token, resource=resource, highest_token=highest)
        except StaleToken:
            if self._fenced:
                self.refused += 1
                return False
        self._history.event("storage", resource, token)
        return True

    def check(self) -> None:
        """Note every acknowledged entry that is not there exactly once."""
        for resource, entry in self.acknowledged:
            count = self.entries.get(resource, ()).count(entry)
            if count != 1:
                self._history.problem(f"F: {resource}: {entry} was acknowledged and is there {count} times")
