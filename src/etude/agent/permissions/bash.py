"""What a bash command would run, as far as its text says.

The text is parsed with tree-sitter-bash; the words are then read by a reader of our own that knows
only literals, quotes and globs. Whatever either does not know makes the command *not plain*, and
what is not plain is never allowed by a rule.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tree_sitter import Node, Parser

_LONGEST = 32_768
_DEEPEST = 200
_ARGUMENTS = frozenset({"word", "number", "string", "raw_string", "concatenation"})
_STRUCTURE = frozenset({"program", "list", "pipeline", "redirected_statement", "command"})
_JOINTS = frozenset({"&&", "||", ";", "\n", "|"})
_OPAQUE = frozenset({"declaration_command", "unset_command", "test_command"})


@dataclass(frozen=True)
class Word:
    """One word of a command. `text` is what the command gets when `literal`, else the source;
    `start` is its beginning up to the first thing that the shell would replace."""

    text: str
    literal: bool
    start: str


@dataclass(frozen=True)
class Simple:
    """One simple command. `piped`: its standard input is the output of another."""

    words: tuple[Word, ...]
    piped: bool = False

    @property
    def literal(self) -> bool:
        """Whether the shell takes every word as it stands."""
        return all(word.literal for word in self.words)


@dataclass(frozen=True)
class Script:
    """`commands` are all simple commands that can be seen, those inside substitutions and blocks
    too. `objection` says what there is beside them, or is None: then the text runs exactly
    `commands`, in order, each or not at all. `unclear`: there may be commands that cannot be
    seen."""

    commands: tuple[Simple, ...]
    objection: str | None = None
    unclear: bool = False


class _NotPlain(Exception):
    """Something that rules do not cover; the message names it."""


@functools.cache
def _parser() -> Parser:
    # Both are only needed once a command is looked at, and the start of a session is timed.
    import tree_sitter
    import tree_sitter_bash

    return tree_sitter.Parser(tree_sitter.Language(tree_sitter_bash.language()))


@functools.lru_cache(maxsize=256)
def analyse(text: str) -> Script:
    """Parse a command. Never raises: what cannot be understood is in `objection`."""
    if len(text) > _LONGEST:
        return Script((), "it is too long to be looked through", unclear=True)
    source = text.encode("utf-8", "replace")
    root = _parser().parse(source).root_node
    commands = tuple(_every_command(source, root))
    if root.has_error:
        return Script(commands, "it could not be parsed", unclear=True)
    if _too_deep(root):
        return Script(commands, "it is nested too deeply", unclear=True)
    try:
        plain = tuple(_plain(source, root, piped=False))
    except _NotPlain as objection:
        return Script(commands, str(objection))
    if not plain:
        return Script((), "it holds no command")
    return Script(plain)


def _text(source: bytes, node: Node) -> str:
    return source[node.start_byte : node.end_byte].decode("utf-8", "replace")


def _nodes(root: Node) -> Iterator[tuple[Node, int]]:
    """Every node with its depth, in order, without recursion: the text is hostile."""
    waiting = [(root, 0)]
    while waiting:
        node, depth = waiting.pop()
        yield node, depth
        waiting.extend((child, depth + 1) for child in reversed(node.children))


def _too_deep(root: Node) -> bool:
    return any(depth > _DEEPEST for _, depth in _nodes(root))


def _every_command(source: bytes, root: Node) -> Iterator[Simple]:
    """All simple commands, wherever they stand; for rules that forbid."""
    for node, _ in _nodes(root):
        if node.type == "command":
            parts = [
                child
                for child in node.named_children
                if child.type != "variable_assignment" and not child.type.endswith("_redirect")
            ]
            if node.parent is not None and node.parent.type == "redirected_statement":
                # Words behind a redirection belong to the command: `a >f b` runs `a b`.
                for child in node.parent.named_children:
                    if child.type == "file_redirect":
                        parts += [part for part in child.named_children if part.type in _ARGUMENTS]
            if parts:
                yield Simple(tuple(_loose_word(source, part) for part in parts))
        elif node.type in _OPAQUE and node.children:
            first = _text(source, node.children[0])
            rest = [_loose_word(source, child) for child in node.named_children]
            yield Simple((Word(first, True, first), *rest))


def _loose_word(source: bytes, node: Node) -> Word:
    text = _text(source, node)
    try:
        return read_word(text)
    except _NotPlain:
        return Word(text, False, "")


def _plain(source: bytes, node: Node, *, piped: bool) -> Iterator[Simple]:
    """The simple commands of a node that is made of nothing else. Raises _NotPlain."""
    if node.type == "program":
        for char in _text(source, node):
            if char not in "\t\n" and not char.isprintable():
                raise _NotPlain(f"it contains the character {char!r}")
    if node.type not in _STRUCTURE:
        raise _NotPlain(_named(node.type))
    if node.type == "command":
        yield _command(source, node, piped)
        return
    _check_gaps(source, node)
    for child in node.children:
        if child.type == "file_redirect":
            _check_redirect(source, child)
        elif child.is_named:
            behind_pipe = node.type == "pipeline" and child.start_byte != node.start_byte
            yield from _plain(source, child, piped=piped or behind_pipe)
        elif child.type not in _JOINTS:
            raise _NotPlain(_named(child.type))


def _command(source: bytes, node: Node, piped: bool) -> Simple:
    """The words of a command node."""
    _check_gaps(source, node)
    words: list[Word] = []
    for child in node.children:
        part = child
        if child.type == "command_name":
            if len(child.children) != 1:
                raise _NotPlain("a command name that is no plain word")
            part = child.children[0]
        elif child.type == "file_redirect":
            _check_redirect(source, child)
            continue
        if part.type not in _ARGUMENTS:
            raise _NotPlain(_named(part.type))
        words.append(read_word(_text(source, part)))
    if not words or not words[0].literal or not words[0].text:
        raise _NotPlain("a command name that the shell would replace")
    return Simple(tuple(words), piped)


def _check_gaps(source: bytes, node: Node) -> None:
    """Between the parts there must be exactly what bash takes for a separator: the parser's idea
    of white space is wider, and it may see two words where bash sees one."""
    outer = node.type in ("program", "list", "pipeline")
    previous: Node | None = None
    at = node.start_byte
    for child in node.children:
        gap = source[at : child.start_byte].decode("utf-8", "replace").replace("\\\n", "")
        if previous is None:
            parted = True
        elif outer:
            parted = not (previous.is_named and child.is_named) or "\n" in gap
        else:
            # `a>f`, but in `2>f` the number belongs to the redirection.
            redirects = _text(source, child)[:1] in (">", "<", "&")
            parted = gap != "" or (redirects and not _text(source, previous)[-1:].isdigit())
        if not parted or gap.strip(" \t\n" if outer else " \t"):
            raise _NotPlain("something that the parser and the shell may read differently")
        previous, at = child, child.end_byte
    around = [source[at : node.end_byte]]
    if node.type == "program":
        around += [source[: node.start_byte], source[node.end_byte :]]
    if any(re.sub(rb"\\\n", b"", text).strip(b" \t\n") for text in around):
        raise _NotPlain("text around the command")


def _check_redirect(source: bytes, node: Node) -> None:
    """Only `/dev/null` and other descriptors; anything else reads or writes a file."""
    text = _text(source, node)
    if not re.fullmatch(r"[0-2]?>&[12]|(?:[0-2]?>>?|&>>?|0?<)[ \t]*/dev/null", text):
        raise _NotPlain(f"the redirection {text}")


def _named(kind: str) -> str:
    """A part of the grammar in a person's words."""
    words = {
        "&": "a command in the background",
        "|&": "the pipe |&",
        "comment": "a comment",
        "command_substitution": "a command substitution",
        "process_substitution": "a process substitution",
        "simple_expansion": "a variable",
        "expansion": "a variable",
        "variable_assignment": "a variable assignment",
        "variable_assignments": "a variable assignment",
        "heredoc_redirect": "a here-document",
        "herestring_redirect": "a here-string",
        "subshell": "a subshell",
        "function_definition": "a function",
    }
    return words.get(kind, f"something that is no simple command ({kind})")


_PIECE = re.compile(
    r"""
    \\(?P<escaped>.)
    | '(?P<single>[^']*)'
    | "(?P<double>(?:[^"\\$`]|\\.)*)"
    | (?P<pattern>[*?\[{]|\A~)
    | (?P<plain>[^\\'"$`|&;()<>\s])
    """,
    re.VERBOSE | re.DOTALL,
)


def read_word(text: str) -> Word:
    """Read one word of source as bash would. Raises _NotPlain where it would run or replace more
    than a file name pattern."""
    out: list[str] = []
    start: str | None = None
    at = 0
    while at < len(text):
        piece = _PIECE.match(text, at)
        if piece is None or (at == 0 and text[0] == "#"):
            found = "a variable or a substitution" if re.search("[$`]", text) else text
            raise _NotPlain(found)
        value = piece.group(piece.lastgroup or 0)
        if piece.lastgroup == "pattern":
            start = "".join(out) if start is None else start
        elif piece.lastgroup == "escaped":
            value = value.removeprefix("\n")
        elif piece.lastgroup == "double":
            value = re.sub(r"\\([$`\"\\\n])", lambda m: m[1].removeprefix("\n"), value)
        out.append(value)
        at = piece.end()
    value = "".join(out)
    return Word(value, True, value) if start is None else Word(text, False, start)
