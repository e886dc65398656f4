"""Rows hold every wanted edge once, share every prefix, and show each node its ancestors only."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.training.forest import Row, grow

sequence = st.lists(st.integers(0, 2), min_size=1, max_size=7)


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[np.ndarray], list[np.ndarray]]:
    ids = [np.array(s, np.int32) for s in draw(st.lists(sequence, min_size=1, max_size=7))]
    wanted = []
    for tokens in ids:
        flags = draw(st.lists(st.booleans(), min_size=len(tokens), max_size=len(tokens)))
        wanted.append(np.array([False, *flags[1:]]))
    return ids, wanted


def make(ids: list[np.ndarray], wanted: list[np.ndarray], nodes: int, overhead: int) -> list[Row]:
    return grow(
        ids,
        wanted,
        [1.0] * len(ids),
        row_nodes=nodes,
        row_overhead=overhead,
        attention_cost=0.01,
    )


def prefix(row: Row, node: int) -> tuple[int, ...]:
    return tuple(row.tokens[np.flatnonzero(row.visible()[node])])


@settings(max_examples=300, deadline=None)
@given(batches(), st.integers(1, 20), st.integers(0, 30))
def test_edges_are_exactly_the_wanted_ones(
    batch: tuple[list[np.ndarray], list[np.ndarray]], nodes: int, overhead: int
) -> None:
    ids, wanted = batch
    starts = np.cumsum([0, *map(len, ids)])
    expected = {
        int(starts[s] + t): (tuple(ids[s][:t]), int(ids[s][t]))
        for s in range(len(ids))
        for t in np.flatnonzero(wanted[s])
    }
    found: dict[int, tuple[tuple[int, ...], int]] = {}
    for row in make(ids, wanted, nodes, overhead):
        assert row.chain or len(row.tokens) <= nodes
        prefixes = [prefix(row, n) for n in range(len(row.tokens))]
        assert len(set(prefixes)) == len(prefixes), "a prefix stands twice in one row"
        assert [len(p) - 1 for p in prefixes] == row.depths.tolist()
        for node, token, place in zip(
            row.edge_nodes, row.edge_tokens, row.edge_places, strict=True
        ):
            assert int(place) not in found
            found[int(place)] = (prefixes[node], int(token))
    assert found == expected


@settings(max_examples=100, deadline=None)
@given(batches())
def test_one_row_has_no_node_too_many(batch: tuple[list[np.ndarray], list[np.ndarray]]) -> None:
    ids, wanted = batch
    needed = {
        tuple(tokens[:t])
        for tokens, flags in zip(ids, wanted, strict=True)
        if flags.any()
        for t in range(1, int(np.flatnonzero(flags)[-1]) + 1)
    }
    rows = make(ids, wanted, 10**6, 10**6)
    assert sum(len(row.tokens) for row in rows) == len(needed)
    assert len(rows) <= 1


@settings(max_examples=60, deadline=None)
@given(batches(), st.integers(3, 12), st.integers(0, 12))
def test_cuts_are_the_cheapest_of_all_cuts(
    batch: tuple[list[np.ndarray], list[np.ndarray]], nodes: int, overhead: int
) -> None:
    ids, wanted = batch
    paths = sorted(
        tuple(tokens[: int(np.flatnonzero(flags)[-1])])
        for tokens, flags in zip(ids, wanted, strict=True)
        if flags.any()
    )

    def cost(run: list[tuple[int, ...]]) -> float:
        trie = {p[:n] for p in run for n in range(1, len(p) + 1)}
        chain = len(trie) == max(map(len, run))
        if len(trie) > nodes and not chain:
            return float("inf")
        return overhead + len(trie) + 0.01 * len(trie) ** 2 * (0.5 if chain else 1)

    if not paths:
        return
    cuts = itertools.product([False, True], repeat=len(paths) - 1)
    best = float("inf")
    for cut in cuts:
        runs: list[list[tuple[int, ...]]] = [[paths[0]]]
        for path, new in zip(paths[1:], cut, strict=True):
            if new:
                runs.append([path])
            else:
                runs[-1].append(path)
        best = min(best, sum(map(cost, runs)))
    ours = sum(
        overhead + len(r.tokens) + 0.01 * len(r.tokens) ** 2 * (0.5 if r.chain else 1)
        for r in make(ids, wanted, nodes, overhead)
    )
    assert ours == pytest.approx(best)


def test_a_group_computes_its_prompt_once() -> None:
    prompt = np.arange(100, 400)
    answers = [np.r_[prompt, np.arange(1000 + 100 * g, 1050 + 100 * g)] for g in range(8)]
    ids = [a.astype(np.int32) for a in answers]
    wanted = [np.arange(len(a)) >= 300 for a in ids]
    (row,) = make(ids, wanted, 768, 64)
    assert len(row.tokens) == 300 + 8 * 49  # the last token of an answer predicts nothing


def test_the_first_token_cannot_be_wanted() -> None:
    with pytest.raises(ValueError, match="predicts its first token"):
        make([np.array([1, 2], np.int32)], [np.array([True, False])], 8, 1)
