"""Keys and values of all slots, and the attention that reads them in place.

A step of the engine is one forward pass over a packed row of tokens, shape (1, tokens): first one
token for each decoding slot, in slot order, then chunks of prompts. The transformers model runs as
it is; it meets the slots through two of its own seams, a cache object (`SlotCache.update`) and a
registered attention function (`slot_attention`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

ATTENTION_NAME = "etude_slots"

_WORTH_SHARING = 48
_GAP = 2
_ALIGN = 32


@dataclass(frozen=True, eq=False)
class DecodeRun:
    """Neighbouring slots whose decoding rows attend in one batched call over positions
    [begin, end). `rows` are their rows of the step, `offsets` their slots relative to `first`,
    None when every slot of the run decodes. `mask` is (slots, 1, 1, end - begin), additive."""

    rows: slice
    first: int
    count: int
    offsets: Tensor | None
    begin: int
    end: int
    mask: Tensor


@dataclass(frozen=True, eq=False)
class SharedPrefix:
    """Decoding `rows` of the step whose slots all hold the same keys and values at positions
    [0, length): they attend to those of `slot` together, and to the rest in their runs."""

    rows: Tensor
    slot: int
    length: int


@dataclass(frozen=True, eq=False)
class Chunk:
    """Prompt positions [start, start + count) of one slot, at `row` of the step. `mask` is
    (count, start + count), additive; None stands for a plain causal mask (start 0)."""

    slot: int
    start: int
    count: int
    row: int
    mask: Tensor | None


@dataclass(frozen=True, eq=False)
class StepLayout:
    """Where the rows of one step belong. `decode_rows` comes first in the packed row."""

    decode_rows: int
    write_index: Tensor
    """(kv_heads * decode_rows,) rows of the flat cache that the decoding tokens fill."""
    runs: Sequence[DecodeRun]
    prefixes: Sequence[SharedPrefix]
    chunks: Sequence[Chunk]


class SlotCache:
    """Keys and values, (layers, 2, slots, kv_heads, context, head_dim).

    Pages come from the system zeroed and only when touched, so that an empty cache costs nothing
    and what a mask hides is finite.
    """

    def __init__(
        self,
        *,
        layers: int,
        slots: int,
        kv_heads: int,
        context: int,
        head_dim: int,
        dtype: torch.dtype,
    ) -> None:
        shape = (layers, 2, slots, kv_heads, context, head_dim)
        storage = np.zeros(shape, np.uint16 if dtype.itemsize == 2 else np.float32)
        self.data = torch.from_numpy(storage).view(dtype)
        self.kv_heads = kv_heads
        self.context = context
        self._flat = self.data.view(layers, 2, slots * kv_heads * context, head_dim)
        self.layout: StepLayout | None = None
        self.calls = 0

    def update(
        self, keys: Tensor, values: Tensor, layer: int, *_args: Any, **_kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store (1, kv_heads, tokens, head_dim) of the current step; called by the model."""
        layout = self.layout
        assert layout is not None
        for which, new in ((0, keys), (1, values)):
            if layout.decode_rows:
                source = new[0, :, : layout.decode_rows].reshape(-1, new.shape[-1])
                self._flat[layer, which].index_copy_(0, layout.write_index, source)
            for chunk in layout.chunks:
                end = chunk.start + chunk.count
                self.data[layer, which, chunk.slot, :, chunk.start : end] = new[
                    0, :, chunk.row : chunk.row + chunk.count
                ]
        return keys, values

    def get_seq_length(self, layer: int = 0) -> int:
        """Positions are always passed in explicitly, so the model never needs this."""
        return 0

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of one slot to another."""
        self.data[:, :, target, :, :length] = self.data[:, :, source, :, :length]

    def write_index(self, slots: Tensor, positions: Tensor) -> Tensor:
        """Rows of the flat cache, head by head, for one token of each of `slots`."""
        heads = torch.arange(self.kv_heads)[:, None]
        return ((slots * self.kv_heads + heads) * self.context + positions).reshape(-1)


def slot_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    slot_cache: SlotCache,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer over the slots: query (1, heads, tokens, head_dim) to
    (1, tokens, heads, head_dim). Raises NotImplementedError for kinds of attention that are not
    plain causal."""
    if s_aux is not None or softcap is not None:
        raise NotImplementedError("attention sinks and soft caps are not supported")
    if sliding_window is not None and sliding_window < slot_cache.context:
        raise NotImplementedError(f"a sliding window of {sliding_window} tokens is not supported")
    layer = int(cast(Any, module).layer_idx)
    layout = slot_cache.layout
    assert layout is not None
    slot_cache.calls += 1
    keys, values = slot_cache.data[layer, 0], slot_cache.data[layer, 1]
    heads, tokens, width = query.shape[1:]
    out = query.new_empty(tokens, heads, width)
    if layout.decode_rows:
        _decode(layout, query[0, :, : layout.decode_rows], keys, values, scaling, out)
    for chunk in layout.chunks:
        end = chunk.start + chunk.count
        rows = slice(chunk.row, chunk.row + chunk.count)
        attended = functional.scaled_dot_product_attention(
            query[:, :, rows],
            keys[None, chunk.slot, :, :end],
            values[None, chunk.slot, :, :end],
            attn_mask=chunk.mask,
            is_causal=chunk.mask is None,
            scale=scaling,
            enable_gqa=True,
        )
        out[rows] = attended[0].transpose(0, 1)
    return out[None], None


def _decode(
    layout: StepLayout, query: Tensor, keys: Tensor, values: Tensor, scaling: float, out: Tensor
) -> None:
    """One query per slot, (heads, rows, head_dim), into the first rows of `out`.

    A group's common prompt is read once for all its rows, which is most of the work; the two
    parts of a softmax are put together by their normalisers (as in flash attention).
    """
    kv_heads, width = keys.shape[1], query.shape[-1]
    normalisers = query.new_empty(query.shape[1], query.shape[0], dtype=torch.float32)
    for run in layout.runs:
        out[run.rows], normalisers[run.rows] = _run(run, query[:, run.rows], keys, values, scaling)
    for prefix in layout.prefixes:
        mine = query[:, prefix.rows].reshape(1, kv_heads, -1, width)
        common, weight = _attend(
            mine,
            keys[None, prefix.slot, :, : prefix.length],
            values[None, prefix.slot, :, : prefix.length],
            None,
            scaling,
        )
        common = common.reshape(-1, len(prefix.rows), width).transpose(0, 1)
        weight = weight.reshape(-1, len(prefix.rows)).t()
        share = torch.sigmoid(weight - normalisers[prefix.rows])[..., None].to(out.dtype)
        out[prefix.rows] = torch.lerp(out[prefix.rows], common, share)


def _run(
    run: DecodeRun, query: Tensor, keys: Tensor, values: Tensor, scaling: float
) -> tuple[Tensor, Tensor]:
    """(heads, rows, head_dim) to (rows, heads, head_dim) and normalisers (rows, heads). The query
    heads that share a key head stand in place of query positions, so nothing is repeated."""
    kv_heads, width = keys.shape[1], query.shape[-1]
    query = query.transpose(0, 1)
    if run.offsets is not None:
        spread = query.new_zeros(run.count, *query.shape[1:])
        query = spread.index_copy_(0, run.offsets, query)
    attended, normalisers = _attend(
        query.reshape(run.count, kv_heads, -1, width),
        keys[run.first : run.first + run.count, :, run.begin : run.end],
        values[run.first : run.first + run.count, :, run.begin : run.end],
        run.mask,
        scaling,
    )
    attended = attended.reshape(run.count, -1, width)
    normalisers = normalisers.reshape(run.count, -1)
    if run.offsets is None:
        return attended, normalisers
    return attended[run.offsets], normalisers[run.offsets]


def _attend(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float
) -> tuple[Tensor, Tensor]:
    """Attention (batch, heads, queries, head_dim) and the log of its normaliser (batch, heads,
    queries), float32. This is the kernel behind `scaled_dot_product_attention` on a CPU, called
    by name because the public function keeps the normaliser to itself."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, keys, values, attn_mask=mask, scale=scaling
    )


def shared_prefixes(
    slots: Sequence[int], families: Sequence[int], shared: Sequence[int]
) -> list[SharedPrefix]:
    """Families of at least two decoding slots and a prefix worth a call of its own."""
    members: dict[int, list[int]] = defaultdict(list)
    for row, family in enumerate(families):
        members[family].append(row)
    prefixes: list[SharedPrefix] = []
    for rows in members.values():
        length = min(shared[row] for row in rows)
        if len(rows) > 1 and length >= _WORTH_SHARING:
            prefixes.append(SharedPrefix(torch.tensor(rows), slots[rows[0]], length))
    return prefixes


def decode_runs(
    slots: Sequence[int],
    lengths: Sequence[int],
    prefixes: Sequence[SharedPrefix],
    context: int,
    dtype: torch.dtype,
) -> list[DecodeRun]:
    """Cut decoding slots (ascending) into runs of neighbours. A few idle slots between two are
    taken along, which is cheaper than a further call; rows with and without a shared prefix are
    not mixed, since a run begins where its earliest row begins. `lengths` count the present
    token."""
    begins = [0] * len(slots)
    for prefix in prefixes:
        for row in prefix.rows.tolist():
            begins[row] = prefix.length
    runs: list[DecodeRun] = []
    start = 0
    for row in range(1, len(slots) + 1):
        if (
            row < len(slots)
            and slots[row] - slots[row - 1] <= _GAP + 1
            and bool(begins[row]) == bool(begins[row - 1])
        ):
            continue
        runs.append(_one_run(slice(start, row), slots, begins, lengths, context, dtype))
        start = row
    return runs


def _one_run(
    rows: slice,
    slots: Sequence[int],
    begins: Sequence[int],
    lengths: Sequence[int],
    context: int,
    dtype: torch.dtype,
) -> DecodeRun:
    first = slots[rows.start]
    count = slots[rows.stop - 1] - first + 1
    begin = min(begins[rows])
    end = min(context, begin + -(-(max(lengths[rows]) - begin) // _ALIGN) * _ALIGN)
    offsets = torch.tensor([slot - first for slot in slots[rows]])
    # An idle slot attends to the first position, which is finite, and its row is dropped.
    low = torch.zeros(count, dtype=torch.long)
    high = torch.ones(count, dtype=torch.long)
    low[offsets] = torch.tensor(begins[rows]) - begin
    high[offsets] = torch.tensor(lengths[rows]) - begin
    place = torch.arange(end - begin)[None, :]
    hidden = (place < low[:, None]) | (place >= high[:, None])
    mask = torch.zeros(count, 1, 1, end - begin, dtype=dtype)
    mask[hidden[:, None, None]] = -torch.inf
    dense = len(offsets) == count
    return DecodeRun(rows, first, count, None if dense else offsets, begin, end, mask)


def chunk_mask(start: int, count: int, dtype: torch.dtype) -> Tensor | None:
    """(count, start + count) additive mask of a prompt chunk, None where plain causal."""
    if start == 0:
        return None
    hidden = torch.ones(count, start + count, dtype=torch.bool).triu(start + 1)
    return torch.zeros(count, start + count, dtype=dtype).masked_fill_(hidden, -torch.inf)
