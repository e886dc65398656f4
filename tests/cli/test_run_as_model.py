"""A trained run as the model of a session: its final model, the tools of its recipe."""

from __future__ import annotations

import json

import pytest
from cli_place import Place

from etude.agent.settings import SessionSettings
from etude.models.tiny import make_tiny
from etude.pipeline.recipe import Recipe


@pytest.fixture
def run_folder(place: Place) -> str:
    """A run as far as a session looks at it; the model knows nothing."""
    run = place.root / "run"
    settings = SessionSettings(max_turn_tokens=8, max_turns=2)
    recipe = Recipe(tools=("edit",), session=settings)
    make_tiny(run / "models" / "final")
    (run / "recipe.json").write_text(recipe.model_dump_json())
    return str(run)


@pytest.mark.slow  # Reads torch; `test_job` has the same with a run that was trained.
def test_a_conversation_through_a_pipe(place: Place, run_folder: str) -> None:
    done = place.run("chat", "--model", run_folder, stdin="Say something.\n\n")
    assert done.returncode == 0, done.stderr
    assert f"models/final on {place.project}" in done.stdout
    assert "› Say something." in done.stdout
    assert "[length]" in done.stdout, "the recipe's limit of a turn"
    head = json.loads(place.sessions()[-1].read_text().splitlines()[1])
    assert [tool["name"] for tool in head["data"]["tools"]] == ["edit"]
    assert (place.project / "a.py").read_text() == "hello = 1\n"


def test_a_run_that_is_not_finished(place: Place) -> None:
    run = place.root / "run"
    run.mkdir()
    (run / "recipe.json").write_text(Recipe().model_dump_json())
    done = place.run("-p", "x", "--model", str(run))
    assert done.returncode == 2 and "practice --resume" in done.stderr
