r"""Divergences between student p and teacher q over the full vocabulary, with their gradients in the student's logits z.

With u = \partial D / \partial p, the logit gradient is  p * (u - <p, u>). Log-probabilities in a chunk are finite (the
objective bounds them), so no product here meets 0 * inf.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log
from typing import ClassVar

import torch
from torch import Tensor

from opd.losses.protocol import Need, needs
from opd.records import TokenChunk


def _teacher_logp(chunk: TokenChunk, floor: float | None) -> Tensor:
    assert chunk.teacher_logp is not None, "a term that needs full_vocab scores was given a chunk without a teacher"
    return chunk.teacher_logp if floor is None else chunk.teacher_logp.clamp(min=floor)


@dataclass(frozen=True)
class ReverseKL:
    """KL(student || teacher) = sum_v p (log p - log q), in nats; gradient p (log p - log q - KL). Mode seeking.

    `floor` bounds the teacher's log-probability from below (nats), which tames the large gradients of a poor start; the
    value is then a lower bound of the divergence. Source: MiniLLM (2306.08543), GKD (2306.13649).
    """

    floor: float | None = None
    needs: ClassVar[frozenset[Need]] = needs("full_vocab")

    def __call__(self, chunk: TokenChunk) -> Tensor:
        """Values [n]."""
        return self.value_and_grad(chunk)[0]

    def value_and_grad(self, chunk: TokenChunk) -> tuple[Tensor, Tensor]:
        """Values [n], logit gradient [n, V]."""
        log_ratio = chunk.student_logp - _teacher_logp(chunk, self.floor)
        p = chunk.student_logp.exp()
        value = _dot(p, log_ratio)
        return value, p.mul_(log_ratio.sub_(value[:, None]))


@dataclass(frozen=True)
class ForwardKL:
    """KL(teacher || student) = sum_v q (log q - log p), in nats; gradient p - q. Mass covering."""

    needs: ClassVar[frozenset[Need]] = needs("full_vocab")

    def __call__(self, chunk: TokenChunk) -> Tensor:
        """Values [n]."""
        return self.value_and_grad(chunk)[0]

    def value_and_grad(self, chunk: TokenChunk) -> tuple[Tensor, Tensor]:
        """Values [n], logit gradient [n, V]."""
        teacher_logp = _teacher_logp(chunk, None)
        q = teacher_logp.exp()
        value = _dot(q, teacher_logp - chunk.student_logp)
        return value, chunk.student_logp.exp().sub_(q)


@dataclass(frozen=True)
class JSD:
    """Generalised Jensen-Shannon divergence, beta KL(q || m) + (1 - beta) KL(p || m), m = beta q + (1 - beta) p.

    `beta` = 0 is the forward KL and 1 the reverse KL (special-cased: the formula itself vanishes at both ends), the
    convention of GKD (2306.13649). Bounded by ln 2 at beta = 1/2. Gradient with u = (1 - beta) log(p / m).
    """

    beta: float = 0.5
    needs: ClassVar[frozenset[Need]] = needs("full_vocab")

    def __post_init__(self) -> None:
        if not 0.0 <= self.beta <= 1.0:
            raise ValueError(f"beta={self.beta}: must lie in [0, 1] (0 = forward KL, 1 = reverse KL)")

    def __call__(self, chunk: TokenChunk) -> Tensor:
        """Values [n]."""
        return self.value_and_grad(chunk)[0]

    def value_and_grad(self, chunk: TokenChunk) -> tuple[Tensor, Tensor]:
        """Values [n], logit gradient [n, V]."""
        if self.beta == 0.0:
            return ForwardKL().value_and_grad(chunk)
        if self.beta == 1.0:
            return ReverseKL().value_and_grad(chunk)
        student_logp, teacher_logp = chunk.student_logp, _teacher_logp(chunk, None)
        mixture_logp = torch.logaddexp(teacher_logp + log(self.beta), student_logp + log(1.0 - self.beta))
        p, q = student_logp.exp(), teacher_logp.exp()
        u = (student_logp - mixture_logp).mul_(1.0 - self.beta)
        student_part = _dot(p, u)
        value = student_part + self.beta * _dot(q, teacher_logp - mixture_logp)
        return value, p.mul_(u.sub_(student_part[:, None]))


def _dot(weights: Tensor, values: Tensor) -> Tensor:
    """sum_v weights * values [n]."""
    return torch.linalg.vecdot(weights, values)
