"""Divergences seen through a view: each wrapper changes the two distributions, asks the divergence inside, and carries
its gradient back to the student's logits. Views nest: `GatedByEntropy` outermost, then `Toward`, then `StopClass`, then
the others.

Two facts carry all of them. Lumping tokens into buckets: with b the bucket's probability and g the gradient in the
bucket's log-odds, the logit gradient of a token v in it is g p_v / b. Renormalising over a set: the gradient inside the
set is that of the small distribution, and zero outside.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from opd.distributions import Distribution, likeliest
from opd.losses.estimators import CrossEntropy
from opd.losses.protocol import AnalyticLoss, ByGradient, Need, needs
from opd.records import TokenChunk
from opd.schedules import Scheduled, at

TINY = 1e-30  # a bucket's probability is never below it, so that its logarithm exists


@dataclass(frozen=True)
class View(ByGradient):
    """What all views share: the divergence inside, and its needs."""

    divergence: AnalyticLoss

    def __post_init__(self) -> None:
        _refuse_inside(self)

    @property
    def needs(self) -> frozenset[Need]:
        """Those of the divergence; a view reads the whole vocabulary, even of one that would not."""
        return self.divergence.needs - needs("top_k") | needs("full_vocab")


@dataclass(frozen=True)
class AtTemperature(View):
    """The divergence between softmax(log p / T) and softmax(log q / T); apart from the temperature of sampling."""

    temperature: Scheduled = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.temperature, float) and self.temperature <= 0:
            raise ValueError(f"temperature={self.temperature}: must be positive")

    def value_and_grad(self, chunk: TokenChunk) -> tuple[Tensor, Tensor]:
        """Values [n], logit gradient [n, V]."""
        temperature = at(self.temperature, chunk.progress)
        student_logp, teacher_logp = (
            torch.log_softmax(logp / temperature, -1) for logp in (chunk.student_logp, chunk.teacher_logp)
        )
        value, grad = self.divergence.value_and_grad(_between(chunk, student_logp, teacher_logp))
        return value, grad.div_(temperature)


@runtime_checkable
class Target(Protocol):
    """A distribution made of the teacher's and others, for the student to follow instead of the teacher's."""

    def logp(self, chunk: TokenChunk) -> Tensor:
        """Log-probabilities [n, V], constant."""
        ...


@dataclass(frozen=True)
class Geometric:
    """q^lam * reference^(1 - lam), normalised: between the two below 1, beyond the teacher above (ExOPD, 2602.12125).

    The reference is the term's `reference`, another teacher: the student's start, or the teacher's own.
    """

    lam: Scheduled = 1.25

    def logp(self, chunk: TokenChunk) -> Tensor:
        """Log-probabilities [n, V]."""
        lam = at(self.lam, chunk.progress)
        return torch.log_softmax(lam * chunk.teacher_logp + (1 - lam) * chunk.reference_logp, -1)


@dataclass(frozen=True)
class Veto:
    """q * p^beta, normalised, p held constant; a constant beta has the fixed point q^(1 / (1 - beta)) (2601.07155)."""

    beta: Scheduled = 0.8

    def logp(self, chunk: TokenChunk) -> Tensor:
        """Log-probabilities [n, V]."""
        return torch.log_softmax(chunk.teacher_logp + at(self.beta, chunk.progress) * chunk.student_logp, -1)


@dataclass(frozen=True)
class Toward(View):
    """The divergence to a target instead of to the teacher."""

    target: Target

    @property
    def needs(self) -> frozenset[Need]:
        """The full vocabulary, and of a geometric target the reference's too."""
        return super().needs | (needs("reference") if isinstance(self.target, Geometric) else needs())

    def value_and_grad(self, chunk: TokenChunk) -> tuple[Tensor, Tensor]:
        """Values [n], logit gradient [n, V]."""
        target = Distribution(self.target.logp(chunk))
        return self.divergence.value_and_grad(replace(chunk, teacher=target, teacher_token_logp=None, teacher_top=None))


@dataclass(frozen=True)
class StopClass(View):
    """All ids that end an answer, the student's and the teacher's, count as one token in both distributions.

    A base student that stops with another id than its teacher otherwise unlearns to stop (2609.20511).
    """

    def value_and_grad(self, chunk: TokenChunk) -> tuple[Tensor, Tensor]:
        """Values [n], logit gradient [n, V]."""
        ids = [index for index in chunk.stop_ids if index < chunk.student_p.shape[1]]
        if len(ids) < 2:
            return self.divergence.value_and_grad(chunk)
        student, teacher = (_lump(p, ids) for p in (chunk.student_p, chunk.teacher_p))
        value, grad = self.divergence.value_and_grad(_between(chunk, _log(student), _log(teacher)))
        share = chunk.student_p[:, ids] / student[:, ids[:1]].clamp(min=TINY)
        grad[:, ids] = grad[:, ids[:1]] * share
        return value, grad


def _lump(p: Tensor, ids: list[int]) -> Tensor:
    """Probabilities [n, V] with the mass of all `ids` on the first of them."""
    lumped = p.clone()
    lumped[:, ids] = 0.0
    lumped[:, ids[0]] = p[:, ids].sum(-1)
    return lumped


@dataclass(frozen=True)
class GatedByEntropy(View):
    """The divergence where the teacher's entropy exceeds `threshold` nats, zero elsewhere (EOPD, 2603.07079)."""

    threshold: float = 0.8

    def value_and_grad(self, chunk: TokenChunk) -> tuple[Tensor, Tensor]:
        """Values [n], logit gradient [n, V]."""
        entropy = -torch.linalg.vecdot(chunk.teacher_p, chunk.teacher_logp)
        gate = (entropy > self.threshold).to(entropy.dtype)
        value, grad = self.divergence.value_and_grad(chunk)
        return value * gate, grad.mul_(gate[:, None])


Support = Literal["teacher", "student", "union", "intersection"]


@dataclass(frozen=True)
class OnTopK(View):
    """The divergence over the k likeliest tokens of one or both models.

    Args:
        of: whose top-k; `union` and `intersection` combine both.
        rest: `tail` lumps all other tokens into one bucket: a lower bound of the full divergence that still pulls the
            student's mass to where the teacher's is (SDPO, 2601.20802). `renormalised` compares the two conditional
            distributions and is blind to mass outside the set (LSM, 2603.25562). Both have the teacher as fixed point.
    """

    k: int = 64
    of: Support = "teacher"
    rest: Literal["tail", "renormalised"] = "tail"

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ValueError(f"k={self.k}: must be at least 1")
        super().__post_init__()

    @property
    def needs(self) -> frozenset[Need]:
        """Of the teacher its likeliest tokens are enough, where the support is theirs."""
        asked = self.divergence.needs
        return asked - needs("full_vocab") | needs("top_k") if self.of == "teacher" else asked

    def value_and_grad(self, chunk: TokenChunk) -> tuple[Tensor, Tensor]:
        """Values [n], logit gradient [n, V]."""
        ids, valid = support_ids(chunk, self.k, self.of)
        inside = self._renormalised if self.rest == "renormalised" else self._with_tail
        return inside(chunk, ids, valid)

    def _with_tail(self, chunk: TokenChunk, ids: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        student = torch.cat([on_set(chunk.student_p, ids, valid), rest_of(chunk.student_p, ids, valid)], -1)
        teacher = teacher_on(chunk, ids, valid).exp()
        rest = 1.0 - teacher.sum(-1, keepdim=True) if chunk.teacher is None else rest_of(chunk.teacher_p, ids, valid)
        teacher = torch.cat([teacher, rest.clamp(min=0.0)], -1)
        value, grad = self.divergence.value_and_grad(_between(chunk, _log(student), _log(teacher)))
        slope = grad[:, -1:] / student[:, -1:].clamp(min=TINY)  # per unit of the tail's probability
        spread = chunk.student_p * slope
        correction = (grad[:, :-1] - student[:, :-1] * slope).masked_fill(~valid, 0.0)
        return value, spread.scatter_add_(-1, ids, correction)

    def _renormalised(self, chunk: TokenChunk, ids: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        inside = (chunk.student_logp.gather(-1, ids), teacher_on(chunk, ids, valid))
        student, teacher = (torch.log_softmax(logp.masked_fill(~valid, -1e4), -1) for logp in inside)
        value, grad = self.divergence.value_and_grad(_between(chunk, student, teacher))
        full = torch.zeros_like(chunk.student_p)
        return value, full.scatter_add_(-1, ids, grad.masked_fill(~valid, 0.0))


def support_ids(chunk: TokenChunk, k: int, of: Support) -> tuple[Tensor, Tensor]:
    """Token ids [n, K] of the support and which of them count [n, K]; no id counts twice."""
    k = min(k, chunk.student_p.shape[1])
    if of == "teacher" and chunk.teacher_top is not None:
        best = chunk.teacher_top.logp.topk(min(k, chunk.teacher_top.logp.shape[1]), -1)
        return chunk.teacher_top.ids.gather(-1, best.indices), best.values > -torch.inf
    student = likeliest(chunk.student_logp, k) if of != "teacher" else None
    teacher = likeliest(chunk.teacher_logp, k) if of != "student" else None
    if student is None or teacher is None:
        ids = teacher if student is None else student
        assert ids is not None, "one of the two was computed"
        return ids, torch.ones_like(ids, dtype=torch.bool)
    common = (student[:, :, None] == teacher[:, None, :]).any(-1)
    if of == "intersection":
        return student, common
    return torch.cat([teacher, student], -1), torch.cat([torch.ones_like(common), ~common], -1)


def teacher_on(chunk: TokenChunk, ids: Tensor, valid: Tensor) -> Tensor:
    """The teacher's log-probabilities [n, K] of the support's tokens, -inf where one does not count."""
    if chunk.teacher_top is None:
        return chunk.teacher_logp.gather(-1, ids).masked_fill(~valid, -torch.inf)
    best = chunk.teacher_top.logp.topk(ids.shape[1], -1)
    return best.values.masked_fill(~valid, -torch.inf)


def on_set(p: Tensor, ids: Tensor, valid: Tensor) -> Tensor:
    """Probabilities [n, K] of the support's tokens, zero where one does not count."""
    return p.gather(-1, ids).masked_fill(~valid, 0.0)


def rest_of(p: Tensor, ids: Tensor, valid: Tensor) -> Tensor:
    """Probability [n, 1] outside the support, summed rather than subtracted: exact however small it is."""
    kept = p.gather(-1, ids).masked_fill(valid, 0.0)  # a duplicate meets its twin's zero, and the minimum wins
    return p.clone().scatter_reduce_(-1, ids, kept, "amin").sum(-1, keepdim=True)


def _between(chunk: TokenChunk, student_logp: Tensor, teacher_logp: Tensor) -> TokenChunk:
    """The chunk with other distributions in place of the full ones; what spoke of the full vocabulary is gone."""
    return replace(
        chunk,
        student=Distribution(student_logp),
        teacher=Distribution(teacher_logp),
        teacher_token_logp=None,
        teacher_top=None,
        support=None,
        reference=None,
        stop_ids=(),
        pool=None,
    )


def _refuse_inside(view: View) -> None:
    """Views that read what another changes stand outside of it; what is no divergence of two distributions, of all."""
    if isinstance(view, GatedByEntropy):
        return  # it changes nothing that a loss reads
    outermost = (GatedByEntropy, Toward, StopClass)  # of these each stands outside of all that follow
    outside = next((outermost[:n] for n, kind in enumerate(outermost) if isinstance(view, kind)), outermost)
    name, inner = type(view).__name__, view.divergence
    while isinstance(inner, View):
        if isinstance(inner, outside):
            raise ValueError(
                f"divergence: {type(inner).__name__} inside {name} would not see the two models' own distributions; "
                f"nest them the other way round, {type(inner).__name__} outside"
            )
        _refuse_second_support(view, inner)
        inner = inner.divergence
    _refuse_second_support(view, inner)
    others = sorted(inner.needs - needs("full_vocab", "top_k", "reference"))
    if others or isinstance(inner, CrossEntropy):
        asks = " and ".join(others) or "a text"
        raise ValueError(
            f"divergence: {type(inner).__name__} (of {asks}) is no divergence of two distributions, and {name} changes "
            f"those alone; use e.g. opd.losses.ReverseKL inside, or {type(inner).__name__} without {name}"
        )


def _refuse_second_support(view: View, inner: AnalyticLoss) -> None:
    if isinstance(view, OnTopK) and (isinstance(inner, OnTopK) or "top_k" in inner.needs):
        raise ValueError(
            f"divergence: {type(inner).__name__} inside OnTopK would take the likeliest of the likeliest tokens and of "
            "their rest; keep one of the two"
        )


def _log(p: Tensor) -> Tensor:
    return p.clamp(min=TINY).log()
