"""Continued pretraining: source files as windows of tokens, held-out functions cut out whole.

The files of one repository follow one another in one stream, each under its path, so that a window
shows code beside the code it belongs to. Neighbouring windows share one token: every token but a
stream's first is predicted exactly once in an epoch.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from etude.errors import EtudeError
from etude.models.tokenizer import ByteTokenizer, load_tokenizer
from etude.records import Int32
from etude.training.batch import Sequence
from etude.training.settings import PretrainSettings

if TYPE_CHECKING:
    from etude.training.trainer import Trainer

Span = tuple[int, int]
"""First and last line, 1-based and inclusive."""


@dataclass(frozen=True)
class Document:
    """One text of a repository; `path` is relative to the repository's root."""

    repository: str
    path: str
    text: str


def documents(
    root: Path, files: Seq[str], cut: Mapping[str, Seq[Span]] | None = None
) -> list[Document]:
    """The texts of `files` under `root`, without the lines of `cut`, by path.

    A span that holds the head of a function or class takes its decorators along. Where a cut would
    leave an empty block, `pass` stands in. Raises EtudeError for a file that is missing or no text.
    """
    cut = cut or {}
    return [
        Document(root.name, path, without(_read(root, path), cut.get(path, ()))) for path in files
    ]


def functions(root: Path, path: str, spans: Seq[Span]) -> list[Document]:
    """The spans of one file as documents of their own, decorators included: what to measure
    held-out loss on. Raises EtudeError for a file that is missing or no text."""
    text = _read(root, path)
    lines = _lines(text)
    return [
        Document(root.name, path, "".join(lines[first - 1 : last]))
        for first, last in _whole(text, spans)
    ]


def without(text: str, spans: Seq[Span]) -> str:
    """`text` without the lines of `spans`; see `documents`."""
    if not spans:
        return text
    lines = _lines(text)
    plain, filled = list(lines), list(lines)
    for first, last in _whole(text, spans):
        head = lines[first - 1]
        indent = head[: len(head) - len(head.lstrip())]
        for number in range(first - 1, min(last, len(lines))):
            plain[number] = filled[number] = ""
        filled[first - 1] = f"{indent}pass\n"
    result = "".join(plain)
    return result if _parses(result) or not _parses(text) else "".join(filled)


def _whole(text: str, spans: Seq[Span]) -> list[Span]:
    """`spans` with the decorators of what they cut."""
    if not _parses(text):
        return list(spans)
    heads = [
        (min(d.lineno for d in node.decorator_list), node.lineno)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and node.decorator_list
    ]
    return [
        (min([first, *(top for top, head in heads if first <= head <= last)]), last)
        for first, last in spans
    ]


def _lines(text: str) -> list[str]:
    """Lines as Python counts them: unlike `str.splitlines`, a form feed ends none."""
    return io.StringIO(text, newline="").readlines()


def _parses(text: str) -> bool:
    try:
        ast.parse(text)
    except (SyntaxError, ValueError):
        return False
    return True


def _read(root: Path, path: str) -> str:
    """Python files by their coding cookie, others as UTF-8."""
    try:
        data = (root / path).read_bytes()
        encoding = "utf-8"
        if path.endswith(".py"):
            encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        return data.decode(encoding)
    except (OSError, UnicodeDecodeError, SyntaxError) as error:
        raise EtudeError(
            f"cannot read {path} of {root} as text ({error}); leave it out of the training files"
        ) from error


class WindowStream:
    """An endless stream of training windows that is a pure function of a counter: whoever keeps
    the number of windows taken can go on at the exact sample.

    Epochs differ in the order of files within a repository and in the order of windows; all have
    the same number of windows. Raises EtudeError when the documents give none.
    """

    def __init__(
        self, texts: Seq[Document], tokenizer: ByteTokenizer, settings: PretrainSettings
    ) -> None:
        self._settings = settings
        first = tokenizer.special("<file_sep>")
        last = tokenizer.special("<|endoftext|>")
        before = [first] if first is not None else []
        self._end = np.array([last] if last is not None else [], np.int32)
        self._streams: dict[str, list[Int32]] = {}
        for text in texts:
            ids = before + tokenizer.encode(f"# {text.path}\n{text.text}")
            self._streams.setdefault(text.repository, []).append(np.array(ids, np.int32))
        self._epoch, self._windows = 0, self._cut(0)
        if not self._windows:
            raise EtudeError("there is no text to train on: every file is empty or was cut out")

    @property
    def per_epoch(self) -> int:
        """Windows in one epoch."""
        return len(self._windows)

    def sample(self, index: int) -> Sequence:
        """The `index`-th window of the stream, counted from 0 across epochs."""
        epoch, place = divmod(index, self.per_epoch)
        if epoch != self._epoch:
            self._epoch, self._windows = epoch, self._cut(epoch)
        return self._windows[place]

    def take(self, start: int, count: int) -> list[Sequence]:
        """`count` windows from the `start`-th on; go on with `start + count`."""
        return [self.sample(index) for index in range(start, start + count)]

    def _cut(self, epoch: int) -> list[Sequence]:
        rng = np.random.default_rng([self._settings.seed, epoch])
        stride = self._settings.window - 1
        result: list[Sequence] = []
        for files in self._streams.values():
            ordered = [files[i] for i in rng.permutation(len(files))]
            ids = np.concatenate([*ordered, self._end])
            result += [
                _window(ids[start : start + stride + 1]) for start in range(0, len(ids) - 1, stride)
            ]
        return [result[i] for i in rng.permutation(len(result))]


def _window(ids: Int32) -> Sequence:
    weights = np.ones(len(ids), np.float32)
    weights[0] = 0
    zeros, unknown = np.zeros_like(weights), np.full_like(weights, np.nan)
    return Sequence(ids, zeros, weights, zeros, unknown, unknown)


def windows(texts: Seq[Document], model: Path, settings: PretrainSettings) -> list[Sequence]:
    """The windows of the first epoch, with the tokenizer of the `model` folder; none for no text.

    Raises EtudeError when the folder has no usable tokenizer.
    """
    if not texts:
        return []
    stream = WindowStream(texts, ByteTokenizer(load_tokenizer(model)), settings)
    return stream.take(0, stream.per_epoch)


def mean_loss(trainer: Trainer, sequences: Seq[Sequence]) -> float:
    """Mean negative log-prob, in nats, of all tokens with a cross-entropy weight; NaN for none."""
    wanted = [sequence.cross_entropy != 0 for sequence in sequences]
    count = sum(int(want.sum()) for want in wanted)
    if not count:
        return float("nan")
    total = sum(
        float(np.nansum(lp, dtype=np.float64)) for lp in trainer.logprobs(sequences, wanted)
    )
    return -total / count
