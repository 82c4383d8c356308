"""The records that stages exchange, in the order in which a step makes them.

Alignment: every per-token array has one entry per token it describes; the shift between a model's output and the token
that it predicts is made in `opd.padding.predictor_index` and nowhere else. Lists before batching, tensors after.
Letters: R response tokens, T padded length, B rows, N trainable tokens, n tokens of a block, V vocabulary, H hidden
size, K top-k.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor

from opd.distributions import Distribution, Pool

Message = Mapping[str, str]
Finish = Literal["stop", "length", "aborted", "given"]  # given: not sampled, the data's own answer
Record = TypeVar("Record")


@dataclass(frozen=True)
class Example:
    """One row of a data source, before any tokenizer has seen it.

    A `str` prompt is tokenized as it stands; a list of messages goes through the student's chat template.
    """

    prompt: str | list[Message]
    answer: str | None = None
    source: str = "default"
    columns: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Prompt:
    """An example as the student sees it."""

    id: str
    stream: str
    token_ids: list[int]
    example: Example
    samples: int = 1

    @property
    def text(self) -> str:
        """The prompt as plain text; messages are joined by lines."""
        prompt = self.example.prompt
        return prompt if isinstance(prompt, str) else "\n".join(message["content"] for message in prompt)


@dataclass(frozen=True)
class TopK:
    """The likeliest tokens of every position under one model; a place without a token has log-probability -inf."""

    ids: Tensor  # [R, K]
    logp: Tensor  # [R, K] nats

    def within(self, vocab_size: int) -> TopK:
        """Without ids outside the vocabulary: a head may be padded beyond the other model's."""
        known = (self.ids >= 0) & (self.ids < vocab_size)
        return TopK(self.ids.where(known, 0), self.logp.where(known, -torch.inf))

    def at(self, positions: slice | Sequence[int] | Tensor) -> TopK:
        """The same of some positions."""
        return TopK(self.ids[positions], self.logp[positions])


@dataclass(frozen=True)
class Rollout:
    """One sampled answer. `token_ids` are the ids that the sampler drew, never re-encoded text."""

    prompt: Prompt
    sample_index: int
    token_ids: list[int]  # [R], the stop token included when one was drawn
    logp: list[float]  # [R], under the distribution that was sampled from (temperature applied)
    text: str
    finish: Finish
    version: int  # of the weights that sampled it
    trainable: list[bool] = field(default_factory=list)  # [R], false where the student did not choose; [] = all true
    sampler_top: TopK | None = None  # [R, K] of the sampling distribution, where `top_logprobs` asks for it

    @property
    def group(self) -> tuple[str, str]:
        """Samples that share this key form a group."""
        return (self.prompt.stream, self.prompt.id)


@dataclass(frozen=True)
class Reward:
    """The verdict on one rollout. `value` is None when no verdict could be reached: never a silent zero."""

    value: float | None
    parts: Mapping[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True)
class FullVocab:
    """A teacher's answer from which every token's probability follows: its last hidden states.

    `hidden[t]` is the state that predicts response token t; logits are `head(hidden)` with the teacher's head.
    """

    hidden: Tensor  # [R, H]
    present: Tensor | None = None  # [R] bool, false where the teacher has no score; None: all true
    places: Tensor | None = None  # [R], of a teacher with other tokens: `opd.shared_vocabulary.place`


@dataclass(frozen=True)
class SomeTokens:
    """A teacher's answer for the tokens that it was asked about: the sampled one, and perhaps its likeliest."""

    token_logp: Tensor  # [R] nats, of the response's own tokens
    top: TopK | None = None  # [R, K]
    present: Tensor | None = None  # [R] bool, false where the teacher has no score; None: all true


TeacherScores = FullVocab | SomeTokens


@dataclass(frozen=True)
class Credit:
    """What one rollout earned. `advantage` is None where no reward signal exists (the row leaves reward terms)."""

    advantage: float | None


@dataclass(frozen=True)
class TokenFields:
    """Per-token facts of a micro-batch, one entry per trainable token."""

    predictor: Tensor  # [N] flat index (row * T + column) of the position whose output predicts the token
    token_ids: Tensor  # [N]
    sampler_logp: Tensor  # [N]
    advantages: Tensor  # [N]
    row_log_ratio: Tensor  # [N], see TokenChunk; zero where no term asks for it
    row_values: Mapping[str, Tensor] = field(default_factory=dict)  # term name -> [N], of losses that see whole rows
    sampler_top: TopK | None = None  # [N, K]


@dataclass(frozen=True)
class TeacherPayload:
    """One teacher's scores for a micro-batch's trainable tokens; `present` is false where the score is missing."""

    hidden: Tensor | None  # [N, H] of a teacher that gives the full vocabulary, zero where missing
    present: Tensor  # [N] bool
    token_logp: Tensor | None = None  # [N] of one that gives some tokens, zero where missing
    top: TopK | None = None  # [N, K] of the same, no token where missing
    places: Tensor | None = None  # [N], see FullVocab


@dataclass(frozen=True)
class MicroBatch:
    """Rows that go through the student together, right-padded."""

    input_ids: Tensor  # [B, T]
    attention_mask: Tensor  # [B, T]
    tokens: TokenFields
    term_weights: Mapping[str, Tensor]  # term name -> [N], already divided by the term's global count
    teachers: Mapping[str, TeacherPayload]  # of the teachers that have scored a row of it
    rows: int  # real rows; a rank with fewer micro-batches than its peers takes part with rows == 0
    rewards: Sequence[float] = ()  # the rows' verdicts, NaN where there is none; () where nobody asked


def moved(record: Record, device: torch.device) -> Record:
    """The same record, its tensors on another device."""
    if isinstance(record, Tensor):
        return cast(Record, record.to(device))
    if isinstance(record, Mapping):
        return cast(Record, {name: moved(value, device) for name, value in record.items()})
    if is_dataclass(record) and not isinstance(record, type):
        return cast(Record, type(record)(**{f.name: moved(vars(record)[f.name], device) for f in fields(record)}))
    return record


@dataclass(frozen=True)
class Batch:
    """One rank's share of an update."""

    micro_batches: list[MicroBatch]
    order: list[list[int]]  # numbers of the rows in each micro-batch
    term_counts: Mapping[str, float]  # term name -> global denominator


@dataclass(frozen=True)
class Scores:
    """One teacher's scores for a block of n tokens."""

    token_logp: Tensor  # [n]
    full: Distribution | None = None
    top: TopK | None = None  # [n, K], where the full distribution is not known
    support: Tensor | None = None  # [1 or n, V], see TokenChunk
    mass: Tensor | None = None  # [n], the teacher's probability of the support before it was renormalised
    restricts: bool = True  # whether losses see the support alone


@dataclass(frozen=True)
class TokenRow:
    """The R trainable tokens of one row under a term, as a forward pass before the update saw them; constant."""

    student_logp: Tensor  # [R]
    sampler_logp: Tensor  # [R]
    teacher_logp: Tensor | None  # [R], NaN where the score is missing
    reference_logp: Tensor | None  # [R]
    progress: float  # steps done / steps planned


@dataclass(frozen=True)
class TokenChunk:
    """What a loss sees: a block of n trainable tokens under one term's teacher.

    A formula is differentiable in the student's distribution and in `token_logp`; everything else is constant.
    `token_logp` is taken at the sampling temperature, so that its ratio to `sampler_logp` is exact; the others at
    temperature 1. Tensors are shared by all terms: never write into them.
    """

    student: Distribution
    token_logp: Tensor  # [n], the student's, of the sampled token
    token_ids: Tensor  # [n]
    sampler_logp: Tensor  # [n]
    advantages: Tensor  # [n]
    teacher: Distribution | None = None  # None for a term without a teacher, or with one that gives some tokens only
    teacher_token_logp: Tensor | None = None  # [n]
    teacher_top: TopK | None = None  # [n, K], the likeliest tokens of a teacher that gives some tokens only
    support: Tensor | None = None  # [1 or n, V] bool, ids that a teacher of another vocabulary shares; None: all
    reference: Distribution | None = None  # the term's second teacher
    reference_token_logp: Tensor | None = None  # [n]
    row_log_ratio: Tensor | None = None  # [n], mean over the token's row of student minus sampler log-prob
    row_value: Tensor | None = None  # [n], what the loss made of the token's whole row, see `RowLoss`
    sampler_top: TopK | None = None  # [n, K], the sampler's likeliest tokens
    stop_ids: tuple[int, ...] = ()  # ids that end an answer, for the student or a teacher
    progress: float = 0.0  # steps done / steps planned, for scheduled parameters
    pool: Pool | None = None

    def difference(self, x: Tensor, y: Tensor) -> Tensor:
        """x - y [n, V] in a tensor that is the caller's alone until the block is over."""
        return x - y if self.pool is None else torch.sub(x, y, out=self.pool.take(x))

    @property
    def student_logp(self) -> Tensor:
        """[n, V]."""
        return self.student.logp

    @property
    def student_p(self) -> Tensor:
        """[n, V]."""
        return self.student.p

    @property
    def teacher_logp(self) -> Tensor:
        """[n, V]."""
        return _there(self.teacher, "teacher").logp

    @property
    def teacher_p(self) -> Tensor:
        """[n, V]."""
        return _there(self.teacher, "teacher").p

    @property
    def reference_logp(self) -> Tensor:
        """[n, V]."""
        return _there(self.reference, "reference").logp


def _there(distribution: Distribution | None, name: str) -> Distribution:
    assert distribution is not None, f"a loss asked for the {name}'s distribution without declaring that it needs it"
    return distribution


@dataclass(frozen=True)
class Mean:
    """A metric that merges exactly over blocks, micro-batches and ranks."""

    sum: float
    count: float

    def __add__(self, other: Mean) -> Mean:
        return Mean(self.sum + other.sum, self.count + other.count)

    @property
    def value(self) -> float:
        """The mean, NaN where nothing was counted."""
        return self.sum / self.count if self.count else float("nan")
