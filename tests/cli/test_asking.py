"""No call can look like another question, or push its own out of sight."""

from hypothesis import given, settings
from hypothesis import strategies as st
from wcwidth import wcswidth

from etude.agent.permissions import Request
from etude.agent.tools.tool import Effect
from etude.cli.asking import exactly


def shown(command: str, width: int) -> list[str]:
    request = Request(
        "call-0-0", "shell", Effect.EXECUTE, command, {"command": command, "cwd": "."}
    )
    return [row.plain for row in exactly(request, width)]


@given(st.text(max_size=300), st.integers(30, 200))
@settings(max_examples=150, deadline=None)
def test_every_row_is_behind_the_bar_and_fits(command: str, width: int) -> None:
    for row in shown(command, width):
        assert row.startswith("  │ ")
        assert wcswidth(row) <= width


def test_a_forged_question_stays_inside_its_own() -> None:
    forged = "? may shell run?  in ask mode …" + " " * 48 + "  │ git status --short"
    rows = shown("bad; : '" + " " * 40 * 80 + forged + "'", 80)
    assert rows[0].startswith("  │ bad; : ' ⟨3200 blanks⟩")
    assert not any(row.startswith(("?", "  │ git status")) for row in rows)
    assert len(rows) <= 4


def test_what_is_shown_is_the_whole_command() -> None:
    command = "echo " + "x" * 500 + "\nrm -rf y"
    joined = "".join(row.removeprefix("  │ ") for row in shown(command, 60))
    assert joined == "echo " + "x" * 500 + "rm -rf y" + "cwd: ."
