from pathlib import Path

import pytest
import torch

from etude.errors import EtudeError
from etude.models.loading import load
from etude.models.tiny import make_tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("loading"))


def test_two_models_do_not_share_their_attention(folder: Path) -> None:
    first, second = load(folder, "float32"), load(folder, "bfloat16", attention="eager")
    assert first.model.config._attn_implementation == "sdpa"
    assert second.model.config._attn_implementation == "eager"
    assert next(first.model.parameters()).dtype == torch.float32
    assert next(second.model.parameters()).dtype == torch.bfloat16
    assert not first.model.training
    assert first.renderer.decode(first.tokenizer.encode("def f(): pass").ids) == "def f(): pass"


def test_a_folder_that_is_no_model_is_told(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(EtudeError, match=r"no config\.json"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(EtudeError, match="not valid JSON"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(EtudeError, match="no model_type"):
        load(tmp_path)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(EtudeError, match=r"no tokenizer\.json"):
        load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(EtudeError, match="not a readable tokenizer"):
        load(tmp_path)
    (tmp_path / "tokenizer.json").write_text((folder / "tokenizer.json").read_text())
    with pytest.raises(EtudeError, match="cannot load"):
        load(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0garbage")
    with pytest.raises(EtudeError, match="cannot load"):
        load(tmp_path)
