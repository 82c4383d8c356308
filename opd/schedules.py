"""Numbers that change over the run: any `weight` may be a number or one of these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Protocol, runtime_checkable


@runtime_checkable
class Schedule(Protocol):
    """A number as a function of training progress."""

    def __call__(self, progress: float) -> float:
        """The value at `progress` in [0, 1): steps done / steps planned."""
        ...


@dataclass(frozen=True)
class Constant:
    """The same value throughout."""

    value: float

    def __call__(self, progress: float) -> float:
        """The value."""
        return self.value


@dataclass(frozen=True)
class Linear:
    """From `start` to `end` in a straight line while progress runs from `begin` to `until`; constant outside."""

    start: float
    end: float
    begin: float = 0.0
    until: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.begin < self.until <= 1.0:
            raise ValueError(f"begin={self.begin}, until={self.until}: must satisfy 0 <= begin < until <= 1")

    def __call__(self, progress: float) -> float:
        """The value at `progress`."""
        share = min(max((progress - self.begin) / (self.until - self.begin), 0.0), 1.0)
        return self.start + share * (self.end - self.start)


@dataclass(frozen=True)
class Switch:
    """`before` until progress reaches `at`, `after` from there on."""

    before: float
    after: float
    at: float = 0.5

    def __call__(self, progress: float) -> float:
        """The value at `progress`."""
        return self.before if progress < self.at else self.after


@runtime_checkable
class Watching(Protocol):
    """A schedule that follows the run's evaluations."""

    def informed_by(self, history: Sequence[Mapping[str, float]]) -> Schedule:
        """The schedule in force once these evaluations, oldest first, are known."""
        ...


@dataclass(frozen=True)
class SwitchOnPlateau:
    """`before` until `metric` has not risen by `min_delta` for `patience` evaluations in a row, `after` from there on.

    `start` evaluations are waited for first; `sign` -1 watches a metric that should fall.
    """

    before: float
    after: float
    metric: str = "eval/accuracy"
    patience: int = 3
    min_delta: float = 0.01
    start: int = 1
    sign: float = 1.0

    def __post_init__(self) -> None:
        if self.patience < 1 or self.start < 1:
            raise ValueError(f"patience={self.patience}, start={self.start}: both must be at least 1")

    def informed_by(self, history: Sequence[Mapping[str, float]]) -> Schedule:
        """`after` for good once the plateau was reached, else `before`."""
        best, idle = -inf, 0
        for number, metrics in enumerate(history, 1):
            value = self.sign * metrics.get(self.metric, -inf)
            idle = 0 if value >= best + self.min_delta else idle + 1
            best = max(best, value)
            if number >= self.start and idle >= self.patience:
                return Constant(self.after)
        return Constant(self.before)

    def __call__(self, progress: float) -> float:
        """Before any evaluation is known."""
        return self.before


Scheduled = float | Schedule  # a number, or one that follows progress


def at(value: Scheduled, progress: float) -> float:
    """The number at `progress`."""
    return value(progress) if isinstance(value, Schedule) else float(value)
