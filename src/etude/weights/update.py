"""One set of new weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from etude.records import PolicyVersion

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class Update:
    """Weights of `version` by their Hugging Face parameter name. A name that is absent keeps its
    value. Tied weights appear once."""

    version: PolicyVersion
    tensors: Mapping[str, Tensor]
