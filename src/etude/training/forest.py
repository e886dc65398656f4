"""A batch of sequences as packed tries: every distinct prefix is computed once.

Sequences of one group share their prompt, and often the beginning of their answers. Sorted
lexicographically, neighbours share the most, so a row is a run of neighbours; where to cut is
chosen by dynamic programming over an estimate of the cost. Within a row the nodes stand in
depth-first order, so that node j is an ancestor of node i exactly if j <= i < ends[j].

The log-prob of token t of a sequence belongs to an *edge*: from the node of its prefix `ids[:t]`
to the token. Only prefixes that lead to a wanted edge become nodes.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from etude.records import Bool, Int32, Int64


@dataclass(frozen=True, eq=False)
class Row:
    """One forward pass. Nodes (N,): `tokens`, `depths` (0 at a root), `ends` (one past the last
    descendant). Edges (E,), sorted by node: `edge_nodes`, `edge_tokens`, `edge_temperatures`, and
    `edge_places`, the index of the token in the concatenation of all sequences."""

    tokens: Int64
    depths: Int64
    ends: Int64
    edge_nodes: Int64
    edge_tokens: Int64
    edge_temperatures: NDArray[np.float32]
    edge_places: Int64

    @property
    def chain(self) -> bool:
        """Whether the row is one unbranched sequence: plain causal attention serves it."""
        return bool((self.ends == len(self.tokens)).all())

    def visible(self) -> Bool:
        """(N, N): whether node i may attend to node j, its ancestor or itself."""
        place = np.arange(len(self.tokens))
        return (place[None, :] <= place[:, None]) & (place[:, None] < self.ends[None, :])


@dataclass(frozen=True, eq=False)
class _Path:
    """One sequence as a path of nodes: `tokens` (L,) up to the last prefix that is needed."""

    sequence: int
    tokens: Int32


@dataclass(frozen=True, eq=False)
class _Source:
    """All sequences, and where each starts in their concatenation."""

    ids: Seq[Int32]
    wanted: Seq[Bool]
    temperatures: Seq[float]
    offsets: Int64


def grow(
    ids: Seq[Int32],
    wanted: Seq[Bool],
    temperatures: Seq[float],
    *,
    row_nodes: int,
    row_overhead: int,
    attention_cost: float,
) -> list[Row]:
    """Rows that together hold exactly the edges `wanted[s][t]` of the sequences `ids`.

    `attention_cost` is what one more visible pair costs against one more node.

    Raises ValueError if the first token of a sequence is wanted: nothing predicts it.
    """
    paths: list[_Path] = []
    for number, (tokens, want) in enumerate(zip(ids, wanted, strict=True)):
        places = np.flatnonzero(want)
        if len(places) == 0:
            continue
        if places[0] == 0:
            raise ValueError(f"sequence {number}: nothing predicts its first token")
        paths.append(_Path(number, tokens[: places[-1]]))
    # Big-endian bytes sort like the ids themselves.
    paths.sort(key=lambda path: path.tokens.astype(">u4").tobytes())
    shared = [0] + [_common(a.tokens, b.tokens) for a, b in pairwise(paths)]
    lengths = [len(path.tokens) for path in paths]
    source = _Source(ids, wanted, temperatures, np.cumsum([0, *(len(t) for t in ids)]))
    cuts = _cut(lengths, shared, row_nodes, row_overhead, attention_cost)
    return [_build(paths[start:end], shared[start:end], source) for start, end in cuts]


def _common(a: Int32, b: Int32) -> int:
    """Length of the longest common prefix."""
    length = min(len(a), len(b))
    different = np.flatnonzero(a[:length] != b[:length])
    return int(different[0]) if len(different) else length


def _cut(
    lengths: Seq[int], shared: Seq[int], row_nodes: int, overhead: int, attention_cost: float
) -> list[tuple[int, int]]:
    """The cheapest runs `[start, end)` of at most `row_nodes` nodes; O(paths * paths per row)."""
    count = len(lengths)
    best = [0.0] + [float("inf")] * count
    back = [0] * (count + 1)
    for start in range(count):
        nodes, longest = 0, 0
        for end in range(start + 1, count + 1):
            length = lengths[end - 1]
            nodes += length - (shared[end - 1] if end - 1 > start else 0)
            longest = max(longest, length)
            chain = nodes == longest
            if nodes > row_nodes and not chain:
                break
            pairs = nodes * nodes * (0.5 if chain else 1.0)
            cost = best[start] + overhead + nodes + attention_cost * pairs
            if cost < best[end]:
                best[end], back[end] = cost, start
    cuts: list[tuple[int, int]] = []
    end = count
    while end > 0:
        cuts.append((back[end], end))
        end = back[end]
    return cuts[::-1]


def _build(
    paths: Seq[_Path],
    shared: Seq[int],
    source: _Source,
) -> Row:
    """The trie of sorted `paths`; `shared[i]` is the common prefix of paths i-1 and i."""
    tokens: list[Int32] = []
    depths: list[Int64] = []
    edge_nodes: list[Int64] = []
    edge_tokens: list[Int32] = []
    edge_temperatures: list[NDArray[np.float32]] = []
    edge_places: list[Int64] = []
    trail = np.zeros(0, np.int64)  # node of every depth on the current path
    closed: list[tuple[Int64, int]] = []  # (nodes, their end)
    count = 0
    for number, path in enumerate(paths):
        keep = shared[number] if number else 0
        closed.append((trail[keep:], count))
        fresh = len(path.tokens) - keep
        trail = np.concatenate([trail[:keep], np.arange(count, count + fresh)])
        tokens.append(path.tokens[keep:])
        depths.append(np.arange(keep, keep + fresh))
        count += fresh
        ids = source.ids[path.sequence]
        places = np.flatnonzero(source.wanted[path.sequence])
        edge_nodes.append(trail[places - 1])
        edge_tokens.append(ids[places])
        edge_temperatures.append(
            np.full(len(places), source.temperatures[path.sequence], dtype=np.float32)
        )
        edge_places.append(places + source.offsets[path.sequence])
    closed.append((trail, count))
    ends = np.zeros(count, np.int64)
    for nodes, end in closed:
        ends[nodes] = end
    all_nodes = np.concatenate(edge_nodes)
    order = np.argsort(all_nodes, kind="stable")
    return Row(
        np.concatenate(tokens).astype(np.int64),
        np.concatenate(depths),
        ends,
        all_nodes[order],
        np.concatenate(edge_tokens).astype(np.int64)[order],
        np.concatenate(edge_temperatures)[order],
        np.concatenate(edge_places)[order],
    )
