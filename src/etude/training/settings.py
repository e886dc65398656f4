"""Settings of the trainer and of pretraining windows. Imports no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

Dtype = Literal["auto", "bfloat16", "float32"]


class TrainerSettings(BaseModel):
    """How one trainer computes. Learning rates are given step by step, not here."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    dtype: Dtype = "auto"
    """Of forward and backward; `auto` is bfloat16 where the processor multiplies it natively.
    Master weights, their gradients and the moments are float32."""
    importance_cap: float | None = Field(default=2.0, gt=0)
    """Cap of omega = pi_old / pi_sampler. None turns the correction off (omega = 1); inf leaves
    it uncapped."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW. A short memory of squares suits the few dozen steps of a laptop run."""
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled, on matrices only; norms and biases are never decayed."""
    max_grad_norm: float | None = Field(default=1.0, gt=0)
    row_nodes: int = Field(default=1024, ge=1)
    """Most trie nodes (distinct prefixes) that go through the model at once; memory grows with it.
    A single longer sequence still gets a pass of its own."""
    pass_overhead: int = Field(default=64, ge=0)
    """Fixed cost of one more pass, in nodes: it reads every weight and writes every gradient once,
    however few nodes it has."""
    head_rows: int = Field(default=512, ge=1)
    """Positions whose logits exist at the same time; (head_rows, vocab) is the largest buffer."""
    threads: int | None = Field(default=None, ge=1)
    """Torch's compute threads during a step; None leaves the process's setting alone."""


class PretrainSettings(BaseModel):
    """How documents become training windows."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    window: int = Field(default=512, ge=2)
    """Tokens of one sequence."""
    seed: int = Field(default=0, ge=0)
    """Of the order of repositories, of their files, and of the windows of an epoch."""
