"""One rollout joined with everything that is known of it: the input of batching."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from opd.records import Credit, FullVocab, Reward, Rollout


@dataclass(frozen=True)
class Row:
    """One rollout with all that is known of it. `terms`: names of the terms its stream trains under."""

    rollout: Rollout
    reward: Reward
    credit: Credit
    scores: Mapping[str, FullVocab | None]  # teacher name -> scores, None where missing
    terms: frozenset[str]

    @property
    def token_ids(self) -> list[int]:
        """Prompt and response, as they go through the model."""
        return self.rollout.prompt.token_ids + self.rollout.token_ids

    @property
    def trainable(self) -> list[int]:
        """Positions inside the response that the student chose."""
        flags = self.rollout.trainable or [True] * len(self.rollout.token_ids)
        return [position for position, flag in enumerate(flags) if flag]
