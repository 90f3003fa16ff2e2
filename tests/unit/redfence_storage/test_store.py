"""The rule of fencing."""

from __future__ import annotations

import itertools

import pytest

from redfence_storage.errors import StaleToken
from redfence_storage.store import admit


@pytest.mark.parametrize(("token", "highest_token"), list(itertools.product(range(1, 6), range(6))))
def test_admit_refuses_exactly_the_tokens_below_the_highest(token: int, highest_token: int) -> None:
    if token < highest_token:
        with pytest.raises(StaleToken) as refusal:
            admit(token, resource="orders/42", highest_token=highest_token)
        assert refusal.value.metadata == {
            "resource": "orders/42",
            "fencing_token": str(token),
            "highest_token": str(highest_token),
        }
    else:
        assert admit(token, resource="orders/42", highest_token=highest_token) == token
