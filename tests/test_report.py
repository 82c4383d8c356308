"""The report of a run made by hand: what it reads, what it draws, what the page holds."""

from __future__ import annotations

import base64
import io
import json
import math
import re
from collections.abc import Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread
from rich.console import Console

from opd.curves import COLOURS, draw_accuracy, draw_lines, draw_stack, draw_times, running_mean
from opd.loggers import Jsonl
from opd.report import load_run, summary_table, write_report
from opd.run_log import labels

SUMMARY: dict[str, Any] = {
    "steps": 40,
    "sampled_tokens": 80_000,
    "wall_seconds": {
        "sample": 60.0,
        "score": 5.0,
        "update": 30.0,
        "sync": 5.0,
        "eval": 20.0,
        "checkpoint": 0.0,
        "total": 125.0,
    },
    "eval": {"before": 0.25, "after": 0.9, "teacher": 0.96, "kl_before": 1.5, "kl_after": None},
    "final_metrics": {"reward/mean": 0.9, "grad_norm": None},
    "versions": {"opd": "0.1.0", "torch": "2.13.0"},
}


def make_run(
    run_dir: Path,
    summary: Mapping[str, Any] | None = None,
    steps: int = 40,
    name: str | None = None,
    thin: bool = False,
) -> Path:
    """An evaluation before, training at every step, an evaluation at every tenth. A thin run has little to draw."""
    log = Jsonl()
    log.start(run_dir, 0)
    log.log(0, {"eval/accuracy": 0.25, "eval/kl": 1.5, "time/eval": 2.0})
    for step in range(1, steps + 1):
        training = {
            "reward/mean": step / steps,
            "teacher/main/kl": 1 / step,
            "loss/distill": 1 / step,
            "loss/grpo": math.nan if step == 3 else -0.01,
            "rollout/tokens_total": 2000.0 * step,
            "rollout/length": 20.0,
            "rollout/truncated": 0.0,
            "grad_norm": 1.0,
            "time/sample": 1.5,
            "time/update": 0.75,
            "time/total": 2.25,
        }
        log.log(step, {"rollout/tokens_total": 2000.0 * step} if thin else training)
        if step % 10 == 0:
            log.log(step, {"eval/accuracy": 0.25 + 0.65 * step / steps, "eval/kl": 1 / step, "time/eval": 2.0})
    log.close()
    if summary is not None:
        (run_dir / "summary.json").write_text(json.dumps(summary))
    if name is not None:
        (run_dir / "config.yaml").write_text(f"experiment: {name}\nsteps: {steps}\n")
    return run_dir


class Page(HTMLParser):
    """Every tag with its attributes, and the text that a person sees."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(html)
        self.text = re.sub(r"\s+", " ", " ".join(self.words))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def page_of(run_dir: Path, compare: tuple[Path, ...] = ()) -> Page:
    return Page(write_report(run_dir, compare)[1].read_text(encoding="utf-8"))


def test_a_series_is_read_as_it_was_logged(tmp_path: Path) -> None:
    run = load_run(make_run(tmp_path))
    assert run.series("eval/accuracy") == pytest.approx({0: 0.25, 10: 0.4125, 20: 0.575, 30: 0.7375, 40: 0.9})
    assert math.isnan(run.series("loss/grpo")[3])
    assert list(run.matching(r"loss/(.+)")) == ["distill", "grpo"]
    assert run.series("loss/none") == {}


def test_a_run_without_summary_is_told_from_its_metrics(tmp_path: Path) -> None:
    """40 steps of 1.5 s and 0.75 s, five evaluations of 2 s; the sum `time/total` is no stage."""
    run = load_run(make_run(tmp_path))
    assert run.wall_seconds() == pytest.approx({"sample": 60.0, "update": 30.0, "eval": 10.0})
    assert run.evals() == pytest.approx({"before": 0.25, "after": 0.9, "kl_before": 1.5, "kl_after": 1 / 40})
    assert (run.last_step(), run.sampled_tokens()) == (40, 80_000)


def test_the_summary_of_a_run_that_went_on_is_left_aside(tmp_path: Path) -> None:
    """Finished at 40, then trained to 45: until it ends again, its lines tell more."""
    assert load_run(make_run(tmp_path / "done", SUMMARY)).sampled_tokens() == 80_000
    gone_on = load_run(make_run(tmp_path / "on", SUMMARY, steps=45))
    assert (gone_on.summary, gone_on.last_step(), gone_on.sampled_tokens()) == (None, 45, 90_000)


def test_the_picture_is_large_enough_and_not_blank(tmp_path: Path) -> None:
    png, html = write_report(make_run(tmp_path, SUMMARY))
    assert (png, html) == (tmp_path / "report/curves.png", tmp_path / "report/index.html")
    pixels = imread(png)
    height, width, _ = pixels.shape
    assert width >= 1200
    assert height >= 1200
    inked = (pixels[:, :, :3] < 0.9).any(axis=2)
    parts = [part for rows in np.array_split(inked, 4, axis=0) for part in np.array_split(rows, 2, axis=1)]
    assert all(0.002 < part.mean() < 0.6 for part in parts), "every region has ink, none is filled"
    blue = np.abs(pixels[:, :, :3] - np.array([0x00, 0x72, 0xB2]) / 255).max(axis=2) < 0.02
    assert blue.sum() > 1000, "curves are drawn, not axes alone"


def test_the_page_is_one_file(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path, SUMMARY, thin=True))
    sources = [
        attrs[key] or "" for _, attrs in page.tags for key in ("src", "href", "srcset", "action") if key in attrs
    ]
    assert len(sources) == 1
    assert sources[0].startswith("data:image/png;base64,")
    assert base64.b64decode(sources[0].split(",")[1]) == (tmp_path / "report/curves.png").read_bytes()
    assert {"script", "link", "iframe"}.isdisjoint(tag for tag, _ in page.tags)
    html = (tmp_path / "report/index.html").read_text()
    assert not re.search(r"https?:|@import|url\(", html)


def test_the_page_tells_the_summary(tmp_path: Path) -> None:
    text = page_of(make_run(tmp_path, SUMMARY, name="quickstart", thin=True)).text
    for fact in ("steps 40", "sampled tokens 80,000", "accuracy before 25.0%", "accuracy after 90.0%"):
        assert fact in text
    for fact in (
        "accuracy of the teacher 96.0%",
        "after / teacher 93.8%",
        "wall time 2:05",
        "time in sample 60.0 s (48%)",
    ):
        assert fact in text
    for fact in ("quickstart", "reward/mean 0.9", "grad_norm -", "torch 2.13.0", "held-out KL before 1.5"):
        assert fact in text
    assert "held-out KL after" not in text
    assert "Not finished" not in text


def test_the_page_of_a_run_that_still_trains_says_so(tmp_path: Path) -> None:
    text = page_of(make_run(tmp_path, steps=3, thin=True)).text
    assert "Not finished" in text
    assert "steps 3 (not finished)" in text
    assert "accuracy after" not in text


def test_samples_are_shown_as_text(tmp_path: Path) -> None:
    """Markup and half a surrogate pair from the model, a missing answer and reward, a torn last line."""
    samples = [
        {"step": 0, "prompt": "1 + 1 =", "answer": "2", "text": "<script>alert('x')</script> \ud83d", "reward": 0.0},
        {"step": 40, "prompt": "say hi", "answer": None, "text": "https://example.org\u2028hi", "reward": None},
    ]
    run_dir = make_run(tmp_path, SUMMARY, thin=True)
    (run_dir / "samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples) + '{"step": 4')
    page = page_of(run_dir)
    assert "<script>alert('x')</script> ?" in page.text
    assert "script" not in [tag for tag, _ in page.tags]
    assert "40 say hi - https://example.org hi -" in page.text


def test_many_samples_show_the_first_and_the_last(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path, SUMMARY, thin=True)
    sample = {"prompt": "p", "answer": "a", "text": "t", "reward": 1.0}
    lines = [json.dumps({"step": step, **sample}) + "\n" for step in range(1000, 2000)]
    (run_dir / "samples.jsonl").write_text("".join(lines))
    shown = [int(step) for step in re.findall(r"\b1\d\d\d\b", page_of(run_dir).text)]
    assert shown == [*range(1000, 1012), *range(1988, 2000)]


def test_compared_runs_join_axes_and_tables(tmp_path: Path) -> None:
    ours = make_run(tmp_path / "ours", SUMMARY, name="quickstart", thin=True)
    grpo = make_run(tmp_path / "grpo", name="grpo_alone", steps=20, thin=True)
    axes = Figure().add_subplot()
    draw_accuracy(axes, [load_run(ours), load_run(grpo)])
    lines = {str(line.get_label()): line for line in axes.get_lines()}
    assert list(lines) == ["quickstart", "grpo_alone", "teacher (0.960)"]
    assert np.asarray(lines["quickstart"].get_xdata()).tolist() == [0, 20_000, 40_000, 60_000, 80_000]
    assert np.asarray(lines["grpo_alone"].get_xdata()).tolist() == [0, 20_000, 40_000]
    assert np.unique(np.asarray(lines["teacher (0.960)"].get_ydata())).tolist() == [0.96]
    assert axes.get_xlabel() == "sampled tokens"
    text = page_of(ours, (grpo,)).text
    assert "quickstart grpo_alone steps 40 20 (not finished)" in text


def test_runs_of_one_experiment_have_different_names(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("a/seed0", "a/seed1", "b/seed1", "c")]
    runs = [load_run(make_run(folder, name="quickstart")) for folder in folders[:3]]
    runs.append(load_run(make_run(folders[3])))
    assert labels(runs) == ["quickstart (seed0)", str(folders[1]), str(folders[2]), "c"]


def test_only_panels_with_data_are_drawn(tmp_path: Path) -> None:
    log = Jsonl()
    log.start(tmp_path, 0)
    log.log(1, {"reward/mean": 0.5})
    log.close()
    small = imread(write_report(tmp_path)[0])
    full = imread(write_report(make_run(tmp_path / "full"))[0])
    assert small.shape[0] < full.shape[0] / 3


def test_values_that_are_not_finite_are_marked() -> None:
    axes = Figure().add_subplot()
    draw_lines(axes, [{"grpo": {1: 0.5, 2: math.nan, 3: math.inf, 4: 0.5}}])
    (marks,) = [line for line in axes.get_lines() if line.get_label() == "not finite"]
    assert np.asarray(marks.get_xdata()).tolist() == [2, 3]


def test_every_run_is_in_every_panel_in_its_own_colour() -> None:
    """Two runs under one term and a third metric of the second alone: colour tells runs apart, dashes tell metrics."""
    axes = Figure().add_subplot()
    draw_lines(axes, [{"distill": {1: 1.0, 2: 2.0}}, {"distill": {1: 3.0, 2: 4.0}, "grpo": {1: 5.0, 2: 6.0}}])
    seen = [
        (np.asarray(line.get_ydata()).tolist(), line.get_color(), line.get_linestyle()) for line in axes.get_lines()
    ]
    assert seen == [
        ([1.0, 2.0], COLOURS[0], "-"),
        ([3.0, 4.0], COLOURS[1], "-"),
        ([5.0, 6.0], COLOURS[1], "--"),
    ]
    legend = axes.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["distill", "grpo"]


def test_panels_of_any_run_are_drawn(tmp_path: Path) -> None:
    """The first run logged its accuracy alone; compared with a full one it has that one's panels too."""
    thin, full = make_run(tmp_path / "thin", thin=True), make_run(tmp_path / "full", name="full")
    alone = imread(write_report(thin)[0])
    both = imread(write_report(thin, (full,))[0])
    orange = np.abs(both[:, :, :3] - np.array([0xD5, 0x5E, 0x00]) / 255).max(axis=2) < 0.02
    assert both.shape[0] > 1.5 * alone.shape[0]
    parts = np.array_split(orange, 4, axis=0)
    assert all(part.sum() > 50 for part in parts), "the second run's colour is in every part of the picture"


def test_a_line_that_only_rounding_moves_is_flat() -> None:
    axes = Figure().add_subplot()
    draw_lines(axes, [{"ess": {1: 1.0, 2: 1.0 - 1e-13}}])
    low, high = axes.get_ylim()
    assert low < 0.96
    assert high > 1.04


def test_stages_of_several_runs_are_a_bar_each() -> None:
    """Per step: 1 + 2 s, and (3 + 5) / 2 = 4 s; the evaluation before the first step counts no step."""
    axes = Figure().add_subplot()
    draw_times(axes, {"a": {"sample": {1: 1.0}, "update": {1: 2.0}}, "b": {"sample": {0: 3.0, 1: 5.0, 2: 0.0}}})
    widths = [[bar.get_width() for bar in bars] for bars in axes.containers]
    assert widths == [[1.0, 4.0], [2.0, 0.0]]


def test_alarms_are_shown_under_the_thresholds_of_the_run(tmp_path: Path) -> None:
    """p99 of 12 at all three steps: an alarm over the default 10, none where the run raised it to 15."""
    for name, threshold in (("strict", 10.0), ("lax", 15.0)):
        log = Jsonl()
        log.start(tmp_path / name, 0)
        for step in (1, 2, 3):
            log.log(step, {"teacher/main/delta_p99": 12.0})
        log.close()
        (tmp_path / name / "config.yaml").write_text(f"experiment: {name}\nalarms: {{delta: {threshold}}}\n")
    text = page_of(tmp_path / "strict", (tmp_path / "lax",)).text
    assert text.count("alarm delta/main: teacher/main/delta_p99 is 12 nats (over 10)") == 1
    assert "strict 1 to now alarm" in text
    assert "Alarms None." in page_of(tmp_path / "lax").text


def test_stages_are_stacked_and_a_rare_peak_is_cut() -> None:
    """Steps of 1 + 2 s, a first one of 50 + 2 s: bars end at 3, the axes at 1.6 · 3."""
    axes = Figure().add_subplot()
    draw_stack(
        axes, {"sample": {1: 50.0} | dict.fromkeys(range(2, 11), 1.0), "update": dict.fromkeys(range(1, 11), 2.0)}
    )
    tops = [bar.get_y() + bar.get_height() for bar in axes.containers[1]]
    assert tops == [52.0] + [3.0] * 9
    assert axes.get_ylim() == pytest.approx((0, 4.8))


def test_running_mean_takes_the_finite_neighbours() -> None:
    """75 values make a window of 3; each inner mean is of the neighbours that are finite."""
    values = np.arange(75.0)
    values[10] = math.nan
    mean = running_mean(values)
    assert mean[5] == pytest.approx((4 + 5 + 6) / 3)
    assert mean[10] == pytest.approx((9 + 11) / 2)
    assert mean[0] == pytest.approx((0 + 1) / 2)
    assert np.isnan(running_mean(np.array([math.nan]))).all()


def test_the_table_for_the_terminal(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "[red]run", SUMMARY)
    out = io.StringIO()
    Console(file=out, width=200).print(summary_table(load_run(run_dir)))
    text = re.sub(r"[ │]+", " ", out.getvalue())
    for fact in (
        "[red]run",
        "steps 40",
        "sampled tokens 80,000",
        "after / teacher 93.8%",
        "time in update 30.0 s (24%)",
    ):
        assert fact in text


def test_no_run_an_empty_run_and_one_without_curves_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"{tmp_path}/none: no metrics.jsonl in it; give the run_dir"):
        load_run(tmp_path / "none")
    metrics = tmp_path / "metrics.jsonl"
    for text in ("", "\n", '{"step": 1, "ti'):
        metrics.write_text(text)
        with pytest.raises(ValueError, match=r"metrics\.jsonl: empty; wait until"):
            load_run(tmp_path)
    metrics.write_text('{"step": 1, "time": 1.0, "lr": 0.1}\n')
    with pytest.raises(ValueError, match=r"none of its metrics has a curve"):
        write_report(tmp_path)
    assert not (tmp_path / "report").exists()
