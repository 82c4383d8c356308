"""The curves of a run as one picture. A panel appears only where the run has logged something for it."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
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
    Panel("Top-16 overlap with the teacher", "share", r"teacher/(.+)/overlap16"),
    Panel("|Teacher - student log-prob|, p99", "nats", r"teacher/(.+)/delta_p99"),
    Panel("Probability of stopping where stopped", "", r"(?:teacher/)?(.+)/stop_mass_end"),
    Panel("Sampler against trainer, p95", "|log-prob difference|", r"mismatch/logp_diff_p95"),
    Panel("Effective sample size", "share", r"mismatch/ess"),
    Panel("Cosine of the terms' gradients", "", r"diagnostics/cosine/(.+)"),
    Panel("Time per step by stage", "seconds", STAGE),
)
# Okabe and Ito's, grey in place of yellow.
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999"]
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
    """A PNG of every panel for which any of the runs has something; each run keeps its colour throughout."""
    panels = [panel for panel in PANELS if any(run.matching(panel.pattern) for run in runs)]
    top = int(any(run.series(ACCURACY) for run in runs))
    if not panels and not top:
        path = runs[0].path / "metrics.jsonl"
        raise ValueError(f"{path}: none of its metrics has a curve; let the run finish a step")
    halves = [panel for panel in panels if panel.pattern != STAGE]  # stages need the width for their names
    rows = math.ceil(len(halves) / 2) + len(panels) - len(halves)
    with style.context(["default", STYLE]):
        figure = Figure(figsize=(12, 4.2 * top + 3.2 * rows), dpi=130, layout="constrained", facecolor="white")
        grid = figure.add_gridspec(top + rows, 2, height_ratios=[1.3] * top + [1.0] * rows)
        if top:
            draw_accuracy(figure.add_subplot(grid[0, :]), runs)
        for index, panel in enumerate(panels):
            spans = panel.pattern == STAGE or (index == len(halves) - 1 and index % 2 == 0)
            row = top + (rows - 1 if panel.pattern == STAGE else index // 2)
            axes = figure.add_subplot(grid[row, slice(None) if spans else index % 2])
            axes.set(title=panel.title, xlabel="step", ylabel=panel.unit)
            shown = [run.matching(panel.pattern) for run in runs]
            if panel.pattern == STAGE:
                draw_times(axes, dict(zip(labels(runs), shown, strict=True)))
            else:
                draw_lines(axes, shown)
        if len(runs) > 1:
            lines = [Line2D([], [], color=_colour(index), linewidth=4) for index in range(len(runs))]
            figure.legend(lines, labels(runs), loc="outside upper center", ncols=min(len(runs), 4))
        png = io.BytesIO()
        figure.savefig(png, format="png")
    return png.getvalue()


def draw_accuracy(axes: Axes, runs: list[RunLog]) -> None:
    """Held-out accuracy over sampled tokens; over steps where one of the runs has not counted its tokens."""
    shown = [(label, run) for label, run in zip(labels(runs), runs, strict=True) if run.series(ACCURACY)]
    in_tokens = all(run.series(TOKENS) for _, run in shown)
    for label, run in shown:
        accuracy, tokens = run.series(ACCURACY), run.series(TOKENS)
        x = [max((t for at, t in tokens.items() if at <= step), default=0) if in_tokens else step for step in accuracy]
        look = _line(labels(runs).index(label), 0)
        axes.plot(x, list(accuracy.values()), marker="o", markersize=4, label=label, **look)
    teacher = runs[0].evals().get("teacher")
    if teacher is not None:
        axes.axhline(teacher, color="0.3", linestyle=(0, (6, 4)), linewidth=1.5, label=f"teacher ({teacher:.3f})")
    if in_tokens:
        axes.set_xlim(left=0, right=None if axes.dataLim.x1 > 0 else 1000)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set(title="Held-out accuracy", xlabel="sampled tokens" if in_tokens else "step", ylabel="accuracy")
    handles, names = axes.get_legend_handles_labels()
    own = [n for n, name in enumerate(names) if len(runs) == 1 or name not in labels(runs)]  # runs: the figure's legend
    if own:
        axes.legend([handles[n] for n in own], [names[n] for n in own], loc="best")


def draw_lines(axes: Axes, runs: Sequence[Mapping[str, Series]]) -> None:
    """Each metric's running mean, the values themselves pale behind it, crosses below where they are not finite.

    `runs`: the metrics of each. Of one run, metrics differ in colour and dash; of several, the runs differ in colour
    and metrics in dash alone. A metric that was zero throughout is left out where there are others.
    """
    names = list(dict.fromkeys(name for lines in runs for name in lines))
    names = [name for name in names if any(any(lines.get(name, {}).values()) for lines in runs)] or names
    several = len(runs) > 1
    for number, lines in enumerate(runs):
        for name in (name for name in names if name in lines):
            index = names.index(name)
            look = _line(number, index) if several else _line(index, index)
            _draw_line(axes, lines[name], look, None if several else name)
    finite = [value for lines in runs for values in lines.values() for value in values.values() if math.isfinite(value)]
    if finite and min(finite) > 0 and max(finite) > 100 * min(finite):
        axes.set_yscale("log")
    elif finite and max(finite) - min(finite) < 1e-6 * max(map(abs, finite)):  # rounding is no curve
        axes.set_ylim(min(finite) - 0.05, max(finite) + 0.05)
    if several and len(names) > 1:
        dashes = [Line2D([], [], **{**_line(0, index), "color": "0.3"}) for index in range(len(names))]
        axes.legend(dashes, names, loc="best")
    elif len(axes.get_legend_handles_labels()[1]) > 1:
        axes.legend(loc="best")


def _draw_line(axes: Axes, values: Series, look: Mapping[str, Any], label: str | None) -> None:
    steps, raw = np.array(list(values)), np.array(list(values.values()), dtype=float)
    if len(raw) >= 2 * BINS:
        axes.plot(steps, raw, color=look["color"], alpha=0.25, linewidth=1)
    axes.plot(steps, running_mean(raw), label=label, marker="o" if len(raw) < BINS else None, markersize=4, **look)
    broken = steps[~np.isfinite(raw)]
    if broken.size:
        foot, mark = axes.get_xaxis_transform(), "not finite" if label else None
        axes.plot(broken, np.full(broken.size, 0.03), "x", color=look["color"], transform=foot, label=mark)


def draw_times(axes: Axes, runs: Mapping[str, Mapping[str, Series]]) -> None:
    """Seconds per step by stage: of one run over its steps, of several, by name, as one bar each."""
    if len(runs) == 1:
        draw_stack(axes, next(iter(runs.values())))
        return
    left = np.zeros(len(runs))
    for index, stage in enumerate(dict.fromkeys(stage for stages in runs.values() for stage in stages)):
        means = []
        for stages in runs.values():
            steps = {step for values in stages.values() for step in values if step > 0}
            spent = [value for value in stages.get(stage, {}).values() if math.isfinite(value)]
            means.append(sum(spent) / max(1, len(steps)))
        look: dict[str, Any] = {"color": _colour(index), "edgecolor": "white", "linewidth": 0.5}
        axes.barh(list(runs), means, left=left, label=stage, **look)
        left += means
    axes.invert_yaxis()
    axes.set(xlabel="seconds per step", ylabel="")
    _legend_above(axes)


def draw_stack(axes: Axes, stages: Mapping[str, Series]) -> None:
    """Mean seconds per step of neighbouring steps, stages stacked; a peak such as a slow first step is cut."""
    steps = sorted({step for values in stages.values() for step in values})
    bins = np.array_split(np.array(steps), min(BINS, len(steps)))
    left = np.array([part[0] - 0.5 for part in bins])
    width = np.diff(left, append=steps[-1] + 0.5)
    base = np.zeros(len(bins))
    for index, (stage, values) in enumerate(stages.items()):
        height = np.array([np.nan_to_num([values.get(int(step), 0.0) for step in part]).mean() for part in bins])
        look: dict[str, Any] = {"color": _colour(index), "edgecolor": "white", "linewidth": 0.5}
        axes.bar(left, height, width, bottom=base, align="edge", label=stage, **look)
        base += height
    top = 1.6 * float(np.percentile(base, 80))
    if 0 < top < base.max():
        axes.set_ylim(0, top)
        axes.text(0.99, 0.97, f"cut: highest {base.max():.3g} s", transform=axes.transAxes, ha="right", va="top")
    axes.margins(x=0)
    _legend_above(axes)


def _legend_above(axes: Axes) -> None:
    count = len(axes.get_legend_handles_labels()[1])
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=count, columnspacing=1.2, handlelength=1)


def running_mean(values: np.ndarray) -> np.ndarray:
    """Mean of the finite ones among the nearest 4 % of values, at each place; NaN where there is none."""
    ones, finite = np.ones(max(1, len(values) // BINS)), np.isfinite(values)
    total = np.convolve(np.where(finite, values, 0.0), ones, mode="same")
    count = np.convolve(finite.astype(float), ones, mode="same")
    return np.divide(total, count, out=np.full(len(values), np.nan), where=count > 0.5)


def _line(colour: int, dash: int) -> dict[str, Any]:
    """The look of a line; dashes beside colours, so that nobody has to tell lines by colour alone."""
    return {"color": _colour(colour), "linestyle": DASHES[dash % len(DASHES)], "linewidth": 2}


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]
