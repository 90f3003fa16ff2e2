"""When a connection is pinged, closed and dropped, and how many pings its peer may send."""

from __future__ import annotations

from redfence_server.http2.liveness import Action, Liveness
from redfence_server.http2.settings import LivenessSettings

SETTINGS = LivenessSettings(
    handshake_s=10, ping_after_s=20, ping_timeout_s=5, idle_s=600, peer_ping_interval_s=0.5, early_pings_max=2
)


def greeted(*, busy: bool = True) -> Liveness:
    subject = Liveness(SETTINGS, 0)
    subject.greeted()
    if busy:
        subject.busy()
    return subject


def test_a_peer_that_never_speaks_http2_is_dropped() -> None:
    subject = Liveness(SETTINGS, 0)
    subject.heard(9)
    assert subject.check(9.9) == (Action.WAIT, 10)
    assert subject.check(10) == (Action.DROP, 10)


def test_a_silent_peer_is_pinged_and_then_dropped() -> None:
    subject = greeted()
    assert subject.check(19) == (Action.WAIT, 20)
    assert subject.check(20) == (Action.PING, 25)
    assert subject.check(24) == (Action.WAIT, 25)
    assert subject.check(25) == (Action.DROP, 25)


def test_any_byte_of_the_peer_counts_as_an_answer() -> None:
    subject = greeted()
    assert subject.check(20) == (Action.PING, 25)
    subject.heard(24)
    assert subject.check(25) == (Action.WAIT, 44)


def test_a_connection_without_calls_is_closed_however_alive_it_is() -> None:
    subject = greeted(busy=False)
    subject.heard(595)
    assert subject.check(599) == (Action.WAIT, 600)
    subject.busy()
    assert subject.check(600) == (Action.WAIT, 615)
    subject.idle(601)
    subject.heard(1200)
    assert subject.check(1200) == (Action.WAIT, 1201)
    assert subject.check(1201)[0] is Action.CLOSE


def test_the_third_early_ping_is_one_too_many() -> None:
    subject = greeted()
    assert [subject.allows_ping(now) for now in (0, 0.1, 0.2, 0.3)] == [True, True, True, False]


def test_a_ping_is_early_only_within_the_interval_and_before_an_answer() -> None:
    subject = greeted()
    assert all(subject.allows_ping(each * 0.5) for each in range(10))
    for now in (10.0, 10.1, 10.2):
        assert subject.allows_ping(now)
    subject.answered()
    assert [subject.allows_ping(now) for now in (10.3, 10.4, 10.5, 10.6)] == [True, True, True, False]
