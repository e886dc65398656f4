"""The token ledger alone: alignment, and the joining of expert routes over turns."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.agent.ledger import UNKNOWN_EXPERT, Ledger
from etude.inference.protocol import Completion, Finish

LAYERS, CHOSEN = 2, 3


def route(position: int, turn: int) -> np.ndarray:
    """A route that tells where and in which turn's forward passes it was made."""
    return np.full((LAYERS, CHOSEN), 100 * turn + position, dtype=np.uint16)


def completion(ids: list[int], prompt: int, turn: int, *, experts: bool) -> Completion:
    """What an engine gives: routes of all tokens that it fed, and an unknown last one."""
    rows = [route(position, turn) for position in range(prompt + len(ids) - 1)]
    rows.append(np.full((LAYERS, CHOSEN), UNKNOWN_EXPERT, dtype=np.uint16))
    return Completion(
        ids=np.array(ids, dtype=np.int32),
        logprobs=-np.arange(1, len(ids) + 1, dtype=np.float32),
        policy_versions=np.full(len(ids), turn, dtype=np.int64),
        finish=Finish.STOP,
        prompt_tokens=prompt,
        cached_tokens=0,
        experts=np.stack(rows) if experts else None,
    )


EXCHANGES = st.lists(
    st.tuples(
        st.lists(st.integers(0, 9), min_size=1, max_size=4),
        st.lists(st.integers(10, 19), min_size=1, max_size=4),
    ),
    min_size=1,
    max_size=4,
)


@given(EXCHANGES, st.booleans())
def test_segment_equals_the_list_of_exchanges(
    exchanges: list[tuple[list[int], list[int]]], experts: bool
) -> None:
    ledger = Ledger()
    assert ledger.segments(1.0) == ()
    expected: list[tuple[int, float | None, int, int | None]] = []  # id, log-prob, version, route
    for turn, (injected, sampled) in enumerate(exchanges):
        # The token sampled last is fed, and routed, in this turn's forward passes.
        expected[-1:] = [(*row[:3], 100 * turn + len(expected) - 1) for row in expected[-1:]]
        for token in injected:
            expected.append((token, None, -1, 100 * turn + len(expected)))
        for rank, token in enumerate(sampled):
            expected.append((token, -1.0 - rank, turn, 100 * turn + len(expected)))
        expected[-1] = (*expected[-1][:3], UNKNOWN_EXPERT)
        prompt = ledger.ids + injected
        ledger.commit(prompt, completion(sampled, len(prompt), turn, experts=experts))
        assert ledger.last_completion == sampled
    (segment,) = ledger.segments(0.0)
    assert segment.temperature == 1.0
    assert segment.prompt_ids.tolist() == exchanges[0][0]
    rest = expected[len(segment.prompt_ids) :]
    assert segment.completion_ids.tolist() == [row[0] for row in rest]
    assert segment.mask.tolist() == [row[1] is not None for row in rest]
    assert segment.logprobs[segment.mask].tolist() == [row[1] for row in rest if row[1] is not None]
    assert segment.policy_versions.tolist() == [row[2] for row in rest]
    assert [t.end - t.start for t in segment.turns] == [len(sampled) for _, sampled in exchanges]
    if experts:
        assert segment.experts is not None
        assert segment.experts[:, 1, 2].tolist() == [row[3] for row in expected]
    else:
        assert segment.experts is None


def test_a_prompt_that_does_not_continue_the_ledger_is_refused() -> None:
    ledger = Ledger()
    ledger.commit([1, 2], completion([3], 2, 0, experts=False))
    with pytest.raises(ValueError, match="does not start with"):
        ledger.commit([1, 2, 4, 5], completion([6], 4, 1, experts=False))
    assert ledger.ids == [1, 2, 3]


def test_experts_for_some_turns_only_are_a_bug_of_the_engine() -> None:
    for first in (True, False):
        ledger = Ledger()
        ledger.commit([1], completion([2], 1, 0, experts=first))
        with pytest.raises(ValueError, match="some turns only"):
            ledger.commit([1, 2, 3], completion([4], 3, 1, experts=not first))
