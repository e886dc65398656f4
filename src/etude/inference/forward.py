"""One step of the model over the slots: build the layout, run, sample."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface

from etude.errors import EtudeError
from etude.inference.kv import (
    ATTENTION_NAME,
    Chunk,
    SlotCache,
    StepLayout,
    chunk_mask,
    decode_runs,
    shared_prefixes,
    slot_attention,
)
from etude.inference.sampler import Sampled, sample
from etude.inference.scheduler import Work
from etude.inference.settings import EngineSettings
from etude.models.routing import RouteRecorder

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class SlotModel:
    """A transformers model whose attention reads a `SlotCache`.

    The model belongs to this object from now on. Raises EtudeError when its attention is not
    plain causal attention behind the library's attention interface.
    """

    def __init__(self, model: PreTrainedModel, settings: EngineSettings) -> None:
        AttentionInterface.register(ATTENTION_NAME, slot_attention)  # pyright: ignore[reportArgumentType] (typed for the library's own functions)
        config = model.config.get_text_config()
        self.slots = settings.max_batch + settings.retained_slots
        self.context = min(settings.max_context, int(config.max_position_embeddings))
        self.vocab = int(config.vocab_size)
        self.model = model
        self.dtype: torch.dtype = model.dtype
        heads = int(config.num_attention_heads)
        self.cache = SlotCache(
            layers=int(config.num_hidden_layers),
            slots=self.slots,
            kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
            context=self.context,
            head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
            dtype=self.dtype,
        )
        self.routes = RouteRecorder(model)
        self._check(str(config.model_type), int(config.num_hidden_layers))

    def _check(self, model_type: str, layers: int) -> None:
        """Feed two tokens and see that every layer went through our attention."""
        try:
            self.model.set_attn_implementation(ATTENTION_NAME)
            nothing = torch.empty(0, dtype=torch.long)
            layout = StepLayout(0, nothing, (), (), [Chunk(0, 0, 2, 0, None)])
            self._run(layout, torch.tensor([[0, 1]]), torch.tensor([[0, 1]]), torch.tensor([1]))
        except (NotImplementedError, ValueError, TypeError, RuntimeError) as error:
            raise EtudeError(
                f"the embedded engine cannot run model type {model_type}: {error}"
            ) from error
        if self.cache.calls != layers:
            raise EtudeError(
                f"the embedded engine cannot run model type {model_type}: only "
                f"{self.cache.calls} of its {layers} layers use plain attention"
            )
        if self.routes.layers:
            self.routes.take()

    def step(self, decode: Sequence[Work], chunks: Sequence[Work]) -> Tensor:
        """Feed the tokens of `decode` (one each, in slot order) and `chunks`. Returns the logits
        (rows, vocab) of every item that is complete, in the order decode, chunks. Chosen experts
        are noted in the slots."""
        work = [*decode, *chunks]
        positions = np.concatenate([np.arange(w.start, w.start + w.count) for w in work])
        ids = np.concatenate([w.slot.ids[w.start : w.start + w.count] for w in work])
        ends = np.cumsum([w.count for w in work])
        last = [int(end) - 1 for end, item in zip(ends, work, strict=True) if item.complete]
        logits = self._run(
            self._layout(decode, chunks),
            torch.from_numpy(ids.astype(np.int64))[None],
            torch.from_numpy(positions)[None],
            torch.tensor(last, dtype=torch.long),
        )
        if self.routes.layers:
            chosen = self.routes.take().to(torch.int32).numpy().astype(np.uint16)
            for item, end in zip(work, ends, strict=True):
                assert item.slot.experts is not None
                rows = chosen[int(end) - item.count : int(end)]
                item.slot.experts[item.start : item.start + item.count] = rows
        return logits

    def _layout(self, decode: Sequence[Work], chunks: Sequence[Work]) -> StepLayout:
        slots = [work.slot.index for work in decode]
        starts = [work.start for work in decode]
        prefixes = shared_prefixes(
            slots, [work.slot.family for work in decode], [work.slot.shared for work in decode]
        )
        lengths = [start + 1 for start in starts]
        row = len(decode)
        placed: list[Chunk] = []
        for work in chunks:
            mask = chunk_mask(work.start, work.count, self.dtype)
            placed.append(Chunk(work.slot.index, work.start, work.count, row, mask))
            row += work.count
        return StepLayout(
            decode_rows=len(decode),
            write_index=self.cache.write_index(
                torch.tensor(slots, dtype=torch.long), torch.tensor(starts, dtype=torch.long)
            ),
            runs=decode_runs(slots, lengths, prefixes, self.context, self.dtype),
            prefixes=prefixes,
            chunks=placed,
        )

    def _run(self, layout: StepLayout, ids: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
        """Ids and positions (1, tokens), rows (n,) of interest, to logits (n, vocab)."""
        self.cache.layout = layout
        with torch.inference_mode():
            output = self.model(
                input_ids=ids,
                position_ids=positions,
                cache=self.cache,
                use_cache=True,
                logits_to_keep=rows,
                slot_cache=self.cache,
            )
        return output.logits[0]

    def sample(self, logits: Tensor, temperatures: list[float], uniforms: list[float]) -> Sampled:
        """One token per row of `logits`."""
        with torch.inference_mode():
            return sample(
                logits,
                torch.tensor(temperatures, dtype=torch.float32),
                torch.tensor(uniforms, dtype=torch.float64),
            )

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Overwrite weights in place. Nothing is changed when a name or a shape is wrong (then
        raises ValueError)."""
        names: dict[str, Tensor] = dict(self.model.named_parameters(remove_duplicate=False))
        for name, tensor in tensors.items():
            if name not in names:
                raise ValueError(f"the update names {name}, which the model does not have")
            if names[name].shape != tensor.shape:
                raise ValueError(
                    f"the update gives {name} as {tuple(tensor.shape)}, the model has "
                    f"{tuple(names[name].shape)}"
                )
        with torch.no_grad():
            for name, tensor in tensors.items():
                names[name].copy_(tensor)


def native_bfloat16() -> bool:
    """Whether this processor multiplies bfloat16 by an instruction of its own."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())  # pyright: ignore[reportPrivateUsage] (torch names no public query)


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
