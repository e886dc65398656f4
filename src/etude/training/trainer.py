"""The trainer: one process, float32 master weights, one AdamW step per batch.

It is blind to the algorithm: it takes weight streams (`batch`), grows tries (`forest`), and adds up
gradients row by row. The compute copy of the weights may be bfloat16; gradients are added up in
float32 and the optimiser only sees float32.
"""

from __future__ import annotations

import math
import time
from collections.abc import Generator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from etude.errors import EtudeError
from etude.machine import machine
from etude.models.loading import load
from etude.records import Bool, Float32, Int32, PolicyVersion
from etude.training.batch import Batch, Sequence
from etude.training.checkpoint import TrainerState, export_model, read_state, write_state
from etude.training.forest import Pass, grow, pack
from etude.training.forward import RowModel
from etude.training.head import edges_of
from etude.training.losses import (
    Denominators,
    TokenStreams,
    denominators,
    stream_losses,
    token_streams,
)
from etude.training.metrics import StepMetrics, Tally
from etude.training.settings import TrainerSettings
from etude.weights.update import Update


def compute_dtype(settings: TrainerSettings) -> torch.dtype:
    """The type of forward and backward on this machine."""
    if settings.dtype == "auto":
        return torch.bfloat16 if machine().fast_bf16 else torch.float32
    return torch.bfloat16 if settings.dtype == "bfloat16" else torch.float32


class Trainer:
    """Trains the model in `folder`, a local Hugging Face folder.

    Raises EtudeError for a folder that holds no model, or one that rows cannot express.
    """

    def __init__(self, folder: Path, settings: TrainerSettings) -> None:
        self.folder = folder
        self.settings = settings
        self.steps = 0
        """Optimiser steps taken so far, kept across save and load."""
        dtype = compute_dtype(settings)
        self._rounds = dtype != torch.float32
        model = load(folder, "float32", "sdpa").model
        self.forward = RowModel(model, settings.head_rows)
        masters = {name: p.detach().clone() for name, p in model.named_parameters()}
        model.to(dtype)  # pyright: ignore[reportArgumentType]  # PreTrainedModel.to is decorated
        self._params = dict(model.named_parameters())
        if dtype == torch.float32:
            masters = {name: p.detach() for name, p in self._params.items()}
        self._masters = masters
        self._grads = {name: torch.zeros_like(m) for name, m in masters.items()}
        for name, master in masters.items():
            master.grad = self._grads[name]
        self._head_grad = self._wire_gradients()
        self._optimizer = self._make_optimizer()

    def _wire_gradients(self) -> Tensor:
        """Send every parameter's gradient into its float32 sum; returns the head's sum."""
        for name, param in self._params.items():
            total = self._grads[name]

            def collect(param: Tensor, total: Tensor = total) -> None:
                if param.grad is not None:
                    total.add_(param.grad)
                    param.grad = None

            param.register_post_accumulate_grad_hook(collect)
        for name, param in self._params.items():
            if param is self.forward.head_weight:
                return self._grads[name]
        raise EtudeError(f"the output head of {self.folder} is no parameter; use another model")

    def _make_optimizer(self) -> torch.optim.AdamW:
        """AdamW on the masters, its moments allocated at once so that load can fill them."""
        matrices = [m for m in self._masters.values() if m.ndim >= 2]
        others = [m for m in self._masters.values() if m.ndim < 2]
        groups = [
            {"params": matrices, "weight_decay": self.settings.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=0.0,
            betas=self.settings.betas,
            eps=self.settings.eps,
            fused=True,
        )
        for master in self._masters.values():
            optimizer.state[master] = {
                "step": torch.zeros((), dtype=torch.float32),
                "exp_avg": torch.zeros_like(master),
                "exp_avg_sq": torch.zeros_like(master),
            }
        return optimizer

    @property
    def parameters(self) -> int:
        """Number of trained parameters, tied ones counted once."""
        return sum(master.numel() for master in self._masters.values())

    def restart(self) -> None:
        """Forget the moments and the step counter, keep the weights: for a new objective."""
        self.steps = 0
        for state in self._optimizer.state.values():
            for tensor in cast("dict[str, Tensor]", state).values():
                tensor.zero_()

    def passes(self, ids: Seq[Int32], wanted: Seq[Bool], temperatures: Seq[float]) -> list[Pass]:
        """The forward passes that give the log-probs of `wanted` tokens."""
        rows = grow(
            ids,
            wanted,
            temperatures,
            row_nodes=self.settings.row_nodes,
            attention_cost=self.forward.attention_cost,
        )
        return pack(rows, row_nodes=self.settings.row_nodes, overhead=self.settings.pass_overhead)

    def step(self, batch: Batch, lr: float) -> StepMetrics:
        """One optimiser step on `batch` at learning rate `lr`.

        A batch without any weight changes nothing and counts as no step. Raises EtudeError, with
        weights and moments as they were, when the loss or the gradient is not finite.
        """
        began = time.monotonic()
        with self._threads():
            tally = self.accumulate(batch)
            norm = self._norm()
            if not math.isfinite(tally.loss) or not math.isfinite(norm):
                self.clear()
                raise EtudeError(
                    f"training step {self.steps + 1} gave a loss of {tally.loss:g} and a gradient "
                    f"norm of {norm:g}; the weights were left as they were: lower the learning "
                    "rate or look at the batch"
                )
            if tally.passes:
                self._apply(norm, lr)
            self.clear()
        return tally.finish(
            self.steps, lr, norm, self.settings.importance_cap, time.monotonic() - began
        )

    def accumulate(self, batch: Batch) -> Tally:
        """Add the batch's gradients to `gradients()` without a step; what it saw comes back."""
        sequences = batch.sequences
        streams = token_streams(sequences)
        divisors = denominators(batch)
        wanted = [
            (s.policy != 0) | (s.cross_entropy != 0) | (s.distillation != 0) for s in sequences
        ]
        passes = self.passes([s.ids for s in sequences], wanted, [s.temperature for s in sequences])
        tally = Tally(sequences)
        for group in passes:
            self._backward(group, streams, divisors, tally)
            if not math.isfinite(tally.loss):
                break
        return tally

    def _backward(
        self, group: Pass, streams: TokenStreams, divisors: Denominators, tally: Tally
    ) -> None:
        edges = edges_of(group)
        mine = streams.select(edges.places)

        def objective(logprobs: Tensor, run: slice) -> Tensor:
            with torch.enable_grad():
                leaf = logprobs.detach().requires_grad_()
                losses = stream_losses(
                    leaf,
                    mine.select(torch.arange(run.start, run.stop)),
                    divisors,
                    self.settings.importance_cap,
                )
                tally.add_losses(losses)
                (grad,) = torch.autograd.grad(losses.total, leaf)
            return grad

        scores = self.forward.backward(group, edges, objective, self._head_grad)
        tally.add_pass(group, scores, mine)

    def gradients(self) -> dict[str, Tensor]:
        """The float32 gradient sums by parameter name; views, zero after every step."""
        return dict(self._grads)

    def clear(self) -> None:
        """Zero the gradient sums."""
        for total in self._grads.values():
            total.zero_()

    def _norm(self) -> float:
        return float(get_total_norm(self._grads.values()))

    def _apply(self, norm: float, lr: float) -> None:
        limit = self.settings.max_grad_norm
        if limit is not None and norm > limit:
            for total in self._grads.values():
                total.mul_(limit / norm)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        for name, master in self._masters.items():
            master.grad = self._grads[name]
        self._optimizer.step()
        self.steps += 1
        self._publish()

    def _publish(self) -> None:
        """Round the masters into the compute copy."""
        if self._rounds:
            with torch.no_grad():
                for name, param in self._params.items():
                    param.copy_(self._masters[name])

    def logprobs(self, sequences: Seq[Sequence], wanted: Seq[Bool] | None = None) -> list[Float32]:
        """log pi(ids[t] | ids[:t]) at the sequence's temperature, one (T,) array each, NaN at 0
        and where not `wanted` (default: everywhere)."""
        ids = [s.ids for s in sequences]
        if wanted is None:
            wanted = [np.arange(len(tokens)) > 0 for tokens in ids]
        flat = np.full(sum(len(tokens) for tokens in ids), np.nan, dtype=np.float32)
        with self._threads():
            for group in self.passes(ids, wanted, [s.temperature for s in sequences]):
                edges, scores = self.forward.logprobs(group)
                flat[edges.places.numpy()] = scores.logprobs.float().numpy()
        return np.split(flat, np.cumsum([len(tokens) for tokens in ids])[:-1])

    def update(self, version: PolicyVersion) -> Update:
        """All weights in the compute dtype under `version`, copied: a later step does not reach
        them. Tied weights appear once, under the name of the first."""
        return Update(version, {name: p.detach().clone() for name, p in self._params.items()})

    def save(self, folder: Path, *, sync: bool = False) -> None:
        """Write masters, moments and step counter to one file in `folder`, atomically; `sync` as
        in `checkpoint.write_state`.

        Raises EtudeError when the disk does not take it.
        """
        write_state(folder, self._state(), sync=sync)

    def load(self, folder: Path) -> None:
        """Continue from what `save` wrote: the next step is bit for bit the one that would have
        followed. Raises EtudeError for a missing, damaged or foreign state."""
        self.steps = read_state(folder, self._state())
        for state in self._optimizer.state.values():
            state["step"].fill_(self.steps)
        self._publish()

    def export(self, folder: Path) -> None:
        """Write a normal Hugging Face folder with the tokenizer, in the compute dtype."""
        export_model(self.forward.model, self.folder, folder)

    def _state(self) -> TrainerState:
        moments = cast("dict[Tensor, dict[str, Any]]", self._optimizer.state)
        return TrainerState(
            self.steps,
            self._masters,
            {name: moments[m]["exp_avg"] for name, m in self._masters.items()},
            {name: moments[m]["exp_avg_sq"] for name, m in self._masters.items()},
        )

    @contextmanager
    def _threads(self) -> Generator[None]:
        before = torch.get_num_threads()
        if self.settings.threads is not None:
            torch.set_num_threads(self.settings.threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)
