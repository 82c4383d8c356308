"""The contract of a teacher: it declares what it can give, and gives it per rollout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from transformers import PreTrainedTokenizerBase

from opd.heads import Head
from opd.losses import Need
from opd.records import Prompt, Rollout, TeacherScores
from opd.students import SamplingParams


@runtime_checkable
class Teacher(Protocol):
    """Scores rollouts. Construction reads nothing; `start` loads. Further abilities are protocols below."""

    @property
    def provides(self) -> frozenset[Need]:
        """What a loss may ask of this teacher."""
        ...

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The teacher's tokenizer, to be compared with the student's before anything heavy starts."""
        ...

    def start(self) -> None:
        """Loads weights or opens connections."""
        ...

    def score(self, rollouts: Sequence[Rollout]) -> list[TeacherScores | None]:
        """Scores in the order of the rollouts; None where there is no score, never a zero."""
        ...

    def close(self) -> None:
        """Releases what `start` took."""
        ...


@runtime_checkable
class GivesFullVocab(Teacher, Protocol):
    """A teacher whose scores are hidden states (`FullVocab`); it provides `full_vocab`."""

    def head(self) -> Head:
        """Turns the scores' hidden states into logits. Loaded anew where it is not kept: callers hold on to it."""
        ...


@runtime_checkable
class LimitsLength(Teacher, Protocol):
    """A teacher that knows, once started, how many tokens a sequence may have."""

    @property
    def max_len(self) -> int:
        """Prompt and response together."""
        ...


@runtime_checkable
class AnsweringTeacher(Teacher, Protocol):
    """A teacher that can also answer prompts itself, as `Sampler.sample` does."""

    def sample(self, prompts: Sequence[Prompt], params: SamplingParams, seed: int) -> list[Rollout]:
        """Its own answers, in the order of prompts and samples."""
        ...
