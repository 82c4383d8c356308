"""Reverse KL over a support that is not treated as a distribution of its own (the buckets of `views.OnTopK` are)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from opd.losses.protocol import ByGradient, Need, needs
from opd.losses.views import Support, on_set, support_ids, teacher_on
from opd.records import TokenChunk


@dataclass(frozen=True)
class TruncatedReverseKL(ByGradient):
    """Sums over the top-k set S alone.

    Args:
        rest: `corrected`: sum_S [p log(p/q) - p + q], never negative, fixed point p = q on S (MOPD, 2606.30406).
            `sampled`: exact on S, and outside it the sampled token's log-ratio as a policy gradient, unbiased for the
            full divergence where tokens are sampled from p (EMA-PG, 2602.04417).
            `raw`: sum_S p log(p/q) alone: can be negative, and its fixed point is NOT the teacher, since it shrinks the
            student's mass on S; needs `i_know_the_fixed_point_is_not_the_teacher`.
    """

    k: int = 64
    of: Support = "teacher"
    rest: Literal["corrected", "sampled", "raw"] = "corrected"
    i_know_the_fixed_point_is_not_the_teacher: bool = False

    @property
    def needs(self) -> frozenset[Need]:
        """The teacher's likeliest tokens, where the support is theirs; with a sampled rest the drawn one's too."""
        asked = needs("top_k") if self.of == "teacher" else needs("full_vocab")
        return asked | (needs("sampled") if self.rest == "sampled" else needs())

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ValueError(f"k={self.k}: must be at least 1")
        if self.rest == "raw" and not self.i_know_the_fixed_point_is_not_the_teacher:
            raise ValueError(
                "rest=raw: a raw truncated sum pushes the student's mass out of the support even where student and "
                "teacher agree; use opd.losses.OnTopK (rest: tail) or rest=corrected, or, to study it, set "
                "i_know_the_fixed_point_is_not_the_teacher=true"
            )

    def value_and_grad(self, chunk: TokenChunk) -> tuple[Tensor, Tensor]:
        """Values [n], logit gradient [n, V]; with u = d value / d p, the gradient is p (u - <p, u>)."""
        ids, valid = support_ids(chunk, self.k, self.of)
        teacher = teacher_on(chunk, ids, valid)
        p, q = on_set(chunk.student_p, ids, valid), teacher.exp()
        log_ratio = (chunk.student_logp.gather(-1, ids) - teacher).masked_fill(~valid, 0.0)
        value, u = (p * log_ratio).sum(-1), log_ratio
        if self.rest == "corrected":
            value = value + (q - p).sum(-1)
        else:
            u = (log_ratio + 1.0).masked_fill(~valid, 0.0)
        pu = p * u
        grad = (chunk.student_p * -pu.sum(-1, keepdim=True)).scatter_add_(-1, ids, pu)
        return self._with_sample(chunk, ids, valid, value, grad) if self.rest == "sampled" else (value, grad)

    @staticmethod
    def _with_sample(
        chunk: TokenChunk, ids: Tensor, valid: Tensor, value: Tensor, grad: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Adds 1[y not in S] (log p(y) - log q(y) + 1) and its score-function gradient."""
        token = chunk.token_ids[:, None]
        outside = ~((ids == token) & valid).any(-1)
        assert chunk.teacher_token_logp is not None, "a sampled rest needs the teacher's score of the sampled token"
        log_ratio = chunk.student_logp.gather(-1, token)[:, 0] - chunk.teacher_token_logp
        coefficient = torch.where(outside, log_ratio + 1.0, 0.0)
        grad.addcmul_(chunk.student_p, coefficient[:, None], value=-1.0)
        grad.scatter_add_(-1, token, coefficient[:, None])
        return value + torch.where(outside, log_ratio, 0.0), grad
