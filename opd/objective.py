"""The streaming objective: every loss term and statistic in one pass over the student's head.

Hidden states of the trainable tokens and the head go in; a scalar with exact gradients and detached per-token
statistics come out. Tokens pass in chunks (matrix products) and, inside a chunk, in cache-sized blocks of rows
(element-wise arithmetic). Gradients are taken on the way, so logits are computed once, never recomputed, and [N, V]
never exists.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opd.distributions import Distribution, Pool, wide
from opd.heads import Head
from opd.records import MicroBatch, Scores, TeacherPayload, TokenChunk
from opd.shared_vocabulary import LOGP_MIN, InStudentIds, of_token
from opd.term_gradients import Block, Share, Sum, Way, add_term
from opd.terms import Term
from opd.token_statistics import TokenStatistics

BLOCK_ELEMENTS = 2**17  # rows * V of a block on a CPU: half a MiB in fp32, so that its few tensors stay in the cache
SLICE_ELEMENTS = 2**19  # of a slice of the head whose gradient is added at once


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
        ctx.grads = grads
        return loss

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        grads, ctx.grads = ctx.grads, None  # given away, so that no second copy is made
        assert grads is not None, "the streamed loss goes backward once"
        return None, *(None if grad is None else grad.mul_(grad_outputs[0]) for grad in grads)


class _Pass:
    """State of one pass; a fresh one per micro-batch."""

    def __init__(self, head: Head, batch: MicroBatch, teacher_heads: Mapping[str, Head], objective: Objective) -> None:
        self.head, self.batch, self.teacher_heads, self.objective = head, batch, teacher_heads, objective
        self.num_tokens = len(batch.tokens.token_ids)
        self.buffers: dict[str, Tensor] = {}
        self.pool = Pool()
        self.values: dict[str, Tensor] = {}
        self.statistics: dict[str, Tensor] = {}
        self.ways = {term.name: Way.of(term.loss) for term in objective.terms}
        self.complete = {name: bool(payload.present.all()) for name, payload in batch.teachers.items()}

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
        one_chunk = self.num_tokens <= self.objective.chunk_tokens  # then there is no sum to lose digits in
        by_weight, by_bias, by_up = (
            torch.zeros_like(tensor, dtype=tensor.dtype if one_chunk else wide(tensor.dtype))
            if need and tensor is not None
            else None
            for tensor, need in ((head.weight, needed[1]), (head.bias, needed[2]), (head.up, needed[4]))
        )
        loss = torch.zeros((), device=hidden.device)
        for start in range(0, self.num_tokens, self.objective.chunk_tokens):
            rows = slice(start, min(start + self.objective.chunk_tokens, self.num_tokens))
            logits = self._logits("student", head, hidden[rows], None if low is None else low[rows])
            loss += self._chunk(logits, rows)  # leaves the gradient in `logits`
            if by_hidden is not None:
                by_hidden[rows] = logits.to(weight.dtype) @ weight
            if by_weight is not None:
                _add_product(by_weight[: len(weight)], logits, hidden[rows])
            if by_bias is not None:
                by_bias[: len(weight)] += logits.sum(0, dtype=by_bias.dtype)
            if by_low is not None and up is not None:
                by_low[rows] = logits.to(up.dtype) @ up
            if by_up is not None and low is not None:
                _add_product(by_up[: len(weight)], logits, low[rows])
        own = [(by_weight, head.weight), (by_bias, head.bias), (by_up, head.up)]
        rounded = [None if g is None or tensor is None else g.to(tensor.dtype) for g, tensor in own]
        return loss, [by_hidden, *rounded[:2], by_low, rounded[2]]

    def _logits(self, whose: str, head: Head, hidden: Tensor, low: Tensor | None) -> Tensor:
        """Raw logits [c, V] in a buffer that every chunk uses again: fresh memory costs as much as a product."""
        if whose not in self.buffers:
            shape = min(self.objective.chunk_tokens, self.num_tokens), len(head.cut()[0])
            self.buffers[whose] = torch.empty(shape, dtype=head.logits_dtype, device=hidden.device)
        return head.raw_logits(hidden, low, out=self.buffers[whose][: len(hidden)])

    def _chunk(self, logits: Tensor, rows: slice) -> Tensor:
        """The chunk's loss; replaces raw logits [c, V] by the loss's gradient in them."""
        given = {  # heads are asked for only where a row needs one: they may have to be loaded
            name: self._given(name, payload, rows)
            for name, payload in self.batch.teachers.items()
            if bool(payload.present[rows].any())
        }
        shares = [self._share(term, rows) for term in self.objective.terms]
        shares = [share for share in shares if bool(share.active.any())]
        noted = TokenStatistics(rows.start, logits.shape[1])
        step = len(logits) if logits.is_cuda else max(1, BLOCK_ELEMENTS // logits.shape[1])
        for start in range(0, len(logits), step):
            inside = slice(start, min(start + step, len(logits)))
            theirs = {name: None if scores is None else scores.at(inside) for name, scores in given.items()}
            self._block(logits[inside], theirs, shares, inside, rows.start, noted)
        present = {name: self.batch.teachers[name].present[rows] for name in given}
        for name, value in noted.finished(self.batch.tokens.sampler_logp[rows], present).items():
            self._put(self.statistics, name, rows, value)
        loss = torch.zeros((), device=logits.device)
        for share in shares:
            own, values, clipped = share.closed()
            loss += own
            self._put(self.values, share.term.name, rows, values)
            if clipped is not None:
                self._put(self.statistics, f"mismatch/clip_fraction/{share.term.name}", rows, clipped)
        return loss

    def _share(self, term: Term, rows: slice) -> Share:
        weight = self.batch.term_weights[term.name][rows]
        row_values = self.batch.tokens.row_values.get(term.name)
        active = weight != 0
        coefficient = weight * self.objective.weights[term.name]
        row_value = None if row_values is None else row_values[rows]
        return Share(term, self.ways[term.name], active, bool(active.all()), coefficient, row_value)

    def _given(self, name: str, payload: TeacherPayload, rows: slice) -> InStudentIds | None:
        """The teacher's logits of the rows, raw where its ids are the student's; None: it gives some tokens only."""
        if payload.hidden is None:
            return None
        head, states = self.teacher_heads[name], payload.hidden[rows]
        if head.onto is None:
            raw = self._logits(f"teacher {name}", head, states, head.low(states))
            return InStudentIds(raw, onward=head.onward)
        return head.in_student_ids(states, None if payload.places is None else payload.places[rows])

    def _block(
        self,
        raw: Tensor,
        given: Mapping[str, InStudentIds | None],
        shares: Sequence[Share],
        inside: slice,
        chunk_start: int,
        noted: TokenStatistics,
    ) -> None:
        """Replaces raw logits [n, V] by the loss's gradient in them; notes values and statistics."""
        fields, temperature = self.batch.tokens, self.objective.temperature
        block = slice(chunk_start + inside.start, chunk_start + inside.stop)
        token_ids = fields.token_ids[block]
        self.pool.take_all_back()
        z = self._widened(raw)
        slope = self.head.onward(z)
        heated = None if temperature == 1.0 else Distribution.of_logits(z / temperature)
        student = Distribution.of_logits(z, out=self.pool.take(z))
        sampling = student if heated is None else heated
        chunk = TokenChunk(
            student=student,
            token_logp=of_token(sampling, token_ids),
            token_ids=token_ids,
            sampler_logp=fields.sampler_logp[block],
            advantages=fields.advantages[block],
            row_log_ratio=fields.row_log_ratio[block],
            sampler_top=None if fields.sampler_top is None else fields.sampler_top.at(block).within(z.shape[1]),
            stop_ids=self.objective.stop_ids,
            progress=self.objective.progress,
            pool=self.pool,
        )
        teachers = {name: self._scores(name, scores, student, block) for name, scores in given.items()}
        noted.add(chunk, teachers, block.start)
        work = Block(chunk, teachers, sampling, temperature, inside, Sum(), Sum())
        for share in shares:
            add_term(share, work)
        grad = work.close()
        if grad is None:
            raw.zero_()
            return
        if slope is not None:
            grad.mul_(slope)
        elif self.head.scale != 1.0:
            grad.mul_(self.head.scale)
        raw.copy_(grad)

    def _widened(self, raw: Tensor) -> Tensor:
        """Raw logits [n, V] in fp32, themselves where they are that wide."""
        return raw if raw.dtype == wide(raw.dtype) else self.pool.take(raw).copy_(raw)

    def _scores(self, name: str, given: InStudentIds | None, student: Distribution, block: slice) -> Scores:
        """The teacher's scores; uniform where they are missing (the term's weight is zero there)."""
        payload = self.batch.teachers[name]
        if given is None:
            assert payload.token_logp is not None, "a teacher gives hidden states or log-probabilities"
            top = None if payload.top is None else payload.top.at(block).within(student.logp.shape[1])
            return Scores(payload.token_logp[block], top=top)
        logits = self._widened(given.beside(student))
        if given.onward is not None:
            given.onward(logits)
        if not self.complete[name]:
            logits.masked_fill_(~payload.present[block][:, None], 0.0)
        full = Distribution.of_logits(logits, LOGP_MIN, self.pool.take(logits))
        token_logp = of_token(full, self.batch.tokens.token_ids[block])
        return Scores(token_logp, full, None, given.support, given.mass, given.restricts)

    def _put(self, store: dict[str, Tensor], name: str, rows: slice, value: Tensor) -> None:
        if name not in store:
            store[name] = torch.full((self.num_tokens,), torch.nan, device=value.device)
        store[name][rows] = value


def _add_product(total: Tensor, grad: Tensor, states: Tensor) -> None:
    """total [V, h] += grad.T @ states, in fp32. Products in 16 bits are added in slices, which stay in the cache."""
    if grad.dtype == total.dtype:
        total.addmm_(grad.T, states.to(grad.dtype))
        return
    states = states.to(grad.dtype)
    step = len(total) if total.is_cuda else max(1, SLICE_ELEMENTS // states.shape[1])
    for start in range(0, len(total), step):
        part = slice(start, start + step)
        total[part] += grad[:, part].T @ states
