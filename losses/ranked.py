"""Losses that compare probabilities by rank, whoever has them: for teachers with other tokens, and for comparison.

Both are blind to what the ranked tokens are: a teacher whose tokens are shuffled has the same value.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log
from typing import ClassVar

import torch
from torch import Tensor

from opd.losses.divergences import ROUNDING
from opd.losses.protocol import ByGradient, Need, needs
from opd.records import TokenChunk


@dataclass(frozen=True)
class ULD(ByGradient):
    """sum_i |p_(i) - q_(i)| over the probabilities in falling order (Universal Logit Distillation, 2402.12030).

    The shorter vocabulary counts as filled up with zeros. Gradient with u = sign(p_(i) - q_(i)) at the token of rank i.
    """

    needs: ClassVar[frozenset[Need]] = needs("ranked")

    def value_and_grad(self, chunk: TokenChunk) -> tuple[Tensor, Tensor]:
        """Values [n], logit gradient [n, V]."""
        p = chunk.student_p
        value, u = _by_rank(p, chunk.teacher_p)
        return value, (u - torch.linalg.vecdot(p, u)[:, None]).mul_(p)


@dataclass(frozen=True)
class GOLD(ByGradient):
    """w JSD_beta over the common tokens + (1 - w) ULD over all others, none of them renormalised (TRL's GOLD).

    `common_share` is w; null for the share of the student's tokens that are common. Over the common tokens M, with
    m = beta q + (1 - beta) p, sum_M [beta q log(q/m) + (1 - beta) p log(p/m)], whose u = (1 - beta) log(p/m). TRL also
    merges spans of several tokens into products that are no distributions; here each span counts once, by its first.
    """

    beta: float = 0.5
    common_share: float | None = None
    needs: ClassVar[frozenset[Need]] = needs("ranked")

    def __post_init__(self) -> None:
        if not 0.0 < self.beta < 1.0:
            raise ValueError(f"beta={self.beta}: must lie strictly between 0 and 1")
        if self.common_share is not None and not 0.0 <= self.common_share <= 1.0:
            raise ValueError(f"common_share={self.common_share}: must lie in [0, 1], or be null")

    def value_and_grad(self, chunk: TokenChunk) -> tuple[Tensor, Tensor]:
        """Values [n], logit gradient [n, V]."""
        p, q, beta = chunk.student_p, chunk.teacher_p, self.beta
        common = torch.ones_like(p[:1], dtype=torch.bool) if chunk.support is None else chunk.support
        w = common.to(p.dtype).mean(-1) if self.common_share is None else torch.full_like(p[:1, 0], self.common_share)
        mixture_logp = torch.logaddexp(chunk.teacher_logp + log(beta), chunk.student_logp + log(1.0 - beta))
        of_student, of_teacher = chunk.student_logp - mixture_logp, chunk.teacher_logp - mixture_logp
        parts = beta * q * of_teacher + (1.0 - beta) * p * of_student
        ranked, sign = _by_rank(p.masked_fill(common, 0.0), q.masked_fill(common, 0.0))
        value = w * parts.masked_fill(~common, 0.0).sum(-1) + (1.0 - w) * ranked
        u = torch.where(common, w[:, None] * (1.0 - beta) * of_student, (1.0 - w)[:, None] * sign)
        return value, (u - torch.linalg.vecdot(p, u)[:, None]).mul_(p)


def _by_rank(p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """sum_i |p_(i) - q_(i)| [n], and for every token the sign of its gap [n, V], 0 where they agree to rounding."""
    ordered, order = p.sort(-1, descending=True)
    gap = ordered - q.sort(-1, descending=True).values
    sign = gap.sign().masked_fill_(gap.abs() < ROUNDING, 0.0)
    return gap.abs().sum(-1), torch.zeros_like(p).scatter_(-1, order, sign)
