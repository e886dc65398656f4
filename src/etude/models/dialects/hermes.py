"""The Hermes dialect: ChatML turns, tool calls as JSON between `<tool_call>` markers.

Example of an answer::

    <think>The first element is seq[0].</think>
    I fill the gap.
    <tool_call>
    {"name": "edit", "arguments": {"path": "a.py", "old": "GAP", "new": "seq[0]"}}
    </tool_call><|im_end|>
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

from tokenizers import Tokenizer

from etude.errors import EtudeError
from etude.models.renderer import ParsedTurn, ToolCall, ToolSpec
from etude.models.stream import MarkerStream
from etude.models.tokenizer import ByteTokenizer, load_tokenizer

TURN_START, TURN_END, DOCUMENT_END = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
RESULT_OPEN, RESULT_CLOSE = "<tool_response>", "</tool_response>"
_BLANK = " \t\r\n"


@dataclass(frozen=True)
class _Marker:
    """A piece of the dialect itself: one special token where the tokenizer has it, else text."""

    content: str


_Part = str | _Marker


class HermesRenderer:
    """`Renderer` of the Hermes dialect over a byte-level tokenizer with ChatML tokens.

    Raises EtudeError when the tokenizer lacks `<|im_start|>` or `<|im_end|>`.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokens = ByteTokenizer(tokenizer)
        self._turn_start = self._required(TURN_START)
        self._turn_end = self._required(TURN_END)
        ends = (self._turn_end, self._tokens.special(DOCUMENT_END))
        self._stop_ids = tuple(end for end in ends if end is not None)

    @classmethod
    def from_folder(cls, folder: Path) -> HermesRenderer:
        """The renderer of a Hugging Face folder; loads neither weights nor torch."""
        return cls(load_tokenizer(folder))

    def _required(self, content: str) -> int:
        token = self._tokens.special(content)
        if token is None:
            raise EtudeError(
                f"this model's tokenizer has no {content} token; use a model with ChatML turns, "
                "such as SmolLM2-Instruct or Qwen"
            )
        return token

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """End of turn, and end of document where the tokenizer has one."""
        return self._stop_ids

    def open(self, system: str, tools: Sequence[ToolSpec], user: str) -> list[int]:
        """The first prompt, up to and including the assistant header."""
        head: list[_Part] = [system]
        if tools:
            head += ["\n\n" if system else "", *_tool_list(tools)]
        ids = self._turn("system", head) if system or tools else []
        return ids + self._turn("user", [user]) + self._header("assistant")

    def follow(
        self,
        last_completion: Sequence[int],
        *,
        results: Sequence[str] = (),
        user: str | None = None,
    ) -> list[int]:
        """End of the sampled turn (if it was cut), results in one user turn, the user's message
        in another, and the next assistant header."""
        ended = bool(last_completion) and last_completion[-1] == self._turn_end
        ids = [] if ended else [self._turn_end]
        ids += self._tokens.encode("\n")
        if results:
            parts: list[_Part] = []
            for number, result in enumerate(results):
                parts += ["\n"] if number else []
                parts += [_Marker(RESULT_OPEN), f"\n{result}\n", _Marker(RESULT_CLOSE)]
            ids += self._turn("user", parts)
        if user is not None:
            ids += self._turn("user", [user])
        return ids + self._header("assistant")

    def expert(self, text: str, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> list[int]:
        """The completion that says `text` and makes `calls`, end of turn included.

        Raises ValueError for a text that would be read back as thinking or as a call."""
        if text.lstrip().startswith(THINK_OPEN) or CALL_OPEN in text:
            raise ValueError(f"text must neither start with {THINK_OPEN} nor contain {CALL_OPEN}")
        parts: list[_Part] = [text]
        for number, (name, arguments) in enumerate(calls):
            body = json.dumps({"name": name, "arguments": dict(arguments)}, ensure_ascii=False)
            parts += ["\n"] if text or number else []
            parts += [_Marker(CALL_OPEN), f"\n{body}\n", _Marker(CALL_CLOSE)]
        return [*self._encode(parts), self._turn_end]

    def parse(self, completion: Sequence[int]) -> ParsedTurn:
        """Take a sampled turn apart. A token counts for the span in which its first byte stands;
        the end of turn counts for the span that it ends."""
        ids = list(completion)
        body = ids[:-1] if ids and ids[-1] in self._stop_ids else ids
        pieces = [self._tokens.token_bytes(token) for token in body]
        data = b"".join(pieces)
        thinking, said_from = _thinking(data)
        call_from = data.find(CALL_OPEN.encode(), said_from)
        call_from = len(data) if call_from < 0 else call_from
        said = data[said_from:call_from]
        calls = _calls(data[call_from:].decode("utf-8", "replace"))
        if calls and said.endswith(b"\n"):
            said = said[:-1]
        thinking_tokens, text_tokens, call_tokens = _count(pieces, said_from, call_from)
        if len(body) < len(ids):
            call_tokens += bool(calls)
            thinking_tokens += not calls and not said and said_from > 0
            text_tokens += not calls and (bool(said) or not said_from)
        return ParsedTurn(
            thinking=thinking,
            text=said.decode("utf-8", "replace"),
            calls=calls,
            thinking_tokens=thinking_tokens,
            call_tokens=call_tokens,
            text_tokens=text_tokens,
        )

    def stream(self) -> MarkerStream:
        """See `Renderer.stream`; the end of the turn is not shown."""

        def shown(token: int) -> bytes:
            return b"" if token in self._stop_ids else self._tokens.token_bytes(token)

        return MarkerStream(shown, think=(THINK_OPEN, THINK_CLOSE), call=CALL_OPEN)

    def decode(self, ids: Sequence[int]) -> str:
        """Ids as text, special tokens shown."""
        return self._tokens.decode(ids)

    def _header(self, role: str) -> list[int]:
        return [self._turn_start, *self._tokens.encode(f"{role}\n")]

    def _turn(self, role: str, parts: Sequence[_Part]) -> list[int]:
        ids = [self._turn_start, *self._encode([f"{role}\n", *parts]), self._turn_end]
        return ids + self._tokens.encode("\n")

    def _encode(self, parts: Sequence[_Part]) -> list[int]:
        """Neighbouring text is tokenised together, as the model would meet it."""
        ids: list[int] = []
        text = ""
        for part in parts:
            special = self._tokens.special(part.content) if isinstance(part, _Marker) else None
            if special is None:
                text += part.content if isinstance(part, _Marker) else part
            else:
                ids += [*self._tokens.encode(text), special]
                text = ""
        return ids + self._tokens.encode(text)


def _tool_list(tools: Sequence[ToolSpec]) -> list[_Part]:
    """One line per tool and one on how to call: on a CPU every prompt token is paid for."""
    lines = [f"{tool.name}({_signature(tool)}): {_line(tool.description)}\n" for tool in tools]
    return [
        "Tools:\n",
        *lines,
        "To call one, end your answer with:\n",
        _Marker(CALL_OPEN),
        '\n{"name": TOOL, "arguments": {NAME: VALUE, ...}}\n',
        _Marker(CALL_CLOSE),
    ]


def _line(text: str) -> str:
    return " ".join(text.split())


def _signature(tool: ToolSpec) -> str:
    """Argument names; `?` marks what may be left out, a type is told unless it is a string."""
    required = set(cast(Sequence[str], tool.parameters.get("required", ())))
    properties = cast(Mapping[str, Mapping[str, Any]], tool.parameters.get("properties", {}))
    names: list[str] = []
    for name, schema in properties.items():
        kind = schema.get("type", "string")
        shown = name if name in required else f"{name}?"
        names.append(shown if kind == "string" else f"{shown}: {kind}")
    return ", ".join(names)


def _count(pieces: Sequence[bytes], said_from: int, call_from: int) -> tuple[int, int, int]:
    """Tokens that begin in [0, said_from), [said_from, call_from) and from there on."""
    offset = thinking = said = 0
    for piece in pieces:
        thinking += offset < said_from
        said += said_from <= offset < call_from
        offset += len(piece)
    return thinking, said, len(pieces) - thinking - said


class _Thinking(NamedTuple):
    text: str
    end: int
    """Offset of the first byte that is no longer thinking."""


def _thinking(data: bytes) -> _Thinking:
    """The leading `<think>` span; one that is never closed takes the whole turn. Blank space
    after it belongs to it."""
    if not data.lstrip().startswith(THINK_OPEN.encode()):
        return _Thinking("", 0)
    start = data.index(THINK_OPEN.encode()) + len(THINK_OPEN)
    close = data.find(THINK_CLOSE.encode(), start)
    if close < 0:
        return _Thinking(data[start:].decode("utf-8", "replace"), len(data))
    end = close + len(THINK_CLOSE)
    end += len(data[end:]) - len(data[end:].lstrip(b"\r\n"))
    return _Thinking(data[start:close].decode("utf-8", "replace"), end)


def _calls(text: str) -> tuple[ToolCall, ...]:
    """Read calls from a text that starts with the opening marker. After a call only another one
    may follow; anything else spoils it."""
    calls: list[ToolCall] = []
    position = 0
    while position < len(text):
        call, position = _one_call(text, position)
        following = text.find(CALL_OPEN, position)
        following = len(text) if following < 0 else following
        if call.error is None and text[position:following].strip(_BLANK):
            call = ToolCall(call.name, {}, call.raw, "there is text after the call")
        calls.append(call)
        position = following
    return tuple(calls)


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)


def _one_call(text: str, start: int) -> tuple[ToolCall, int]:
    """The call that opens at `start`, and where the text after it begins. The JSON decoder finds
    its end, so that a closing marker inside a string is only text."""
    body = start + len(CALL_OPEN)
    while body < len(text) and text[body] in _BLANK:
        body += 1
    try:
        value, end = _DECODER.raw_decode(text, body)
    except (ValueError, RecursionError) as error:
        closed = text.find(CALL_CLOSE, body)
        end = len(text) if closed < 0 else closed + len(CALL_CLOSE)
        reason = f"the call is not valid JSON: {error}"
        return ToolCall("", {}, text[start:end], reason), end
    rest = text[end:].lstrip(_BLANK)
    closed = rest.startswith(CALL_CLOSE)
    if closed:
        end = len(text) - len(rest) + len(CALL_CLOSE)
    name, arguments, reason = _shape(value)
    if reason is None and not closed:
        reason = f"the call is not closed by {CALL_CLOSE}"
    return ToolCall(name, arguments if reason is None else {}, text[start:end], reason), end


def _shape(value: object) -> tuple[str, Mapping[str, Any], str | None]:
    """Name, arguments and what is wrong with the shape of a decoded call."""
    call = cast(dict[str, Any], value if isinstance(value, dict) else {})
    name, arguments = call.get("name"), call.get("arguments")
    reason = None
    if not isinstance(value, dict):
        reason = "the call is not a JSON object"
    elif not isinstance(name, str) or not name:
        reason = 'the call has no "name"'
    elif "arguments" not in call:
        reason = 'the call has no "arguments"'
    elif not isinstance(arguments, dict):
        reason = '"arguments" is not a JSON object'
    elif unknown := set(call) - {"name", "arguments"}:
        reason = f"the call has unknown keys: {', '.join(sorted(unknown))}"
    elif not _encodable(value):
        reason = "the call contains half of a surrogate pair, which is no character"
    if reason is None:
        return cast(str, name), cast(dict[str, Any], arguments), None
    return name if isinstance(name, str) and _encodable(name) else "", {}, reason


def _encodable(value: object) -> bool:
    """JSON can spell code points that no text may contain."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True
