"""The text of an HTML page."""

from __future__ import annotations

import re
import time
from html.parser import HTMLParser

_SKIPPED = frozenset({"script", "style", "noscript", "template", "svg", "head"})
_BLOCKS = re.compile(
    r"address|article|aside|blockquote|body|br|dd|details|div|dl|dt|fieldset|figure|footer|form"
    r"|h[1-6]|header|hr|li|main|nav|ol|p|pre|section|summary|table|tr|ul"
)
_HEADINGS = {f"h{level}": "#" * level for level in range(1, 7)}
_CHUNK = 4096
_SECONDS = 3.0


def html_to_text(html: str) -> str:
    """Headings, paragraphs, lists and code in order, links as `text <address>`; no scripts, no
    styles. A page that takes longer than some seconds to parse is cut there."""
    reader = _Reader()
    # The standard parser gives up on marked sections that are none.
    html = html.replace("<![", "&lt;![")
    deadline = time.monotonic() + _SECONDS
    for start in range(0, len(html), _CHUNK):
        reader.feed(html[start : start + _CHUNK])
        if time.monotonic() > deadline:
            reader.parts.append("\n[the rest was not read]")
            break
    return reader.text()


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self._skipping: str | None = None
        self._depth = 0
        self._pre = 0
        self._links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if self._skipping is not None:
            self._depth += tag == self._skipping
            return
        if tag in _SKIPPED:
            self._skipping, self._depth = tag, 1
        elif tag == "pre":
            self._pre += 1
            self.parts.append("\n\n```\n")
        elif tag == "a":
            self._links.append(dict(attrs).get("href") or "")
        elif tag in ("td", "th"):
            self.parts.append(" | ")
        elif _BLOCKS.fullmatch(tag):
            mark = {"li": "- ", **{h: f"{m} " for h, m in _HEADINGS.items()}}.get(tag, "")
            self.parts.append(f"\n{mark}" if tag in ("li", "br", "tr", "dd") else f"\n\n{mark}")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if _BLOCKS.fullmatch(tag) and self._skipping is None:
            self.parts.append("\n")

    def handle_endtag(self, tag: str) -> None:
        if self._skipping is not None:
            self._depth -= tag == self._skipping
            if self._depth == 0:
                self._skipping = None
        elif tag == "pre" and self._pre:
            self._pre -= 1
            self.parts.append("\n```\n")
        elif tag == "a" and self._links:
            link = self._links.pop()
            if link.startswith(("http://", "https://", "/")):
                self.parts.append(f" <{link}>")
        elif _BLOCKS.fullmatch(tag) and tag != "br":
            self.parts.append("\n")

    def handle_data(self, data: str) -> None:
        if self._skipping is None:
            self.parts.append(data if self._pre else re.sub(r"\s+", " ", data))

    def text(self) -> str:
        joined = re.sub(r"[ \t]+\n", "\n", "".join(self.parts))
        return re.sub(r"\n{3,}", "\n\n", joined).strip()
