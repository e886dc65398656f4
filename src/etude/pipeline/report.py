"""The report of a run: one self-contained HTML page."""

from __future__ import annotations

import math
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from etude.agent.transcript import to_text
from etude.errors import EtudeError
from etude.evaluation.statistics import Estimate
from etude.pipeline.plots import lines_plot, phases_plot, scores_plot
from etude.pipeline.run import Run
from etude.pipeline.summary import EVALUATIONS, Summary, showcase, summarize
from etude.records import Trajectory
from etude.store import write_atomically


def percent(estimate: Estimate) -> str:
    """`12.3 % [8.0, 17.1]`, or a dash where there is nothing to divide by."""
    if math.isnan(estimate.value):
        return "–"
    return f"{100 * estimate.value:.1f} % [{100 * estimate.low:.1f}, {100 * estimate.high:.1f}]"


def headline(summary: Summary) -> str:
    """One sentence with the main figure as it is, good or bad."""
    names = list(summary.scores)
    if names[-1] != "after":
        return "Practice is not finished yet: these figures are of the phases so far"
    first, last = summary.scores[names[0]].pass_1.value, summary.scores[names[-1]].pass_1.value
    return f"Held-out pass@1 went from {100 * first:.1f} % to {100 * last:.1f} %"


def table(summary: Summary) -> list[dict[str, str]]:
    """Rows of the score table as text."""
    return [
        {
            "name": EVALUATIONS[name],
            "pass_1": percent(score.pass_1),
            "pass_k": percent(score.pass_k),
            "valid": percent(score.valid),
            "correct": percent(score.correct_given_valid),
            "tokens": f"{score.mean_tokens:.0f}",
        }
        for name, score in summary.scores.items()
    ]


def gain_table(summary: Summary) -> list[dict[str, str]]:
    """Rows of paired differences as text."""
    rows: list[dict[str, str]] = []
    for pair, estimate in summary.gains.items():
        later, earlier = pair.split(" - ")
        rows.append(
            {
                "name": f"{EVALUATIONS[later]} against {EVALUATIONS[earlier]}",
                "value": f"{100 * estimate.value:+.1f}",
                "interval": f"[{100 * estimate.low:+.1f}, {100 * estimate.high:+.1f}]",
            }
        )
    return rows


def remarks(summary: Summary) -> list[str]:
    """What a reader must know to take the figures as they are."""
    lines: list[str] = []
    last = summary.gains.get("after - warmup")
    if last is not None and last.low <= 0 <= last.high:
        lines.append(
            "The interval of practice against warm-up holds zero: this run alone does not show"
            " that practice helped."
        )
    lines += [f"The time ceiling ended “{name}” before its plan was done." for name in summary.cut]
    unmeasured = sum(score.unmeasured for score in summary.scores.values())
    if unmeasured:
        lines.append(f"{unmeasured} rollouts could not be measured and are left out.")
    return lines


def write_report(run: Run) -> Path:
    """Write `RUN/report.html`. Raises EtudeError when no evaluation is finished yet, OSError when
    the page cannot be written."""
    summary = summarize(run)
    if not summary.scores:
        raise EtudeError(f"{run.folder} has no finished evaluation to report yet")
    text = resources.files("etude.pipeline").joinpath("report.html.j2").read_text()
    page = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True).from_string(
        text
    )
    details = [(key.replace("_", " "), value) for key, value in summary.facts.items()]
    first = next(iter(summary.scores.values()))
    html = page.render(
        headline=headline(summary),
        facts={
            "source": "",
            "model": "",
            "seed": "",
            "date": "",
            "command": "",
            "temperature": "",
            **summary.facts,
        },
        k=min(score.k for score in summary.scores.values()),
        tasks=first.tasks,
        rows=table(summary),
        gains=gain_table(summary),
        remarks=remarks(summary),
        plots=_plots(summary),
        transcripts=[_exhibit(title, session) for title, session in showcase(run)],
        details=[(key, value) for key, value in details if key != "command"],
    )
    path = run.folder / "report.html"
    write_atomically(path, html.encode())
    return path


def _plots(summary: Summary) -> list[dict[str, str]]:
    plots = [
        {"title": "Held-out evaluation", "svg": scores_plot(summary)},
        {"title": "Time by phase", "svg": phases_plot(summary)},
    ]
    if summary.practice:
        curves = {"pass_rate": "passed", "mean_reward": "reward", "valid_rate": "valid call"}
        plots.append(
            {
                "title": "Practice: rollouts of each step",
                "svg": lines_plot(summary.practice, curves, "step", "mean over rollouts"),
            }
        )
        health = {"entropy": "entropy (nats)", "mismatch_mean": "mean |log ω|"}
        plots.append(
            {
                "title": "Practice: entropy and engine mismatch",
                "svg": lines_plot(summary.practice, health, "step", "per sampled token"),
            }
        )
    for name, title in (("pretrain", "Continued pretraining"), ("warmup", "Warm-up")):
        if summary.losses[name]:
            series = {"loss": "training", "heldout_loss": "held out"}
            svg = lines_plot(summary.losses[name], series, "step", "loss (nats)", bottom=None)
            plots.append({"title": title, "svg": svg})
    return plots


def _exhibit(title: str, session: Trajectory) -> dict[str, Any]:
    verdict = session.outcome.verdict
    return {
        "title": title,
        "verdict": "not graded" if verdict is None else verdict.reason,
        "text": to_text(session.events),
    }
