"""Which tokens and rows a term trains on, and how much: every weigher gives each trainable token a factor.

Factors multiply; a token of factor 0 leaves the term and its count. Some need facts that only a forward pass knows
(entropies, log-probs): those of the batch, taken by a pass without gradients before the update.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, inf, isnan
from typing import ClassVar, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from opd import ranks
from opd.losses import Need
from opd.rows import Row
from opd.token_statistics import student_beside

Facts = Sequence[Mapping[str, Tensor]]  # per row: statistic name -> values of its trainable tokens


def split_by_rows(rows: Sequence[Row], order: Sequence[Sequence[int]], found: Sequence[Mapping[str, Tensor]]) -> Facts:
    """Statistics of micro-batches [N] as facts of the rows; `order` names the rows of each micro-batch."""
    facts: list[Mapping[str, Tensor]] = [{} for _ in rows]
    for group, statistics in zip(order, found, strict=True):
        lengths = [len(rows[index].trainable) for index in group]
        pieces = {name: values.cpu().split(lengths) for name, values in statistics.items()} if group else {}
        for place, index in enumerate(group):
            facts[index] = {name: parts[place] for name, parts in pieces.items()}
    return facts


@runtime_checkable
class Weigher(Protocol):
    """`weigh(rows, facts) -> one list per row, one factor per trainable token`."""

    @property
    def needs_facts(self) -> bool:
        """Whether `facts` must be there."""
        ...

    def weigh(self, rows: Sequence[Row], facts: Facts) -> list[list[float]]:
        """Factors in the order of rows and their trainable tokens; `facts` is empty where it is not needed."""
        ...


@dataclass(frozen=True)
class FirstTokens:
    """Only the first `count` trainable tokens of a row (Fast OPD, 2602.15260; ESR, 2605.27028: 100)."""

    count: int = 100
    needs_facts: ClassVar[bool] = False

    def weigh(self, rows: Sequence[Row], facts: Facts) -> list[list[float]]:
        """1 inside the window, 0 behind it."""
        return [[float(place < self.count) for place in range(len(row.trainable))] for row in rows]


@dataclass(frozen=True)
class WithoutTokens:
    """Leaves out the given token ids: everywhere, or at their first occurrence in a row (LSM, 2603.25562)."""

    token_ids: list[int] = field(default_factory=list)
    first_only: bool = True
    needs_facts: ClassVar[bool] = False

    def weigh(self, rows: Sequence[Row], facts: Facts) -> list[list[float]]:
        """0 on the listed tokens."""
        return [self._row([row.rollout.token_ids[place] for place in row.trainable]) for row in rows]

    def _row(self, tokens: Sequence[int]) -> list[float]:
        seen: set[int] = set()
        factors = []
        for token in tokens:
            hit = token in self.token_ids and not (self.first_only and token in seen)
            seen.add(token)
            factors.append(0.0 if hit else 1.0)
        return factors


@dataclass(frozen=True)
class ByCorrectness:
    """One factor for rows with a reward of at least `threshold`, another for those below (routing by the verifier)."""

    right: float = 0.0
    wrong: float = 1.0
    unjudged: float = 1.0
    threshold: float = 0.5
    needs_facts: ClassVar[bool] = False
    reads_rewards: ClassVar[bool] = True

    def weigh(self, rows: Sequence[Row], facts: Facts) -> list[list[float]]:
        """The row's factor on each of its tokens."""
        return [[self._factor(row)] * len(row.trainable) for row in rows]

    def _factor(self, row: Row) -> float:
        if row.reward.value is None:
            return self.unjudged
        return self.right if row.reward.value >= self.threshold else self.wrong


@dataclass(frozen=True)
class ByPassRate:
    """p^a (1 - p)^b with p the group's pass rate: neither solved nor hopeless prompts (PACED, 2603.11178)."""

    a: float = 1.0
    b: float = 1.0
    threshold: float = 0.5
    needs_facts: ClassVar[bool] = False
    reads_rewards: ClassVar[bool] = True

    def weigh(self, rows: Sequence[Row], facts: Facts) -> list[list[float]]:
        """The group's factor on each token; 0 for a group without verdicts."""
        passed: dict[tuple[str, str], list[float]] = defaultdict(list)
        for row in rows:
            if row.reward.value is not None:
                passed[row.rollout.group].append(float(row.reward.value >= self.threshold))
        rates = {group: sum(hits) / len(hits) for group, hits in passed.items()}
        return [[self._factor(rates.get(row.rollout.group))] * len(row.trainable) for row in rows]

    def _factor(self, rate: float | None) -> float:
        return 0.0 if rate is None else rate**self.a * (1.0 - rate) ** self.b


@dataclass(frozen=True)
class ByPerplexity:
    """Softmax over a group of PPL^(1/tau) of the student, or PPL^(-1/tau) of the teacher (SCOPE, 2604.10688).

    Of the group's rows on one side of `side` (right or wrong answers) only; factors sum to one per group and side.
    """

    of: Literal["student", "teacher"] = "student"
    teacher: str = "main"
    tau: float = 1.0
    side: Literal["right", "wrong", "all"] = "all"
    threshold: float = 0.5
    needs_facts: ClassVar[bool] = True
    reads_scores: ClassVar[Need] = "sampled"

    def __post_init__(self) -> None:
        if not self.tau > 0.0:
            raise ValueError(f"tau={self.tau}: must be positive")

    @property
    def reads_teacher(self) -> str | None:
        """Only for the teacher's perplexity."""
        return self.teacher if self.of == "teacher" else None

    @property
    def reads_rewards(self) -> bool:
        """Only where sides are told apart."""
        return self.side != "all"

    def weigh(self, rows: Sequence[Row], facts: Facts) -> list[list[float]]:
        """The row's share on each of its tokens; of the teacher's scores those that are there, 0 without any."""
        scores = [self._log_weight(row, fact) for row, fact in zip(rows, facts, strict=True)]
        groups: dict[tuple[str, str], list[float]] = defaultdict(list)
        for row, score in zip(rows, scores, strict=True):
            if score is not None:
                groups[row.rollout.group].append(score)
        return [
            [0.0 if score is None else _softmax(score, groups[row.rollout.group])] * len(row.trainable)
            for row, score in zip(rows, scores, strict=True)
        ]

    def _log_weight(self, row: Row, fact: Mapping[str, Tensor]) -> float | None:
        """log of PPL^(1/tau) or PPL^(-1/tau), log PPL being minus the mean log-probability; None for no part in it."""
        if not row.trainable or not self._counts(row):
            return None
        name = "student/token_logp" if self.of == "student" else f"teacher/{self.teacher}/token_logp"
        mean = _fact(fact, name).double().nanmean().item()
        return None if isnan(mean) else (-mean if self.of == "student" else mean) / self.tau

    def _counts(self, row: Row) -> bool:
        if self.side == "all":
            return True
        return row.reward.value is not None and (row.reward.value >= self.threshold) == (self.side == "right")


def _softmax(score: float, scores: Sequence[float]) -> float:
    largest = max(scores)
    return exp(score - largest) / sum(exp(other - largest) for other in scores)


@dataclass(frozen=True)
class TopShare:
    """Keeps the `share` of tokens with the highest score, over the whole batch and all ranks.

    `entropy`: the student's (REOPOLD, 2603.11137). `divergence`: KL to the teacher. `soft_or`: h + d - h d of both,
    scaled to [0, 1] over the batch (TIP, 2604.14084). A token that the teacher has not scored is not among them.
    """

    share: float = 0.5
    score: Literal["entropy", "divergence", "soft_or"] = "entropy"
    teacher: str = "main"
    needs_facts: ClassVar[bool] = True
    reads_scores: ClassVar[Need] = "full_vocab"

    def __post_init__(self) -> None:
        if not 0.0 < self.share <= 1.0:
            raise ValueError(f"share={self.share}: must lie in (0, 1]")

    @property
    def reads_teacher(self) -> str | None:
        """All scores but the entropy compare with the teacher."""
        return None if self.score == "entropy" else self.teacher

    def weigh(self, rows: Sequence[Row], facts: Facts) -> list[list[float]]:
        """1 for kept tokens, 0 for the others."""
        ranges = self._ranges(facts)  # once: all ranks take part
        scores = [self._score(fact, *ranges) for fact in facts]
        local = [score for row in scores for score in row if not isnan(score)]
        everyone = torch.tensor([score for part in ranks.gather(local) for score in part])
        kept = max(1, round(self.share * len(everyone)))
        threshold = everyone.topk(kept).values[-1].item() if len(everyone) else inf
        return [[float(score >= threshold) for score in row] for row in scores]

    def _ranges(self, facts: Facts) -> tuple[tuple[float, float], tuple[float, float]]:
        return self._range(facts, "student/entropy"), self._range(facts, f"teacher/{self.teacher}/kl")

    def _range(self, facts: Facts, name: str) -> tuple[float, float]:
        if self.score != "soft_or":
            return 0.0, 1.0
        local = [value for fact in facts for value in _fact(fact, name).tolist()]
        values = [value for part in ranks.gather(local) for value in part if not isnan(value)]
        return (min(values), max(values)) if values else (0.0, 1.0)

    def _score(self, fact: Mapping[str, Tensor], h: tuple[float, float], d: tuple[float, float]) -> list[float]:
        entropy = _fact(fact, "student/entropy")
        if self.score == "entropy":
            return entropy.tolist()
        divergence = _fact(fact, f"teacher/{self.teacher}/kl")
        if self.score == "divergence":
            return divergence.tolist()
        entropy, divergence = _scaled(entropy, h), _scaled(divergence, d)
        return (entropy + divergence - entropy * divergence).tolist()


def _scaled(values: Tensor, limits: tuple[float, float]) -> Tensor:
    low, high = limits
    return (values - low) / max(high - low, 1e-12)


@dataclass(frozen=True)
class EarlyDisagreement:
    """1 + gamma (1 - share of the row's total |log q - log p| that lies before the token) (IW-OPD, 2606.22600)."""

    gamma: float = 0.5
    teacher: str = "main"
    needs_facts: ClassVar[bool] = True
    reads_scores: ClassVar[Need] = "sampled"

    @property
    def reads_teacher(self) -> str | None:
        """The one that the student disagrees with."""
        return self.teacher

    def weigh(self, rows: Sequence[Row], facts: Facts) -> list[list[float]]:
        """Factors that fall along the row from 1 + gamma; |A| = (1, 2, 3, 4) gives 1.5, 1.45, 1.35, 1.2."""
        return [self._row(fact) for fact in facts]

    def _row(self, fact: Mapping[str, Tensor]) -> list[float]:
        if not fact:
            return []
        teacher, student = _fact(fact, f"teacher/{self.teacher}/token_logp"), student_beside(fact, [self.teacher])
        gap = (teacher - student).abs().nan_to_num(0.0)
        before = gap.cumsum(0) - gap
        return (1.0 + self.gamma * (1.0 - before / gap.sum().clamp(min=1e-12))).tolist()


@dataclass(frozen=True)
class TeacherConfidence:
    """1 - H(q) / H_max with H_max the batch's largest teacher entropy: trust the teacher where it is sure."""

    teacher: str = "main"
    needs_facts: ClassVar[bool] = True
    reads_scores: ClassVar[Need] = "full_vocab"

    @property
    def reads_teacher(self) -> str | None:
        """The one whose entropy counts."""
        return self.teacher

    def weigh(self, rows: Sequence[Row], facts: Facts) -> list[list[float]]:
        """Factors in [0, 1]."""
        entropies = [_fact(fact, f"teacher/{self.teacher}/entropy") for fact in facts]
        local = max((values.nan_to_num(0.0).max().item() for values in entropies if len(values)), default=0.0)
        largest = max(max(ranks.gather(local)), 1e-12)
        return [(1.0 - values.nan_to_num(largest) / largest).tolist() for values in entropies]


def _fact(fact: Mapping[str, Tensor], name: str) -> Tensor:
    """A row's values: NaN where the teacher scored none of its micro-batch, none where that has no trainable token."""
    if not fact:
        return torch.zeros(0)
    return fact[name] if name in fact else torch.full_like(next(iter(fact.values())), torch.nan)
