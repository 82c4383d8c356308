"""One batch on which every term of the catalogue has something to say, and its gradient by the trainer's own path.

Rows of three streams: sampled answers in groups, some without a reward or one teacher's score, one with tokens of a
tool; a given answer under imitation; and bystanders, rows of other lengths that the term does not train on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import nan
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from opd.batching import make_batch
from opd.engine import _Trainee
from opd.heads import Head
from opd.losses import CrossEntropy
from opd.objective import Objective, Outcome
from opd.records import Batch, Credit, Example, FullVocab, MicroBatch, Prompt, Reward, Rollout, TopK
from opd.rows import Row
from opd.teachers import LocalTeacher
from opd.term_checks import ReadsTeacher, of_samples
from opd.terms import Term
from opd.weighting import Facts, split_by_rows
from tests.catalogue import NAME
from tests.rows import gradients
from tests.tiny import save_model

VOCAB = 80  # above every k of conf/, so that supports leave something out
TOP = 12  # tokens whose log-probs the sampler tells
PROGRESS, TEMPERATURE = 0.25, 0.9
STOP_IDS = (1, 2)
TEACHERS = {"main": 192, "reference": 24, "weak": 16}  # hidden sizes: the larger, the surer
WEIGHTS = {NAME: 1.0, "gold": 0.1}
GOLD = Term("gold", CrossEntropy())


@dataclass(frozen=True)
class Plan:
    """How a row is made; `noise`: deviation of the sampler's log-probs from the student's."""

    group: str
    prompt: int
    answer: int
    reward: float | None
    advantage: float | None
    noise: float
    missing: str = ""  # the teacher that has not scored it
    stream: str = "main"
    trainable: list[bool] = field(default_factory=list)


PLANS = [  # 11 or 12 tokens a row: a budget of 12 k puts any k of them together
    Plan("a", 7, 5, 1.0, 0.8, 0.3),
    Plan("a", 7, 4, 0.0, -1.2, 0.001),
    Plan("a", 7, 5, None, None, 0.3),
    Plan("b", 4, 8, 0.0, 0.4, 0.5, missing="main"),
    Plan("b", 4, 7, 1.0, -0.6, 0.3, trainable=[True, False, False, True, True, False, True]),
    Plan("c", 10, 2, 1.0, 1.1, 0.002, missing="reference"),
    Plan("gold", 5, 6, None, None, 0.0, stream="gold"),
    Plan("other", 8, 3, 0.0, None, 0.2, missing="main", stream="other"),
]
BESIDE = Plan("beside", 3, 29, None, None, 0.2, missing="weak", stream="other")


@dataclass(frozen=True)
class Found:
    """What one update made of a term."""

    loss: float  # the term's own
    total: float  # the weighted sum with the imitation of the given answer
    grads: dict[str, Tensor] = field(repr=False)

    @property
    def largest(self) -> float:
        """The largest entry of any gradient."""
        return max(grad.abs().max().item() for grad in self.grads.values())


Measure = Callable[[Batch, Objective, Mapping[str, Head]], list[tuple[MicroBatch, Outcome]]]


@dataclass(frozen=True, eq=False)
class Mixed:
    """The models and the rows."""

    student: Path
    teachers: Mapping[str, LocalTeacher]
    rows: list[Row]
    beside: Row

    @classmethod
    def of(cls, folder: Path, dtype: torch.dtype = torch.float32) -> Mixed:
        """Rows that the student in the folder might have sampled, scored by the teachers there in `dtype`."""
        teachers = {name: LocalTeacher(str(folder / name)) for name in TEACHERS}
        for teacher in teachers.values():
            teacher.start()
            nn.Module.to(teacher.network, dtype)
        model, random = AutoModelForCausalLM.from_pretrained(folder / "student"), torch.Generator().manual_seed(5)
        plans = [*PLANS, BESIDE]
        samples = [_sampled(model, plan, number, random) for number, plan in enumerate(plans)]
        scores = {name: teacher.score(samples) for name, teacher in teachers.items()}
        rows = [
            _row(plan, sample, {name: given[number] for name, given in scores.items()})
            for number, (plan, sample) in enumerate(zip(plans, samples, strict=True))
        ]
        return cls(folder / "student", teachers, rows[:-1], rows[-1])

    def heads(self) -> dict[str, Head]:
        """Teacher name -> head."""
        return {name: teacher.head().narrowed(VOCAB) for name, teacher in self.teachers.items()}

    def update(
        self, term: Term, rows: Sequence[Row], measure: Measure, *, budget: int = 1000, chunk: int = 256
    ) -> tuple[Batch, Objective]:
        """What a run makes of the rows: facts from a pass before the update where the term asks for them, the batch."""
        rows, terms = [under(term, row) for row in rows], [term, GOLD]
        objective = Objective(terms, WEIGHTS, VOCAB, TEMPERATURE, chunk, PROGRESS, STOP_IDS)
        facts: Facts = ()
        if term.needs_facts:
            bare = make_batch(rows, [], budget, 0)
            found = measure(bare, replace(objective, terms=[], weights={}), self.heads())
            facts = split_by_rows(rows, bare.order, [outcome.statistics for _, outcome in found])
        return make_batch(rows, terms, budget, 0, facts, PROGRESS), objective

    def plain(
        self, model: nn.Module, term: Term, rows: Sequence[Row], *, budget: int = 1000, chunk: int = 256
    ) -> Found:
        """The update's loss and gradients in one process, without DeepSpeed."""
        trainee = _Trainee(model)

        @torch.no_grad()
        def measure(batch: Batch, objective: Objective, heads: Mapping[str, Head]) -> list[tuple[MicroBatch, Outcome]]:
            return [(micro, Outcome(*trainee(micro, heads, objective)[1:])) for micro in batch.micro_batches]

        batch, objective = self.update(term, rows, measure, budget=budget, chunk=chunk)
        total, grads, metrics = gradients(model, batch, objective, self.heads())
        return Found(metrics[f"loss/{NAME}"].value, total, grads)


def save_models(folder: Path) -> Path:
    """Writes the student and the teachers, of different hidden sizes."""
    for seed, (name, hidden) in enumerate({"student": 32, **TEACHERS}.items()):
        save_model(folder / name, seed, hidden=hidden, layers=1, vocab_size=VOCAB)
    return folder


def under(term: Term, row: Row) -> Row:
    """The row with the terms of its stream and the scores that they read.

    A given answer has neither a sampler nor a reward for the term to read.
    """
    stream = row.rollout.prompt.stream
    given = of_samples(term) is None and not term.needs_advantage
    names = {"main": {NAME}, "gold": {"gold", NAME} if given else {"gold"}, "other": set[str]()}
    read = [weigher.reads_teacher for weigher in term.weigh.values() if isinstance(weigher, ReadsTeacher)]
    scores = {name: given for name, given in row.scores.items() if name in (*term.teachers, *read)}
    return replace(row, terms=frozenset(names[stream]), scores=scores)


@torch.no_grad()
def _sampled(model: nn.Module, plan: Plan, number: int, random: torch.Generator) -> Rollout:
    """Drawn from the student token by token (with a tool: from anywhere), then a stop token; noisy log-probs."""
    ids = [3 + number, *torch.randint(3, VOCAB, (plan.prompt - 1,), generator=random).tolist()]
    prompt, known = Prompt(plan.group, plan.stream, list(ids), Example("x")), []
    for position in range(plan.answer):
        own = torch.log_softmax(model(input_ids=torch.tensor([ids])).logits[0, -1] / TEMPERATURE, -1)
        known.append(torch.log_softmax(own + plan.noise * torch.randn(VOCAB, generator=random), -1))
        chances = torch.ones(VOCAB) if plan.trainable else own.exp()
        last = position == plan.answer - 1
        ids.append(STOP_IDS[number % 2] if last else int(torch.multinomial(chances, 1, generator=random)))
    answer, sampler = ids[plan.prompt :], torch.stack(known)
    logp = sampler.gather(-1, torch.tensor(answer)[:, None])[:, 0].tolist()
    if plan.stream == "gold":
        return Rollout(prompt, number, answer, [nan] * len(answer), "", "given", 0)
    best = sampler.topk(TOP + number % 2, -1)
    return Rollout(prompt, number, answer, logp, "", "stop", 0, plan.trainable, TopK(best.indices, best.values))


def _row(plan: Plan, sample: Rollout, scores: Mapping[str, FullVocab | None]) -> Row:
    known = {name: None if name == plan.missing else given for name, given in scores.items()}
    return Row(sample, Reward(plan.reward), Credit(plan.advantage), known, frozenset())


def apart(got: Found, expected: Found) -> float:
    """The largest difference of loss or gradient, in units of the largest gradient or of 1, what losses are made of."""
    assert got.grads.keys() == expected.grads.keys()
    gaps = [(got.grads[name] - grad).abs().max().item() for name, grad in expected.grads.items()]
    losses = max(abs(got.loss - expected.loss), abs(got.total - expected.total))
    return max(max(gaps) / expected.largest, losses / max(1.0, abs(expected.loss), expected.largest))
