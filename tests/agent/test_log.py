"""The session log survives whatever the process does not."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from etude.agent.log import Entry, SessionLog, decode_entry, encode_entry, read_log
from etude.errors import EtudeError
from etude.records import Event, EventKind

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
EVENTS = st.builds(
    Event,
    st.sampled_from(EventKind),
    st.integers(-1, 99),
    st.dictionaries(st.text(), JSON, max_size=3),
)


@given(EVENTS)
def test_event_round_trip(event: Event) -> None:
    line = encode_entry(Entry((event,)))
    assert len(line.splitlines()) == 1
    assert decode_entry(line) == Entry((event,))


@given(st.lists(EVENTS, min_size=1, max_size=4), st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_cut_anywhere_it_loses_only_what_was_half_written(
    tmp_path: Path, events: list[Event], data: st.DataObject
) -> None:
    path = tmp_path / "session.jsonl"
    path.unlink(missing_ok=True)
    ends = []
    with SessionLog(path) as log:
        header = path.stat().st_size
        for event in events:
            log.append(Entry((event,)))
            ends.append(path.stat().st_size)
    assert read_log(path).events == tuple(events)
    cut = data.draw(st.integers(header, ends[-1]))
    os.truncate(path, cut)
    whole = [event for event, end in zip(events, ends, strict=True) if end <= cut]
    torn = cut not in [header, *ends]
    with SessionLog(path) as log:
        assert log.earlier.events == tuple(whole)
        assert (log.earlier.dropped is not None) == torn
        log.append(Entry((events[0],)))
    again = read_log(path)
    assert again.events == (*whole, events[0])
    assert again.dropped is None


def test_case_12_kill_in_the_middle_of_writing(tmp_path: Path) -> None:
    path = tmp_path / "session.jsonl"
    writer = (
        "import sys; from pathlib import Path; from etude.agent.log import Entry, SessionLog;"
        "from etude.records import Event, EventKind\n"
        "log = SessionLog(Path(sys.argv[1])); number = 0\n"
        "while True:\n"
        "    log.append(Entry((Event(EventKind.USER, number, {'text': 'x' * 3_000_000}),)))\n"
        "    number += 1\n"
    )
    process = subprocess.Popen([sys.executable, "-c", writer, str(path)])
    try:
        deadline = time.monotonic() + 30
        while not path.exists() or path.stat().st_size < 9_000_000:
            assert time.monotonic() < deadline
            time.sleep(0.005)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=10)
    lines = path.read_bytes().count(b"\n")
    with SessionLog(path) as log:
        events = log.earlier.events
        assert [event.turn for event in events] == list(range(len(events)))
        assert len(events) == lines - 1
        log.append(Entry((Event(EventKind.USER, len(events), {"text": "resumed"}),)))
    assert read_log(path).events[-1].data["text"] == "resumed"


def test_damage_before_the_end_is_told_and_not_skipped(tmp_path: Path) -> None:
    path = tmp_path / "session.jsonl"
    with SessionLog(path) as log:
        log.append(Entry((Event(EventKind.USER, -1, {"text": "a"}),)))
    with path.open("a") as file:
        file.write('{"kind": "nonsense", "turn": 1, "data": {}}\n')
    with pytest.raises(EtudeError, match="damaged at line 3"):
        read_log(path)
    with pytest.raises(EtudeError, match="cannot be read"):
        read_log(tmp_path / "missing")
    (tmp_path / "other").write_text("hello\n")
    with pytest.raises(EtudeError, match="not a session log"):
        read_log(tmp_path / "other")
