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
from opd.records import TokenChunk
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
    """

    shape: Literal["none", "floor", "clip", "signed_log", "power"] = "none"
    low: float = log(0.1 / 0.9)
    high: float = 5.0
    alpha: float = 0.5
    baseline: Literal["none", "negative_kl"] = "none"
    extrapolate: Scheduled = 1.0
    ratio: bool = True

    @property
    def needs(self) -> frozenset[Need]:
        """The teacher's score of the sampled token; more for rho, a baseline or an extrapolation."""
        extra = (needs("sampler_logp") if self.ratio else needs()) | (
            needs("full_vocab") if self.baseline == "negative_kl" else needs()
        )
        return needs("sampled") | extra | (needs() if self.extrapolate == 1.0 else needs("reference"))

    def __call__(self, chunk: TokenChunk) -> Tensor:
        """Values [n]."""
        advantage = self.advantage(chunk)
        if not self.ratio:
            return -advantage * chunk.token_logp
        return -advantage * (chunk.token_logp - chunk.sampler_logp).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()

    def advantage(self, chunk: TokenChunk) -> Tensor:
        """A [n], constant."""
        student, teacher = chunk.token_logp.detach(), _teacher_token_logp(chunk)
        advantage = teacher - student
        if self.extrapolate != 1.0:
            assert chunk.reference_token_logp is not None, "extrapolation needs the term's reference"
            reference = chunk.reference_token_logp
            lam = at(self.extrapolate, chunk.progress)
            advantage = lam * (teacher - reference) - (student - reference)
        if self.shape == "power":
            advantage = (self.alpha * teacher).exp() - (self.alpha * student).exp()
        elif self.shape == "signed_log":
            advantage = advantage.sign() * advantage.abs().log1p()
        elif self.shape != "none":
            advantage = advantage.clamp(self.low, self.high if self.shape == "clip" else None)
        if self.baseline == "negative_kl":
            p = chunk.student_p.detach()
            advantage = advantage + torch.linalg.vecdot(p, chunk.student_logp.detach() - chunk.teacher_logp)
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
