"""Glob patterns as regular expressions for ripgrep.

ripgrep's own `--glob` overrides `.gitignore`, so the names that it lists are filtered with these.
"""

from __future__ import annotations

import re

_SPECIAL = re.compile(r"[\\.+*?()|\[\]{}^$#&~-]")


def regex_of_glob(pattern: str, folder: str = "") -> str:
    """A regular expression for whole paths relative to the workspace, or to `folder` in it. A
    pattern without a slash means names in every folder, as in `.gitignore`. `**` crosses
    folders, `*` and `?` do not; `[...]` and `{a,b}` are known. Raises ValueError for a bracket
    or brace that is not closed."""
    pattern = pattern.removeprefix("./")
    if "/" not in pattern:
        pattern = f"**/{pattern}"
    prefix = f"(?:{_escaped(folder)}/)?" if folder not in ("", ".") else ""
    return rf"^(?:\./)?{prefix}{_Translator(pattern.removeprefix('/')).whole()}$"


def _escaped(text: str) -> str:
    return _SPECIAL.sub(r"\\\g<0>", text)


class _Translator:
    """One pass over a pattern."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0
        self._depth = 0

    def whole(self) -> str:
        parts: list[str] = []
        while self._at < len(self._pattern):
            parts.append(self._next())
        if self._depth:
            raise ValueError(f"a brace of {self._pattern!r} is not closed")
        return "".join(parts)

    def _next(self) -> str:
        pattern, at = self._pattern, self._at
        if pattern.startswith("**", at) and (at == 0 or pattern[at - 1] == "/"):
            if pattern[at + 2 : at + 3] == "/":
                self._at += 3
                return "(?:[^/]+/)*"
            if at + 2 == len(pattern):
                self._at += 2
                return ".+"
        self._at += 1
        character = pattern[at]
        if character == "[":
            return self._bracket()
        if character == "\\" and self._at < len(pattern):
            self._at += 1
            return _escaped(pattern[self._at - 1])
        if character == "{" or (self._depth and character == "}"):
            self._depth += 1 if character == "{" else -1
            return "(?:" if character == "{" else ")"
        wild = {"*": "[^/]*", "?": "[^/]", **({",": "|"} if self._depth else {})}
        return wild.get(character) or _escaped(character)

    def _bracket(self) -> str:
        end = self._pattern.find(
            "]", self._at + 1 + (self._pattern[self._at : self._at + 1] == "!")
        )
        if end < 0:
            raise ValueError(f"a bracket of {self._pattern!r} is not closed")
        inner = self._pattern[self._at : end]
        self._at = end + 1
        negated = inner[:1] in ("!", "^")
        inner = re.sub(r"[\\\[\]^&~]", r"\\\g<0>", inner[negated:])
        return f"[^/{inner}]" if negated else f"[{inner}]"
