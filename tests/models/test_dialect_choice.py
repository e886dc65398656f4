import json
from pathlib import Path
from typing import Any

import pytest
from dialect_cases import NAMES, case, family_tokenizer

from etude.errors import EtudeError
from etude.models.dialects.choose import DIALECTS, renderer_for

# Words that tell the families' templates apart, not the templates.
TEMPLATES = {
    "hermes in letters": "<|im_start|>",
    "hermes": "{'name': ...} <tool_call>",
    "qwen-coder": "<tool_call>\\n<function=",
    "qwen3.5": "<think>\\n <function=",
    "glm": "{{ '\\n<think></think>' }} <arg_key>",
    "deepseek-v3": "\\n```json\\n",
    "deepseek": "<｜tool▁sep｜>",
}


def _folder(folder: Path, name: str, config: dict[str, Any], template: str | None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    family_tokenizer(name).save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(config))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_speaks_its_familys_dialect(tmp_path: Path, name: str) -> None:
    folder = _folder(tmp_path, name, {"model_type": "x"}, TEMPLATES.get(name))
    assert type(renderer_for(folder)) is type(case(name).renderer)


def test_the_template_may_stand_in_the_tokenizers_config(tmp_path: Path) -> None:
    folder = _folder(tmp_path, "qwen-coder", {"model_type": "qwen3_moe"}, None)
    assert type(renderer_for(folder)).__name__ == "HermesRenderer"
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": TEMPLATES["qwen-coder"]}))
    assert type(renderer_for(folder)).__name__ == "QwenCoderRenderer"
    named = [{"name": "default", "template": ""}]
    named.append({"name": "tool_use", "template": TEMPLATES["qwen-coder"]})
    config.write_text(json.dumps({"chat_template": named}))
    assert type(renderer_for(folder)).__name__ == "QwenCoderRenderer"
    config.write_text("{")
    with pytest.raises(EtudeError, match="cannot be read"):
        renderer_for(folder)


def test_a_dialect_may_be_chosen_by_name(tmp_path: Path) -> None:
    folder = _folder(tmp_path, "hermes", {"model_type": "qwen3"}, TEMPLATES["hermes"])
    assert type(renderer_for(folder, "qwen-coder")).__name__ == "QwenCoderRenderer"
    with pytest.raises(EtudeError, match=r"unknown dialect 'xml'; dialects: harmony, .*hermes"):
        renderer_for(folder, "xml")
    with pytest.raises(EtudeError, match="use a gpt-oss model"):
        renderer_for(folder, "harmony")


@pytest.mark.parametrize(
    ("name", "model_type", "template"),
    [
        ("deepseek", "deepseek_v32", ""),
        ("glm", "glm4_moe", "GLM-4.7 <think> without a line break before"),
    ],
)
def test_a_family_that_only_looks_alike_is_refused(
    tmp_path: Path, name: str, model_type: str, template: str
) -> None:
    folder = _folder(tmp_path, name, {"model_type": model_type}, template)
    with pytest.raises(EtudeError) as error:
        renderer_for(folder)
    message = str(error.value)
    assert model_type in message
    assert all(dialect in message for dialect in DIALECTS)
    assert "\n" not in message


def test_an_unknown_family_is_one_sentence(tmp_path: Path) -> None:
    from etude.models.tiny import train_tokenizer

    description = json.loads(train_tokenizer(300).to_str())
    description["added_tokens"] = []
    (tmp_path / "tokenizer.json").write_text(json.dumps(description))
    with pytest.raises(EtudeError, match="no chat dialect that is known here; choose one with"):
        renderer_for(tmp_path)
    with pytest.raises(EtudeError, match=r"no tokenizer\.json"):
        renderer_for(tmp_path / "nowhere")
