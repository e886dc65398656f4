"""One prepared cache for all pipeline tests: a tiny model, a small repository, their recipe."""

from __future__ import annotations

import pytest
from little_library import Corner, write_repository

from etude.models.tiny import make_tiny

RECIPE = """
name = "test"
model = "{model}"
tools = ["edit"]

[maker.wanted.expression]
warmup = 3
practice = 6
heldout = 3

[session]
max_turn_tokens = 24

[engine]
dtype = "float32"
max_context = 1024

[trainer]
dtype = "float32"

[pretrain]
epochs = 4
tokens_per_step = 256
learning_rate = 1e-3

[warmup]
epochs = 2
learning_rate = 1e-3

[practice]
steps = 3
groups_per_step = 2
group_size = 3

[evaluation]
samples = 2
"""


@pytest.fixture(scope="session")
def corner(tmp_path_factory: pytest.TempPathFactory) -> Corner:
    root = tmp_path_factory.mktemp("corner")
    model = make_tiny(root / "model")
    recipe = root / "recipe.toml"
    recipe.write_text(RECIPE.format(model=model))
    return Corner(root / "cache", write_repository(root / "smallib"), recipe)
