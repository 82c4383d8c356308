"""Reward functions that behave and misbehave, importable by the reward worker."""

import os
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from opd.records import Rollout


class AwkwardError(Exception):
    """Pickles, but does not come back: its constructor takes more than its `args`."""

    def __init__(self, code: int, detail: str) -> None:
        super().__init__(f"code {code}")
        self.detail = detail


def give(rollouts: Sequence[Rollout], values: Any) -> Any:
    """Answers `values` whatever it is asked."""
    return values


def number_of_row(rollouts: Sequence[Rollout]) -> list[float | None]:
    """A well-behaved function: row 3 gets 3.0."""
    return [float(rollout.sample_index) for rollout in rollouts]


def raise_on(rollouts: Sequence[Rollout], row: int) -> list[float | None]:
    """Fails when one row is among those it is asked about."""
    if any(rollout.sample_index == row for rollout in rollouts):
        raise ValueError(f"row {row} is bad")
    return number_of_row(rollouts)


def raise_awkwardly(rollouts: Sequence[Rollout]) -> list[float | None]:
    """Fails with an exception that does not survive the way back."""
    raise AwkwardError(7, "no detail")


def raise_timeout(rollouts: Sequence[Rollout]) -> list[float | None]:
    """Fails as a network client does; the stage's own limit has nothing to do with it."""
    raise TimeoutError("the judge did not answer")


def leave(rollouts: Sequence[Rollout]) -> list[float | None]:
    """Asks its process to end, politely."""
    sys.exit(3)


def die_on(rollouts: Sequence[Rollout], row: int) -> list[float | None]:
    """Ends its process at once, as a crash in C code does."""
    if any(rollout.sample_index == row for rollout in rollouts):
        os._exit(3)
    return number_of_row(rollouts)


def hang_on(rollouts: Sequence[Rollout], rows: Sequence[int]) -> list[float | None]:
    """Sleeps for ever when one of the rows is among those it is asked about."""
    if any(rollout.sample_index in rows for rollout in rollouts):
        time.sleep(3600)
    return number_of_row(rollouts)


def hold_the_interpreter(rollouts: Sequence[Rollout]) -> list[float | None]:
    """Catastrophic backtracking: C code that lets no other thread of its process run."""
    return [float(bool(re.match(r"(a+)+$", "a" * 64 + "b")))]


def tell_process(rollouts: Sequence[Rollout]) -> list[float | None]:
    """The number of the process it runs in."""
    return [float(os.getpid()) for _ in rollouts]


def tell_process_slowly(rollouts: Sequence[Rollout]) -> list[float | None]:
    """The same, after two seconds."""
    time.sleep(2.0)
    return tell_process(rollouts)


def report_and_hang(rollouts: Sequence[Rollout], path: str) -> list[float | None]:
    """Writes the number of its process to a file and sleeps for ever."""
    with open(path, "w") as file:
        file.write(str(os.getpid()))
    time.sleep(3600)
    return []


@dataclass(frozen=True)
class InProcessSquare:
    """Runs beside the trainer."""

    in_process: ClassVar[bool] = True

    def __call__(self, rollouts: Sequence[Rollout]) -> list[float | None]:
        return [float(rollout.sample_index**2) for rollout in rollouts]


@dataclass(frozen=True)
class RowByRow:
    """Wants its rows asked alone; hangs on some of them."""

    hanging: tuple[int, ...] = ()
    row_limit: float = 0.4

    def __call__(self, rollouts: Sequence[Rollout]) -> list[float | None]:
        assert len(rollouts) == 1
        return hang_on(rollouts, self.hanging)
