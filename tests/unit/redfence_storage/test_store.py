"""The rule of fencing."""

from __future__ import annotations

import itertools

import pytest

from redfence_storage.errors import StaleToken
from redfence_storage.store import NO_TOKEN, admit


@pytest.mark.parametrize(("token", "highest_token"), list(itertools.product(range(1, 6), range(6))))
def test_admit_refuses_exactly_the_tokens_below_the_highest(token: int, highest_token: int) -> None:
    if token < highest_token:
        with pytest.raises(StaleToken) as refusal:
            admit(token, resource="orders/42", highest_token=highest_token)
        assert refusal.value.highest_token == highest_token
    else:
        assert admit(token, resource="orders/42", highest_token=highest_token) == token


def test_accepted_tokens_never_fall_whatever_the_order_of_requests() -> None:
    for tokens in itertools.product(range(1, 4), repeat=5):
        highest_token = NO_TOKEN
        accepted = []
        for number, token in enumerate(tokens):
            try:
                highest_token = admit(token, resource="orders/42", highest_token=highest_token)
            except StaleToken:
                assert token < max(tokens[:number])
            else:
                accepted.append(token)
                assert token == max(tokens[: number + 1])
        assert accepted == sorted(accepted)
        assert highest_token == max(tokens)


def test_a_stale_token_names_the_resource_and_both_tokens() -> None:
    with pytest.raises(StaleToken) as refusal:
        admit(3, resource="orders/42", highest_token=7)
    assert refusal.value.metadata == {"resource": "orders/42", "fencing_token": "3", "highest_token": "7"}
