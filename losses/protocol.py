"""What a loss is: a formula over a block of tokens, with what it needs declared beside it.

A loss knows no mask, mean, rank or weight; the streaming objective applies those. A user's loss is any class (or,
wrapped in `Formula`, any function) that maps a `TokenChunk` to `[n]` values by differentiable torch operations.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from torch import Tensor

from opd.records import TokenChunk, TokenRow

Need = Literal[
    "full_vocab", "top_k", "sampled", "ranked", "text", "reference", "advantage", "sampler_logp", "sampler_top",
    "row_ratio", "row_value",
]  # fmt: skip


@runtime_checkable
class Loss(Protocol):
    """`loss(chunk) -> [n]`: one value per token, differentiable in `chunk.student_logp` and `chunk.token_logp`."""

    @property
    def needs(self) -> frozenset[Need]:
        """What must exist for the formula.

        `full_vocab`, `top_k` or `sampled`: the teacher's scores of all tokens, of its likeliest or of the sampled one;
        `ranked`: its probabilities alone, whosever they are (`text`, which some teachers provide, is no score: a stream
        takes it, and no loss can need it); `reference`: the same of a second teacher; `advantage`: rewards;
        `sampler_logp`: the probability under which the token was drawn, exactly; `sampler_top`: the same of the
        likeliest tokens at every position; `row_ratio`: the mean log-ratio of the whole row, `row_value`: the loss's
        own `of_row`; these two cost a forward pass without gradients.
        """
        ...

    def __call__(self, chunk: TokenChunk) -> Tensor:
        """Values [n] for the n tokens of the chunk."""
        ...


@runtime_checkable
class AnalyticLoss(Loss, Protocol):
    """A loss that also knows its gradient, which saves the autograd pass over the block."""

    def value_and_grad(self, chunk: TokenChunk) -> tuple[Tensor, Tensor]:
        """Values [n] and gradient with respect to the student's logits [n, V], a fresh tensor that the caller may
        overwrite.
        """
        ...


@runtime_checkable
class RowLoss(Loss, Protocol):
    """A loss that wants to see whole rows first; it declares `row_value` among its needs."""

    def of_row(self, row: TokenRow) -> Tensor:
        """One constant per trainable token of the row [R]; comes back block by block as `chunk.row_value`."""
        ...


@runtime_checkable
class ClippedLoss(Loss, Protocol):
    """A surrogate that cuts off or bounds the gradient of some tokens; their share is logged."""

    def clipped(self, chunk: TokenChunk) -> Tensor:
        """Whether each token is cut [n]."""
        ...


@runtime_checkable
class TokenLoss(Loss, Protocol):
    """A loss of the sampled token's log-probability alone that knows its slope, which saves an autograd pass."""

    def value_and_slope(self, chunk: TokenChunk) -> tuple[Tensor, Tensor]:
        """Values [n] and their derivative [n] in the same token's `token_logp`."""
        ...


class ByGradient(ABC):
    """A loss given by `value_and_grad` alone: calling it takes the values."""

    @abstractmethod
    def value_and_grad(self, chunk: TokenChunk) -> tuple[Tensor, Tensor]:
        """Values [n], logit gradient [n, V]."""

    def __call__(self, chunk: TokenChunk) -> Tensor:
        """Values [n]."""
        return self.value_and_grad(chunk)[0]


@dataclass(frozen=True)
class Formula:
    """A plain function as a loss: `{_target_: opd.losses.Formula, function: my_pkg.my_loss, needs: [full_vocab]}`."""

    function: Callable[[TokenChunk], Tensor]
    needs: frozenset[Need] = frozenset()

    def __post_init__(self) -> None:
        object.__setattr__(self, "needs", frozenset(self.needs))

    def __call__(self, chunk: TokenChunk) -> Tensor:
        """The function's values [n]."""
        return self.function(chunk)


def needs(*names: Need) -> frozenset[Need]:
    """A set of needs, for class bodies."""
    return frozenset(names)


def declared_needs(loss: Loss) -> Sequence[Need]:
    """The needs of a loss in a stable order, for messages."""
    return sorted(loss.needs)
