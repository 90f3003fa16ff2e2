"""The fake that users test with: the real clients over a server in memory, and time by hand."""

from __future__ import annotations

from functools import partial

import pytest

import redfence
from redfence.testing import FakeLockServer, ManualClock


def test_time_stands_still_until_it_is_advanced_and_then_a_lease_is_over() -> None:
    with FakeLockServer(ManualClock()) as fake:
        lease = fake.client().acquire("orders/42", ttl=10)
        assert lease.remaining() == pytest.approx(9.898)
        fake.clock.advance(9.8)
        assert lease.state is redfence.LeaseState.ACTIVE or lease.state is redfence.LeaseState.AT_RISK
        fake.clock.advance(11)
        assert lease.lost.is_set()
        assert lease.lost.wait(0)
        assert lease.remaining() == 0.0
        with pytest.raises(redfence.LeaseLostError, match=r"EXPIRED|validity"):
            lease.raise_if_lost()


def test_tokens_grow_with_every_grant_also_to_somebody_else() -> None:
    with FakeLockServer() as fake:
        client = fake.client()
        with client.lock("r", ttl=10) as first:
            pass
        second = fake.take_away("r")
        fake.expire("r")
        with client.lock("r", ttl=10) as third:
            assert fake.token("r") == third.token
        assert first.token < second < third.token
        assert fake.token("r") is None


def test_a_holder_learns_that_its_lease_was_taken_away() -> None:
    with FakeLockServer() as fake:
        client = fake.client()

        def hold() -> None:
            with client.lock("r", ttl=0.3) as lease:
                fake.take_away("r", holder="them")
                assert lease.lost.wait(5)

        with pytest.raises(redfence.LeaseLostError) as lost:
            hold()
        assert lost.value.reason is redfence.LossReason.NOT_HELD
        assert fake.holder("r") == "them"


def test_the_server_in_memory_needs_no_address_and_closes_its_clients() -> None:
    with FakeLockServer() as fake:
        client = fake.client()
        lease = client.acquire("r", ttl=10)
    assert lease.lost.is_set()
    with pytest.raises(redfence.ClosedError):
        client.acquire("r", ttl=10)


def test_the_faults_of_a_server_reach_every_call() -> None:
    with FakeLockServer() as fake, fake.client() as client:
        fake.lose_quorum()
        for call in (partial(client.get_lock, "r"), partial(client.check_token, "r", 1)):
            with pytest.raises(redfence.UnavailableError, match="no quorum of nodes answered"):
                call()
        assert not client.cluster_status().ready
        fake.freeze()
        with pytest.raises(redfence.OutcomeUnknownError, match="the server is frozen"):
            client.cluster_status()
