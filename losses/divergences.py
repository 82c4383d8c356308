r"""Divergences between student p and teacher q over the full vocabulary, with their gradients in the student's logits.

With u = \partial D / \partial p, the logit gradient is  p * (u - <p, u>). Log-probabilities in a chunk are finite (the
objective bounds them), so no product here meets 0 * inf.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log
from typing import ClassVar

import torch
from torch import Tensor

from opd.distributions import row_dots
from opd.losses.protocol import ByGradient, Need, needs
from opd.records import TokenChunk
from opd.schedules import Scheduled, at

ROUNDING = 1e-7  # of probabilities in fp32


def _teacher(chunk: TokenChunk) -> tuple[Tensor, Tensor]:
    """Log-probabilities and probabilities [n, V]."""
    return chunk.teacher_logp, chunk.teacher_p


@dataclass(frozen=True)
class ReverseKL(ByGradient):
    """KL(student || teacher) = sum_v p (log p - log q), in nats; gradient p (log p - log q - KL). Mode seeking.

    `floor` bounds the teacher's log-probability from below (nats), which tames the large gradients of a poor start; the
    value is then a lower bound of the divergence. Source: MiniLLM (2306.08543), GKD (2306.13649).
    """

    floor: float | None = None
    needs: ClassVar[frozenset[Need]] = needs("full_vocab")

    def value_and_grad(self, chunk: TokenChunk) -> tuple[Tensor, Tensor]:
        """Values [n], logit gradient [n, V]."""
        teacher_logp, _ = _teacher(chunk)
        if self.floor is not None:
            teacher_logp = teacher_logp.clamp(min=self.floor)
        log_ratio = chunk.difference(chunk.student_logp, teacher_logp)
        value = _dot(chunk.student_p, log_ratio)
        return value, log_ratio.sub_(value[:, None]).mul_(chunk.student_p)


@dataclass(frozen=True)
class ForwardKL(ByGradient):
    """KL(teacher || student) = sum_v q (log q - log p), in nats; gradient p - q. Mass covering."""

    needs: ClassVar[frozenset[Need]] = needs("full_vocab")

    def value_and_grad(self, chunk: TokenChunk) -> tuple[Tensor, Tensor]:
        """Values [n], logit gradient [n, V]."""
        teacher_logp, q = _teacher(chunk)
        return _dot(q, teacher_logp - chunk.student_logp), chunk.student_p - q


@dataclass(frozen=True)
class JSD(ByGradient):
    """Generalised Jensen-Shannon divergence, beta KL(q || m) + (1 - beta) KL(p || m), m = beta q + (1 - beta) p.

    `beta` = 0 is the forward KL and 1 the reverse KL (special-cased: the formula itself vanishes at both ends), the
    convention of GKD (2306.13649). Bounded by ln 2 at beta = 1/2. Gradient with u = (1 - beta) log(p / m).
    """

    beta: Scheduled = 0.5
    needs: ClassVar[frozenset[Need]] = needs("full_vocab")

    def __post_init__(self) -> None:
        if isinstance(self.beta, float) and not 0.0 <= self.beta <= 1.0:
            raise ValueError(f"beta={self.beta}: must lie in [0, 1] (0 = forward KL, 1 = reverse KL)")

    def value_and_grad(self, chunk: TokenChunk) -> tuple[Tensor, Tensor]:
        """Values [n], logit gradient [n, V]."""
        beta = at(self.beta, chunk.progress)
        if beta == 0.0:
            return ForwardKL().value_and_grad(chunk)
        if beta == 1.0:
            return ReverseKL().value_and_grad(chunk)
        student_logp, (teacher_logp, q), p = chunk.student_logp, _teacher(chunk), chunk.student_p
        mixture_logp = _mixture(teacher_logp, student_logp, beta)
        u = (student_logp - mixture_logp).mul_(1.0 - beta)
        student_part = _dot(p, u)
        value = student_part + beta * _dot(q, teacher_logp - mixture_logp)
        return value, u.sub_(student_part[:, None]).mul_(p)


@dataclass(frozen=True)
class SkewForwardKL(ByGradient):
    """KL(q || alpha q + (1 - alpha) p), bounded by -log alpha (DistiLLM, 2402.03898).

    Gradient with u = -(1 - alpha) q/m.
    """

    alpha: Scheduled = 0.1
    needs: ClassVar[frozenset[Need]] = needs("full_vocab")

    def __post_init__(self) -> None:
        _check_alpha(self.alpha)

    def value_and_grad(self, chunk: TokenChunk) -> tuple[Tensor, Tensor]:
        """Values [n], logit gradient [n, V]."""
        (teacher_logp, q), p = _teacher(chunk), chunk.student_p
        alpha = at(self.alpha, chunk.progress)
        mixture_logp = _mixture(teacher_logp, chunk.student_logp, alpha)
        u = (teacher_logp - mixture_logp).exp().mul_(alpha - 1.0)
        return _dot(q, teacher_logp - mixture_logp), u.sub_(_dot(p, u)[:, None]).mul_(p)


@dataclass(frozen=True)
class SkewReverseKL(ByGradient):
    """KL(p || (1 - alpha) q + alpha p), bounded by -log alpha (DistiLLM, 2402.03898).

    Gradient with u = log(p/m) + 1 - alpha p/m.
    """

    alpha: Scheduled = 0.1
    needs: ClassVar[frozenset[Need]] = needs("full_vocab")

    def __post_init__(self) -> None:
        _check_alpha(self.alpha)

    def value_and_grad(self, chunk: TokenChunk) -> tuple[Tensor, Tensor]:
        """Values [n], logit gradient [n, V]."""
        (teacher_logp, _), p = _teacher(chunk), chunk.student_p
        alpha = at(self.alpha, chunk.progress)
        log_ratio = chunk.student_logp - _mixture(chunk.student_logp, teacher_logp, alpha)
        value = _dot(p, log_ratio)
        u = log_ratio.exp().mul_(-alpha).add_(log_ratio)
        return value, u.sub_(_dot(p, u)[:, None]).mul_(p)


@dataclass(frozen=True)
class AdaptiveKL(ByGradient):
    """Forward and reverse KL weighted by how far the models part on the teacher's head and tail (AKL, 2404.02657).

    The head is the teacher's likeliest tokens up to a mass of `mass`; with g the sum of |p - q| over each part, held
    constant: (g_head KL(q||p) + g_tail KL(p||q)) / (g_head + g_tail). Sorts the vocabulary: the slowest of all.
    """

    mass: float = 0.5
    needs: ClassVar[frozenset[Need]] = needs("full_vocab")

    def value_and_grad(self, chunk: TokenChunk) -> tuple[Tensor, Tensor]:
        """Values [n], logit gradient [n, V]."""
        _, q = _teacher(chunk)
        ordered, order = q.sort(-1, descending=True)
        head = torch.zeros_like(q).scatter_(-1, order, (ordered.cumsum(-1) - ordered < self.mass).to(q.dtype))
        gap = (chunk.student_p - q).abs()
        head_gap, total = _dot(head, gap), gap.sum(-1)
        share = torch.where(total > 0, head_gap / total.clamp(min=1e-30), 0.5)
        (forward, forward_grad), (reverse, reverse_grad) = (f.value_and_grad(chunk) for f in (ForwardKL(), ReverseKL()))
        value = share * forward + (1.0 - share) * reverse
        return value, forward_grad.mul_(share[:, None]).add_(reverse_grad.mul_(1.0 - share[:, None]))


@dataclass(frozen=True)
class TotalVariation(ByGradient):
    """sum_v |p - q| / 2, in [0, 1]. Gradient with u = sign(p - q) / 2, zero where they agree to rounding."""

    needs: ClassVar[frozenset[Need]] = needs("full_vocab")

    def value_and_grad(self, chunk: TokenChunk) -> tuple[Tensor, Tensor]:
        """Values [n], logit gradient [n, V]."""
        gap = chunk.student_p - _teacher(chunk)[1]
        u = gap.sign().masked_fill_(gap.abs() < ROUNDING, 0.0).mul_(0.5)
        return 0.5 * gap.abs().sum(-1), u.sub_(_dot(chunk.student_p, u)[:, None]).mul_(chunk.student_p)


def _check_alpha(alpha: Scheduled) -> None:
    if isinstance(alpha, float) and not 0.0 < alpha < 1.0:
        raise ValueError(f"alpha={alpha}: must lie in (0, 1)")


def _mixture(first_logp: Tensor, second_logp: Tensor, alpha: float) -> Tensor:
    """log(alpha first + (1 - alpha) second) [n, V]."""
    return torch.logaddexp(first_logp + log(alpha), second_logp + log(1.0 - alpha))


def _dot(weights: Tensor, values: Tensor) -> Tensor:
    """sum_v weights * values [n]."""
    return row_dots(weights, values)
