"""Rows hold every wanted edge once, share every prefix, and show each node its ancestors only."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.training.forest import Pass, Row, grow, pack

Arrays = list[np.ndarray]

sequence = st.lists(st.integers(0, 2), min_size=1, max_size=7)


@st.composite
def batches(draw: st.DrawFn) -> tuple[Arrays, Arrays]:
    ids = [np.array(s, np.int32) for s in draw(st.lists(sequence, min_size=1, max_size=7))]
    wanted = []
    for tokens in ids:
        flags = draw(st.lists(st.booleans(), min_size=len(tokens), max_size=len(tokens)))
        wanted.append(np.array([False, *flags[1:]]))
    return ids, wanted


def make(ids: Arrays, wanted: Arrays, nodes: int, cost: float = 0.01) -> list[Row]:
    return grow(
        ids,
        wanted,
        [1.0] * len(ids),
        row_nodes=nodes,
        attention_cost=cost,
    )


def prefix(row: Row, node: int) -> tuple[int, ...]:
    return tuple(row.tokens[np.flatnonzero(row.visible()[node])])


@settings(max_examples=300, deadline=None)
@given(batches(), st.integers(1, 20))
def test_edges_are_exactly_the_wanted_ones(batch: tuple[Arrays, Arrays], nodes: int) -> None:
    ids, wanted = batch
    starts = np.cumsum([0, *map(len, ids)])
    expected = {
        int(starts[s] + t): (tuple(ids[s][:t]), int(ids[s][t]))
        for s in range(len(ids))
        for t in np.flatnonzero(wanted[s])
    }
    found: dict[int, tuple[tuple[int, ...], int]] = {}
    for row in make(ids, wanted, nodes):
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
def test_without_a_ceiling_no_prefix_is_computed_twice(
    batch: tuple[Arrays, Arrays],
) -> None:
    ids, wanted = batch
    needed = {
        tuple(tokens[:t])
        for tokens, flags in zip(ids, wanted, strict=True)
        if flags.any()
        for t in range(1, int(np.flatnonzero(flags)[-1]) + 1)
    }
    rows = make(ids, wanted, 10**6, cost=0.0)
    assert sum(len(row.tokens) for row in rows) == len(needed)


@settings(max_examples=60, deadline=None)
@given(batches(), st.integers(3, 12))
def test_cuts_are_the_cheapest_of_all_cuts(batch: tuple[Arrays, Arrays], nodes: int) -> None:
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
        return len(trie) + 0.01 * len(trie) ** 2 * (0.5 if chain else 1)

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
        len(r.tokens) + 0.01 * len(r.tokens) ** 2 * (0.5 if r.chain else 1)
        for r in make(ids, wanted, nodes)
    )
    assert ours == pytest.approx(best)


def test_a_group_computes_its_prompt_once() -> None:
    prompt = np.arange(100, 400)
    answers = [np.r_[prompt, np.arange(1000 + 100 * g, 1050 + 100 * g)] for g in range(8)]
    ids = [a.astype(np.int32) for a in answers]
    wanted = [np.arange(len(a)) >= 300 for a in ids]
    (row,) = make(ids, wanted, 768, 0.0003)
    assert len(row.tokens) == 300 + 8 * 49  # the last token of an answer predicts nothing


def test_the_first_token_cannot_be_wanted() -> None:
    with pytest.raises(ValueError, match="predicts its first token"):
        make([np.array([1, 2], np.int32)], [np.array([True, False])], 8)


@settings(max_examples=100, deadline=None)
@given(batches(), st.integers(1, 30), st.integers(0, 20))
def test_passes_hold_every_row_and_pad_harmlessly(
    batch: tuple[Arrays, Arrays], nodes: int, overhead: int
) -> None:
    rows = make(*batch, nodes)
    passes = pack(rows, row_nodes=nodes, overhead=overhead)
    assert {id(row) for p in passes for row in p.rows} == {id(row) for row in rows}
    for group in passes:
        tokens, depths, visible = group.tokens(), group.depths(), group.visible()
        assert tokens.shape == depths.shape == visible.shape[:2]
        assert len(group.rows) == 1 or tokens.size <= nodes
        assert visible.any(-1).all()
        for b, row in enumerate(group.rows):
            n = len(row.tokens)
            assert tokens[b, :n].tolist() == row.tokens.tolist()
            assert np.array_equal(visible[b, :n, :n], row.visible())
            assert not visible[b, :n, n:].any()
        edges = group.edge_nodes()
        expected = np.concatenate([row.tokens[row.edge_nodes] for row in group.rows])
        assert tokens.reshape(-1)[edges].tolist() == expected.tolist()


def test_equal_windows_go_side_by_side_without_a_mask() -> None:
    rng = np.random.default_rng(0)
    ids = [rng.integers(0, 9, 129).astype(np.int32) for _ in range(8)]
    rows = make(ids, [np.arange(129) > 0] * 8, 1024, 0.0003)
    (group,) = pack(rows, row_nodes=1024, overhead=64)
    assert isinstance(group, Pass)
    assert group.chains
    assert group.tokens().shape == (8, 128)
