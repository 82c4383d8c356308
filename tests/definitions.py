"""Divergences and views as their definitions say: in probability space, in fp64, for one token, by plain formulas.

`definition(loss, p, q, given)` is differentiable in p, the student [V]; q is the teacher [V].
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import singledispatch
from math import exp

import torch
from torch import Tensor

from opd.losses import (
    GOLD,
    JSD,
    ULD,
    AdaptiveKL,
    AtTemperature,
    CrossEntropy,
    ForwardKL,
    GatedByEntropy,
    Geometric,
    OnTopK,
    ReverseKL,
    SkewForwardKL,
    SkewReverseKL,
    StopClass,
    TotalVariation,
    Toward,
    TruncatedReverseKL,
)
from opd.schedules import at

PROGRESS = 0.25  # of the run, for scheduled parameters


@dataclass(frozen=True)
class Given:
    """What a definition may need beside the two distributions."""

    reference: Tensor  # [V]
    token: int = 0
    stop_ids: tuple[int, ...] = ()


def kl(a: Tensor, b: Tensor) -> Tensor:
    """sum a log(a / b)."""
    return (a * (a.log() - b.log())).sum()


@singledispatch
def definition(loss: object, p: Tensor, q: Tensor, given: Given) -> Tensor:
    """The loss's value."""
    raise NotImplementedError(f"write down here what {type(loss).__name__} is")


@definition.register
def _(loss: ReverseKL, p: Tensor, q: Tensor, given: Given) -> Tensor:
    return kl(p, q if loss.floor is None else q.clamp(min=exp(loss.floor)))


@definition.register
def _(loss: ForwardKL, p: Tensor, q: Tensor, given: Given) -> Tensor:
    return kl(q, p)


@definition.register
def _(loss: JSD, p: Tensor, q: Tensor, given: Given) -> Tensor:
    beta = at(loss.beta, PROGRESS)
    if beta in (0.0, 1.0):
        return kl(p, q) if beta else kl(q, p)
    m = beta * q + (1 - beta) * p
    return beta * kl(q, m) + (1 - beta) * kl(p, m)


@definition.register
def _(loss: SkewForwardKL, p: Tensor, q: Tensor, given: Given) -> Tensor:
    alpha = at(loss.alpha, PROGRESS)
    return kl(q, alpha * q + (1 - alpha) * p)


@definition.register
def _(loss: SkewReverseKL, p: Tensor, q: Tensor, given: Given) -> Tensor:
    alpha = at(loss.alpha, PROGRESS)
    return kl(p, (1 - alpha) * q + alpha * p)


@definition.register
def _(loss: TotalVariation, p: Tensor, q: Tensor, given: Given) -> Tensor:
    return (p - q).abs().sum() / 2


@definition.register
def _(loss: ULD, p: Tensor, q: Tensor, given: Given) -> Tensor:
    return (p.sort().values - q.sort().values).abs().sum()


@definition.register
def _(loss: GOLD, p: Tensor, q: Tensor, given: Given) -> Tensor:
    """Of a teacher with the student's tokens: all are common, and w is their share, 1, unless it is set."""
    m = loss.beta * q + (1 - loss.beta) * p
    jsd = (loss.beta * q * (q / m).log() + (1 - loss.beta) * p * (p / m).log()).sum()
    return (1.0 if loss.common_share is None else loss.common_share) * jsd


@definition.register
def _(loss: AdaptiveKL, p: Tensor, q: Tensor, given: Given) -> Tensor:
    head, mass = [], 0.0
    for token in q.argsort(descending=True).tolist():
        if mass < loss.mass:
            head.append(token)
        mass += q[token].item()
    gap = (p - q).abs().detach()
    share = (gap[head].sum() / gap.sum()).item() if gap.sum() > 0 else 0.5
    return share * kl(q, p) + (1 - share) * kl(p, q)


@definition.register
def _(loss: AtTemperature, p: Tensor, q: Tensor, given: Given) -> Tensor:
    inverse = 1 / at(loss.temperature, PROGRESS)
    return definition(loss.divergence, _normal(p**inverse), _normal(q**inverse), given)


@definition.register
def _(loss: GatedByEntropy, p: Tensor, q: Tensor, given: Given) -> Tensor:
    gate = float(-(q * q.log()).sum() > loss.threshold)
    return gate * definition(loss.divergence, p, q, given)


@definition.register
def _(loss: Toward, p: Tensor, q: Tensor, given: Given) -> Tensor:
    if isinstance(loss.target, Geometric):
        lam = at(loss.target.lam, PROGRESS)
        target = q**lam * given.reference ** (1 - lam)
    else:
        target = q * p.detach() ** at(loss.target.beta, PROGRESS)
    return definition(loss.divergence, p, _normal(target), given)


@definition.register
def _(loss: StopClass, p: Tensor, q: Tensor, given: Given) -> Tensor:
    return definition(loss.divergence, _lumped(p, given.stop_ids), _lumped(q, given.stop_ids), given)


@definition.register
def _(loss: OnTopK, p: Tensor, q: Tensor, given: Given) -> Tensor:
    inside = support(p, q, loss.k, loss.of)
    if loss.rest == "tail":
        outside = [token for token in range(len(p)) if token not in inside]
        return definition(loss.divergence, _lumped(p, outside), _lumped(q, outside), given)
    if not inside:
        return 0.0 * p.sum()
    return definition(loss.divergence, _normal(p[inside]), _normal(q[inside]), given)


@definition.register
def _(loss: TruncatedReverseKL, p: Tensor, q: Tensor, given: Given) -> Tensor:
    inside = support(p, q, loss.k, loss.of)
    a, b = p[inside], q[inside]
    head = (a * (a / b).log()).sum()
    if loss.rest == "corrected":
        return head + (b - a).sum()
    if loss.rest == "raw" or given.token in inside:
        return head
    # the score-function form of 1[y outside] log(p / q): its value, and in p the gradient (log(p / q) + 1) d log p
    ratio = (p[given.token] / q[given.token]).log()
    return head + ratio.detach() + (ratio.detach() + 1) * (p[given.token].log() - p[given.token].log().detach())


@definition.register
def _(loss: CrossEntropy, p: Tensor, q: Tensor, given: Given) -> Tensor:
    return -p[given.token].log()


def support(p: Tensor, q: Tensor, k: int, of: str) -> list[int]:
    """The tokens of a support, in order."""
    student, teacher = (set(x.topk(min(k, len(x))).indices.tolist()) for x in (p, q))
    either, both = student | teacher, student & teacher
    return sorted({"student": student, "teacher": teacher, "union": either, "intersection": both}[of])


def _normal(x: Tensor) -> Tensor:
    return x / x.sum()


def _lumped(x: Tensor, tokens: list[int] | tuple[int, ...]) -> Tensor:
    """The other tokens, and if there are any of `tokens` one bucket for all of them."""
    kept = [token for token in range(len(x)) if token not in tokens]
    return torch.cat([x[kept], x[list(tokens)].sum()[None]]) if tokens else x
