"""The scripted expert: transcripts of perfect work, made by the real harness."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from etude.inference.protocol import Sampling
from etude.inference.scripted import ScriptedEngine
from etude.models.renderer import Renderer, ToolSpec


def expert_engine(
    renderer: Renderer,
    turns: Sequence[tuple[str, Mapping[str, Any]]],
    tools: Sequence[ToolSpec],
    *,
    texts: Sequence[str] = (),
    closing: str = "Done.",
    context_length: int = 8192,
) -> ScriptedEngine:
    """An engine for one session that makes one call (tool name, arguments) per turn, each after
    saying its entry of `texts` if there is one, and then says `closing`. The tokens are those that
    the renderer gives a perfect model that knows `tools`."""
    answers = [
        renderer.expert(texts[index] if index < len(texts) else "", [turn], tools)
        for index, turn in enumerate(turns)
    ]
    answers.append(renderer.expert(closing, []))
    said = 0

    def answer(prompt_ids: Sequence[int], sampling: Sampling) -> Sequence[int]:
        nonlocal said
        said += 1
        return answers[min(said, len(answers)) - 1]

    return ScriptedEngine(answer, context_length=context_length)
