"""What editors are told and tell: paths, diffs, foreign text, messages."""

import asyncio
import base64
from pathlib import Path
from typing import Any, get_args

import pytest
from acp.helpers import (
    audio_block,
    embedded_blob_resource,
    embedded_text_resource,
    image_block,
    resource_block,
    resource_link_block,
    text_block,
)
from acp.schema import SessionNotification
from acp.schema import StopReason as StopReasons
from hypothesis import given
from hypothesis import strategies as st

from etude.cli.acp_content import message_text
from etude.cli.acp_outbox import Outbox
from etude.cli.acp_session import STOPS
from etude.cli.acp_updates import Reporter, fenced, host_path, read_text, replayed
from etude.records import Event, EventKind, StopReason

PROJECT = Path("/home/me/project")


def test_a_message_of_all_kinds() -> None:
    data = base64.b64encode(b"12345").decode()
    text = message_text(
        PROJECT,
        [
            text_block("look at <|im_end|> this"),
            resource_link_block("a", "file:///home/me/project/src/a%20b.py#L3"),
            resource_link_block("b", "file:///etc/passwd"),
            resource_block(embedded_text_resource("file:///home/me/project/c.txt", "text of c")),
            resource_block(embedded_blob_resource("file:///home/me/project/d.bin", data)),
            image_block(data, "image/png"),
            audio_block(data, "audio/wav"),
        ],
    )
    assert text == (
        "look at <|im_end|> this\n"
        "[file: src/a b.py at L3]\n"
        "[file: /etc/passwd (outside of the project)]\n"
        "[content of c.txt]\ntext of c\n[end of c.txt]\n"
        "[file: d.bin, 5 bytes that are no text]\n"
        "[image: image/png, 5 bytes; left out, the model reads only text]\n"
        "[audio: audio/wav, 5 bytes; left out, the model reads only text]"
    )


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("a/b", "a/b"),
        ("./a/../b", "b"),
        ("/workspace/a", "a"),
        ("/workspace", ""),
        ("../a", None),
        ("/etc/passwd", None),
        ("/workspacex/a", None),
        ("a\0b", None),
        (7, None),
    ],
)
def test_places_are_inside_the_project(path: object, expected: str | None) -> None:
    assert host_path(PROJECT, path) == (None if expected is None else PROJECT / expected)


@given(st.text())
def test_foreign_text_stays_in_its_fence(text: str) -> None:
    """Read as an editor reads markdown: nothing of the text ends the fence."""
    lines = fenced(text).split("\n")
    fence = lines[0]
    assert set(fence) == {"`"} and lines[-1] == fence
    assert not any(line.strip().startswith(fence) for line in lines[1:-1])
    assert not any(ord(char) < 32 and char not in "\n\t" for char in fenced(text))


def test_no_link_leads_out(tmp_path: Path) -> None:
    project = tmp_path / "project"
    (project / "sub").mkdir(parents=True)
    (tmp_path / "secret").write_text("secret")
    (project / "link").symlink_to(tmp_path / "secret")
    (project / "out").symlink_to(tmp_path)
    (project / "sub" / "a").write_text("mine")
    (project / "in").symlink_to(project / "sub")
    assert read_text(project, project / "link") is None
    assert read_text(project, project / "out" / "secret") is None
    assert read_text(project, project / "sub") is None
    assert read_text(project, project / "in" / "a") == "mine"


def event(kind: EventKind, **data: Any) -> Event:
    return Event(kind, 0, data)


def call(call_id: str, name: str, arguments: Any, malformed: bool = False) -> Event:
    return event(
        EventKind.TOOL_CALL, id=call_id, name=name, arguments=arguments, malformed=malformed
    )


def result(call_id: str, name: str, text: str, error_class: str | None = None) -> Event:
    return event(EventKind.TOOL_RESULT, id=call_id, name=name, text=text, error_class=error_class)


def test_two_edits_of_one_turn_are_two_diffs(tmp_path: Path) -> None:
    """Both calls are known before the first one runs; each shows only its own change."""
    file = tmp_path / "a"
    file.write_text("1 2")
    reporter = Reporter(tmp_path, live=True)
    edits = [{"path": "a", "old": "1", "new": "x"}, {"path": "./a", "old": "2", "new": "y"}]
    for number, arguments in enumerate(edits):
        list(reporter.updates(call(str(number), "edit", arguments)))
    shown: list[Any] = []
    for number, text in enumerate(("x 2", "x y")):
        file.write_text(text)
        (update,) = reporter.updates(result(str(number), "edit", "edited"))
        shown.append(update["content"][0])
    assert [(d["oldText"], d["newText"]) for d in shown] == [("1 2", "x 2"), ("x 2", "x y")]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=4,
)
names = st.sampled_from(["read", "edit", "write", "shell", "todo", "finish", "ask", "", "nope"])
keys = st.sampled_from(["path", "old", "new", "content", "start", "command", "entries", "x"])


@given(names, st.dictionaries(keys, json_values, max_size=3), st.booleans(), st.booleans())
def test_whatever_a_model_calls_the_update_is_valid(
    name: str, arguments: dict[str, Any], malformed: bool, failed: bool
) -> None:
    """Calls come from the model: any name, any JSON. A failed call is reported whatever it was;
    the SDK's own schema takes every update."""
    failed = failed or name in ("todo", "finish")
    events = [
        call("1", name, arguments, malformed),
        event(EventKind.PERMISSION, id="1", allowed=True, by="", reason=""),
        result("1", name, "text", "refused" if failed else None),
    ]
    for update in replayed(PROJECT, events):
        note = SessionNotification.model_validate({"sessionId": "s", "update": update})
        said = note.update.model_dump(by_alias=True, exclude_none=True)
        assert said["sessionUpdate"] == update["sessionUpdate"]
        assert len(said.get("content", [])) == len(update.get("content", []))


def test_every_stop_has_a_reason_of_the_protocols() -> None:
    known = get_args(StopReasons)
    assert set(STOPS) == set(StopReason) - {StopReason.ERROR}
    assert set(STOPS.values()) <= set(known)


def test_words_are_joined_in_order_and_an_editor_that_left_is_no_error() -> None:
    async def run() -> None:
        got: list[str] = []
        slow = asyncio.Event()

        async def send(update: dict[str, Any]) -> None:
            await slow.wait()
            if len(got) == 3:
                raise ConnectionError
            got.append(f"{update['sessionUpdate'][6:11]}:{update['content']['text']}")

        outbox = Outbox(send)
        outbox.put_text("agent_message_chunk", "a")
        outbox.open()
        await asyncio.sleep(0)
        for kind, text in (("message", "b"), ("message", "c"), ("thought", "d"), ("message", "e")):
            outbox.put_text(f"agent_{kind}_chunk", text)
        slow.set()
        await outbox.flush()
        assert got == ["messa:a", "messa:bc", "thoug:d"]
        outbox.put_text("agent_message_chunk", "late")
        await outbox.flush()
        await outbox.close()
        assert len(got) == 3

    asyncio.run(run())
