"""A batch of sequences as packed tries: every distinct prefix is computed once.

Sequences of one group share their prompt, and often the beginning of their answers. Sorted
lexicographically, neighbours share the most, so a row is a run of neighbours; where to cut is
chosen by dynamic programming over an estimate of the cost. Within a row the nodes stand in
depth-first order, so that node j is an ancestor of node i exactly if j <= i < ends[j]. Rows of
about the same length go through the model side by side, in one *pass*.

The log-prob of token t of a sequence belongs to an *edge*: from the node of its prefix `ids[:t]`
to the token. Only prefixes that lead to a wanted edge become nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from etude.records import Bool, Int32, Int64


@dataclass(frozen=True, eq=False)
class Row:
    """One packed trie. Nodes (N,): `tokens`, `depths` (0 at a root), `ends` (one past the last
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
class Pass:
    """Rows (B) that go through the model together, padded on the right to the longest (T)."""

    rows: tuple[Row, ...]

    @property
    def width(self) -> int:
        """T."""
        return max(len(row.tokens) for row in self.rows)

    @property
    def nodes(self) -> int:
        """Nodes without padding."""
        return sum(len(row.tokens) for row in self.rows)

    @property
    def chains(self) -> bool:
        """Whether plain causal attention serves all rows; padding on the right is then unseen."""
        return all(row.chain for row in self.rows)

    def tokens(self) -> Int64:
        """(B, T), padded with 0."""
        return self._padded([row.tokens for row in self.rows])

    def depths(self) -> Int64:
        """(B, T), padded with 0."""
        return self._padded([row.depths for row in self.rows])

    def visible(self) -> Bool:
        """(B, T, T); a padded place sees itself, because an empty softmax is NaN."""
        mask = np.broadcast_to(
            np.eye(self.width, dtype=np.bool_), (len(self.rows),) + (self.width,) * 2
        )
        mask = mask.copy()
        for number, row in enumerate(self.rows):
            mask[number, : len(row.tokens), : len(row.tokens)] = row.visible()
        return mask

    def edge_nodes(self) -> Int64:
        """(E,): places of the edges' nodes in the flattened (B * T)."""
        return np.concatenate([row.edge_nodes + b * self.width for b, row in enumerate(self.rows)])

    def _padded(self, arrays: Seq[Int64]) -> Int64:
        result = np.zeros((len(arrays), self.width), np.int64)
        for number, array in enumerate(arrays):
            result[number, : len(array)] = array
        return result


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
    attention_cost: float,
) -> list[Row]:
    """Rows of at most `row_nodes` nodes that together hold exactly the edges `wanted[s][t]` of the
    sequences `ids`. A single longer sequence gets a row of its own.

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
    source = _Source(ids, wanted, temperatures, np.cumsum([0, *(len(t) for t in ids)]))

    def costs(start: int) -> Iterator[float]:
        nodes, longest = 0, 0
        for end in range(start, len(paths)):
            length = len(paths[end].tokens)
            nodes += length - (shared[end] if end > start else 0)
            longest = max(longest, length)
            chain = nodes == longest
            if nodes > row_nodes and not chain:
                return
            yield nodes + attention_cost * nodes * nodes * (0.5 if chain else 1.0)

    return [
        _build(paths[start:end], shared[start:end], source)
        for start, end in _cheapest_runs(len(paths), costs)
    ]


def pack(rows: Seq[Row], *, row_nodes: int, overhead: int) -> list[Pass]:
    """Passes of at most `row_nodes` places, padding included, over all `rows`. One more pass costs
    as much as `overhead` places. A single longer row gets a pass of its own."""
    ordered = sorted(rows, key=lambda row: len(row.tokens))

    def costs(start: int) -> Iterator[float]:
        for end in range(start, len(ordered)):
            places = (end + 1 - start) * len(ordered[end].tokens)
            if places > row_nodes and end > start:
                return
            yield overhead + places

    return [Pass(tuple(ordered[a:b])) for a, b in _cheapest_runs(len(ordered), costs)]


def _common(a: Int32, b: Int32) -> int:
    """Length of the longest common prefix."""
    length = min(len(a), len(b))
    different = np.flatnonzero(a[:length] != b[:length])
    return int(different[0]) if len(different) else length


def _cheapest_runs(count: int, costs: Callable[[int], Iterator[float]]) -> list[tuple[int, int]]:
    """The cheapest way to cut `count` items into runs `[start, end)`. `costs(start)` yields the
    costs of the runs from `start` of 1, 2, ... items, as far as they are allowed, at least one."""
    best = [0.0] + [float("inf")] * count
    back = [0] * (count + 1)
    for start in range(count):
        for end, cost in enumerate(costs(start), start + 1):
            if best[start] + cost < best[end]:
                best[end], back[end] = best[start] + cost, start
    runs: list[tuple[int, int]] = []
    end = count
    while end > 0:
        runs.append((back[end], end))
        end = back[end]
    return runs[::-1]


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
