"""Rows made by hand, the engine that trains on them, and the plain torch computation it is compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from opd.batching import make_batch, trains
from opd.engine import Engine, EngineConfig, _Trainee, init_distributed
from opd.losses import JSD, Formula, ForwardKL, PPOClip, ReverseKL
from opd.metrics import outcome_metrics
from opd.objective import Objective, Outcome
from opd.records import Batch, Credit, Example, FullVocab, Mean, Prompt, Reward, Rollout, TokenChunk
from opd.rows import Row
from opd.students import HFStudent
from opd.teachers import LocalTeacher
from opd.terms import Term

LENGTHS = [(2, 5), (9, 3), (4, 1), (3, 8), (1, 4)]  # prompt and answer tokens of each row
ADVANTAGES = [0.8, -1.2, 0.4, None, -0.6]  # None: no reward was reached
TERMS = {
    "kl": Term("kl", ReverseKL(), teacher="main"),
    "forward": Term("forward", ForwardKL(), teacher="main"),
    "jsd": Term("jsd", JSD(0.3), teacher="main"),
    "pg": Term("pg", PPOClip()),
}
WEIGHTS = {"kl": 0.7, "forward": 0.4, "jsd": 1.1, "pg": 1.3}
CONSTANT_LOSSES = {1: 2.0, 9: 1.0, 4: 0.5, 2: 3.0}  # answer tokens -> the loss of each of them
CONSTANT_WEIGHTS = {"distill": 0.5, "reward": 2.0}


def constant_distill(chunk: TokenChunk) -> Tensor:
    """-advantage as value, the gradient that of -advantage * KL / KL's value."""
    kl = (chunk.student_logp.exp() * (chunk.student_logp - chunk.teacher_logp)).sum(-1)
    return -chunk.advantages * kl / kl.detach()


def constant_terms(aggregation: str = "token_mean") -> list[Term]:
    """A teacher's term and a reward term whose values are -advantage at every token."""
    distill = Formula(constant_distill, frozenset({"full_vocab"}))
    settings = {"aggregation": aggregation, "constant_tokens": 10}
    return [Term("distill", distill, teacher="main", **settings), Term("reward", PPOClip(), **settings)]


def rollout(
    prompt: Sequence[int], answer: Sequence[int], *, logp: Sequence[float] = (), trainable: Sequence[bool] = ()
) -> Rollout:
    """A sampled answer of given ids."""
    example = Prompt("p", "main", list(prompt), Example("p"))
    return Rollout(example, 0, list(answer), list(logp) or [0.0] * len(answer), "", "stop", 0, list(trainable))


def row(
    sample: Rollout, *, scores: FullVocab | None = None, advantage: float | None = None,
    terms: Sequence[str] = tuple(TERMS), teachers: Sequence[str] = ("main",),
) -> Row:  # fmt: skip
    """A rollout with what is known of it."""
    return Row(sample, Reward(None), Credit(advantage), dict.fromkeys(teachers, scores), frozenset(terms))


def masked(original: Row) -> Row:
    """The same row without any trainable token."""
    return replace(original, rollout=replace(original.rollout, trainable=[False] * len(original.rollout.token_ids)))


def answer_logp(model: nn.Module, sample: Rollout) -> Tensor:
    """Log-probabilities [R, V] of the answer's positions, from the whole row's logits, in fp64."""
    ids = torch.tensor([sample.prompt.token_ids + sample.token_ids])
    logits = model(input_ids=ids, use_cache=False).logits[0].double()
    return torch.log_softmax(logits[len(sample.prompt.token_ids) - 1 : -1], -1)


@torch.no_grad()
def sampled_by(model: nn.Module, sample: Rollout) -> Rollout:
    """The rollout with the model's own log-probs, so that every ratio is 1."""
    logp = answer_logp(model, sample).gather(-1, torch.tensor(sample.token_ids)[:, None])[:, 0]
    return replace(sample, logp=logp.tolist())


def plain_values(name: str, student: Tensor, teacher: Tensor, original: Row) -> Tensor:
    """Each term's values [R] from the definition, in probability space."""
    p, q = student.exp(), teacher.exp()
    if name == "kl":
        return (p * (p / q).log()).sum(-1)
    if name == "forward":
        return (q * (q / p).log()).sum(-1)
    if name == "jsd":
        m = 0.3 * q + 0.7 * p
        return (0.3 * q * (q / m).log() + 0.7 * p * (p / m).log()).sum(-1)
    sample, advantage = original.rollout, original.credit.advantage
    ratio = p.gather(-1, torch.tensor(sample.token_ids)[:, None])[:, 0] / torch.tensor(sample.logp).double().exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)


def plain_losses(model: nn.Module, teacher: nn.Module, rows: Sequence[Row], terms: Sequence[Term]) -> dict[str, Tensor]:
    """Every term's mean over all rows, each row alone through the model: no padding, no batch, no split."""
    losses = {}
    for term in terms:
        taken = [r for r in rows if trains(r, term) and r.trainable]
        values = []
        for original in taken:
            with torch.no_grad():
                q = answer_logp(teacher, original.rollout)
            values.append(
                plain_values(term.name, answer_logp(model, original.rollout), q, original)[original.trainable]
            )
        losses[term.name] = {
            "token_mean": lambda values=values: torch.cat(values).mean(),
            "sequence_mean": lambda values=values: torch.stack([v.mean() for v in values]).mean(),
            "constant": lambda values=values, term=term: torch.cat(values).sum() / (len(values) * term.constant_tokens),
        }[term.aggregation]()
    return losses


@dataclass(frozen=True)
class Setting:
    """A student's folder, its teacher, and rows that the student might have sampled."""

    student: Path
    teacher: LocalTeacher
    rows: list[Row]
    vocab_size: int

    @classmethod
    def of(cls, student: Path, teacher_folder: Path) -> Setting:
        """Rows of `LENGTHS` and `ADVANTAGES`; the last one has no teacher score, the third trains under `kl` alone."""
        teacher = LocalTeacher(str(teacher_folder))
        teacher.start()
        model = AutoModelForCausalLM.from_pretrained(student)
        vocabulary = model.config.vocab_size
        generator = torch.Generator().manual_seed(3)
        draw = lambda count: torch.randint(3, vocabulary, (count,), generator=generator).tolist()  # noqa: E731
        samples = [sampled_by(model, rollout(draw(prompt), draw(answer))) for prompt, answer in LENGTHS]
        samples = [  # another policy's log-probs, so that ratios differ from 1
            replace(s, logp=[p + 0.2 * torch.randn(1, generator=generator).item() for p in s.logp]) for s in samples
        ]
        scores = [*teacher.score(samples)[:-1], None]
        rows = [row(s, scores=q, advantage=a) for s, q, a in zip(samples, scores, ADVANTAGES, strict=True)]
        rows[2] = replace(rows[2], terms=frozenset({"kl"}))
        return cls(student, teacher, rows, vocabulary)

    def constant(self) -> Setting:
        """The same models with answers of 1, 9, 4, 2 tokens whose losses under `constant_terms` are 2, 1, .5, 3."""
        model = AutoModelForCausalLM.from_pretrained(self.student)
        answers = {count: [3 + (count * position) % 7 for position in range(count)] for count in CONSTANT_LOSSES}
        samples = [sampled_by(model, rollout([4], answer)) for answer in answers.values()]
        rows = [
            row(sample, scores=scores, advantage=-loss, terms=("distill", "reward"))
            for sample, scores, loss in zip(samples, self.teacher.score(samples), CONSTANT_LOSSES.values(), strict=True)
        ]
        return replace(self, rows=rows)

    def batch(self, rows: Sequence[Row] | None = None, terms: Sequence[Term] = (), budget: int = 1000) -> Batch:
        """The rows as micro-batches."""
        chosen = self.rows if rows is None else rows
        return make_batch(chosen, terms or list(TERMS.values()), budget, 0)

    def objective(self, terms: Sequence[Term] = (), weights: Mapping[str, float] | None = None) -> Objective:
        """The terms under `WEIGHTS`."""
        return Objective(terms or list(TERMS.values()), weights or WEIGHTS, self.vocab_size, chunk_tokens=4)

    def heads(self) -> dict[str, Any]:
        """Teacher name -> head."""
        return {"main": self.teacher.head().narrowed(self.vocab_size)}

    def plain_model(self) -> nn.Module:
        """The student for the reference computation, in fp64."""
        return AutoModelForCausalLM.from_pretrained(self.student).double()

    def plain_loss(self, model: nn.Module, rows: Sequence[Row] | None = None, terms: Sequence[Term] = ()) -> Tensor:
        """The weighted sum of the terms, differentiable in `model`."""
        losses = plain_losses(
            model, self.teacher.network, self.rows if rows is None else rows, terms or list(TERMS.values())
        )
        return torch.stack([WEIGHTS[name] * value for name, value in losses.items()]).sum()


def gradients(
    model: nn.Module, batch: Batch, objective: Objective, heads: Mapping[str, Any]
) -> tuple[float, dict[str, Tensor], dict[str, Mean]]:
    """Loss, gradients and metrics of a batch through the engine's module, without DeepSpeed."""
    trainee = _Trainee(model)
    model.zero_grad()
    total, outcomes = 0.0, []
    for micro_batch in batch.micro_batches:
        loss, values, statistics = trainee(micro_batch, heads, objective)
        loss.backward()
        total += loss.item()
        outcomes.append((micro_batch, Outcome(values, statistics)))
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return total, grads, outcome_metrics(outcomes, objective)


def sgd(lr: float = 0.1) -> Callable[..., torch.optim.Optimizer]:
    """A rate at which one step moves the weights by far more than rounding."""
    return partial(torch.optim.SGD, lr=lr)


def engine(student: HFStudent | Path, stage: int = 0, **settings: Any) -> Engine:
    """A DeepSpeed engine; at ZeRO 3 even the smallest parameter is really taken apart."""
    init_distributed()
    student = student if isinstance(student, HFStudent) else HFStudent(str(student))
    defaults = {"optimizer": sgd(), "max_grad_norm": 0.0, "chunk_tokens": 4}
    sharded = {"zero_optimization": {"stage3_param_persistence_threshold": 0}} if stage == 3 else {}
    config = EngineConfig(**{**defaults, "zero_stage": stage, "deepspeed": sharded, **settings})
    return Engine(student.load(), config, student.dtype)


def weights_of(trained: Engine) -> dict[str, Tensor]:
    """Copies of the engine's weights."""
    return {name: tensor.detach().clone() for name, tensor in trained.weights()}


def largest_difference(mine: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    """The largest absolute difference of any weight; both must name the same ones."""
    assert mine.keys() == theirs.keys()
    return max((mine[name].double() - theirs[name].double()).abs().max().item() for name in mine)
