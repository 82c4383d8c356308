"""Weights over the run."""

from __future__ import annotations

import pytest

from opd.schedules import Constant, Linear, Switch, SwitchOnPlateau, at


def test_linear_between_two_points() -> None:
    """1 to 0 until 80 %: .5 at 40 %, 0 from 80 % on."""
    weight = Linear(1.0, 0.0, until=0.8)
    assert [weight(p) for p in (0.0, 0.4, 0.8, 0.99)] == pytest.approx([1.0, 0.5, 0.0, 0.0])
    assert Linear(2.0, 4.0, begin=0.5)(0.25) == 2.0


def test_switch() -> None:
    weight = Switch(1.0, 0.0, at=0.5)
    assert [weight(p) for p in (0.0, 0.49, 0.5, 1.0)] == [1.0, 1.0, 0.0, 0.0]


def test_numbers_and_schedules_are_read_alike() -> None:
    assert at(0.3, 0.9) == 0.3
    assert at(Constant(2.0), 0.9) == 2.0


def accuracies(*values: float) -> list[dict[str, float]]:
    return [{"eval/accuracy": value} for value in values]


@pytest.mark.parametrize(
    ("history", "value"),
    [
        ((), 1.0),
        ((0.1, 0.2, 0.3, 0.4), 1.0),
        ((0.1, 0.5, 0.505, 0.5, 0.49), 0.0),  # three evaluations without a rise of .01
        ((0.1, 0.5, 0.5, 0.5), 1.0),
        ((0.5, 0.5, 0.5, 0.5, 0.9), 0.0),  # once switched, it stays
    ],
)
def test_switch_on_a_plateau(history: tuple[float, ...], value: float) -> None:
    assert SwitchOnPlateau(1.0, 0.0, patience=3).informed_by(accuracies(*history))(0.5) == value


def test_a_falling_metric_and_a_late_start() -> None:
    falling = [{"eval/kl": value} for value in (2.0, 1.0, 1.0, 1.0)]
    assert SwitchOnPlateau(1.0, 0.0, metric="eval/kl", sign=-1.0, patience=2).informed_by(falling)(0.0) == 0.0
    assert SwitchOnPlateau(1.0, 0.0, metric="eval/kl", sign=-1.0, patience=2, start=9).informed_by(falling)(0.0) == 1.0


@pytest.mark.parametrize("bad", [{"begin": 0.5, "until": 0.5}, {"begin": -0.1}, {"until": 1.1}])
def test_ranges_are_checked(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="begin"):
        Linear(1.0, 0.0, **bad)
