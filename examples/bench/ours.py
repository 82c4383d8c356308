"""The floor, naive code, and this project's objective."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from problem import CHUNK, CLIP, TOP_K, Answer, Problem, Variant, answered
from torch import Tensor

import opd.objective
from opd.heads import Head
from opd.losses import Loss, OnTopK, PPOClip, ReverseKL
from opd.objective import Objective, streamed_loss
from opd.records import MicroBatch, Scores, TeacherPayload, TokenChunk, TokenFields
from opd.terms import Term
from opd.token_statistics import TokenStatistics

FLOOR = "floor: four products"


def floor(problem: Problem) -> Answer:
    """Student logits, teacher logits, gradient of the hidden states, gradient of the head, in chunks, nothing else."""
    hidden, head = problem.hidden, problem.head
    by_head, by_hidden = torch.zeros_like(head), torch.empty_like(hidden)
    for start in range(0, len(hidden), CHUNK):
        rows = slice(start, start + CHUNK)
        logits = hidden[rows] @ head.T
        _ = problem.teacher_hidden[rows] @ problem.teacher_head.T
        by_hidden[rows] = logits @ head
        by_head.addmm_(logits.T, hidden[rows])
    return Answer(torch.zeros(()), by_hidden, by_head)


def floor_in_place(problem: Problem) -> Answer:
    """The same with one pair of buffers for the logits of all chunks."""
    hidden, head = problem.hidden, problem.head
    by_head, by_hidden = torch.zeros_like(head), torch.empty_like(hidden)
    buffers = [hidden.new_empty(min(CHUNK, len(hidden)), len(head)) for _ in range(2)]
    for start in range(0, len(hidden), CHUNK):
        rows = slice(start, min(start + CHUNK, len(hidden)))
        logits, teacher_logits = (buffer[: rows.stop - start] for buffer in buffers)
        torch.mm(hidden[rows], head.T, out=logits)
        torch.mm(problem.teacher_hidden[rows], problem.teacher_head.T, out=teacher_logits)
        torch.mm(logits, head, out=by_hidden[rows])
        by_head.addmm_(logits.T, hidden[rows])
    return Answer(torch.zeros(()), by_hidden, by_head)


def _naive_loss(hidden: Tensor, head: Tensor, teacher_hidden: Tensor, teacher_head: Tensor) -> Tensor:
    student = torch.log_softmax((hidden @ head.T).float(), -1)
    teacher = torch.log_softmax((teacher_hidden @ teacher_head.T).float(), -1)
    return (student.exp() * (student - teacher)).sum(-1).mean()


def naive(problem: Problem, loss: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] = _naive_loss) -> Answer:
    """Full logits, log-softmax in fp32, autograd."""
    leaves = problem.leaves()
    return answered(loss(*leaves, problem.teacher_hidden, problem.teacher_head), leaves)


def streamed(problem: Problem, losses: Mapping[str, Loss]) -> Answer:
    """This project's objective with some terms of weight 1, and every statistic."""
    leaves, tokens = problem.leaves(), len(problem.hidden)
    terms = [Term(name, loss, teacher=None if "advantage" in loss.needs else "main") for name, loss in losses.items()]
    fields = TokenFields(
        predictor=torch.arange(tokens),
        token_ids=problem.token_ids,
        sampler_logp=problem.sampler_logp,
        advantages=problem.advantages,
        row_log_ratio=torch.zeros(tokens),
    )
    batch = MicroBatch(
        input_ids=torch.zeros(1, 1, dtype=torch.long),
        attention_mask=torch.ones(1, 1, dtype=torch.long),
        tokens=fields,
        term_weights={name: torch.full((tokens,), 1.0 / tokens) for name in losses},
        teachers={"main": TeacherPayload(problem.teacher_hidden, torch.ones(tokens, dtype=torch.bool))},
        rows=1,
    )
    objective = Objective(terms, dict.fromkeys(losses, 1.0), len(problem.head), chunk_tokens=CHUNK)
    loss, _ = streamed_loss(leaves[0], Head(leaves[1]), batch, {"main": Head(problem.teacher_head)}, objective)
    return answered(loss, leaves)


class NoStatistics(TokenStatistics):
    """Notes nothing."""

    def add(self, chunk: TokenChunk, teachers: Mapping[str, Scores], start: int) -> None:
        """Leaves the block alone."""

    def finished(self, sampler_logp: Tensor, present: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Nothing."""
        return {}


def without_statistics(problem: Problem, losses: Mapping[str, Loss]) -> Answer:
    """The same, its statistics left out, to see what they cost."""
    kept = opd.objective.TokenStatistics
    opd.objective.TokenStatistics = NoStatistics
    try:
        return streamed(problem, losses)
    finally:
        opd.objective.TokenStatistics = kept


def passes(problem: Problem, each: Sequence[Mapping[str, Loss]]) -> Answer:
    """Several passes, one per set of terms, as trainers without a common objective make them."""
    found = [streamed(problem, losses) for losses in each]
    total = [sum((vars(answer)[name] for answer in found), torch.zeros(())) for name in vars(found[0])]
    return Answer(*total)


def variants() -> list[Variant]:
    """Everything that needs no other library, the floor first."""
    distill, grpo = {"distill": ReverseKL()}, {"grpo": PPOClip(CLIP, CLIP)}
    top_k = {"distill": OnTopK(ReverseKL(), k=TOP_K)}
    compiled = torch.compile(_naive_loss, dynamic=False)
    return [
        Variant(FLOOR, None, floor),
        Variant("floor, buffers reused", None, floor_in_place),
        Variant("naive", "kl", naive),
        Variant("naive, compiled", "kl", partial(naive, loss=compiled)),
        Variant("opd: KL, no statistics", "kl", partial(without_statistics, losses=distill)),
        Variant("opd: KL", "kl", partial(streamed, losses=distill)),
        Variant("opd: KL + GRPO", "kl+grpo", partial(streamed, losses=distill | grpo)),
        Variant("opd: KL and GRPO, two passes", "kl+grpo", partial(passes, each=[distill, grpo])),
        Variant("opd: top-64 + tail", "top-k", partial(streamed, losses=top_k)),
    ]
