"""A run as the files in its folder tell it: metrics.jsonl, summary.json, config.yaml."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from opd.alarms import Episode, configured, replayed
from opd.loggers import read_jsonl

ACCURACY = "eval/accuracy"
TOKENS = "rollout/tokens_total"
STAGE = r"time/(?!total$|step$)(.+)"  # sums of stages are no stages

Series = dict[int, float]  # step -> value, by rising step


@dataclass(frozen=True)
class RunLog:
    """One run, finished or not."""

    path: Path
    name: str
    lines: Sequence[Mapping[str, float]]  # of metrics.jsonl, NaN where a value was not finite
    summary: Mapping[str, Any] | None  # summary.json, None while the run has steps to do
    alarms: Sequence[Episode] = ()  # under the run's own thresholds, oldest first

    def series(self, metric: str) -> Series:
        """The metric at the steps where it was logged; the later line of a step wins."""
        return dict(sorted({int(line["step"]): line[metric] for line in self.lines if metric in line}.items()))

    def matching(self, pattern: str) -> dict[str, Series]:
        """The series of every metric whose whole name fits, keyed by the pattern's group that took part."""
        names = dict.fromkeys(name for line in self.lines for name in line)
        matches = [match for name in names if (match := re.fullmatch(pattern, name))]
        return {match[match.lastindex or 0]: self.series(match[0]) for match in matches}

    def last_step(self) -> int:
        """Finished optimiser steps."""
        return int(max(line["step"] for line in self.lines))

    def sampled_tokens(self) -> float | None:
        """Tokens the student has sampled for training; None where the run did not count them."""
        if self.summary is not None:
            return self.summary["sampled_tokens"]
        return max(self.series(TOKENS).values(), default=None)

    def wall_seconds(self) -> dict[str, float]:
        """Seconds by stage: the summary's, with their `total`, or what has been logged so far."""
        if self.summary is not None:
            return dict(self.summary["wall_seconds"])
        stages = self.matching(STAGE).items()
        return {stage: sum(value for value in values.values() if math.isfinite(value)) for stage, values in stages}

    def evals(self) -> dict[str, float | None]:
        """before, after, teacher, kl_before, kl_after: the summary's, or the first and latest evaluation so far."""
        if self.summary is not None:
            return dict(self.summary["eval"])
        known: dict[str, float | None] = {}
        for prefix, metric in (("", ACCURACY), ("kl_", "eval/kl")):
            values = list(self.series(metric).values())
            if values:
                known[f"{prefix}before"] = values[0]
            if len(values) > 1:
                known[f"{prefix}after"] = values[-1]
        return known

    def final_metrics(self) -> dict[str, float | None]:
        """The summary's, or the latest value of every metric so far."""
        if self.summary is not None:
            return dict(self.summary["final_metrics"])
        return {name: values[max(values)] for name, values in self.matching(r"(?!step$|time$)(.+)").items()}


def load_run(run_dir: Path) -> RunLog:
    """Read a run's folder. Raises ValueError where there is no run, or one that has logged nothing yet."""
    metrics = run_dir / "metrics.jsonl"
    if not metrics.is_file():
        raise ValueError(f"{run_dir}: no metrics.jsonl in it; give the run_dir of a run, such as outputs/quickstart")
    records = read_jsonl(metrics)
    if not records:
        raise ValueError(f"{metrics}: empty; wait until the run has finished a step, or start it again")
    lines = [{key: math.nan if value is None else value for key, value in record.items()} for record in records]
    summary = _summary(run_dir / "summary.json", max(record["step"] for record in records))
    config = _config(run_dir)
    alarms = replayed(configured(config.get("alarms", {})), records).episodes
    return RunLog(run_dir, _name(run_dir, config), lines, summary, alarms)


def _summary(file: Path, last_step: int) -> Mapping[str, Any] | None:
    """summary.json; None where there is none, or where the run has gone on since."""
    summary = json.loads(file.read_text("utf-8")) if file.exists() else None
    return None if summary is None or summary["steps"] < last_step else summary


def _config(run_dir: Path) -> Mapping[str, Any]:
    """config.yaml; empty where there is none."""
    config = run_dir / "config.yaml"
    return yaml.safe_load(config.read_text("utf-8")) if config.exists() else {}


def _name(run_dir: Path, config: Mapping[str, Any]) -> str:
    """The experiment that the configuration names; without one the folder's name."""
    experiment = config.get("experiment")
    return experiment if isinstance(experiment, str) else run_dir.resolve().name


def labels(runs: list[RunLog]) -> list[str]:
    """A name for each run that no other bears: the shortest of experiment, experiment with folder, path."""
    choices = [[run.name, f"{run.name} ({run.path.resolve().name})", str(run.path)] for run in runs]
    return [
        next((text for rank, text in enumerate(mine) if [other[rank] for other in choices].count(text) == 1), mine[-1])
        for mine in choices
    ]
