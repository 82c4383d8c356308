"""A reward is a function of a batch of rollouts: one value each, None where there is no verdict."""

from collections.abc import Sequence

from opd.records import Rollout


def right_digits(rollouts: Sequence[Rollout], total: int = 6) -> list[float | None]:
    """Share of the answer's digits that are right, place by place."""
    return [
        None
        if rollout.prompt.example.answer is None
        else sum(a == b for a, b in zip(rollout.text, rollout.prompt.example.answer, strict=False)) / total
        for rollout in rollouts
    ]
