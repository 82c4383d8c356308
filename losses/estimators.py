"""Estimates of the reverse KL from the sampled token alone, each with its true expected gradient (2510.01555).

With k1 = log p - log q at the sampled token, k2 = k1^2 / 2, k3 = q/p - 1 - log(q/p), rho = p / sampler probability:

| used as                       | expected gradient, tokens sampled from p |                                    |
|-------------------------------|------------------------------------------|------------------------------------|
| k1 as a loss                  | 0                                        | refused                            |
| k3 as a loss                  | that of the forward KL, unbounded        | refused                            |
| -k1 as an advantage           | reverse KL                               | `SampledReverseKL`                 |
| k2 as a loss                  | reverse KL                               | `SampledKL(estimator="k2")`        |
| rho k3 = sg(rho) k2, off-policy | reverse KL                             | `SampledKL(estimator="rho_k3")`    |
| k3's value with k2's gradient | reverse KL                               | `SampledKL(estimator="k3_plus")`   |
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log
from typing import ClassVar, Literal

import torch
from torch import Tensor

from opd.losses.policy_gradients import MAX_LOG_RATIO
from opd.losses.protocol import ByGradient, Need, needs
from opd.records import TokenChunk, TokenRow
from opd.schedules import Scheduled, at

REFUSED = {
    "k1": "back-propagated k1 has zero expected gradient and no teacher in it; use opd.losses.SampledReverseKL",
    "k3": "back-propagated k3 has the gradient of the forward KL, with unbounded weights; use estimator=k3_plus",
}


@dataclass(frozen=True)
class SampledKL:
    """A differentiable estimator; see the table above."""

    estimator: Literal["k2", "rho_k3", "k3_plus", "k1", "k3"] = "k2"

    def __post_init__(self) -> None:
        if self.estimator in REFUSED:
            raise ValueError(f"estimator={self.estimator}: {REFUSED[self.estimator]}")

    @property
    def needs(self) -> frozenset[Need]:
        """The teacher's score of the sampled token; the sampler's for rho."""
        return needs("sampled") | (needs("sampler_logp") if self.estimator == "rho_k3" else needs())

    def __call__(self, chunk: TokenChunk) -> Tensor:
        """Values [n]."""
        k1 = chunk.token_logp - _teacher_token_logp(chunk)
        k2 = 0.5 * k1.square()
        if self.estimator == "k2":
            return k2
        k3 = (-k1).clamp(max=MAX_LOG_RATIO).exp() - 1.0 + k1
        if self.estimator == "k3_plus":
            return k3.detach() + k2 - k2.detach()
        return (chunk.token_logp - chunk.sampler_logp).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp() * k3


@dataclass(frozen=True)
class SampledReverseKL:
    """Policy gradient with the advantage A = log q - log p of the sampled token: -sg(A) rho (Thinking Machines OPD).

    Args:
        shape: map on the log-ratio: `none`; `floor` max(A, low), low = log(lam / (1 - lam)) bounds what the teacher can
            take away (REOPOLD, 2603.11137: lam .1, low -2.197); `clip` to [low, high]; `signed_log`
            sign(A) log(1 + |A|) (2607.13399); `power` q^alpha - p^alpha in [-1, 1] (PowerOPD, 2606.17199).
        baseline: `negative_kl` adds KL(p || q): A's exact value function at one token's horizon, unbiased, not always
            of lower variance (vOPD, 2605.07865); needs the full vocabulary.
        extrapolate: lam of ExOPD (2602.12125), A = lam (log q - log r) - (log p - log r) with r the term's
            reference; 1 is plain OPD, and needs no reference.
        ratio: rho in place of log p, which corrects for samples of older weights.
        gamma: 0 credits a token with its own A; above, with sum_{s > t} gamma^(s-t) A_s of the row's later trainable
            tokens too. At 1 the expected gradient is that of the whole answer's KL(p || q), at a variance that grows
            with its length (MiniLLM, 2306.08543).
        own: whether a token's own A counts; without it the term holds the future alone, beside a divergence that takes
            the single step over the whole vocabulary (MiniLLM).
        length_normalised: divides the future's sum by the number of its tokens (MiniLLM).
    """

    shape: Literal["none", "floor", "clip", "signed_log", "power"] = "none"
    low: float = log(0.1 / 0.9)
    high: float = 5.0
    alpha: float = 0.5
    baseline: Literal["none", "negative_kl"] = "none"
    extrapolate: Scheduled = 1.0
    ratio: bool = True
    gamma: float = 0.0
    own: bool = True
    length_normalised: bool = False

    def __post_init__(self) -> None:
        if not 0.0 <= self.gamma <= 1.0:
            raise ValueError(f"gamma={self.gamma}: must lie in [0, 1]")
        if self.gamma == 0.0 and not self.own:
            raise ValueError("own=false with gamma=0: neither the token nor its future would count; raise gamma")

    @property
    def needs(self) -> frozenset[Need]:
        """The teacher's score of the sampled token; more for rho, a baseline or an extrapolation."""
        return (
            needs("sampled")
            | (needs("sampler_logp") if self.ratio else needs())
            | (needs("full_vocab") if self.baseline == "negative_kl" else needs())
            | (needs() if self.extrapolate == 1.0 else needs("reference"))
            | (needs("row_value") if self.gamma > 0.0 else needs())
        )

    def __call__(self, chunk: TokenChunk) -> Tensor:
        """Values [n]."""
        advantage = self.advantage(chunk)
        if not self.ratio:
            return -advantage * chunk.token_logp
        return -advantage * (chunk.token_logp - chunk.sampler_logp).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()

    def advantage(self, chunk: TokenChunk) -> Tensor:
        """A [n], constant."""
        student, teacher = chunk.token_logp.detach(), _teacher_token_logp(chunk)
        advantage = self._shaped(student, teacher, chunk.reference_token_logp, chunk.progress)
        if not self.own:
            advantage = torch.zeros_like(advantage)
        if self.baseline == "negative_kl":
            p = chunk.student_p.detach()
            advantage = advantage + torch.linalg.vecdot(p, chunk.student_logp.detach() - chunk.teacher_logp)
        if self.gamma == 0.0:
            return advantage
        assert chunk.row_value is not None, "a discounted future needs the token's row"
        return advantage + chunk.row_value

    def of_row(self, row: TokenRow) -> Tensor:
        """The future's part of A [R]: sum_{s > t} gamma^(s-t) A_s; a missing score counts for nothing."""
        assert row.teacher_logp is not None, "a discounted future needs the teacher's scores"
        own = self._shaped(row.student_logp, row.teacher_logp, row.reference_logp, row.progress).nan_to_num(0.0)
        future = torch.zeros_like(own)
        for place in range(len(own) - 2, -1, -1):
            future[place] = self.gamma * (own[place + 1] + future[place + 1])
        later = torch.arange(len(own) - 1, -1, -1).clamp(min=1)
        return future / later if self.length_normalised else future

    def _shaped(self, student: Tensor, teacher: Tensor, reference: Tensor | None, progress: float) -> Tensor:
        """A from log-probabilities [n] of one token each."""
        advantage = teacher - student
        if self.extrapolate != 1.0:
            assert reference is not None, "extrapolation needs the term's reference"
            advantage = at(self.extrapolate, progress) * (teacher - reference) - (student - reference)
        if self.shape == "power":
            advantage = (self.alpha * teacher).exp() - (self.alpha * student).exp()
        elif self.shape == "signed_log":
            advantage = advantage.sign() * advantage.abs().log1p()
        elif self.shape != "none":
            advantage = advantage.clamp(self.low, self.high if self.shape == "clip" else None)
        return advantage


@dataclass(frozen=True)
class CrossEntropy(ByGradient):
    """-log p of the token at temperature 1: imitation of a given text (a gold answer, a teacher's, an observation)."""

    needs: ClassVar[frozenset[Need]] = needs()

    def value_and_grad(self, chunk: TokenChunk) -> tuple[Tensor, Tensor]:
        """Values [n], logit gradient p - onehot [n, V]."""
        token = chunk.token_ids[:, None]
        grad = chunk.student_p.scatter_add(-1, token, torch.full_like(chunk.student_p[:, :1], -1.0))
        return -chunk.student_logp.gather(-1, token)[:, 0], grad


def _teacher_token_logp(chunk: TokenChunk) -> Tensor:
    assert chunk.teacher_token_logp is not None, "a sampled-token loss was given a chunk without a teacher's score"
    return chunk.teacher_token_logp
