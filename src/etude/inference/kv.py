"""Keys and values of all slots, and the attention that reads them in place.

A step of the engine is one forward pass over a packed row of tokens, shape (1, tokens): first one
token for each decoding slot, in slot order, then chunks of prompts. The transformers model runs as
it is; it meets the slots through two of its own seams, a cache object (`SlotCache.update`) and a
registered attention function (`slot_attention`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

ATTENTION_NAME = "etude_slots"


@dataclass(frozen=True, eq=False)
class DecodeRun:
    """Neighbouring slots whose decoding rows attend in one batched call over positions
    [0, end). `rows` are their rows of the step, `offsets` their slots relative to `first`, None
    when every slot of the run decodes. `mask` is (slots, 1, 1, end), additive."""

    rows: slice
    first: int
    count: int
    offsets: Tensor | None
    end: int
    mask: Tensor


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
    for run in layout.runs:
        out[run.rows] = _decode(run, query[0, :, run.rows], keys, values, scaling)
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


def _decode(run: DecodeRun, query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
    """One query per slot: (heads, rows, head_dim) to (rows, heads, head_dim). The query heads
    that share a key head stand in place of query positions, so nothing is repeated."""
    kv_heads, width = keys.shape[1], query.shape[-1]
    query = query.transpose(0, 1)
    if run.offsets is not None:
        spread = query.new_zeros(run.count, *query.shape[1:])
        query = spread.index_copy_(0, run.offsets, query)
    attended = functional.scaled_dot_product_attention(
        query.reshape(run.count, kv_heads, -1, width),
        keys[run.first : run.first + run.count, :, : run.end],
        values[run.first : run.first + run.count, :, : run.end],
        attn_mask=run.mask,
        scale=scaling,
    ).reshape(run.count, -1, width)
    return attended if run.offsets is None else attended[run.offsets]


def decode_runs(
    slots: Sequence[int],
    lengths: Sequence[int],
    dtype: torch.dtype,
    *,
    gap: int = 2,
    align: int = 32,
) -> list[DecodeRun]:
    """Cut decoding slots (ascending) into runs of neighbours. Up to `gap` idle slots between two
    are taken along, which is cheaper than a further call; `lengths` count the present token."""
    runs: list[DecodeRun] = []
    begin = 0
    for index in range(1, len(slots) + 1):
        if index < len(slots) and slots[index] - slots[index - 1] <= gap + 1:
            continue
        first, count = slots[begin], slots[index - 1] - slots[begin] + 1
        offsets = torch.tensor([slot - first for slot in slots[begin:index]])
        # An idle slot attends to its position 0, which is finite, and its row is dropped.
        filled = torch.ones(count, dtype=torch.long)
        filled[offsets] = torch.tensor(lengths[begin:index])
        end = -(-max(lengths[begin:index]) // align) * align
        hidden = torch.arange(end)[None, :] >= filled[:, None]
        mask = torch.zeros(count, 1, 1, end, dtype=dtype)
        mask[hidden[:, None, None]] = -torch.inf
        dense = len(offsets) == count
        runs.append(
            DecodeRun(slice(begin, index), first, count, None if dense else offsets, end, mask)
        )
        begin = index
    return runs


def chunk_mask(start: int, count: int, dtype: torch.dtype) -> Tensor | None:
    """(count, start + count) additive mask of a prompt chunk, None where plain causal."""
    if start == 0:
        return None
    hidden = torch.ones(count, start + count, dtype=torch.bool).triu(start + 1)
    return torch.zeros(count, start + count, dtype=dtype).masked_fill_(hidden, -torch.inf)
