"""A loss is a formula over a block of tokens; autograd differentiates it block by block."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from opd.losses import Need
from opd.records import TokenChunk


@dataclass(frozen=True)
class SkewedReverseKL:
    """KL(p || (1 - alpha) q + alpha p): bounded by -log(alpha) where the teacher has no mass (DistiLLM, 2402.03898)."""

    alpha: float = 0.1
    needs: ClassVar[frozenset[Need]] = frozenset({"full_vocab"})

    def __call__(self, chunk: TokenChunk) -> Tensor:
        """Values [n]."""
        mixture = (1 - self.alpha) * chunk.teacher_p + self.alpha * chunk.student_p
        return (chunk.student_p * (chunk.student_logp - mixture.log())).sum(-1)
