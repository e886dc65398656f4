"""The output head where it is wanted only, forward and backward in one go, without stored logits.

Logits of `head_rows` positions exist at a time. Softmax runs over a few rows at a time so that its
float32 temporaries stay in the cache, and d loss / d logits overwrites the logits. That is possible
because the loss is a sum over tokens: its gradient with respect to a position's logits needs
nothing but that position.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from etude.training.forest import Pass

_SOFTMAX_ROWS = 16


@dataclass(frozen=True, eq=False)
class Edges:
    """The edges of a pass by *position*: a distinct (node, temperature) pair, whose logits are
    computed once. Positions (P,): `nodes`, `temperatures`. Edges (E,), sorted by position:
    `positions`, `tokens`, `places`."""

    nodes: Tensor
    temperatures: Tensor
    positions: Tensor
    tokens: Tensor
    places: Tensor


def edges_of(group: Pass) -> Edges:
    """The edges of a pass, grouped."""
    nodes = group.edge_nodes()
    temperatures = np.concatenate([row.edge_temperatures for row in group.rows])
    order = np.lexsort((temperatures, nodes))
    tokens = np.concatenate([row.edge_tokens for row in group.rows])[order]
    places = np.concatenate([row.edge_places for row in group.rows])[order]
    nodes, temperatures = nodes[order], temperatures[order]
    first = np.ones(len(order), np.bool_)
    first[1:] = (nodes[1:] != nodes[:-1]) | (temperatures[1:] != temperatures[:-1])
    return Edges(
        torch.from_numpy(nodes[first]),
        torch.from_numpy(temperatures[first]),
        torch.from_numpy(np.cumsum(first) - 1),
        torch.from_numpy(tokens),
        torch.from_numpy(places),
    )


@dataclass(frozen=True, eq=False)
class EdgeScores:
    """Of E edges, detached, in float32 or better: `logprobs` (E,), and `entropy` (E,), nats, of
    the whole distribution the token was predicted from."""

    logprobs: Tensor
    entropy: Tensor


Objective = Callable[[Tensor, slice], Tensor]
"""(log-probs of a run of edges (M,), which run) -> d loss / d log-prob (M,)."""


def score(
    hidden: Tensor,
    weight: Tensor,
    edges: Edges,
    *,
    head_rows: int,
    objective: Objective | None = None,
    weight_grad: Tensor | None = None,
) -> tuple[EdgeScores, Tensor | None]:
    """Log-probs of `edges` from `hidden` (N, hidden size) of all nodes and the head's `weight`
    (vocab, hidden size); both are taken as constants.

    With an `objective`, d loss / d hidden (N, hidden size) comes back too, and d loss / d weight
    is added to `weight_grad`, which may be of a wider dtype.
    """
    hidden, weight = hidden.detach(), weight.detach()
    precise = torch.promote_types(hidden.dtype, torch.float32)
    logprobs = torch.empty(len(edges.tokens), dtype=precise)
    entropy = torch.empty(len(edges.nodes), dtype=precise)
    hidden_grad = torch.zeros_like(hidden) if objective is not None else None
    bounds = torch.searchsorted(edges.positions, torch.arange(len(edges.nodes) + 1)).tolist()
    with torch.no_grad():
        for start in range(0, len(edges.nodes), head_rows):
            end = min(start + head_rows, len(edges.nodes))
            nodes = edges.nodes[start:end]
            inputs = hidden[nodes]
            logits = inputs @ weight.T
            for low in range(start, end, _SOFTMAX_ROWS):
                high = min(low + _SOFTMAX_ROWS, end)
                run = slice(bounds[low], bounds[high])
                local = edges.positions[run] - low
                block = logits[low - start : high - start]
                scale = edges.temperatures[low:high, None].to(precise)
                logp = torch.log_softmax(block.to(precise) / scale, dim=-1)
                logprobs[run] = logp[local, edges.tokens[run]]
                probs = logp.exp()
                entropy[low:high] = -torch.linalg.vecdot(probs, logp)
                if objective is not None:
                    grad = objective(logprobs[run], run).to(precise)
                    total = torch.zeros(high - low, dtype=precise).index_add_(0, local, grad)
                    probs *= -total[:, None]
                    probs.index_put_((local, edges.tokens[run]), grad, accumulate=True)
                    block.copy_(probs / scale)
            if hidden_grad is not None:
                hidden_grad.index_add_(0, nodes, logits @ weight)
                if weight_grad is not None:
                    _add_product(weight_grad, logits, inputs)
    return EdgeScores(logprobs, entropy[edges.positions]), hidden_grad


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left^T right."""
    if total.dtype == left.dtype:
        total.addmm_(left.T, right)
    else:
        total += left.T @ right
