"""A loss term: a formula with its name, weight, teacher and way of averaging."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from opd.losses import Correction, Loss
from opd.schedules import Constant, Schedule
from opd.weighting import Weigher

Aggregation = Literal["token_mean", "sequence_mean", "constant"]


@dataclass(frozen=True)
class Term:
    """weight(progress) * sum_t w_t c_t loss_t / N, with N counted over all ranks and micro-batches of the update.

    w_t is the product of the weighers' factors (`weigh`, named; a token of factor 0 is not counted), c_t the
    `correction` for the mismatch between sampler and student.

    `aggregation`: `token_mean` (w = 1, N = tokens), `sequence_mean` (w = 1 / tokens of the row, N = rows; the mean of
    row means), `constant` (w = 1, N = rows * `constant_tokens`; Dr. GRPO, 2503.20783).
    """

    name: str
    loss: Loss
    weight: Schedule = field(default_factory=lambda: Constant(1.0))
    teacher: str | None = None
    reference: str | None = None
    correction: Correction | None = None
    weigh: dict[str, Weigher] = field(default_factory=dict)
    aggregation: Aggregation = "token_mean"
    constant_tokens: int = 1

    @property
    def teachers(self) -> list[str]:
        """Names of the teachers whose scores a row must have: `teacher`, and `reference`, a second one."""
        return [name for name in (self.teacher, self.reference) if name is not None]

    @property
    def needs_facts(self) -> bool:
        """Whether a forward pass without gradients must precede the update."""
        asked = self.loss.needs | (frozenset() if self.correction is None else self.correction.needs)
        return bool({"row_ratio", "row_value"} & asked) or any(weigher.needs_facts for weigher in self.weigh.values())

    @property
    def needs_advantage(self) -> bool:
        """Whether rows without a reward must stay out of this term."""
        return "advantage" in self.loss.needs
