"""Rewards that are trained in the loop: their pairs of answers, and their part of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from safetensors.torch import load_file
from transformers import PreTrainedTokenizerBase

from opd import ranks
from opd.checkpoint import save_tensors
from opd.records import Mean, Prompt, Rollout
from opd.remote import on_all_ranks
from opd.rewards import LearnsFromPairs, RewardTerm
from opd.students import HFStudent, SamplingParams
from opd.teachers import AnsweringTeacher

PAIR_SEED = 104_729  # a teacher's answer to compare with depends on the prompt alone


class PairLearning:
    """All rewards of a run that learn from pairs of a teacher's and the student's answers."""

    def __init__(self, terms: Sequence[RewardTerm], teachers: Mapping[str, AnsweringTeacher]) -> None:
        self.learners = {term.name: f for term in terms if isinstance(f := term.function, LearnsFromPairs)}
        self.teachers = teachers

    def begin(self, student: HFStudent, tokenizer: PreTrainedTokenizerBase) -> None:
        """Makes what is to learn."""
        for learner in self.learners.values():
            learner.begin(student, tokenizer)

    def step(self, rollouts: Sequence[Rollout], params: SamplingParams) -> dict[str, Mean]:
        """Lets every learner learn from this step's samples; all ranks call, and learn the same. Their metrics.

        Raises:
            RemoteError: a teacher does not answer; on all ranks.
        """
        metrics: dict[str, Mean] = {}
        for name, learner in self.learners.items():
            own = [rollout for rollout in rollouts if learner.judges(rollout.prompt.stream)]
            prompts = {rollout.group: _once(rollout.prompt) for rollout in own}
            teacher = self.teachers[learner.teacher]
            texts = on_all_ranks(
                lambda t=teacher, p=prompts: t.sample(list(p.values()), params, PAIR_SEED) if p else []
            )
            known = {text.group: text for text in texts if text.finish == "stop" and text.text.strip()}
            pairs = [(known[rollout.group], rollout) for rollout in own if rollout.group in known]
            found = learner.learn([pair for part in ranks.gather(pairs) for pair in part])
            metrics |= {f"reward/{name}/{key}": mean for key, mean in found.items()}
        return metrics

    def save(self, folder: Path) -> None:
        """Writes into a checkpoint what the rewards have become; all ranks call, rank 0 writes.

        Raises:
            OSError: it could not be written.
        """
        for name, learner in self.learners.items():
            if ranks.rank() == 0:
                save_tensors(learner.state(), _file(folder, name))

    def load(self, folder: Path) -> None:
        """Restores what `save` wrote.

        Raises:
            ValueError: the checkpoint is of a run without such a reward.
        """
        for name, learner in self.learners.items():
            if not _file(folder, name).is_file():
                raise ValueError(
                    f"reward.{name}: it is trained along with the student, and the checkpoint {folder} holds nothing "
                    "of it; take the configuration that made it, or start anew by resume=never"
                )
            learner.restore(load_file(_file(folder, name)))


def _once(prompt: Prompt) -> Prompt:
    return Prompt(prompt.id, prompt.stream, prompt.token_ids, prompt.example)


def _file(folder: Path, name: str) -> Path:
    return folder / "rewards" / f"{name}.safetensors"
