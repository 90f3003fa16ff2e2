"""The judge of chaos runs finds each broken promise, and nothing in what could be true.

For each rule there are histories that break it and nothing else, and near misses which are right.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest

from harness.history.checker import VIOLATIONS_TOLD_MAX, check
from harness.history.history_builder import (
    CLIENTS,
    FAILED,
    HEALED_S,
    OK,
    UNKNOWN,
    VALIDITY_S,
    Cases,
    HistoryBuilder,
    letters,
    verdict_of,
)
from harness.history.records import Kind

BROKEN: Mapping[str, Cases] = {
    "T1": {
        "one token twice": lambda s: s.acquire("a", 5, (10, 10.1)).acquire("b", 5, (20, 20.1)),
        "one token twice, of calls at once": lambda s: (
            s.acquire("a", 5, (10, 10.1)).release("a", (10.2, 10.3)).acquire("b", 5, (10, 10.3))
        ),
        "a repeat told another lease's token": lambda s: (
            s.acquire("a", 5, (10, 10.1)).acquire("b", 0, (9.9, 10.2), UNKNOWN).acquire("b", 5, (20, 20.1))
        ),
        "a renewal told a token that its lease was not granted": lambda s: s.acquire(
            "a", 5, (10, 10.1)
        ).renew("a", (11, 11.1), token=6),
        "a renewal of a lease of unknown token told another lease's": lambda s: (
            s.acquire("a", 5, (10, 10.1)).acquire("b", 0, (19, 20), UNKNOWN).renew("b", (21, 21.1), token=5)
        ),
        "zero": lambda s: s.acquire("a", 0, (9, 9.1)),
        "2^53": lambda s: s.acquire("a", 2**53, (102, 102.1)),
    },
    "T2": {
        "smaller after greater": lambda s: s.acquire("a", 6, (10, 10.1)).acquire("b", 5, (20, 20.1)),
        "smaller after greater, clocks or not": lambda s: (
            s.acquire("a", 6, (10, 10.1)).acquire("b", 5, (20, 20.1)).fault("clock", 5, 30, moves_clocks=True)
        ),
        "smaller after greater, copies of nodes or not": lambda s: (
            s.acquire("a", 6, (10, 10.1)).acquire("b", 5, (20, 20.1)).fault("copy", 5, 30, overlaps_s=2)
        ),
        "smaller after greater, hidden among overlaps": lambda s: (
            s.acquire("a", 6, (10, 10.1)).acquire("b", 9, (9, 30), until=31.9).acquire("c", 5, (20, 20.1))
        ),
        "an unknown Acquire of its lease was called after the other's answer": lambda s: (
            s.acquire("a", 6, (10, 10.1)).acquire("b", 0, (10.2, 15), UNKNOWN).acquire("b", 5, (20, 20.1))
        ),
        "a repeat told less than before": lambda s: s.acquire("a", 6, (10, 10.1)).acquire("a", 5, (11, 11.1)),
        "a repeat told its old token after another's grant": lambda s: (
            s.acquire("a", 5, (10, 10.1)).acquire("b", 6, (13, 13.1)).acquire("a", 5, (16, 16.1))
        ),
        "a released lease granted anew with its old token": lambda s: (
            s.acquire("a", 5, (10, 10.1)).release("a", (10.2, 10.3)).acquire("a", 5, (10.4, 10.5))
        ),
    },
    "L": {
        "granted inside another's validity": lambda s: s.acquire("a", 5, (10, 10.1)).acquire(
            "b", 6, (11, 11.5)
        ),
        "granted inside a validity that was renewed": lambda s: (
            s.acquire("a", 5, (10, 10.1)).renew("a", (11, 11.1)).acquire("b", 6, (12, 12.1))
        ),
        "granted inside one that an overlap with a third hides": lambda s: (
            s.acquire("a", 5, (10, 10.1))
            .renew("a", (10.25, 11.1))
            .acquire("b", 6, (10.2, 10.3))
            .release("b", (10.4, 10.5))
            .acquire("c", 7, (12, 12.5))
        ),
        "released after the other was granted": lambda s: (
            s.acquire("a", 5, (10, 10.1)).acquire("b", 6, (10, 11)).release("a", (11.1, 11.2))
        ),
        "after a repeat that began another ttl": lambda s: (
            s.acquire("a", 5, (10, 10.1)).acquire("a", 5, (11, 11.1)).acquire("b", 6, (12, 12.1))
        ),
        "a lease of the same id after its release was answered": lambda s: (
            s.acquire("a", 5, (10, 10.1))
            .release("a", (10.2, 10.3))
            .acquire("a", 6, (10.4, 10.5))
            .acquire("b", 7, (11, 11.1))
        ),
        "a clock was moved, but both were granted after every lease of then had ended": lambda s: (
            s.fault("clock", 5, 9.9, moves_clocks=True)
            .acquire("a", 5, (10, 10.1))
            .acquire("b", 6, (11, 11.1))
        ),
        "a clock was moved, but only when they overlapped already": lambda s: (
            s.acquire("a", 5, (10, 10.1))
            .acquire("b", 6, (11, 11.1))
            .fault("clock", 11.2, 15, moves_clocks=True)
        ),
        "a copy of a node was there, but a ttl had passed since": lambda s: (
            s.fault("copy", 5, 9, overlaps_s=2).acquire("a", 5, (10, 10.1)).acquire("b", 6, (11, 11.1))
        ),
        "a copy of a node was there, but only when they overlapped already": lambda s: (
            s.acquire("a", 5, (10, 10.1)).acquire("b", 6, (11, 11.1)).fault("copy", 11.2, 15, overlaps_s=2)
        ),
        "granted inside one that an overlap hides for which a clock was moved": lambda s: (
            s.fault("clock", 5, 9, moves_clocks=True)
            .acquire("b", 5, (8, 10.2), until=12)
            .release("b", (10.3, 10.4))
            .acquire("a", 6, (10, 10.1))
            .acquire("c", 7, (11, 11.1))
        ),
        "a fault, but not of clocks": lambda s: (
            s.fault("node wiped", 5, 30).acquire("a", 5, (10, 10.1)).acquire("b", 6, (11, 11.1))
        ),
    },
    "F": {
        "a stale append let in": lambda s: s.read(6, (10, 10.1)).append("x", 5, (11, 11.1)).keeps("x"),
        "a stale read let in": lambda s: s.read(6, (10, 10.1)).read(5, (11, 11.1)),
        "a stale read let in after an append": lambda s: (
            s.append("x", 6, (10, 10.1)).read(5, (11, 11.1)).keeps("x")
        ),
        "an acknowledged append lost": lambda s: s.append("x", 5, (10, 10.1)),
        "acknowledged appends lost, for nothing is kept at all": lambda s: s.keeps_nothing(),
        "an acknowledged append lost beside one of another token": lambda s: s.append(
            "x", 5, (10, 10.5)
        ).append("y", 6, (10, 10.5), UNKNOWN),
        "an acknowledged append lost before another one of its token": lambda s: (
            s.append("x", 5, (10, 10.1)).append("y", 5, (10.2, 10.3)).keeps("y")
        ),
        "an acknowledged append lost after another one of its token": lambda s: (
            s.append("x", 5, (10, 10.1)).append("y", 5, (10.2, 10.3)).keeps("x")
        ),
        "an acknowledged append twice": lambda s: s.append("x", 5, (10, 10.1)).keeps("x", "x"),
        "an unknown append twice": lambda s: s.append("x", 5, (10, 10.1), UNKNOWN).keeps("x", "x"),
        "a failed append is there": lambda s: s.append("x", 5, (10, 10.1), FAILED).keeps("x"),
        "a stale append is there": lambda s: s.append("x", 5, (10, 10.1), FAILED, stale=True).keeps("x"),
        "nobody's entry is there": lambda s: s.read(5, (10, 10.1)).keeps("x"),
        "another resource's entry is there": lambda s: s.read(5, (10, 10.1)).keeps("e1"),
        "kept in another order than acknowledged": lambda s: (
            s.append("x", 5, (10, 10.1)).append("y", 5, (10.2, 10.3)).keeps("y", "x")
        ),
        "an unknown one kept before what was acknowledged before it was sent": lambda s: (
            s.append("x", 5, (10, 10.1)).append("y", 5, (10.2, None), UNKNOWN).keeps("y", "x")
        ),
        "a smaller token kept after a greater": lambda s: (
            s.append("x", 5, (10, 10.3)).append("y", 6, (10, 10.2)).keeps("y", "x")
        ),
    },
    "D": {
        "a validity longer than the ttl": lambda s: s.acquire("a", 5, (10, 10.1), until=12.2),
        "a validity without the allowance for drift": lambda s: s.acquire("a", 5, (10, 10.001), until=12),
        "a renewal's validity counted from its answer": lambda s: s.acquire("a", 5, (10, 10.1)).renew(
            "a", (11, 11.1), until=13.078
        ),
        "a validity of nothing": lambda s: s.acquire("a", 5, (10, 10.1), until=10),
        "a validity of nothing, for a ttl that is not known": lambda s: s.acquire(
            "a", 5, (10, 10.1), until=10, ttl=0
        ),
        "a renewal without validity": lambda s: s.acquire("a", 5, (10, 10.1)).renew(
            "a", (11, 11.1), until=11
        ),
        "a validity too short": lambda s: s.acquire("a", 5, (10, 10.1), until=11.9),
        "a renewal's validity too short": lambda s: s.acquire("a", 5, (10, 10.1)).renew(
            "a", (11, 11.1), until=12.9
        ),
        "lost while it was counted on": lambda s: s.acquire("a", 5, (10, 10.1)).lost("a", (11, 11.9)),
        "lost while it was counted on by a renewal": lambda s: (
            s.acquire("a", 5, (10, 10.1)).renew("a", (11, 11.1)).lost("a", (12, 12.9))
        ),
        "lost before its release": lambda s: (
            s.acquire("a", 5, (10, 10.1)).lost("a", (10.2, 10.3)).release("a", (10.4, 10.5))
        ),
        "lost, and a clock was moved before": lambda s: (
            s.fault("clock", 5, 9.9, moves_clocks=True).acquire("a", 5, (10, 10.1)).lost("a", (11, 11.1))
        ),
        "lost, and a clock was moved after": lambda s: (
            s.acquire("a", 5, (10, 10.1)).lost("a", (11, 11.1)).fault("clock", 11.2, 15, moves_clocks=True)
        ),
        "lost, and a copy of a node was there a ttl before": lambda s: (
            s.fault("copy", 5, 8.9, overlaps_s=2).acquire("a", 5, (10, 10.1)).lost("a", (11, 11.1))
        ),
        "lost after a minority was wiped": lambda s: (
            s.fault("node wiped", 10, 11).acquire("a", 5, (10, 10.1)).lost("a", (11, 11.1))
        ),
        "renewed after its release": lambda s: (
            s.acquire("a", 5, (10, 10.1)).release("a", (10.2, 10.3)).renew("a", (10.4, 10.5))
        ),
        "renewed after it was told lost": lambda s: (
            s.acquire("a", 5, (10, 10.1)).lost("a", (12.1, 12.2)).renew("a", (12.3, 12.4))
        ),
        "a first release told that it does not hold while it was counted on": lambda s: s.acquire(
            "a", 5, (10, 10.1)
        ).not_held("a", (10.2, 10.3)),
        "renewed after a later lease was granted": lambda s: (
            s.acquire("a", 5, (10, 10.1)).acquire("b", 6, (12.5, 12.6)).renew("a", (12.7, 12.8))
        ),
        "renewed after a later lease was granted, clocks or not": lambda s: (
            s.fault("clock", 5, 30, moves_clocks=True)
            .acquire("a", 5, (10, 10.1))
            .acquire("b", 6, (10.2, 10.3))
            .renew("a", (10.4, 10.5))
        ),
    },
    "P": {
        "two calls of a hundred are unknown though all is well": lambda s: s.late(unknown=2, of=100),
        "two calls of a hundred are turned away though all is well": lambda s: s.late(
            admission_refused=2, of=100
        ),
        "granted late after the healing": lambda s: (
            s.without_last_acquires()
            .acquire("z", 90, (100, 100.1), resource="background")
            .acquire("a", 5, (100, 106.1), until=107.9)
        ),
        "granted in time, but long after the healing": lambda s: (
            s.without_last_acquires()
            .acquire("z", 90, (100, 100.1), resource="background")
            .acquire("a", 0, (100, 102), FAILED)
            .acquire("b", 0, (102, 104), FAILED)
            .acquire("c", 0, (104, 106.5), FAILED)
            .acquire("d", 5, (106.6, 106.7))
        ),
        "renewals never worked again": lambda s: s.failing(
            lambda call: call.kind is Kind.RENEW and call.invoked_s >= HEALED_S
        ),
        "reads never worked again": lambda s: s.failing(
            lambda call: call.kind is Kind.READ and call.invoked_s >= HEALED_S
        ),
        "a server never granted anything again": lambda s: (
            s.acquire("a", 5, (10, 10.1))
            .at("one server")
            .acquire("b", 0, (103, 103.1), FAILED)
            .at("one server")
        ),
        "a server never released anything again": lambda s: (
            s.acquire("a", 5, (10, 10.1))
            .release("a", (10.2, 10.3))
            .at("one server")
            .release("b", (103, 103.1), UNKNOWN)
            .at("one server")
        ),
        "a workload was never granted anything again": lambda s: (
            s.acquire("a", 5, (10, 10.1)).by("sdk3.1").acquire("b", 0, (103, 103.1), UNKNOWN).by("sdk3.2")
        ),
        "granted while a majority had forgotten": lambda s: s.fault("majority wiped", 10, 12).acquire(
            "a", 5, (10.1, 10.2)
        ),
        "renewed while a majority had forgotten": lambda s: (
            s.acquire("a", 5, (9, 9.1)).fault("majority wiped", 10, 12).renew("a", (10.1, 10.2))
        ),
    },
}

RIGHT: Cases = {
    "nothing more": lambda s: s,
    "a grant after another": lambda s: s.acquire("a", 5, (10, 10.1)).acquire("b", 6, (20, 20.1)),
    "T1: one token for two resources": lambda s: s.acquire("a", 500, (10, 10.1)).acquire(
        "b", 500, (10, 10.1), resource="q"
    ),
    "T1: a repeat told the same token": lambda s: s.acquire("a", 5, (10, 10.1)).acquire("a", 5, (11, 11.1)),
    "T1: a renewal told its lease's token, or none": lambda s: (
        s.acquire("a", 5, (10, 10.1)).renew("a", (11, 11.1), token=5).renew("a", (11.2, 11.3), token=0)
    ),
    "T1: a renewal told the token of a repeat that is unknown": lambda s: (
        s.acquire("a", 5, (10, 10.1)).acquire("a", 0, (10.2, 10.3), UNKNOWN).renew("a", (11, 11.1), token=6)
    ),
    "T1: the last token there is": lambda s: s.acquire("a", 2**53 - 1, (102, 102.1)),
    "T2: a smaller token of a call at once": lambda s: (
        s.acquire("a", 6, (10, 10.1)).release("a", (10.2, 10.3)).acquire("b", 5, (10.05, 10.4))
    ),
    "T2: called at the very instant of the other's answer": lambda s: (
        s.acquire("a", 6, (10, 10.1)).release("a", (10.2, 10.3)).acquire("b", 5, (10.1, 10.4))
    ),
    "T2: after a grant that is unknown": lambda s: s.acquire("a", 6, (10, 10.1), UNKNOWN).acquire(
        "b", 5, (20, 20.1)
    ),
    "T2: the answer to a repeat is the grant of a call that was unknown": lambda s: (
        s.acquire("b", 0, (10, 10.5), UNKNOWN)
        .acquire("a", 6, (10, 10.1))
        .release("a", (10.2, 10.3))
        .acquire("b", 5, (10.6, 10.7))
    ),
    "T2: the answer to a repeat is the grant of a call under way": lambda s: (
        s.acquire("b", 5, (10, 10.8))
        .acquire("a", 6, (10, 10.1))
        .release("a", (10.2, 10.3))
        .acquire("b", 5, (10.6, 10.7))
    ),
    "T2: a repeat told a greater token": lambda s: s.acquire("a", 5, (10, 10.1)).acquire("a", 6, (11, 11.1)),
    "T2: a repeat at once told a smaller token": lambda s: s.acquire("a", 6, (10, 10.3)).acquire(
        "a", 5, (10.2, 10.4)
    ),
    "T2: a lease granted anew after a release that may not have come": lambda s: (
        s.acquire("a", 5, (10, 10.1)).release("a", (10.2, 10.3), UNKNOWN).acquire("a", 5, (10.4, 10.5))
    ),
    "T2: a released lease granted anew with a greater token": lambda s: (
        s.acquire("a", 5, (10, 10.1)).release("a", (10.2, 10.3)).acquire("a", 6, (10.4, 10.5))
    ),
    "L: granted when the other's validity has just ended": lambda s: s.acquire("a", 5, (10, 10.1)).acquire(
        "b", 6, (11, 10 + VALIDITY_S)
    ),
    "L: granted at the very instant of the release": lambda s: (
        s.acquire("a", 5, (10, 10.1)).release("a", (10.5, 10.6)).acquire("b", 6, (10.2, 10.5))
    ),
    "L: granted while a release is in flight": lambda s: (
        s.acquire("a", 5, (10, 10.1)).release("a", (10.5, 11), UNKNOWN).acquire("b", 6, (10.2, 10.6))
    ),
    "L: granted while a release is in flight that fails in the end": lambda s: (
        s.acquire("a", 5, (10, 10.1)).release("a", (10.5, 11), FAILED).acquire("b", 6, (10.2, 10.6))
    ),
    "L: beside a grant that is unknown": lambda s: s.acquire("a", 5, (10, 10.1), UNKNOWN).acquire(
        "b", 6, (10.5, 10.6)
    ),
    "L: beside a lease whose renewal is unknown": lambda s: (
        s.acquire("a", 5, (10, 10.1)).renew("a", (11, 11.1), UNKNOWN, until=13).acquire("b", 6, (12, 12.1))
    ),
    "L: beside a lease whose renewal came too late": lambda s: (
        s.acquire("a", 5, (10, 10.1)).renew("a", (11, 12.1)).acquire("b", 6, (12, 12.2))
    ),
    "L: beside a lease whose renewal came at the very end": lambda s: (
        s.acquire("a", 5, (10, 10.1)).renew("a", (11, 10 + VALIDITY_S)).acquire("b", 6, (12, 12.2))
    ),
    "L: beside a lease whose grant came too late": lambda s: s.acquire("a", 5, (10, 12.1)).acquire(
        "b", 6, (12, 12.2)
    ),
    "L: beside a lease that may be ended by an earlier release in flight": lambda s: (
        s.acquire("a", 0, (9, 9.5), UNKNOWN)
        .release("a", (9.6, 9.7), UNKNOWN)
        .acquire("a", 5, (10, 10.1))
        .acquire("b", 6, (11, 11.1))
    ),
    "L: beside a lease that was lost when clocks were moved": lambda s: (
        s.fault("clock", 10.5, 10.6, moves_clocks=True)
        .acquire("a", 5, (10, 10.1))
        .lost("a", (11, 11.1))
        .acquire("b", 6, (11, 11.2))
    ),
    "L: a clock was moved at the very instant of the second's answer": lambda s: (
        s.acquire("a", 5, (10, 10.1)).acquire("b", 6, (11, 11.1)).fault("clock", 11.1, 15, moves_clocks=True)
    ),
    "L: a clock was moved until the second was called": lambda s: (
        s.acquire("b", 6, (10, 11.1)).fault("clock", 5, 10, moves_clocks=True).acquire("a", 5, (10.2, 10.3))
    ),
    "L: a clock was moved until the first was called": lambda s: (
        s.fault("clock", 5, 10, moves_clocks=True).acquire("a", 5, (10, 10.1)).acquire("b", 6, (11, 11.1))
    ),
    "L: a copy of a node was there when the second began": lambda s: (
        s.fault("copy", 10.5, 20, overlaps_s=2).acquire("a", 5, (10, 10.1)).acquire("b", 6, (11, 11.1))
    ),
    "L: a copy of a node had been there until a ttl before": lambda s: (
        s.fault("copy", 5, 9.1, overlaps_s=2).acquire("a", 5, (10, 10.1)).acquire("b", 6, (11, 11.1))
    ),
    "D: a lease is lost beside a copy of a node": lambda s: (
        s.fault("copy", 5, 9, overlaps_s=2).acquire("a", 5, (10, 10.1)).lost("a", (10.9, 11))
    ),
    "L: a clock was moved while an unknown Acquire may have got the lease": lambda s: (
        s.fault("clock", 5, 10, moves_clocks=True)
        .acquire("a", 0, (9, 9.5), UNKNOWN)
        .acquire("a", 5, (10.2, 10.3))
        .acquire("b", 6, (11, 11.1))
    ),
    "F: an equal token after an equal one": lambda s: (
        s.read(5, (10, 10.1)).append("x", 5, (11, 11.1)).read(5, (12, 12.1)).keeps("x")
    ),
    "F: a smaller token of a call at once": lambda s: s.read(6, (10, 10.1)).read(5, (10.1, 10.2)),
    "F: a smaller token after one that is unknown": lambda s: (
        s.read(6, (10, 10.1), UNKNOWN).append("x", 5, (11, 11.1)).keeps("x")
    ),
    "F: a smaller token after one that was refused": lambda s: (
        s.read(6, (10, 10.1), FAILED).append("x", 5, (11, 11.1)).keeps("x")
    ),
    "F: a smaller token that is unknown": lambda s: s.read(6, (10, 10.1)).append("x", 5, (11, 11.1), UNKNOWN),
    "F: an unknown append is there": lambda s: s.append("x", 5, (10, None), UNKNOWN).keeps("x"),
    "F: an unknown append is not there": lambda s: s.append("x", 5, (10, 10.1), UNKNOWN),
    "F: a failed append is not there": lambda s: s.append("x", 5, (10, 10.1), FAILED),
    "F: an append that failed was repeated": lambda s: (
        s.append("x", 5, (10, 10.1), FAILED).append("x", 5, (11, 11.1)).keeps("x")
    ),
    "F: an append that was unknown was repeated, and refused": lambda s: (
        s.append("x", 5, (10, 10.1), UNKNOWN).append("x", 5, (11, 11.1), FAILED, stale=True).keeps("x")
    ),
    "F: appends at once in either order": lambda s: (
        s.append("x", 5, (10, 10.2)).append("y", 5, (10.1, 10.3)).keeps("y", "x")
    ),
    "F: appends in either order, one at the instant of the other's answer": lambda s: (
        s.append("x", 5, (10, 10.2)).append("y", 5, (10.2, 10.3)).keeps("y", "x")
    ),
    "F: undone by an unknown one of the same token": lambda s: (
        s.append("x", 5, (10, 10.1), UNKNOWN).append("y", 5, (10.2, 10.3)).keeps("x")
    ),
    "F: an unknown one of a smaller token before": lambda s: (
        s.append("x", 5, (10, None), UNKNOWN).append("y", 6, (10, 10.2)).keeps("x", "y")
    ),
    "D: all that the ttl leaves": lambda s: s.acquire("a", 5, (10, 10), until=10 + VALIDITY_S),
    "D: a millisecond less, for it is told in whole ones": lambda s: s.acquire(
        "a", 5, (10, 10.1), until=10 + VALIDITY_S - 0.001
    ),
    "D: a validity that contains the wait": lambda s: s.acquire(
        "a", 5, (10, 50), until=50 - 0.01 + VALIDITY_S - 0.0005 * 40
    ),
    "D: a lease that is all but used up by its wait": lambda s: s.acquire(
        "a", 5, (10, 50), until=10 + VALIDITY_S - 0.0005 * 40
    ),
    "D: a renewal that is sent at once": lambda s: s.acquire("a", 5, (10, 10.1)).renew("a", (10.1, 10.2)),
    "D: renewed with the ttl of either Acquire": lambda s: (
        s.acquire("a", 5, (10, 10.1))
        .acquire("a", 5, (10.2, 10.3), ttl=4, until=10.2 + 3.958)
        .renew("a", (11, 11.1), until=11 + 3.958)
        .renew("a", (12, 12.1), until=12 + VALIDITY_S)
    ),
    "D: lost at the very end": lambda s: s.acquire("a", 5, (10, 10.1)).lost("a", (11, 10 + VALIDITY_S)),
    "D: lost after its release was sent": lambda s: (
        s.acquire("a", 5, (10, 10.1)).release("a", (10.2, 11)).lost("a", (10.3, 10.4))
    ),
    "D: lost after a release that is unknown": lambda s: (
        s.acquire("a", 5, (10, 10.1)).release("a", (10.2, None), UNKNOWN).lost("a", (10.3, 10.4))
    ),
    "D: lost when its grant is unknown": lambda s: s.acquire("a", 5, (10, 10.1), UNKNOWN).lost(
        "a", (10.3, 10.4)
    ),
    "D: lost by a renewal from before the grant": lambda s: s.lost("a", (9.9, 10.2)).acquire(
        "a", 5, (10, 10.1)
    ),
    "D: lost when clocks were moved": lambda s: (
        s.fault("clock", 5, 10, moves_clocks=True).acquire("a", 5, (10, 10.1)).lost("a", (11, 11.1))
    ),
    "D: lost when a majority was wiped": lambda s: (
        s.acquire("a", 5, (9, 9.1)).fault("majority wiped", 9.5, 20).lost("a", (10, 10.1))
    ),
    "D: renewed while its release is in flight": lambda s: (
        s.acquire("a", 5, (10, 10.1)).release("a", (10.2, 10.6)).renew("a", (10.4, 10.5))
    ),
    "D: renewed after a release that may not have come": lambda s: (
        s.acquire("a", 5, (10, 10.1)).release("a", (10.2, 10.3), UNKNOWN).renew("a", (10.4, 10.5))
    ),
    "D: renewed after a release that was overtaken by a repeat": lambda s: (
        s.acquire("a", 5, (10, 10.1))
        .acquire("a", 0, (10.1, 10.4), UNKNOWN)
        .release("a", (10.2, 10.3))
        .renew("a", (10.5, 10.6))
    ),
    "D: a second release told that it does not hold": lambda s: (
        s.acquire("a", 5, (10, 10.1)).release("a", (10.2, 10.3), UNKNOWN).not_held("a", (10.4, 10.5))
    ),
    "D: a release told that it does not hold after the validity": lambda s: s.acquire(
        "a", 5, (10, 10.1)
    ).not_held("a", (11.9, 12)),
    "D: a release told that it does not hold when clocks were moved": lambda s: (
        s.fault("clock", 5, 30, moves_clocks=True).acquire("a", 5, (10, 10.1)).not_held("a", (10.2, 10.3))
    ),
    "D: renewed after an earlier lease was granted": lambda s: (
        s.acquire("b", 5, (9, 10.3))
        .release("b", (10.4, 10.5))
        .acquire("a", 6, (9.5, 11))
        .renew("a", (11.1, 11.2))
    ),
    "D: renewed when the later lease was granted at once": lambda s: (
        s.acquire("a", 5, (10, 10.1)).renew("a", (11.9, 13)).acquire("b", 6, (12.2, 12.5))
    ),
    "D: renewed after it was granted anew": lambda s: (
        s.acquire("a", 5, (10, 10.1))
        .acquire("b", 6, (12.5, 12.6))
        .acquire("a", 7, (15, 15.1))
        .renew("a", (15.2, 15.3))
    ),
    "D: renewed when an Acquire of it is unknown": lambda s: (
        s.acquire("a", 5, (10, 10.1))
        .acquire("b", 6, (12.5, 12.6))
        .acquire("a", 0, (15, 15.1), UNKNOWN)
        .renew("a", (15.2, 15.3))
    ),
    "D: released, acquired and renewed again": lambda s: (
        s.acquire("a", 5, (10, 10.1))
        .release("a", (10.2, 10.3))
        .acquire("a", 6, (10.4, 10.5))
        .renew("a", (10.6, 10.7))
    ),
    "P: granted at the last instant": lambda s: (
        s.without_last_acquires()
        .acquire("z", 90, (100, 100.1), resource="background")
        .acquire("a", 5, (100, 106), until=107.9)
    ),
    "P: some tries fail and one is granted": lambda s: (
        s.without_last_acquires()
        .acquire("z", 90, (100, 100.1), resource="background")
        .acquire("a", 0, (100, 101), FAILED)
        .acquire("b", 5, (101, 101.1))
    ),
    "P: granted long after the healing, for somebody held it until then": lambda s: (
        s.without_last_acquires()
        .acquire("z", 90, (100, 100.1), resource="background")
        .acquire("h", 5, (99, 99.1))
        .renew("h", (100, 100.1))
        .acquire("a", 0, (100, 104), FAILED)
        .acquire("b", 0, (104, 107), FAILED)
        .acquire("c", 6, (107, 107.9))
    ),
    "P: granted as soon as somebody tried": lambda s: (
        s.without_last_acquires()
        .acquire("z", 90, (100, 100.1), resource="background")
        .acquire("a", 5, (108, 108.1))
    ),
    "P: one call of a hundred is unknown though all is well": lambda s: s.late(unknown=1, of=100),
    "P: calls are unknown soon after all was healed": lambda s: s.late(unknown=9, of=10, at_s=105.9),
    "P: granted within three of the longest ttls that were asked for": lambda s: (
        s.without_last_acquires()
        .acquire("z", 90, (100, 100.1), resource="background")
        .acquire("a", 0, (100, 100.1), FAILED, ttl=0.3)
        .acquire("b", 0, (100.1, 103), FAILED)
        .acquire("c", 6, (103, 105))
    ),
    "P: a server and a workload work again": lambda s: (
        s.acquire("a", 5, (10, 10.1))
        .at("one server")
        .by("sdk3.1")
        .acquire("b", 2 * 10**6, (104, 104.1))
        .at("one server")
        .by("sdk4")
    ),
    "P: called before the majority had forgotten": lambda s: s.fault("majority wiped", 10, 12).acquire(
        "a", 5, (10, 10.1)
    ),
    "P: answered when the recovery had begun": lambda s: s.fault("majority wiped", 10, 12).acquire(
        "a", 5, (11, 12)
    ),
    "P: unknown while a majority had forgotten": lambda s: s.fault("majority wiped", 10, 12).acquire(
        "a", 5, (11, 11.1), UNKNOWN
    ),
    "P: released while a majority had forgotten": lambda s: (
        s.fault("majority wiped", 10, 12).acquire("a", 5, (9, 9.1)).release("a", (10.1, 10.2))
    ),
    "P: granted while a minority had forgotten": lambda s: s.fault("node wiped", 10, 12).acquire(
        "a", 5, (10.1, 10.2)
    ),
}

INVALID: Cases = {
    "no renew was ever OK": lambda s: s.failing(lambda call: call.kind is Kind.RENEW),
    "no release was ever OK": lambda s: s.failing(lambda call: call.kind is Kind.RELEASE),
    "no read was ever OK": lambda s: s.failing(lambda call: call.kind is Kind.READ),
    "no check was ever OK": lambda s: s.failing(lambda call: call.kind is Kind.CHECK),
    "no get lock was ever OK": lambda s: s.failing(lambda call: call.kind is Kind.GET_LOCK),
    "no append was ever OK": lambda s: s.failing(lambda call: call.kind is Kind.APPEND).keeps_nothing(),
    "96.0 operations per second were OK before the first fault": lambda s: s.failing(
        lambda call: call.kind in (Kind.READ, Kind.RELEASE) and 0.1 < call.invoked_s < 1
    ),
    "0.0 operations per second": lambda s: s.fault("node paused", 0, 0.1),
    "faults that were asked for and never struck: node wiped": lambda s: s.asks(
        "server killed", "node wiped"
    ),
    "nobody tried to acquire 'r' after all was healed": lambda s: (
        s.without_last_acquires()
        .acquire("z", 90, (100, 100.1), resource="background")
        .acquire("a", 5, (HEALED_S - 0.001, 100.1))
    ),
    "nobody tried again after all was healed: acquire at one server": lambda s: s.acquire(
        "a", 5, (10, 10.1)
    ).at("one server"),
    "nobody tried again after all was healed: acquire of sdk": lambda s: s.acquire("a", 5, (10, 10.1)).by(
        "sdk3.1"
    ),
    "the last acquire of 'r' failed after all was healed": lambda s: s.acquire(
        "a", 2 * 10**6, (102, 102.1)
    ).acquire("b", 0, (108, 108.1), FAILED),
    "1 records cannot be true": lambda s: s.acquire("a", 5, (10, 9.9)),
    "2 records cannot be true": lambda s: s.acquire("a", 5, (10, None)).release("b", (10, None), FAILED),
}


def _each(broken: Mapping[str, Cases]) -> list[object]:
    return [
        pytest.param(letter, tell, id=f"{letter}: {name}")
        for letter, cases in broken.items()
        for name, tell in cases.items()
    ]


@pytest.mark.parametrize(("letter", "tell"), _each(BROKEN))
def test_a_history_that_breaks_one_promise_is_told_to_break_that_one(
    letter: str, tell: Callable[[HistoryBuilder], object]
) -> None:
    """And no other, so whoever reads the letter knows where to look."""
    verdict = verdict_of(tell)
    assert letters(verdict) == {letter}, verdict.violations
    assert not verdict.clean


@pytest.mark.parametrize("tell", RIGHT.values(), ids=RIGHT)
def test_a_near_miss_is_right(tell: Callable[[HistoryBuilder], object]) -> None:
    """What could be true breaks nothing: equal instants, unknown outcomes, calls in flight, clocks that were moved."""
    verdict = verdict_of(tell)
    assert verdict.clean, (verdict.violations, verdict.invalid)


@pytest.mark.parametrize(("told", "tell"), INVALID.items(), ids=INVALID)
def test_a_run_that_proves_nothing_is_invalid(told: str, tell: Callable[[HistoryBuilder], object]) -> None:
    """Also where no promise was broken; the reason is told."""
    verdict = verdict_of(tell)
    assert len(verdict.invalid) == 1, verdict.invalid
    assert told in verdict.invalid[0]
    assert not verdict.violations
    assert not verdict.clean


def test_a_last_acquire_that_fails_breaks_progress_and_makes_the_run_invalid() -> None:
    """Nobody can tell whether what came before was right."""
    verdict = verdict_of(
        lambda s: (
            s.without_last_acquires()
            .acquire("z", 90, (100, 100.1), resource="background")
            .acquire("a", 0, (100, 101), FAILED)
        )
    )
    assert letters(verdict) == {"P"}
    assert verdict.invalid == ("the last acquire of 'r' failed after all was healed",)


def test_a_run_in_which_nothing_was_granted_is_invalid() -> None:
    """For each reason there is."""
    verdict = verdict_of(
        lambda s: (
            s.failing(lambda call: True)
            .only(lambda call: call.invoked_s < HEALED_S)
            .keeps_nothing()
            .without_last_acquires()
        )
    )
    assert not verdict.violations
    assert {reason.split(" was ever OK")[0] for reason in verdict.invalid[: len(Kind)]} == {
        f"no {kind}" for kind in Kind
    }
    assert len(verdict.invalid) == len(Kind) + 2


def test_a_run_without_faults_is_valid_if_none_was_asked_for() -> None:
    """Its throughput is that of the whole run."""
    builder = HistoryBuilder().without_faults()
    history = replace(builder.history(), healed_s=1.0)
    assert check(history).clean


def test_a_violation_names_its_calls_with_client_token_and_instants() -> None:
    """Whoever reads it finds them in the records; instants are told from the beginning on."""
    builder = HistoryBuilder().acquire("a", 6, (10, 10.25)).acquire("b", 5, (20, 20.5))
    (violation,) = check(replace(builder.history(), began_s=-5.0)).violations
    assert violation.resource == "r"
    assert violation.at_s == 20.5
    assert [call.lease for call in violation.operations] == ["a", "b"]
    for words in (
        f"client{CLIENTS['a']}",
        f"client{CLIENTS['b']}",
        "token 6",
        "token 5",
        "+15.000000 s",
        "+25.500000 s",
        "lease b",
    ):
        assert words in violation.words


def test_a_repeat_that_is_told_less_is_told_once() -> None:
    """Though two rules could find it."""
    verdict = verdict_of(lambda s: s.acquire("a", 6, (10, 10.1)).acquire("a", 5, (11, 11.1)))
    assert len(verdict.violations) == 1


def test_the_figures_are_those_of_the_run() -> None:
    """Calls by kind and outcome, faults by kind, refusals, throughput, and the longest time without a grant."""
    counts = verdict_of(
        lambda s: (
            s.append("x", 5, (40, 40.1), FAILED, stale=True)
            .read(5, (41, 41.1), UNKNOWN)
            .read(4, (42, 42.1), FAILED)
            .acquire("a", 5, (60, 60.5))
            .fault("node wiped", 5, 6)
            .fault("node wiped", 7, 8)
        )
    ).counts
    assert counts.operations[Kind.APPEND] == {OK: 31, FAILED: 1, UNKNOWN: 0}
    assert counts.operations[Kind.READ] == {OK: 31, FAILED: 1, UNKNOWN: 1}
    assert counts.faults == {"server killed": 1, "node wiped": 2}
    assert counts.stale_writes_refused == 1
    assert counts.stale_reads_refused == 0
    assert counts.throughput_per_s == 150
    assert counts.longest_gap_s == pytest.approx(60.5 - 29 / 31 - 0.001)
    assert set(counts.violations.values()) == {0}


def test_of_very_many_violations_the_first_are_told_and_all_are_counted() -> None:
    """A run that broke at its beginning does not fill the memory."""
    builder = HistoryBuilder().acquire("a", 10**5, (2, 2.1))
    for turn in range(VIOLATIONS_TOLD_MAX + 7):
        builder.acquire(f"b{turn}", turn + 1, (5 + turn / 1000, 5 + turn / 1000 + 0.0004), until=None)
        builder.release(f"b{turn}", (5 + turn / 1000 + 0.0005, 5 + turn / 1000 + 0.0006))
    verdict = check(builder.history())
    assert letters(verdict) == {"T2"}
    assert len(verdict.violations) == VIOLATIONS_TOLD_MAX
    assert verdict.counts.violations["T2"] == VIOLATIONS_TOLD_MAX + 7  # type: ignore[index]
