"""Recipes: what cannot work is refused when they are read, and what was read is kept exactly."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import EtudeError
from etude.pipeline.recipe import Recipe, presets
from etude.tasks.settings import MakerSettings, Wanted
from etude.tasks.task import Rung


def read(folder: Path, text: str) -> Recipe:
    path = folder / "r.toml"
    path.write_text(text)
    return Recipe.from_toml(path)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("seed = -1", "seed"),
        ("[maker]\nseed = -1", "maker.seed"),
        ("[windows]\nseed = -1", "windows.seed"),
        ("[prepare]\nhash_seed = 4294967296", "prepare.hash_seed"),
        ('model = ""', "model: name a model"),
        ('model = "  "', "model: name a model"),
        ("tools = []", "tools: name `edit`"),
        ('tools = ["read"]', "tools: name `edit`"),
        ('tools = ["edit", "python"]', "tools: There is no tool named 'python'; choose from read,"),
        ("[pretrain]\nlearning_rate = inf", "pretrain.learning_rate"),
        ("[warmup]\nlearning_rate = nan", "warmup.learning_rate"),
        ("[practice]\nlearning_rate = inf", "practice.learning_rate"),
        ("[maker.wanted.expression]\nheldout = 0", "maker.wanted.expression.heldout must ask"),
        ("[maker.wanted.body]\nwarmup = 0", "maker.wanted.body.warmup must ask"),
        (
            "[maker.wanted.body]\npractice = 0\n[maker.wanted.statement]\npractice = 0",
            "maker.wanted.body.practice or maker.wanted.statement.practice must ask",
        ),
        ("maker.wanted = {}", "maker.wanted must ask"),
        ("[maker]\nheldout_fraction = 0", "maker.heldout_fraction"),
        ("[maker]\nwarmup_fraction = 0", "maker.warmup_fraction"),
        ("[maker]\nwarmup_fraction = 0.5\nheldout_fraction = 0.5", "leave some for practice"),
    ],
)
def test_what_cannot_work_is_refused_when_read(text: str, named: str, tmp_path: Path) -> None:
    with pytest.raises(EtudeError) as error:
        read(tmp_path, text)
    sentence = str(error.value)
    assert sentence.startswith(f"{tmp_path / 'r.toml'}: ")
    assert named in sentence
    assert "\n" not in sentence and "Value error" not in sentence


def test_practice_tasks_are_not_needed_where_practice_is_switched_off(tmp_path: Path) -> None:
    recipe = read(
        tmp_path, "[practice]\nsteps = 0\n[maker.wanted.expression]\npractice = 0\nheldout = 2"
    )
    assert recipe.maker.wanted[Rung.EXPRESSION].practice == 0


def test_one_rung_is_enough_for_a_split(tmp_path: Path) -> None:
    text = "[maker.wanted.body]\nheldout = 0\n[maker.wanted.statement]\nheldout = 1"
    assert read(tmp_path, text).maker.wanted[Rung.BODY].heldout == 0


def test_a_negative_seed_of_the_command_line_is_refused() -> None:
    with pytest.raises(EtudeError, match="the seed is -3; give 0 or more"):
        Recipe().with_choices(seed=-3)


@pytest.mark.parametrize("name", sorted(presets()))
def test_presets_survive_the_run_folder(name: str, tmp_path: Path) -> None:
    recipe = Recipe.preset(name).with_choices(source="pypi:toolz", seed=7)
    (tmp_path / "recipe.json").write_text(recipe.to_json())
    assert Recipe.from_json(tmp_path / "recipe.json") == recipe


def test_what_is_unbounded_stays_so_in_the_run_folder(tmp_path: Path) -> None:
    """`inf` is no cap; null would be no correction at all."""
    recipe = read(tmp_path, "[trainer]\nimportance_cap = inf\n[practice]\nminutes = inf")
    (tmp_path / "recipe.json").write_text(recipe.to_json())
    again = Recipe.from_json(tmp_path / "recipe.json")
    assert again == recipe and again.trainer.importance_cap == math.inf


@given(
    st.lists(st.integers(0, 2), min_size=6, max_size=6),
    st.floats(0, 1),
    st.floats(0, 1),
    st.integers(0, 1),
)
def test_a_recipe_is_read_exactly_when_every_split_that_is_used_can_have_a_task(
    counts: list[int], warmup: float, heldout: float, steps: int
) -> None:
    names = ("warmup", "practice", "heldout")
    rungs = {
        Rung.EXPRESSION: dict(zip(names, counts[:3], strict=True)),
        Rung.BODY: dict(zip(names, counts[3:], strict=True)),
    }
    data = {
        "maker": {"wanted": rungs, "warmup_fraction": warmup, "heldout_fraction": heldout},
        "practice": {"steps": steps},
    }
    used = names if steps else ("warmup", "heldout")
    share = {"warmup": warmup, "heldout": heldout, "practice": 1 - warmup - heldout}
    works = all(share[n] > 0 and any(rung[n] for rung in rungs.values()) for n in used)
    try:
        recipe = Recipe.model_validate(data)
    except ValueError:
        assert not works
    else:
        assert works
        assert recipe.maker == MakerSettings(
            wanted={rung: Wanted(**count) for rung, count in rungs.items()},
            warmup_fraction=warmup,
            heldout_fraction=heldout,
        )
