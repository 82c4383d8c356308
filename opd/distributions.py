"""Distributions over the vocabulary for a block of tokens, and arithmetic on such blocks that stays in the cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FEW_ROWS = 16
GROUP = 32  # tokens of a group in a search for the likeliest


class Distribution:
    """Log-probabilities over the vocabulary, and their exponentials, made once when first asked for."""

    def __init__(self, logp: Tensor, p: Tensor | None = None) -> None:
        self.logp = logp  # [n, V]
        self._p = p

    @classmethod
    def of_logits(cls, logits: Tensor, floor: float | None = None, out: Tensor | None = None) -> Distribution:
        """Softmax and log-softmax of logits [n, V] in one pass; `floor` bounds the log-probabilities.

        The logits become the log-probabilities: they are overwritten. `out` [n, V] takes the probabilities.
        """
        logits.sub_(logits.amax(-1, keepdim=True))  # first, or a large peak would round the logarithm below away
        p = torch.softmax(logits, -1, out=out)
        logp = logits.add_(p.amax(-1, keepdim=True).log_())  # the normaliser, read off the likeliest token
        return cls(logp if floor is None else logp.clamp_(min=floor), p)

    @property
    def p(self) -> Tensor:
        """Probabilities [n, V]."""
        if self._p is None:
            self._p = self.logp.exp()
        return self._p


def row_dots(x: Tensor, y: Tensor) -> Tensor:
    """sum_v x * y [n] of two [n, V]. A few long rows go one by one, without a product in memory."""
    if len(x) <= FEW_ROWS and not x.is_cuda:
        return torch.stack([torch.dot(a, b) for a, b in zip(x, y, strict=True)])
    return torch.linalg.vecdot(x, y)


def likeliest(logp: Tensor, k: int) -> Tensor:
    """Ids [n, k] of the k largest of [n, V], the largest first.

    Over a large vocabulary the maxima of groups come first: each of the k is in one of the k groups with the largest.
    """
    tokens, vocabulary = logp.shape
    groups = vocabulary // GROUP
    if groups < 4 * k:
        return logp.topk(k, -1).indices
    grouped = logp[:, : groups * GROUP].view(tokens, GROUP, groups)  # members are a stride apart: fast maxima
    best = grouped.amax(1).topk(k, -1, sorted=False).indices
    members = torch.arange(0, groups * GROUP, groups, device=logp.device)
    ids = (best[:, None, :] + members[:, None]).flatten(1)
    if groups * GROUP < vocabulary:
        rest = torch.arange(groups * GROUP, vocabulary, device=logp.device)
        ids = torch.cat([ids, rest.expand(tokens, -1)], -1)
    return ids.gather(-1, logp.gather(-1, ids).topk(k, -1).indices)


def wide(dtype: torch.dtype) -> torch.dtype:
    """At least fp32."""
    return torch.promote_types(dtype, torch.float32)


class Pool:
    """Wide tensors that every block uses again: fresh memory of this size costs more than the arithmetic in it."""

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []
        self._taken = 0

    def take(self, like: Tensor) -> Tensor:
        """A tensor [n, V] with anything in it, the taker's until the pool is emptied; n may only fall."""
        if self._taken == len(self._tensors):
            self._tensors.append(torch.empty(like.shape, dtype=wide(like.dtype), device=like.device))
        self._taken += 1
        return self._tensors[self._taken - 1][: len(like)]

    def take_all_back(self) -> None:
        """Every tensor may be given away again."""
        self._taken = 0


@dataclass(frozen=True)
class LogitMap:
    """softcap * tanh(scale * raw / softcap): what some architectures do to a product before it is a logit."""

    scale: float = 1.0
    softcap: float | None = None

    def __call__(self, raw: Tensor) -> Tensor | None:
        """Turns raw logits [n, V] in fp32 into logits, in place; returns the slope of that, None if it is `scale`."""
        if self.scale != 1.0:
            raw.mul_(self.scale)
        if self.softcap is None:
            return None
        raw.div_(self.softcap).tanh_()
        slope = (1.0 - raw.square()).mul_(self.scale)
        raw.mul_(self.softcap)
        return slope
