"""Advantages by hand. Two of eight right: mean .25, population deviation .4330, sample deviation .4629."""

from __future__ import annotations

import pytest

from opd.credit import GRPO, NoCredit, informative_share
from opd.records import Example, Prompt, Reward, Rollout


def group(values: list[float | None], prompt_id: str = "0") -> tuple[list[Rollout], list[Reward]]:
    prompt = Prompt(prompt_id, "main", [3], Example("x"), len(values))
    return [Rollout(prompt, i, [4], [-1.0], "", "stop", 0) for i in range(len(values))], [Reward(v) for v in values]


def advantages(credit: GRPO, values: list[float | None]) -> list[float | None]:
    return [item.advantage for item in credit.assign(*group(values))]


@pytest.mark.parametrize(
    ("deviation", "right", "wrong"),
    [("population", 1.7321, -0.5774), ("sample", 1.6202, -0.5401), ("none", 0.75, -0.25)],
)
def test_two_of_eight(deviation: str, right: float, wrong: float) -> None:
    found = advantages(GRPO(deviation=deviation), [1.0, 1.0] + [0.0] * 6)
    assert found == pytest.approx([right] * 2 + [wrong] * 6, abs=1e-4)


@pytest.mark.parametrize("values", [[1.0] * 4, [0.1 + 0.2] * 3, [2.0]])
def test_no_spread_gives_exactly_zero(values: list[float]) -> None:
    assert advantages(GRPO(), values) == [0.0] * len(values)


def test_nearly_equal_rewards_are_tempered_by_epsilon() -> None:
    """1 and 1.00001: deviation 5e-6, so A = 5e-6 / (5e-6 + 1e-6) = .8333, finite and below one."""
    assert advantages(GRPO(epsilon=1e-6), [1.0, 1.00001]) == pytest.approx([-0.8333, 0.8333], abs=1e-3)


def test_a_row_without_reward_does_not_move_its_siblings() -> None:
    """Of (1, none, 0, 1) the mean is 2/3 over three, not 1/2 over four."""
    found = advantages(GRPO(deviation="none"), [1.0, None, 0.0, 1.0])
    assert found[1] is None
    assert [found[i] for i in (0, 2, 3)] == pytest.approx([1 / 3, -2 / 3, 1 / 3])


def test_groups_do_not_mix_and_the_informative_share_is_counted() -> None:
    parts = [group([1.0] * 4, "a"), group([0.0, 1.0, 0.0, 1.0], "b"), group([2.0], "c")]
    rollouts, rewards = [r for p in parts for r in p[0]], [r for p in parts for r in p[1]]
    found = [item.advantage for item in GRPO().assign(rollouts, rewards)]
    assert found[:4] == [0.0] * 4
    assert found[4:8] == pytest.approx([-1.0, 1.0, -1.0, 1.0], abs=1e-5)
    assert found[8] == 0.0
    assert informative_share(rollouts, rewards).value == pytest.approx(1 / 3)


def test_no_credit_trains_nothing() -> None:
    assert [item.advantage for item in NoCredit().assign(*group([1.0, 0.0]))] == [None, None]
