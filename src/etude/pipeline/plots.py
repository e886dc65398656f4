"""Plots of a run as SVG text, to stand inside one self-contained page."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from etude.pipeline.summary import EVALUATIONS, Summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_INK = "#1f2933"
_COLOURS = ("#2463eb", "#e4572e", "#2a9d62", "#8a4fbe")


def _figure(width: float = 6.4, height: float = 3.0) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.grid(axis="y", color="#d9dee5", linewidth=0.8)
    axes.set_axisbelow(True)
    return figure, axes


def _svg(figure: Figure) -> str:
    import matplotlib as mpl

    # Text stays text: smaller, and searchable in the page.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "etude"}):
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)


def scores_plot(summary: Summary) -> str:
    """Held-out pass@1 and pass@k of each evaluation, with 95 % intervals."""
    figure, axes = _figure()
    names = list(summary.scores)
    k = min(s.k for s in summary.scores.values())
    series = (("pass@1", "pass_1"), (f"pass@{k}", "pass_k"))
    for offset, (label, field) in enumerate(series):
        estimates = [getattr(summary.scores[name], field) for name in names]
        values = [e.value for e in estimates]
        errors = [[e.value - e.low for e in estimates], [e.high - e.value for e in estimates]]
        at = [i + (offset - 0.5) * 0.36 for i in range(len(names))]
        axes.bar(at, values, width=0.34, color=_COLOURS[offset], label=label)
        axes.errorbar(at, values, yerr=errors, fmt="none", ecolor=_INK, capsize=3, linewidth=1)
    axes.set_xticks(range(len(names)), [EVALUATIONS[name] for name in names])
    axes.set_ylabel("held-out tasks solved")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, loc="upper left")
    return _svg(figure)


def lines_plot(
    rows: Sequence[dict[str, Any]], series: dict[str, str], x: str, y: str, bottom: float | None = 0
) -> str:
    """Curves of stored step figures: `series` maps a field to its label; `x`, `y` name axes."""
    figure, axes = _figure()
    for colour, (field, label) in zip(_COLOURS, series.items(), strict=False):
        points = [(row["step"] + 1, row[field]) for row in rows if row.get(field) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), marker=".", color=colour, label=label)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if bottom is not None:
        axes.set_ylim(bottom=bottom)
    if len(series) > 1 and axes.lines:
        axes.legend(frameon=False)
    return _svg(figure)


def phases_plot(summary: Summary) -> str:
    """Minutes by phase, in the order in which they ran."""
    figure, axes = _figure(height=0.5 + 0.32 * max(len(summary.phases), 1))
    names = list(summary.phases)[::-1]
    minutes = [summary.phases[name] / 60 for name in names]
    bars = axes.barh(names, minutes, color=_COLOURS[0], height=0.6)
    axes.bar_label(bars, [f"{m:.1f}" for m in minutes], padding=3)
    axes.grid(visible=False)
    axes.set_xlabel("minutes")
    return _svg(figure)
