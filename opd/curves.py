"""The curves of a run as one picture. A panel appears only where the run has logged something for it."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from opd.run_log import ACCURACY, STAGE, TOKENS, RunLog, Series, labels


class Panel(NamedTuple):
    """Axes over steps for every metric that the pattern matches; the pattern's group names the line."""

    title: str
    unit: str
    pattern: str


PANELS = (
    Panel("KL to the teacher", "nats per token", r"teacher/(.+)/kl|(eval/kl)"),
    Panel("Reward", "", r"reward/(.+)"),
    Panel("Loss by term", "", r"loss/(.+)"),
    Panel("Gradient norm", "", r"grad_norm"),
    Panel("Response length", "tokens", r"rollout/length"),
    Panel("Truncated responses", "share", r"rollout/truncated"),
    Panel("Entropy", "nats per token", r"(?:teacher/)?(.+)/entropy"),
    Panel("Sampler against trainer, p95", "|log-prob difference|", r"mismatch/logp_diff_p95"),
    Panel("Time per step by stage", "seconds", STAGE),
)
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]  # Okabe and Ito, less yellow
DASHES = ["-", "--", "-.", ":"]
BINS = 25  # a run is smoothed and summed in parts of 1/25
STYLE = {
    "font.size": 12,
    "axes.titlesize": 13,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.35,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "legend.fontsize": 11,
}


def draw_curves(runs: list[RunLog]) -> bytes:
    """A PNG of the first run's panels; the other runs join it in the accuracy axes."""
    run = runs[0]
    panels = [panel for panel in PANELS if run.matching(panel.pattern)]
    top = int(any(other.series(ACCURACY) for other in runs))
    if not panels and not top:
        raise ValueError(f"{run.path / 'metrics.jsonl'}: none of its metrics has a curve; let the run finish a step")
    rows = math.ceil(len(panels) / 2)
    with style.context(["default", STYLE]):
        figure = Figure(figsize=(12, 4.2 * top + 3.2 * rows), dpi=130, layout="constrained", facecolor="white")
        grid = figure.add_gridspec(top + rows, 2, height_ratios=[1.3] * top + [1.0] * rows)
        if top:
            draw_accuracy(figure.add_subplot(grid[0, :]), runs)
        for index, panel in enumerate(panels):
            spans = index == len(panels) - 1 and index % 2 == 0
            axes = figure.add_subplot(grid[top + index // 2, slice(None) if spans else index % 2])
            (draw_stack if panel.pattern == STAGE else draw_lines)(axes, run.matching(panel.pattern))
            axes.set(title=panel.title, xlabel="step", ylabel=panel.unit)
        png = io.BytesIO()
        figure.savefig(png, format="png")
    return png.getvalue()


def draw_accuracy(axes: Axes, runs: list[RunLog]) -> None:
    """Held-out accuracy over sampled tokens; over steps where one of the runs has not counted its tokens."""
    shown = [(label, run) for label, run in zip(labels(runs), runs, strict=True) if run.series(ACCURACY)]
    in_tokens = all(run.series(TOKENS) for _, run in shown)
    for index, (label, run) in enumerate(shown):
        accuracy, tokens = run.series(ACCURACY), run.series(TOKENS)
        x = [max((t for at, t in tokens.items() if at <= step), default=0) if in_tokens else step for step in accuracy]
        axes.plot(x, list(accuracy.values()), marker="o", markersize=4, label=label, **_line(index))
    teacher = runs[0].evals().get("teacher")
    if teacher is not None:
        axes.axhline(teacher, color="0.3", linestyle=(0, (6, 4)), linewidth=1.5, label=f"teacher ({teacher:.3f})")
    if in_tokens:
        axes.set_xlim(left=0, right=None if axes.dataLim.x1 > 0 else 1000)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set(title="Held-out accuracy", xlabel="sampled tokens" if in_tokens else "step", ylabel="accuracy")
    axes.legend(loc="best")


def draw_lines(axes: Axes, lines: Mapping[str, Series]) -> None:
    """Each metric's running mean, the values themselves pale behind it, crosses below where they are not finite.

    A metric that was zero throughout is left out where there are others.
    """
    shown = {label: values for label, values in lines.items() if any(values.values())} or lines
    for index, (label, values) in enumerate(shown.items()):
        line, steps, raw = _line(index), np.array(list(values)), np.array(list(values.values()), dtype=float)
        if len(raw) >= 2 * BINS:
            axes.plot(steps, raw, color=line["color"], alpha=0.25, linewidth=1)
        axes.plot(steps, running_mean(raw), label=label, marker="o" if len(raw) < BINS else None, markersize=4, **line)
        broken = steps[~np.isfinite(raw)]
        if broken.size:
            foot = axes.get_xaxis_transform()
            axes.plot(broken, np.full(broken.size, 0.03), "x", color=line["color"], transform=foot, label="not finite")
    finite = [value for values in lines.values() for value in values.values() if math.isfinite(value)]
    if finite and min(finite) > 0 and max(finite) > 100 * min(finite):
        axes.set_yscale("log")
    if len(axes.get_legend_handles_labels()[1]) > 1:
        axes.legend(loc="best")


def draw_stack(axes: Axes, stages: Mapping[str, Series]) -> None:
    """Mean seconds per step of neighbouring steps, stages stacked; a peak such as a slow first step is cut."""
    steps = sorted({step for values in stages.values() for step in values})
    bins = np.array_split(np.array(steps), min(BINS, len(steps)))
    left = np.array([part[0] - 0.5 for part in bins])
    width = np.diff(left, append=steps[-1] + 0.5)
    base = np.zeros(len(bins))
    for index, (stage, values) in enumerate(stages.items()):
        height = np.array([np.nan_to_num([values.get(int(step), 0.0) for step in part]).mean() for part in bins])
        look: dict[str, Any] = {"color": COLOURS[index % len(COLOURS)], "edgecolor": "white", "linewidth": 0.5}
        axes.bar(left, height, width, bottom=base, align="edge", label=stage, **look)
        base += height
    top = 1.6 * float(np.percentile(base, 80))
    if 0 < top < base.max():
        axes.set_ylim(0, top)
        axes.text(0.99, 0.97, f"cut: highest {base.max():.3g} s", transform=axes.transAxes, ha="right", va="top")
    axes.margins(x=0)
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=len(stages), columnspacing=1.2, handlelength=1)


def running_mean(values: np.ndarray) -> np.ndarray:
    """Mean of the finite ones among the nearest 4 % of values, at each place; NaN where there is none."""
    ones, finite = np.ones(max(1, len(values) // BINS)), np.isfinite(values)
    total = np.convolve(np.where(finite, values, 0.0), ones, mode="same")
    count = np.convolve(finite.astype(float), ones, mode="same")
    return np.divide(total, count, out=np.full(len(values), np.nan), where=count > 0.5)


def _line(index: int) -> dict[str, Any]:
    """Colour and dash of the index-th line, so that nobody has to tell lines by colour alone."""
    return {"color": COLOURS[index % len(COLOURS)], "linestyle": DASHES[index % len(DASHES)], "linewidth": 2}
