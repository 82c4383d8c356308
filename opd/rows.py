"""One rollout joined with everything that is known of it: the input of batching."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from opd.records import Credit, Reward, Rollout, TeacherScores


@dataclass(frozen=True)
class Row:
    """One rollout with all that is known of it. `terms`: names of the terms its stream trains under."""

    rollout: Rollout
    reward: Reward
    credit: Credit
    scores: Mapping[str, TeacherScores | None]  # teacher name -> scores, None where missing
    terms: frozenset[str]

    @property
    def scorers(self) -> list[str]:
        """The teachers that have scored it."""
        return [name for name, given in self.scores.items() if given is not None]

    @property
    def token_ids(self) -> list[int]:
        """Prompt and response, as they go through the model."""
        return self.rollout.prompt.token_ids + self.rollout.token_ids

    @property
    def trainable(self) -> list[int]:
        """Positions inside the response that the student chose."""
        flags = self.rollout.trainable or [True] * len(self.rollout.token_ids)
        return [position for position, flag in enumerate(flags) if flag]


def joined(
    rollouts: Sequence[Rollout],
    rewards: Sequence[Reward],
    credits: Sequence[Credit],
    scores: Mapping[str, Sequence[TeacherScores | None]],
    terms: Sequence[frozenset[str]],
) -> list[Row]:
    """One row per rollout; `terms`: names of those that train on it."""
    return [
        Row(rollout, rewards[i], credits[i], {name: given[i] for name, given in scores.items()}, terms[i])
        for i, rollout in enumerate(rollouts)
    ]
