"""Numbers that change over the run: any `weight` may be a number or one of these."""

from __future__ import annotations

from dataclasses import dataclass
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


Scheduled = float | Schedule  # a number, or one that follows progress


def at(value: Scheduled, progress: float) -> float:
    """The number at `progress`."""
    return value(progress) if isinstance(value, Schedule) else float(value)
