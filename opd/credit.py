"""From rewards to advantages."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, pstdev, stdev
from typing import ClassVar, Literal, Protocol, runtime_checkable

from opd import ranks
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

    min_group: ClassVar[int] = 1

    def assign(self, rollouts: Sequence[Rollout], rewards: Sequence[Reward]) -> list[Credit]:
        """No row has an advantage."""
        return [Credit(None) for _ in rollouts]


@dataclass(frozen=True)
class GRPO:
    """A = (r - group mean) / (group deviation + epsilon), over the samples of a prompt that have a reward (2402.03300).

    `deviation`: `population` (divides by G), `sample` (divides by G - 1) or `none` (Dr. GRPO, 2503.20783). Equal
    rewards and groups of one give exactly 0; `epsilon` is added here and nowhere else.
    """

    deviation: Literal["population", "sample", "none"] = "population"
    epsilon: float = 1e-6
    min_group: ClassVar[int] = 2

    def assign(self, rollouts: Sequence[Rollout], rewards: Sequence[Reward]) -> list[Credit]:
        """Group-relative advantages; rows without a reward stay without one and do not move their siblings."""
        groups = _by_group(rollouts, rewards)
        return _each(rollouts, rewards, lambda rollout, value: self._advantage(value, groups[rollout.group]))

    def _advantage(self, value: float, group: Sequence[float]) -> float:
        if len(group) < 2 or min(group) == max(group):
            return 0.0
        centered = value - fmean(group)
        if self.deviation == "none":
            return centered
        spread = pstdev(group) if self.deviation == "population" else stdev(group)
        return centered / (spread + self.epsilon)


@dataclass(frozen=True)
class RLOO:
    """A = r - mean of the other samples of the prompt = n / (n - 1) (r - group mean) (2402.14740)."""

    min_group: ClassVar[int] = 2

    def assign(self, rollouts: Sequence[Rollout], rewards: Sequence[Reward]) -> list[Credit]:
        """Leave-one-out advantages; 0 for a lone sample."""
        groups = _by_group(rollouts, rewards)

        def advantage(rollout: Rollout, value: float) -> float:
            group = groups[rollout.group]
            return 0.0 if len(group) < 2 else len(group) / (len(group) - 1) * (value - fmean(group))

        return _each(rollouts, rewards, advantage)


@dataclass(frozen=True)
class MaxRL:
    """A = (r - group mean) / group mean for rewards >= 0: rare successes count more; 0 where no sample succeeds."""

    min_group: ClassVar[int] = 2

    def assign(self, rollouts: Sequence[Rollout], rewards: Sequence[Reward]) -> list[Credit]:
        """Advantages relative to the pass rate."""
        groups = _by_group(rollouts, rewards)

        def advantage(rollout: Rollout, value: float) -> float:
            mean = fmean(groups[rollout.group])
            return (value - mean) / mean if mean > 0 else 0.0

        return _each(rollouts, rewards, advantage)


@dataclass(frozen=True)
class BatchMean:
    """A = r - mean over the batch and all ranks: one sample per prompt suffices (FlashREINFORCE)."""

    min_group: ClassVar[int] = 1

    def assign(self, rollouts: Sequence[Rollout], rewards: Sequence[Reward]) -> list[Credit]:
        """Centred rewards."""
        mean, _ = _moments([reward.value for reward in rewards if reward.value is not None])
        return _each(rollouts, rewards, lambda rollout, value: value - mean)


@dataclass(frozen=True)
class ReinforcePP:
    """REINFORCE++ (2501.03262): rewards whitened over the batch and all ranks.

    `group_baseline` first subtracts the group's mean (the paper's baseline form).
    """

    group_baseline: bool = False
    epsilon: float = 1e-6

    @property
    def min_group(self) -> int:
        """Two with the baseline, else one."""
        return 2 if self.group_baseline else 1

    def assign(self, rollouts: Sequence[Rollout], rewards: Sequence[Reward]) -> list[Credit]:
        """Whitened rewards."""
        groups = _by_group(rollouts, rewards)

        def centred(rollout: Rollout, value: float) -> float:
            return value - fmean(groups[rollout.group]) if self.group_baseline else value

        return _whitened(_each(rollouts, rewards, centred), self.epsilon)


@dataclass(frozen=True)
class GDPO:
    """Every reward normalised in its group by itself, then weighted, added and whitened over the batch (2601.05242).

    Args:
        weights: reward name -> weight; a reward that is not named has weight 1. (A reward's own `weight` belongs to the
            sum that is logged as its value, and plays no part here.)
        conditions: reward name -> another reward that must reach `threshold` for it to count, else it is 0.
    """

    weights: dict[str, float] = field(default_factory=dict)
    conditions: dict[str, str] = field(default_factory=dict)
    threshold: float = 1.0
    epsilon: float = 1e-4
    whiten: bool = True
    min_group: ClassVar[int] = 2

    def assign(self, rollouts: Sequence[Rollout], rewards: Sequence[Reward]) -> list[Credit]:
        """Advantages; a row that lacks any part has none."""
        parts = [self._conditioned(reward) for reward in rewards]
        names = sorted({name for part in parts for name in part})
        single = GRPO(deviation="population", epsilon=self.epsilon)
        total: list[float | None] = [0.0 if reward.value is not None else None for reward in rewards]
        for name in names:
            known = [None if sum_ is None else part.get(name) for sum_, part in zip(total, parts, strict=True)]
            credits = single.assign(rollouts, [Reward(value) for value in known])
            weight = self.weights.get(name, 1.0)
            total = [
                None if sum_ is None or credit.advantage is None else sum_ + weight * credit.advantage
                for sum_, credit in zip(total, credits, strict=True)
            ]
        credits = [Credit(value) for value in total]
        return _whitened(credits, self.epsilon) if self.whiten else credits

    def _conditioned(self, reward: Reward) -> dict[str, float | None]:
        def met(name: str) -> bool:
            gate = reward.parts.get(self.conditions[name]) if name in self.conditions else self.threshold
            return gate is not None and gate >= self.threshold

        return {name: value if value is None or met(name) else 0.0 for name, value in reward.parts.items()}


def _by_group(rollouts: Sequence[Rollout], rewards: Sequence[Reward]) -> dict[tuple[str, str], list[float]]:
    groups: dict[tuple[str, str], list[float]] = defaultdict(list)
    for rollout, reward in zip(rollouts, rewards, strict=True):
        if reward.value is not None:
            groups[rollout.group].append(reward.value)
    return groups


def _each(
    rollouts: Sequence[Rollout], rewards: Sequence[Reward], advantage: Callable[[Rollout, float], float]
) -> list[Credit]:
    """The advantage of every row that has a reward."""
    return [
        Credit(None if reward.value is None else advantage(rollout, reward.value))
        for rollout, reward in zip(rollouts, rewards, strict=True)
    ]


def _moments(values: Sequence[float]) -> tuple[float, float]:
    """Mean and population deviation over all ranks; all ranks must call."""
    everyone = [value for part in ranks.gather(list(values)) for value in part]
    return (fmean(everyone), pstdev(everyone)) if everyone else (0.0, 0.0)


def _whitened(credits: Sequence[Credit], epsilon: float) -> list[Credit]:
    mean, deviation = _moments([credit.advantage for credit in credits if credit.advantage is not None])
    return [
        Credit(None if credit.advantage is None else (credit.advantage - mean) / (deviation + epsilon))
        for credit in credits
    ]


def informative_share(rollouts: Sequence[Rollout], rewards: Sequence[Reward]) -> Mean:
    """Share of the judged groups whose rewards differ: the others give a reward term no gradient."""
    groups = _by_group(rollouts, rewards)
    return Mean(float(sum(min(group) != max(group) for group in groups.values())), float(len(groups)))
