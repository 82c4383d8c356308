"""What can be refused of weights that change, and of the metrics that a run is steered by; see `opd.checks`."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from opd.config import TrainConfig, nearest
from opd.rewards import RESERVED_NAMES
from opd.schedules import Constant, SwitchOnPlateau, Watching

EVALS = {"eval/accuracy", "eval/kl", "eval/length", "eval/truncated"}
METRIC_FAMILIES = {
    "answers", "cost", "diagnostics", "grad_norm", "loss", "lr", "mismatch", "reward", "rollout", "student", "teacher",
    "time", "update", "weight",
}  # fmt: skip


def _best_is_measured(config: TrainConfig) -> Iterator[str]:
    metric = config.checkpoint.best_metric
    if metric is None:
        return
    key = f"checkpoint.best_metric={metric}"
    for what in _lacking(config, metric):
        yield f"{key}: never measured without {what}; add it, or set best_metric=null"
    yield from (f"{key}: {unknown}" for unknown in _unknown(config, metric))


def _lacking(config: TrainConfig, metric: str) -> Iterator[str]:
    """What the run must have, and has not, to measure an evaluation's metric."""
    lacks = {
        "data.heldout": config.data.heldout is None,
        "eval.problems above 0": config.eval.problems == 0,
        "a reward": metric == "eval/accuracy" and not config.reward,
        "a teacher": metric == "eval/kl" and not any(term.teachers for term in config.loss.values()),
    }
    lacking = [what for what, is_lacking in lacks.items() if is_lacking]
    if metric.startswith("eval/") and lacking:
        yield " and ".join(lacking)


def _unknown(config: TrainConfig, metric: str) -> Iterator[str]:
    """Why no metric can be called so."""
    family, _, rest = metric.partition("/")
    name = rest.partition("/")[0]
    teachers = {teacher for term in config.loss.values() for teacher in term.teachers}
    names = {
        "loss": ("loss term", set(config.loss)),
        "weight": ("loss term", set(config.loss)),
        "reward": ("reward", {*config.reward, *RESERVED_NAMES, "informative_groups"}),
        "teacher": ("teacher", teachers),
    }
    if "/" in rest:
        names["eval"] = ("teacher", teachers)
    if metric in EVALS:
        return
    if family in names and rest:
        kind, known = names[family]
        if name not in known:
            yield f"no {kind} is called {name!r}{nearest(name, known, f'{kind}s')}"
    elif family not in METRIC_FAMILIES:
        known = EVALS if family == "eval" else EVALS | METRIC_FAMILIES
        yield f"no metric is called so{nearest(metric, known, 'metrics')}"


def _watched_is_measured(config: TrainConfig) -> Iterator[str]:
    """A schedule that follows evaluations stands where it is told of them, and there are any."""
    for name, term in config.loss.items():
        for key, part in _parts([term.loss, term.correction, term.weigh, term.weight], f"loss.{name}"):
            if not isinstance(part, Watching):
                continue
            kind = type(part).__name__
            if part is not term.weight:
                yield (
                    f"{key}: {kind} follows the evaluations, and only the weight of a term is told of them; use a "
                    "number, Linear or Switch"
                )
                continue
            metric = part.metric if isinstance(part, SwitchOnPlateau) else "eval/"
            key = f"loss.{name}.weight ({kind})"
            if not metric.startswith("eval/"):
                yield f"{key}: metric={metric} is not one of an evaluation{nearest(metric, EVALS, 'metrics')}"
                continue
            for what in _lacking(config, metric):
                yield f"{key}: {metric.rstrip('/')} is never measured without {what}; add it, or use another schedule"
            if metric != "eval/":
                yield from (f"{key}: metric={metric}: {unknown}" for unknown in _unknown(config, metric))


def _weights_are_numbers(config: TrainConfig) -> Iterator[str]:
    for name, term in config.loss.items():
        for key, number in _parts(term.weight, f"loss.{name}.weight"):
            if isinstance(number, float) and not math.isfinite(number):
                yield f"{key.removesuffix('.value')}={number}: must be a finite number"
    if config.loss and all(term.weight == Constant(0.0) for term in config.loss.values()):
        yield f"loss.{next(iter(config.loss))}.weight=0: no term has another weight, so nothing would be trained"


def _parts(node: Any, key: str) -> Iterator[tuple[str, Any]]:
    """The node and all that it is made of, under the keys that configure them."""
    yield key, node
    if isinstance(node, functools.partial):
        node = node.keywords
    if is_dataclass(node) and not isinstance(node, type):
        node = {field.name: getattr(node, field.name) for field in fields(node) if field.init}
    if isinstance(node, Mapping):
        for name, part in node.items():
            yield from _parts(part, f"{key}.{name}")
    if isinstance(node, list | tuple):
        for part in node:
            yield from _parts(part, key)


METRIC_RULES = (_best_is_measured, _watched_is_measured, _weights_are_numbers)
