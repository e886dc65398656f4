"""Text from outside, made safe for a terminal: whatever could move the cursor, reorder or hide
characters is shown as a visible sign instead.

Everything that a model, a repository, a tool server or a file name says goes through `visible`
before it reaches the screen. The mapping looks at one character at a time, so a text may be cut
anywhere.
"""

from __future__ import annotations

import unicodedata

_HIDDEN_CATEGORIES = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
"""Controls, format characters (bidi, zero width, tags), surrogates, unassigned, separators."""

_INVISIBLE = frozenset(
    [
        *(0x034F, 0x115F, 0x1160, 0x17B4, 0x17B5, 0x3164, 0xFFA0),
        *range(0x180B, 0x1810),
        *range(0xFE00, 0xFE0F),
        *range(0xE0100, 0xE01F0),
    ]
)
"""Letters and marks of no width that can hide text; the selector of emoji (U+FE0F) is harmless."""


class _Signs(dict[int, str]):
    """What each code point is shown as; grows as code points are met."""

    def __missing__(self, code: int) -> str:
        sign = self[code] = _sign(code)
        return sign


def _sign(code: int) -> str:
    char = chr(code)
    if char in "\n\t":
        return char
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "\u2421"
    if unicodedata.category(char) in _HIDDEN_CATEGORIES or code in _INVISIBLE:
        return f"<U+{code:04X}>"
    return char


_SIGNS = _Signs()


def visible(text: str) -> str:
    """The text with every control character but newline and tab replaced by a sign: C0 and DEL by
    their pictures, all else that is invisible or reorders by `<U+…>`."""
    if text.isascii() and text.isprintable():
        return text
    return text.translate(_SIGNS)
