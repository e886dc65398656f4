"""A session explained: what was asked, what was done, and which event shows each claim of the final
message. Pure functions of the events; no model is asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from etude.agent.explain.claims import Claim, ClaimKind, claims
from etude.agent.explain.deeds import (
    Command,
    Deeds,
    FileUse,
    Refusal,
    deeds,
    one_line,
    quoted,
    to_json,
)
from etude.agent.explain.judge import Evidence, Judged, Verdict, judge
from etude.agent.transcript import visible
from etude.records import Event

__all__ = [
    "Claim",
    "ClaimKind",
    "Command",
    "Deeds",
    "Evidence",
    "Explanation",
    "FileUse",
    "Judged",
    "Refusal",
    "Verdict",
    "explain",
    "in_one_line",
]


@dataclass(frozen=True)
class Explanation:
    """What the record of a session says. `judged` are the claims of the final message."""

    deeds: Deeds
    judged: tuple[Judged, ...]

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        return {
            **to_json(self.deeds),
            "final": {"turn": self.deeds.final_turn, "text": self.deeds.final},
            "claims": [
                {
                    "kind": judged.claim.kind.value,
                    "claim": judged.claim.sentence,
                    "subject": judged.claim.subject,
                    "verdict": judged.verdict.value,
                    "reason": judged.reason,
                    "evidence": [
                        {"turn": e.turn, "call": e.call_id, "what": e.what} for e in judged.evidence
                    ],
                }
                for judged in self.judged
            ],
        }

    def to_text(self) -> str:
        """Plain text for a terminal; nothing that a model or a file said can move the cursor."""
        found = self.deeds
        blocks = [
            ("Asked", [one_line(text) for text in found.asked]),
            ("Read", _file_lines(found.read)),
            ("Changed", [*_file_lines(found.changed), *_maybe_changed(found)]),
            *([("Refused", [_refusal_line(r) for r in found.refused])] if found.refused else []),
            ("Commands", [_command_line(command) for command in found.commands]),
            ("Claims of the final message", [line for j in self.judged for line in _lines(j)]),
        ]
        parts = [
            "\n".join([f"{title}:", *(f"  {line}" for line in lines or ["(nothing)"])])
            for title, lines in blocks
        ]
        return visible("\n\n".join(parts)) + "\n"


def in_one_line(judged: Judged) -> str:
    """A claim with the event that shows it, for standing below the final message."""
    places = "; ".join(f"{e.call_id} (turn {e.turn}): {e.what}" for e in judged.evidence)
    told = ", ".join(part for part in (judged.verdict.value, judged.reason) if part)
    return visible(f"{quoted(judged.claim.sentence)} – {told}{f' by {places}' if places else ''}")


def explain(events: Sequence[Event]) -> Explanation:
    """Explain a session by its events, which may also be those of one that still goes on."""
    found = deeds(events)
    return Explanation(found, tuple(judge(claim, found) for claim in claims(found.final)))


def _file_lines(uses: Sequence[FileUse]) -> list[str]:
    files: dict[str, list[FileUse]] = {}
    for use in uses:
        files.setdefault(use.path, []).append(use)
    return [
        f"{path}{' (new)' if any(use.made for use in group) else ''}:"
        f" {', '.join(use.place.call_id for use in group)}"
        for path, group in files.items()
    ]


def _maybe_changed(found: Deeds) -> list[str]:
    lines = [
        f"{quoted(c.command)} may have changed files ({c.place.call_id})"
        for c in found.changing_commands()
    ]
    return lines + [f"a sub-agent could change files ({p.call_id})" for p in found.delegated]


def _refusal_line(refusal: Refusal) -> str:
    subject = f" {quoted(refusal.subject)}" if refusal.subject else ""
    return f"{refusal.tool}{subject}: {one_line(refusal.reason)} ({refusal.place.call_id})"


def _command_line(command: Command) -> str:
    tests = f"; tests {command.result.value}" if command.tests is not None else ""
    return f"{quoted(command.command)}: {command.told}{tests} ({command.place.call_id})"


def _lines(judged: Judged) -> list[str]:
    reason = f": {judged.reason}" if judged.reason else ""
    subject = f" [{one_line(judged.claim.subject)}]" if judged.claim.subject else ""
    return [
        f"{quoted(judged.claim.sentence)}{subject}",
        f"  {judged.verdict.value}{reason}",
        *(f"  {e.call_id} (turn {e.turn}): {e.what}" for e in judged.evidence),
    ]
