"""Advantages beyond GRPO, by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from opd.credit import GDPO, RLOO, BatchMean, CreditAssigner, MaxRL, ReinforcePP
from opd.records import Example, Prompt, Reward, Rollout

Values = Sequence[float | None]


def advantages(credit: CreditAssigner, *groups: Values) -> list[float | None]:
    """Of groups of rewards, in order."""
    pairs = [(rollout(str(g), i), Reward(v)) for g, values in enumerate(groups) for i, v in enumerate(values)]
    return [item.advantage for item in credit.assign([r for r, _ in pairs], [v for _, v in pairs])]


def rollout(group: str, index: int) -> Rollout:
    """A sample of a prompt."""
    return Rollout(Prompt(group, "main", [3], Example("x")), index, [4], [-1.0], "", "stop", 0)


TWO_OF_EIGHT = [1.0, 1.0] + [0.0] * 6


# ------------------------------------------------------------------------------------------------------ RLOO and MaxRL


def test_rloo_two_of_eight() -> None:
    """8/7 (1 - 1/4) = .8571; 8/7 (0 - 1/4) = -.2857."""
    assert advantages(RLOO(), TWO_OF_EIGHT) == pytest.approx([6 / 7] * 2 + [-2 / 7] * 6)


def test_rloo_is_the_difference_to_the_others_mean() -> None:
    """(3, 1, 2): 3 - 1.5, 1 - 2.5, 2 - 2; the row without a reward is no sibling."""
    assert advantages(RLOO(), [3.0, None, 1.0, 2.0]) == [1.5, None, -1.5, 0.0]


@pytest.mark.parametrize("credit", [RLOO(), MaxRL()], ids=str)
def test_lone_and_equal_rewards_teach_nothing(credit: CreditAssigner) -> None:
    assert advantages(credit, [2.0], [None, 1.0], [0.5] * 3) == [0.0, None, 0.0, 0.0, 0.0, 0.0]


def test_maxrl() -> None:
    """Mean 1/4: (1 - 1/4) / (1/4) = 3 and -1; a group without any success gives 0; groups do not mix."""
    assert advantages(MaxRL(), TWO_OF_EIGHT, [0.0, 0.0], [1.0, 0.0]) == pytest.approx(
        [3.0] * 2 + [-1.0] * 6 + [0.0, 0.0] + [1.0, -1.0]
    )


# ------------------------------------------------------------------------------------------------------------ the batch


def test_batch_mean() -> None:
    """One sample per prompt: (1, 0, 0, 1, -) has the mean 1/2; no deviation."""
    assert advantages(BatchMean(), [1.0], [0.0], [0.0], [1.0], [None]) == [0.5, -0.5, -0.5, 0.5, None]
    assert BatchMean().min_group == 1


def test_nothing_judged() -> None:
    for credit in (BatchMean(), ReinforcePP(), ReinforcePP(group_baseline=True), GDPO(), RLOO(), MaxRL()):
        assert advantages(credit, [None, None]) == [None, None]


def test_reinforce_pp() -> None:
    """(1, 0, 0, 1) over the batch: mean 1/2, deviation 1/2, so +-1, less the 1e-6 of epsilon."""
    assert advantages(ReinforcePP(), [1.0, 0.0], [0.0, 1.0]) == pytest.approx([1.0, -1.0, -1.0, 1.0], abs=1e-5)
    assert ReinforcePP().min_group == 1


def test_reinforce_pp_with_the_group_s_baseline() -> None:
    """Groups (1, 0) and (8, 4): centred (.5, -.5, 2, -2); mean 0, deviation sqrt((.25 + .25 + 4 + 4) / 4) = 1.4577."""
    found = advantages(ReinforcePP(group_baseline=True), [1.0, 0.0], [8.0, 4.0])
    assert found == pytest.approx([0.3430, -0.3430, 1.3720, -1.3720], abs=1e-4)
    assert ReinforcePP(group_baseline=True).min_group == 2


def test_equal_rewards_over_the_batch_give_zero() -> None:
    assert advantages(ReinforcePP(), [1.0], [1.0]) == [0.0, 0.0]


# ---------------------------------------------------------------------------------------------------------------- GDPO


def parts(*rewards: dict[str, float | None], credit: GDPO) -> list[float | None]:
    """Of one group with named parts; the value is missing as soon as a part is."""
    values = [None if None in part.values() else sum(v for v in part.values() if v is not None) for part in rewards]
    given = [Reward(value, part) for value, part in zip(values, rewards, strict=True)]
    return [item.advantage for item in credit.assign([rollout("a", i) for i in range(len(rewards))], given)]


def test_gdpo_tells_apart_what_a_sum_cannot() -> None:
    """Sums 1, 1, 1, 2: the group's advantage of the sum cannot tell the first three.

    hard (0, 0, 1, 1): +-1. easy (1, 1, 0, 1): mean .75, deviation .4330, so .5774 and -1.7321. Added: -.4226, -.4226,
    -.7321, 1.5774.
    """
    rows = [{"hard": h, "easy": e} for h, e in ((0.0, 1.0), (0.0, 1.0), (1.0, 0.0), (1.0, 1.0))]
    found = parts(*rows, credit=GDPO(whiten=False))
    assert found == pytest.approx([-0.4226, -0.4226, -0.7321, 1.5774], abs=1e-3)


def test_gdpo_whitens_over_the_batch() -> None:
    """(-.4226, -.4226, -.7321, 1.5774): mean 0, deviation sqrt(3.3813 / 4) = .9194."""
    rows = [{"hard": h, "easy": e} for h, e in ((0.0, 1.0), (0.0, 1.0), (1.0, 0.0), (1.0, 1.0))]
    assert parts(*rows, credit=GDPO()) == pytest.approx([-0.4597, -0.4597, -0.7963, 1.7157], abs=1e-3)


def test_gdpo_weights() -> None:
    """Half of hard's +-1 and all of easy's."""
    rows = [{"hard": h, "easy": e} for h, e in ((0.0, 1.0), (0.0, 1.0), (1.0, 0.0), (1.0, 1.0))]
    found = parts(*rows, credit=GDPO(weights={"hard": 0.5}, whiten=False))
    assert found == pytest.approx([0.0774, 0.0774, -1.2321, 1.0774], abs=1e-3)


def test_a_conditional_reward_counts_only_where_the_other_is_reached() -> None:
    """easy counts where hard is right: (0, 0, 0, 1), deviation .4330, so 1.7321 and -.5774, beside hard's +-1."""
    rows = [{"hard": h, "easy": e} for h, e in ((0.0, 1.0), (0.0, 1.0), (1.0, 0.0), (1.0, 1.0))]
    found = parts(*rows, credit=GDPO(conditions={"easy": "hard"}, whiten=False))
    assert found == pytest.approx([-1.5774, -1.5774, 0.4226, 2.7321], abs=1e-3)


def test_the_threshold_of_a_condition() -> None:
    """hard (.4, .8) at threshold .5: easy (1, 1) becomes (0, 1). Both +-1, so -2 and 2."""
    rows = [{"hard": 0.4, "easy": 1.0}, {"hard": 0.8, "easy": 1.0}]
    assert parts(*rows, credit=GDPO(conditions={"easy": "hard"}, threshold=0.5, whiten=False)) == pytest.approx(
        [-2.0, 2.0], abs=1e-2
    )


def test_a_row_that_lacks_a_part_has_no_advantage_and_moves_no_sibling() -> None:
    """Without the third row hard is (0, 1) and easy (1, 0): +-1 each, which cancel; with it as 0 they would not."""
    rows: list[dict[str, float | None]] = [
        {"hard": 0.0, "easy": 1.0}, {"hard": 1.0, "easy": 0.0}, {"hard": None, "easy": 1.0},
    ]  # fmt: skip
    assert parts(*rows, credit=GDPO(whiten=False)) == [pytest.approx(0.0), pytest.approx(0.0), None]


def test_a_reward_on_which_all_agree_adds_nothing() -> None:
    rows = [{"hard": h, "easy": 1.0} for h in (0.0, 1.0)]
    assert parts(*rows, credit=GDPO(whiten=False)) == pytest.approx([-1.0, 1.0], abs=1e-3)
