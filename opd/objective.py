"""The streaming objective: every loss term and statistic in one pass over the student's head.

Hidden states of the trainable tokens and the head go in; a scalar with exact gradients and detached per-token
statistics come out. Tokens pass in chunks (matrix products) and, inside a chunk, in cache-sized blocks of rows
(element-wise arithmetic). Gradients are taken on the way, so logits are computed once, never recomputed, and [N, V]
never exists.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from opd.heads import Head
from opd.losses import AnalyticLoss, ClippedLoss
from opd.records import Distribution, MicroBatch, Scores, TokenChunk
from opd.terms import Term
from opd.token_statistics import token_statistics

LOGP_MIN = -1e4  # nats; stands for -inf in a teacher's scores, so that products with zero stay zero
BLOCK_ELEMENTS = 2**17  # rows * V of a block on a CPU: half a MiB in fp32, so that its few tensors stay in the cache


@dataclass(frozen=True)
class Objective:
    """What to compute on every micro-batch of an update."""

    terms: Sequence[Term]
    weights: Mapping[str, float]  # term name -> its weight at this step
    vocab_size: int  # ids that the student and all teachers share
    temperature: float = 1.0  # of sampling
    chunk_tokens: int = 256
    progress: float = 0.0  # steps done / steps planned
    stop_ids: tuple[int, ...] = ()  # ids that end an answer, the student's and the teachers'


@dataclass(frozen=True)
class Outcome:
    """Detached per-token results of a micro-batch, each [N]; NaN where a term or teacher does not apply."""

    values: Mapping[str, Tensor]  # term name -> loss values
    statistics: Mapping[str, Tensor]


def streamed_loss(
    hidden: Tensor, head: Head, batch: MicroBatch, teacher_heads: Mapping[str, Head], objective: Objective
) -> tuple[Tensor, Outcome]:
    """The micro-batch's share of the loss, differentiable in `hidden` and the head, and its per-token results.

    Args:
        hidden: [N, H], the states that predict the trainable tokens.
        head: the student's head.
        batch: per-token fields, term weights and teacher payloads.
        teacher_heads: teacher name -> its head, for every teacher of the batch.
        objective: terms and their weights.
    """
    run = _Pass(head, batch, teacher_heads, objective)
    loss = _Streamed.apply(run, hidden, head.weight, head.bias, head.low(hidden), head.up)
    return loss, Outcome(run.values, run.statistics)


class _Streamed(torch.autograd.Function):
    """One autograd node for the whole pass: gradients are made in forward and only scaled in backward."""

    @staticmethod
    def forward(
        ctx: Any, run: _Pass, hidden: Tensor, weight: Tensor, bias: Tensor | None, low: Tensor | None, up: Tensor | None
    ) -> Tensor:
        loss, grads = run(hidden, low, [bool(needed) for needed in ctx.needs_input_grad[1:]])
        ctx.save_for_backward(*grads)
        return loss

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        scale = grad_outputs[0]
        return None, *(None if grad is None else grad * scale for grad in ctx.saved_tensors)


class _Pass:
    """State of one pass; a fresh one per micro-batch."""

    def __init__(self, head: Head, batch: MicroBatch, teacher_heads: Mapping[str, Head], objective: Objective) -> None:
        self.head, self.batch, self.teacher_heads, self.objective = head, batch, teacher_heads, objective
        self.num_tokens = len(batch.tokens.token_ids)
        self.values: dict[str, Tensor] = {}
        self.statistics: dict[str, Tensor] = {}

    def __call__(
        self, hidden: Tensor, low: Tensor | None, needed: Sequence[bool]
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Loss, and its gradients in hidden [N, H], weight [V', H], bias [V'], low [N, r] and up [V', r] where needed.

        Those of the parameters are summed over chunks in fp32 and then rounded to the parameter's dtype.
        """
        head = self.head
        (weight, _), up = head.cut(), None if head.up is None else head.up[: head.vocab_size]
        by_hidden, by_low = (
            torch.zeros_like(states) if need and states is not None else None
            for states, need in ((hidden, needed[0]), (low, needed[3]))
        )
        by_weight, by_bias, by_up = (
            torch.zeros(tensor.shape, device=tensor.device) if need and tensor is not None else None
            for tensor, need in ((head.weight, needed[1]), (head.bias, needed[2]), (head.up, needed[4]))
        )
        loss = torch.zeros((), device=hidden.device)
        for start in range(0, self.num_tokens, self.objective.chunk_tokens):
            rows = slice(start, min(start + self.objective.chunk_tokens, self.num_tokens))
            logits = head.raw_logits(hidden[rows], None if low is None else low[rows])
            loss += self._chunk(logits, rows)  # leaves the gradient in `logits`
            if by_hidden is not None:
                by_hidden[rows] = logits.to(weight.dtype) @ weight
            if by_weight is not None:
                by_weight[: len(weight)].addmm_(logits.T, hidden[rows].float())
            if by_bias is not None:
                by_bias[: len(weight)] += logits.sum(0)
            if by_low is not None and up is not None:
                by_low[rows] = logits.to(up.dtype) @ up
            if by_up is not None and low is not None:
                by_up[: len(weight)].addmm_(logits.T, low[rows].float())
        own = [(by_weight, head.weight), (by_bias, head.bias), (by_up, head.up)]
        rounded = [None if g is None or tensor is None else g.to(tensor.dtype) for g, tensor in own]
        return loss, [by_hidden, *rounded[:2], by_low, rounded[2]]

    def _chunk(self, logits: Tensor, rows: slice) -> Tensor:
        """The chunk's loss; replaces raw logits [c, V] by the loss's gradient in head(hidden) before scale and cap."""
        head, loss = self.head, torch.zeros((), device=logits.device)
        teacher_logits = {  # heads are asked for only where a row needs one: they may have to be loaded
            name: None if payload.hidden is None else self.teacher_heads[name].logits(payload.hidden[rows])
            for name, payload in self.batch.teachers.items()
            if bool(payload.present[rows].any())
        }
        terms = [term for term in self.objective.terms if bool(self.batch.term_weights[term.name][rows].any())]
        step = len(logits) if logits.is_cuda else max(1, BLOCK_ELEMENTS // logits.shape[1])
        for start in range(0, len(logits), step):
            inside = slice(start, start + step)
            block = slice(rows.start + start, min(rows.start + start + step, rows.stop))
            z = logits[inside]
            cap_slope = None
            if head.softcap is not None:
                z.div_(head.softcap).tanh_()
                cap_slope = 1.0 - z.square()
                z.mul_(head.softcap)
            theirs = {name: None if logits is None else logits[inside] for name, logits in teacher_logits.items()}
            loss += self._block(z, theirs, terms, block)
            if cap_slope is not None:
                z.mul_(cap_slope)
            if head.scale != 1.0:
                z.mul_(head.scale)
        return loss

    def _block(
        self, z: Tensor, teacher_logits: Mapping[str, Tensor | None], terms: Sequence[Term], block: slice
    ) -> Tensor:
        """The loss of a block under `terms`; replaces logits `z` [n, V] by the loss's gradient in them."""
        fields, temperature = self.batch.tokens, self.objective.temperature
        token_ids = fields.token_ids[block]
        student = Distribution.of_logits(z)
        sampling = student if temperature == 1.0 else Distribution.of_logits(z / temperature)
        chunk = TokenChunk(
            student=student,
            token_logp=_of_token(sampling, token_ids),
            token_ids=token_ids,
            sampler_logp=fields.sampler_logp[block],
            advantages=fields.advantages[block],
            row_log_ratio=fields.row_log_ratio[block],
            sampler_top=None if fields.sampler_top is None else fields.sampler_top.at(block),
            stop_ids=self.objective.stop_ids,
            progress=self.objective.progress,
        )
        teachers = {name: self._scores(name, logits, block) for name, logits in teacher_logits.items()}
        present = {name: self.batch.teachers[name].present[block] for name in teachers}
        for name, value in token_statistics(chunk, teachers, present).items():
            self._put(self.statistics, name, block, value)
        loss = z.new_zeros(())
        token_grad = z.new_zeros(len(z))  # d loss / d token_logp
        z.zero_()
        for term in terms:
            weight = self.batch.term_weights[term.name][block]
            row_values = fields.row_values.get(term.name)
            seen = _under(chunk, teachers, term, None if row_values is None else row_values[block])
            factor = 1.0 if term.correction is None else term.correction(seen)
            active = weight != 0  # elsewhere a factor may be NaN: a given answer has no sampler's probability
            coefficient = torch.where(active, weight * self.objective.weights[term.name] * factor, 0.0)
            value = _add_gradient(term, seen, coefficient, z, token_grad)
            loss += torch.where(active, coefficient * value, 0.0).sum()
            self._put(self.values, term.name, block, torch.where(active, factor * value, torch.nan))
            if isinstance(term.loss, ClippedLoss):
                clipped = torch.where(active, term.loss.clipped(seen).to(z.dtype), torch.nan)
                self._put(self.statistics, f"mismatch/clip_fraction/{term.name}", block, clipped)
        if bool(token_grad.any()):
            _add_token_gradient(z, token_grad / temperature, sampling.p, token_ids)
        return loss

    def _scores(self, name: str, logits: Tensor | None, block: slice) -> Scores:
        """The teacher's scores; uniform where they are missing (the term's weight is zero there)."""
        payload = self.batch.teachers[name]
        if logits is None:
            assert payload.token_logp is not None, "a teacher gives hidden states or log-probabilities"
            return Scores(payload.token_logp[block], top=None if payload.top is None else payload.top.at(block))
        present = payload.present[block]
        if not bool(present.all()):
            logits = logits.masked_fill(~present[:, None], 0.0)
        full = Distribution.of_logits(logits, floor=LOGP_MIN)
        return Scores(_of_token(full, self.batch.tokens.token_ids[block]), full)

    def _put(self, store: dict[str, Tensor], name: str, block: slice, value: Tensor) -> None:
        if name not in store:
            store[name] = torch.full((self.num_tokens,), torch.nan, device=value.device)
        store[name][block] = value


def _of_token(distribution: Distribution, token_ids: Tensor) -> Tensor:
    return distribution.logp.gather(-1, token_ids[:, None])[:, 0]


def _under(chunk: TokenChunk, teachers: Mapping[str, Scores], term: Term, row_value: Tensor | None) -> TokenChunk:
    """The chunk as the term sees it: with its teacher's and its reference's scores and its rows' values."""
    teacher = None if term.teacher is None else teachers[term.teacher]
    reference = None if term.reference is None else teachers[term.reference]
    return replace(
        chunk,
        row_value=row_value,
        teacher=teacher and teacher.full,
        teacher_token_logp=teacher and teacher.token_logp,
        teacher_top=teacher and teacher.top,
        reference=reference and reference.full,
        reference_token_logp=reference and reference.token_logp,
    )


def _add_gradient(term: Term, chunk: TokenChunk, coefficient: Tensor, grad: Tensor, token_grad: Tensor) -> Tensor:
    """The term's values [n]; adds coefficient * gradient to the logits' gradient [n, V] or the sampled tokens' [n]."""
    active = coefficient != 0
    if isinstance(term.loss, AnalyticLoss):
        value, logit_grad = term.loss.value_and_grad(chunk)
        grad.addcmul_(_only(active, logit_grad), coefficient[:, None])
        return value
    with torch.enable_grad():
        leaves = (chunk.student_logp.detach().requires_grad_(), chunk.token_logp.detach().requires_grad_())
        value = term.loss(replace(chunk, student=Distribution(leaves[0]), token_logp=leaves[1]))
        _check_values(term, value, len(coefficient))
        total = (value * coefficient).sum()
        by_logp, by_token = (
            torch.autograd.grad(total, leaves, allow_unused=True) if total.requires_grad else (None, None)
        )
    if by_logp is not None:
        by_logp = _only(active, by_logp)
        grad.add_(by_logp).addcmul_(chunk.student_p, by_logp.sum(-1, keepdim=True), value=-1.0)
    if by_token is not None:
        token_grad += _only(active, by_token)
    return value.detach()


def _only(active: Tensor, grad: Tensor) -> Tensor:
    """The gradient [n, ...], zero in rows that the term does not weigh: a formula may be infinite there."""
    return grad if bool(active.all()) else grad.masked_fill(~active.view(-1, *[1] * (grad.ndim - 1)), 0.0)


def _add_token_gradient(grad: Tensor, token_grad: Tensor, p: Tensor, token_ids: Tensor) -> None:
    """Adds token_grad * (onehot - p): the gradient of the sampled tokens' log-probabilities."""
    grad.addcmul_(p, token_grad[:, None], value=-1.0)
    grad.scatter_add_(-1, token_ids[:, None], token_grad[:, None])


def _check_values(term: Term, value: Tensor, num_tokens: int) -> None:
    if value.shape != (num_tokens,):
        raise ValueError(
            f"loss.{term.name} ({type(term.loss).__name__}) returned shape {tuple(value.shape)} for a block of "
            f"{num_tokens} tokens: a loss must return one value per token, shape ({num_tokens},)"
        )
