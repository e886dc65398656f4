"""Exact replacement against slow references."""

import re

from hypothesis import assume, given
from hypothesis import strategies as st

from etude.agent.tools import text as texts

CHARACTERS = st.text(alphabet="ab \té\n", max_size=30)
MIXED = st.lists(st.sampled_from(["a", "b", " ", "\n", "\r\n", "\r", "é"]), max_size=30).map(
    "".join
)


@st.composite
def replacements(draw: st.DrawFn, raws: st.SearchStrategy[str]) -> tuple[str, int, str, str]:
    """(raw, index in unix(raw), a non-empty piece that stands there, its replacement)."""
    raw = draw(raws)
    text = texts.unix(raw)
    assume(text)
    start = draw(st.integers(0, len(text) - 1))
    end = draw(st.integers(start + 1, len(text)))
    return raw, start, text[start:end], draw(CHARACTERS)


@given(replacements(CHARACTERS))
def test_splice_of_a_unix_file_is_plain_replacement(case: tuple[str, int, str, str]) -> None:
    raw, at, old, new = case
    assert texts.splice(raw, [at], old, new) == raw[:at] + new + raw[at + len(old) :]


@given(replacements(CHARACTERS))
def test_splice_of_a_dos_file_is_replacement_in_the_unix_file(
    case: tuple[str, int, str, str],
) -> None:
    text, at, old, new = case
    assume("\n" in text)
    expected = (text[:at] + new + text[at + len(old) :]).replace("\n", "\r\n")
    assert texts.splice(text.replace("\n", "\r\n"), [at], old, new) == expected


@given(replacements(MIXED))
def test_splice_keeps_the_endings_of_all_kept_lines(case: tuple[str, int, str, str]) -> None:
    raw, at, old, new = case
    result = texts.splice(raw, [at], old, new)
    text = texts.unix(raw)
    after = len(text) - at - len(old)

    def raw_prefix(count: int) -> str:
        """The raw text of the first `count` characters of `text`, found by brute force."""
        return next(raw[:n] for n in range(len(raw) + 1) if len(texts.unix(raw[:n])) >= count)

    # A lone "\r" just before the cut may join a "\n" after it; such files are not promised much.
    assume(not re.search(r"\r(?!\n)", raw))
    assert texts.unix(result) == text[:at] + new + text[at + len(old) :]
    head = raw_prefix(at)
    assert result.startswith(head.removesuffix("\r"))
    assert after == 0 or result.endswith(raw[len(raw_prefix(at + len(old))) :].removeprefix("\n"))
    if new == old:
        assert result == raw


@given(st.binary(max_size=40))
def test_every_byte_survives_decoding(data: bytes) -> None:
    assert texts.encode(texts.decode(data)) == data
    texts.shown(texts.decode(data)).encode()


@given(st.text(alphabet="ab", max_size=12), st.text(alphabet="ab", min_size=1, max_size=3))
def test_occurrences_overlap(text: str, part: str) -> None:
    slow = [at for at in range(len(text)) if text[at : at + len(part)] == part]
    assert texts.occurrences(text, part) == slow


@given(st.lists(st.text(alphabet="ab: 1", max_size=8), min_size=1, max_size=5), st.integers(1, 99))
def test_line_numbers_come_off_as_read_puts_them_on(lines: list[str], first: int) -> None:
    bare = texts.without_line_numbers(texts.numbered(lines, first))
    assert bare is not None
    assert bare[0] == f"{first}: "
    assert [line.strip() for line in bare[1].split("\n")] == [line.strip() for line in lines]


@given(st.text(alphabet="ab\n", max_size=2000), st.integers(200, 400))
def test_long_text_keeps_head_and_tail(text: str, limit: int) -> None:
    cut = texts.head_and_tail(text, limit)
    if len(text) <= limit:
        assert cut == text
        return
    assert len(cut) <= limit + 50
    head, tail = re.split(r"\n\[\.\.\. \d+ characters cut \.\.\.\]\n", cut)
    assert text.startswith(head)
    assert text.endswith(tail)
    assert len(tail) > limit // 8
