"""A causal language model as the trainer runs it: passes in, gradients out."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from etude.errors import EtudeError
from etude.training.forest import Pass
from etude.training.head import Edges, EdgeScores, Objective, edges_of, score

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_SCALES = ("final_logit_softcapping", "logits_scaling", "logit_scale", "lm_head_multiplier")


class RowModel:
    """Forward and backward of one model over passes, on the CPU, without dropout.

    Raises EtudeError for a model whose head or attention is outside what rows can express.
    """

    def __init__(self, model: PreTrainedModel, head_rows: int) -> None:
        config = model.config
        refuse(config)
        self.model = model.eval()
        self.trunk = cast(nn.Module, model.get_decoder())
        head = cast(nn.Linear, model.get_output_embeddings())
        if not hasattr(head, "weight") or getattr(head, "bias", None) is not None:
            raise EtudeError(
                f"cannot train {config.model_type}: its output head is not one matrix without a "
                "bias; use another model"
            )
        self.head_weight = cast(nn.Parameter, head.weight)
        self._head_rows = head_rows

    @property
    def attention_cost(self) -> float:
        """Cost of one visible pair of nodes against one node, from multiply-adds: a pair costs
        about 2 * heads * head_dim in each layer, a node its share of the layers' weights."""
        config = self.model.config
        width = config.hidden_size
        head_dim = getattr(config, "head_dim", None) or width // config.num_attention_heads
        embeddings = {id(self.head_weight), id(self.model.get_input_embeddings().weight)}
        dense = sum(p.numel() for p in self.model.parameters() if id(p) not in embeddings)
        pair = 2 * config.num_attention_heads * head_dim * config.num_hidden_layers
        return pair / max(dense, 1)

    def hidden(self, group: Pass) -> Tensor:
        """Final hidden states (B * T, hidden size) of all places of a pass."""
        tokens = torch.from_numpy(group.tokens())
        if group.chains:
            out = self.trunk(input_ids=tokens, use_cache=False)
        else:
            # A boolean mask is right under sdpa only, which is what the trainer loads with.
            out = self.trunk(
                input_ids=tokens,
                attention_mask=torch.from_numpy(group.visible())[:, None],
                position_ids=torch.from_numpy(group.depths()),
                use_cache=False,
            )
        return cast(Tensor, out.last_hidden_state).flatten(0, 1)

    def logprobs(self, group: Pass) -> tuple[Edges, EdgeScores]:
        """Log-probs of the pass's edges, nothing for a backward pass kept."""
        edges = edges_of(group)
        with torch.inference_mode():
            hidden = self.hidden(group)
            scores, _ = score(hidden, self.head_weight, edges, head_rows=self._head_rows)
        return edges, scores

    def backward(
        self, group: Pass, edges: Edges, objective: Objective, head_grad: Tensor
    ) -> EdgeScores:
        """Add the pass's gradients to `.grad` of the trunk's parameters and to `head_grad`."""
        hidden = self.hidden(group)
        scores, hidden_grad = score(
            hidden,
            self.head_weight,
            edges,
            head_rows=self._head_rows,
            objective=objective,
            weight_grad=head_grad,
        )
        hidden.backward(hidden_grad)
        return scores


def refuse(config: PreTrainedConfig) -> None:
    """Raise EtudeError for logits that are not a plain product and for windowed attention."""
    for name in _SCALES:
        if getattr(config, name, None) not in (None, 1, 1.0):
            raise EtudeError(
                f"cannot train {config.model_type}: its logits are transformed ({name}), which "
                "the trainer does not do; use another model"
            )
    kinds = set(getattr(config, "layer_types", None) or ())
    if kinds - {"full_attention"}:
        raise EtudeError(
            f"cannot train {config.model_type}: it has {', '.join(sorted(kinds))} layers and only "
            "full attention is supported; use another model"
        )
