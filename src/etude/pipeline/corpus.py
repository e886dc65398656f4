"""The text of continued pretraining: the repository without its held-out functions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from etude.pipeline.recipe import Recipe
from etude.tasks.repository import Repository
from etude.tasks.splits import heldout_spans
from etude.training.batch import Sequence as TokenSequence
from etude.training.pretrain import documents, functions, mean_loss, windows
from etude.training.trainer import Trainer


def pretraining_sequences(
    repository: Repository, recipe: Recipe, model: Path
) -> list[TokenSequence]:
    """Windows over all source files, held-out functions cut out whole."""
    cut = heldout_spans(repository, recipe.maker)
    texts = documents(repository.root, repository.source_files, cut)
    return windows(texts, model, recipe.windows)


def heldout_loss(
    repository: Repository, recipe: Recipe, model: Path, trainer: Trainer
) -> Callable[[], float]:
    """Loss per token on the held-out functions alone, in nats."""
    spans = heldout_spans(repository, recipe.maker)
    texts = [
        text for path, ranges in spans.items() for text in functions(repository.root, path, ranges)
    ]
    sequences = windows(texts, model, recipe.windows)
    return lambda: mean_loss(trainer, sequences)
