"""Sampling by inverse distribution function, with the log-prob of what was drawn."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_BLOCK = 256


class Sampled(NamedTuple):
    """Drawn token ids (rows,) and their log-softmax(logits / T) over the whole vocabulary."""

    ids: list[int]
    logprobs: list[float]


def sample(logits: Tensor, temperatures: Tensor, uniforms: Tensor) -> Sampled:
    """Draw one token per row of `logits` (rows, vocab).

    `temperatures` (rows,) float32; 0 takes the likeliest token and reports its log-prob at
    temperature 1. `uniforms` (rows,) float64 in [0, 1) decide the draw, so that a row's result
    does not depend on its neighbours. Everything is computed in float32. The distribution
    function is built in two levels, block sums first: summing 50,000 numbers one after another
    costs more time and more precision.
    """
    greedy = temperatures == 0
    scores = logits.float() / torch.where(greedy, 1.0, temperatures)[:, None]
    peak = scores.amax(-1, keepdim=True)
    weights = torch.exp(scores - peak)
    rows, vocab = weights.shape
    if vocab % _BLOCK:
        weights = torch.nn.functional.pad(weights, (0, _BLOCK - vocab % _BLOCK))
    blocks = weights.view(rows, -1, _BLOCK)
    edges = blocks.sum(-1).double().cumsum(-1)
    total = edges[:, -1]
    goal = (uniforms * total)[:, None]
    block = _first_above(edges, goal)
    before = torch.where(block > 0, edges.gather(1, (block - 1).clamp(min=0)), 0.0)
    inside = blocks[torch.arange(rows), block[:, 0]].double().cumsum(-1) + before
    drawn = (block * _BLOCK + _first_above(inside, goal)).clamp(max=vocab - 1)
    ids = torch.where(greedy[:, None], scores.argmax(-1, keepdim=True), drawn)
    logprobs = scores.gather(1, ids).double() - peak.double() - total.log()[:, None]
    return Sampled(ids[:, 0].tolist(), logprobs[:, 0].tolist())


def _first_above(edges: Tensor, goal: Tensor) -> Tensor:
    """Index (rows, 1) of the first edge above `goal`: an entry of no weight has the edge of the
    one before it and is never taken. Where rounding leaves every edge at or below `goal`, the
    last entry that has weight. (Edges that are no numbers give any index; the log-prob tells.)"""
    index = torch.searchsorted(edges, goal, right=True)
    last = torch.searchsorted(edges, edges[:, -1:].contiguous())
    return torch.minimum(index, last).clamp(max=edges.shape[1] - 1)
