"""A term's values and gradient on one block of tokens, for the streaming objective."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import Tensor

from opd.distributions import Distribution
from opd.losses import AnalyticLoss, ClippedLoss, Loss, TokenLoss
from opd.records import Scores, TokenChunk
from opd.shared_vocabulary import common_support, restricted
from opd.terms import Term


@dataclass(frozen=True)
class Way:
    """What a loss can do beside giving values; to ask takes as long as a small block."""

    analytic: bool
    of_token: bool
    clips: bool

    @classmethod
    def of(cls, loss: Loss) -> Way:
        """Asks the loss."""
        return cls(isinstance(loss, AnalyticLoss), isinstance(loss, TokenLoss), isinstance(loss, ClippedLoss))


@dataclass(frozen=True)
class Share:
    """A term's part in a chunk of c tokens; its lists get one entry per block."""

    term: Term
    way: Way
    active: Tensor  # [c] bool
    all_active: bool
    coefficient: Tensor  # [c], of the values in the loss, before any correction
    row_value: Tensor | None  # [c]
    values: list[Tensor] = field(default_factory=list)
    factors: list[Tensor] = field(default_factory=list)
    clipped: list[Tensor] = field(default_factory=list)

    def closed(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """After the last block: the loss, the values [c] with any correction, and which tokens were clipped [c]; NaN
        where the term has no weight.
        """
        value, coefficient = torch.cat(self.values), self.coefficient
        if self.factors:
            factor = torch.cat(self.factors)
            coefficient = coefficient * factor
            loss, value = coefficient * value, factor * value
        else:
            loss = coefficient * value
        clipped = None
        if self.clipped:
            clipped = torch.where(self.active, torch.cat(self.clipped).to(value.dtype), torch.nan)
        return torch.where(self.active, loss, 0.0).sum(), torch.where(self.active, value, torch.nan), clipped


class Sum:
    """A sum of gradients, which costs nothing before the first."""

    def __init__(self) -> None:
        self.total: Tensor | None = None

    def add(self, grad: Tensor) -> None:
        """Adds a gradient; the first one becomes the sum."""
        self.total = grad if self.total is None else self.total.add_(grad)

    def add_of_tokens(self, by_token: Tensor, p: Tensor, token_ids: Tensor) -> None:
        """Adds by_token * (onehot - p): the gradient of the sampled tokens' log-probabilities [n] in the logits."""
        if self.total is None:
            self.total = p * -by_token[:, None]
        else:
            self.total.addcmul_(p, by_token[:, None], value=-1.0)
        self.total.scatter_add_(-1, token_ids[:, None], by_token[:, None])


@dataclass(frozen=True)
class Block:
    """A block of n tokens of a chunk, and the sums to which terms add."""

    chunk: TokenChunk
    teachers: Mapping[str, Scores]
    sampling: Distribution  # at the temperature of sampling
    temperature: float
    inside: slice  # of the chunk
    grad: Sum  # of the loss, in the logits [n, V]
    by_token: Sum  # of the loss, in `token_logp` [n]

    def close(self) -> Tensor | None:
        """The gradient in the logits [n, V]; None where nothing has one."""
        if self.by_token.total is not None:
            by_token = self.by_token.total / self.temperature
            self.grad.add_of_tokens(by_token, self.sampling.p, self.chunk.token_ids)
        return self.grad.total


def add_term(share: Share, block: Block) -> None:
    """Adds the term's gradient to the block's and notes its values."""
    term, inside = share.term, block.inside
    chunk = _under(block, term, None if share.row_value is None else share.row_value[inside])
    drawn, by_token, support = block.sampling, block.by_token, common_support(block.teachers, term.teachers)
    if support is not None:
        chunk, drawn = restricted(chunk, drawn, support)
        by_token = Sum()
    coefficient, active = share.coefficient[inside], None if share.all_active else share.active[inside]
    if term.correction is not None:
        factor = term.correction(chunk)
        share.factors.append(factor.clone())
        coefficient = coefficient * factor
        if active is not None:  # elsewhere a factor may be NaN: a given answer has no sampler's probability
            coefficient = torch.where(active, coefficient, 0.0)
    if share.way.clips:
        share.clipped.append(cast(ClippedLoss, term.loss).clipped(chunk))
    if share.way.analytic:
        value, grad = cast(AnalyticLoss, term.loss).value_and_grad(chunk)
        block.grad.add(_only(active, grad).mul_(coefficient[:, None]))
    elif share.way.of_token:
        value, slope = cast(TokenLoss, term.loss).value_and_slope(chunk)
        by_token.add(_only(active, slope) * coefficient)
    else:
        value = _add_autograd(term, chunk, support, coefficient, active, block.grad, by_token)
    if support is not None and by_token.total is not None:
        block.grad.add_of_tokens(by_token.total / block.temperature, drawn.p, chunk.token_ids)
    share.values.append(value.clone())  # a user's formula may give a view of a tensor that the next block overwrites


def _add_autograd(
    term: Term,
    chunk: TokenChunk,
    support: Tensor | None,
    coefficient: Tensor,
    active: Tensor | None,
    grad: Sum,
    by_token: Sum,
) -> Tensor:
    """The values [n] of a loss that knows no gradient, whose gradient it adds.

    Outside of `support` [1 or n, V] the chunk's log-probabilities are constants.
    """
    with torch.enable_grad():
        leaves = (chunk.student_logp.detach().requires_grad_(), chunk.token_logp.detach().requires_grad_())
        value = term.loss(replace(chunk, student=Distribution(leaves[0]), token_logp=leaves[1], pool=None))
        _check_values(term, value, len(coefficient))
        total = (value * coefficient).sum()
        of_logp, of_token = (
            torch.autograd.grad(total, leaves, allow_unused=True) if total.requires_grad else (None, None)
        )
    if of_logp is not None:
        of_logp = _only(active, of_logp if support is None else of_logp.masked_fill(~support, 0.0))
        grad.add(torch.addcmul(of_logp, chunk.student_p, of_logp.sum(-1, keepdim=True), value=-1.0))
    if of_token is not None:
        by_token.add(_only(active, of_token))
    return value.detach()


def _under(block: Block, term: Term, row_value: Tensor | None) -> TokenChunk:
    """The chunk as the term sees it: with its teacher's and its reference's scores and its rows' values."""
    teacher = None if term.teacher is None else block.teachers[term.teacher]
    reference = None if term.reference is None else block.teachers[term.reference]
    return replace(
        block.chunk,
        row_value=row_value,
        teacher=teacher and teacher.full,
        teacher_token_logp=teacher and teacher.token_logp,
        teacher_top=teacher and teacher.top,
        support=teacher and teacher.support,
        reference=reference and reference.full,
        reference_token_logp=reference and reference.token_logp,
    )


def _only(active: Tensor | None, grad: Tensor) -> Tensor:
    """The gradient [n, ...], zero in rows that the term does not weigh: a formula may be infinite there."""
    return grad if active is None else grad.masked_fill(~active.view(-1, *[1] * (grad.ndim - 1)), 0.0)


def _check_values(term: Term, value: Tensor, num_tokens: int) -> None:
    if value.shape != (num_tokens,):
        raise ValueError(
            f"loss.{term.name} ({type(term.loss).__name__}) returned shape {tuple(value.shape)} for a block of "
            f"{num_tokens} tokens: a loss must return one value per token, shape ({num_tokens},)"
        )
