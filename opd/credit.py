"""From rewards to advantages."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev, stdev
from typing import Literal, Protocol, runtime_checkable

from opd.records import Credit, Mean, Reward, Rollout


@runtime_checkable
class CreditAssigner(Protocol):
    """Gives each rollout its credit; sees all samples of a group together."""

    @property
    def min_group(self) -> int:
        """The smallest number of samples per prompt that can carry a signal."""
        ...

    def assign(self, rollouts: Sequence[Rollout], rewards: Sequence[Reward]) -> list[Credit]:
        """One credit per rollout, in order."""
        ...


@dataclass(frozen=True)
class NoCredit:
    """Rewards are logged but train nothing."""

    min_group: int = 1

    def assign(self, rollouts: Sequence[Rollout], rewards: Sequence[Reward]) -> list[Credit]:
        """No row has an advantage."""
        return [Credit(None) for _ in rollouts]


@dataclass(frozen=True)
class GRPO:
    """A = (r - group mean) / (group deviation + epsilon), over the samples of a prompt that have a reward (2402.03300).

    `deviation`: `population` (divides by G), `sample` (divides by G - 1) or `none` (Dr. GRPO, 2503.20783). Equal rewards
    and groups of one give exactly 0; `epsilon` is added here and nowhere else.
    """

    deviation: Literal["population", "sample", "none"] = "population"
    epsilon: float = 1e-6
    min_group: int = 2

    def assign(self, rollouts: Sequence[Rollout], rewards: Sequence[Reward]) -> list[Credit]:
        """Group-relative advantages; rows without a reward stay without one and do not move their siblings."""
        groups: dict[tuple[str, str], list[float]] = defaultdict(list)
        for rollout, reward in zip(rollouts, rewards, strict=True):
            if reward.value is not None:
                groups[rollout.group].append(reward.value)
        return [
            Credit(None if reward.value is None else self._advantage(reward.value, groups[rollout.group]))
            for rollout, reward in zip(rollouts, rewards, strict=True)
        ]

    def _advantage(self, value: float, group: Sequence[float]) -> float:
        if len(group) < 2 or min(group) == max(group):
            return 0.0
        centered = value - fmean(group)
        if self.deviation == "none":
            return centered
        spread = pstdev(group) if self.deviation == "population" else stdev(group)
        return centered / (spread + self.epsilon)


def informative_share(rollouts: Sequence[Rollout], rewards: Sequence[Reward]) -> Mean:
    """Share of groups whose rewards differ: the others give a reward term no gradient."""
    groups: dict[tuple[str, str], set[float]] = {}
    for rollout, reward in zip(rollouts, rewards, strict=True):
        seen = groups.setdefault(rollout.group, set())
        if reward.value is not None:
            seen.add(reward.value)
    return Mean(float(sum(len(seen) > 1 for seen in groups.values())), float(len(groups)))
