"""Which experts a mixture-of-experts model chose, read by a hook on its routers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from etude.errors import EtudeError

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel

_ROUTERS = {"qwen3_moe": "mlp.gate"}
"""Model type to the router inside a layer. A router listed here returns (logits, weights and ids
of the chosen), the last two of shape (tokens, k), which is not a rule of the library."""


class RouteRecorder:
    """Keeps the expert ids that each router chose in the latest forward pass.

    Raises EtudeError for a mixture-of-experts model whose routers are not known.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        config = model.config.get_text_config()
        self._chosen: list[Tensor] = []
        self.experts_per_token = 0
        routers = _routers(model, config.model_type)
        if not routers:
            if getattr(config, "num_experts_per_tok", None):
                raise EtudeError(
                    f"the expert routing of model type {config.model_type} cannot be recorded; "
                    f"known are {', '.join(sorted(_ROUTERS))}"
                )
            return
        self.experts_per_token = int(config.num_experts_per_tok)
        for router in routers:
            router.register_forward_hook(self._keep)
        self.layers = len(routers)

    layers: int = 0
    """Number of layers with a router; 0 for a dense model."""

    def take(self) -> Tensor:
        """(tokens, layers, k) expert ids of the forward pass since the last call."""
        import torch

        chosen, self._chosen = self._chosen, []
        if len(chosen) != self.layers:
            raise RuntimeError(f"{len(chosen)} of {self.layers} routers reported their choice")
        return torch.stack(chosen, dim=1)

    def _keep(
        self, _module: nn.Module, _inputs: Any, output: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        self._chosen.append(output[2].detach())


def _routers(model: PreTrainedModel, model_type: str) -> list[nn.Module]:
    suffix = _ROUTERS.get(model_type)
    if suffix is None:
        return []
    return [module for name, module in model.named_modules() if name.endswith(f".{suffix}")]
