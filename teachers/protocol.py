"""The contract of a teacher: it declares what it can give, and gives it per rollout."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from opd.heads import Head
from opd.losses import Need
from opd.records import Example, Prompt, Reward, Rollout, TeacherScores
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


@runtime_checkable
class ReadsVerdicts(Teacher, Protocol):
    """A teacher that may look at the rewards of what it scores."""

    @property
    def reads_verdicts(self) -> bool:
        """Whether, as it is set, it needs them: a run without rewards is then refused."""
        ...

    def score_judged(self, rollouts: Sequence[Rollout], rewards: Sequence[Reward]) -> list[TeacherScores | None]:
        """As `score`; called instead of it."""
        ...


@runtime_checkable
class FollowsStudent(Teacher, Protocol):
    """A teacher that is made of the student. What it became must survive a checkpoint exactly."""

    def attach(self, student: nn.Module) -> None:
        """Gives it the module in training, before `start`."""
        ...

    def follow(self, weights: Callable[[], Iterable[tuple[str, Tensor]]], step: int) -> None:
        """After the update to `step`. `weights()` gathers (Hugging Face name, tensor); on all ranks or on none."""
        ...

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint must hold beside the student; the same on all ranks, empty for nothing."""
        ...

    def restore(self, state: dict[str, Tensor]) -> None:
        """Goes on from what `state` gave."""
        ...


@runtime_checkable
class TriesExamples(Teacher, Protocol):
    """A teacher that can tell before weights load whether it fits the data."""

    def check_examples(self, examples: Sequence[Example]) -> None:
        """Raises ValueError, starting with its own key, where it does not fit."""
        ...


@runtime_checkable
class OwnTokens(Teacher, Protocol):
    """A teacher whose tokens are not the student's, and whose scores are of the student's tokens all the same."""

    def meet(self, tokenizer: PreTrainedTokenizerBase, stop_ids: Sequence[int]) -> None:
        """Gives it the student's tokenizer and the ids that end an answer, before weights load.

        Raises:
            ValueError: starting with its own key, where it cannot deal with that tokenizer.
        """
        ...
