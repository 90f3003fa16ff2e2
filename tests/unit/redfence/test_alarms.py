"""The alarms of a client against the simplest thing that could be right: a dictionary."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from redfence._core.alarms import Alarms

_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("set"), st.integers(0, 9), st.integers(0, 50)),
        st.tuples(st.just("clear"), st.integers(0, 9), st.just(0)),
        st.tuples(st.just("take"), st.just(0), st.integers(0, 50)),
    ),
    max_size=300,
)


@given(_STEPS)
def test_alarms_agree_with_a_dictionary_after_any_sequence_of_steps(
    steps: list[tuple[str, int, int]],
) -> None:
    alarms: Alarms[int] = Alarms()
    model: dict[int, float] = {}
    for step, item, at_ms in steps:
        if step == "set":
            alarms.set(item, at_ms)
            model[item] = at_ms
        elif step == "clear":
            alarms.clear(item)
            model.pop(item, None)
        else:
            due = [i for i, at in model.items() if at <= at_ms]
            taken = alarms.take_due(at_ms)
            assert sorted(taken) == sorted(due)
            assert [model[i] for i in taken] == sorted(model[i] for i in taken)
            for i in due:
                del model[i]
        assert alarms.next_at_ms() == min(model.values(), default=math.inf)
        assert len(alarms) == len(model)


def test_memory_stays_bounded_when_alarms_are_moved_for_ever() -> None:
    alarms: Alarms[str] = Alarms()
    for at_ms in range(10_000):
        alarms.set("lease", at_ms)
    assert len(alarms._heap) < 100
    assert alarms.take_due(10_000) == ["lease"]
