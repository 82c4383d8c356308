"""The contract of a teacher: it declares what it can give, and gives it per rollout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from transformers import PreTrainedTokenizerBase

from opd.heads import Head
from opd.losses import Need
from opd.records import FullVocab, Rollout


@runtime_checkable
class Teacher(Protocol):
    """Scores rollouts. Construction reads nothing; `start` loads."""

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

    def score(self, rollouts: Sequence[Rollout]) -> list[FullVocab | None]:
        """Scores in the order of the rollouts; None where there is no score, never a zero."""
        ...

    def head(self) -> Head:
        """Turns the scores' hidden states into logits."""
        ...

    def close(self) -> None:
        """Releases what `start` took."""
        ...
