"""Evaluation on held-out prompts: accuracy by the run's rewards, and divergence from the teachers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from opd import ranks
from opd.answers import inside_vocabulary
from opd.batching import make_batch
from opd.engine import Engine
from opd.heads import Head
from opd.metrics import Outcomes, statistics_metrics
from opd.objective import Objective
from opd.prompts import Prompts
from opd.records import Credit, Mean, Prompt, Reward, Rollout, TeacherScores
from opd.remote import on_all_ranks
from opd.rewards import RewardStage
from opd.rows import Row
from opd.scoring import TeacherStage
from opd.students import Sampler, SamplingParams
from opd.teachers import AnsweringTeacher

EVAL_SEED = 7_919


@dataclass(frozen=True)
class EvalConfig:
    """Every `every` steps, before the first and after the last, on `problems` held-out prompts.

    Args:
        temperature: 0 answers greedily; 1 measures the divergence on the student's own distribution.
        samples: answers per prompt.
        max_tokens: null for the sampler's own limit.
        teacher: also let the first teacher that can answer do so once, for comparison.
    """

    every: int = 20
    problems: int = 256
    temperature: float = 0.0
    samples: int = 1
    max_tokens: int | None = None
    teacher: bool = True

    def __post_init__(self) -> None:
        if self.every < 1 or self.problems < 0 or self.samples < 1:
            raise ValueError(f"every={self.every}, problems={self.problems}, samples={self.samples}: out of range")

    def sampling(self, params: SamplingParams) -> SamplingParams:
        """How evaluation draws: the full softmax at its own temperature."""
        return SamplingParams(max_tokens=self.max_tokens or params.max_tokens, temperature=self.temperature)


@dataclass(frozen=True)
class Evaluator:
    """Evaluates whatever weights the sampler and the engine hold."""

    config: EvalConfig
    prompts: Prompts
    rewards: RewardStage
    teachers: TeacherStage
    heads: Mapping[str, Head]
    engine: Engine
    vocab_size: int
    micro_batch_tokens: int
    pad_id: int

    def student(self, sampler: Sampler) -> tuple[dict[str, Mean], list[tuple[Rollout, Reward]]]:
        """Merged metrics `eval/...` and this rank's judged answers; nothing when no prompts are held out."""
        if not self.has_problems:
            return {}, []
        prompts = self.share()
        drawn = sampler.sample(prompts, self.config.sampling(sampler.params), EVAL_SEED) if prompts else []
        rollouts = inside_vocabulary(drawn, self.vocab_size)
        rewards = on_all_ranks(lambda: self.rewards.score(rollouts))
        metrics = self.accuracy(rewards) | self._divergence(rollouts, rewards)
        metrics["eval/length"] = Mean(float(sum(len(r.token_ids) for r in rollouts)), float(len(rollouts)))
        metrics["eval/truncated"] = Mean(float(sum(r.finish == "length" for r in rollouts)), float(len(rollouts)))
        return ranks.merged(metrics), list(zip(rollouts, rewards, strict=True))

    @property
    def has_problems(self) -> bool:
        """Whether there is anything to evaluate on."""
        return bool(self.prompts.heldout) and self.config.problems > 0

    def share(self) -> list[Prompt]:
        """This rank's held-out prompts."""
        return ranks.share(self.prompts.evaluation(self.config.problems, self.config.samples))

    def accuracy(self, rewards: Sequence[Reward]) -> dict[str, Mean]:
        """`eval/accuracy`: the mean of the first reward, by itself; absent where no reward is configured."""
        if not self.rewards.terms:
            return {}
        name = self.rewards.terms[0].name
        known = [part for reward in rewards if (part := reward.parts.get(name)) is not None]
        return {"eval/accuracy": Mean(float(sum(known)), float(len(known)))}

    def teacher_accuracy(self, params: SamplingParams) -> float | None:
        """What the first teacher that can answer reaches on the same prompts; None where none can."""
        answering = [teacher for teacher in self.teachers.teachers.values() if isinstance(teacher, AnsweringTeacher)]
        prompts = self.share()
        if not answering or not self.has_problems:
            return None
        rollouts = answering[0].sample(prompts, self.config.sampling(params), EVAL_SEED) if prompts else []
        return ranks.merged(self.accuracy(on_all_ranks(lambda: self.rewards.score(rollouts))))["eval/accuracy"].value

    def _divergence(self, rollouts: Sequence[Rollout], rewards: Sequence[Reward]) -> dict[str, Mean]:
        """`eval/kl` per token (the first teacher's) and `eval/<teacher>/...`."""
        if not self.teachers.teachers:
            return {}
        outcomes = self.measure(rollouts, self.teachers.score_all(rollouts, rewards))
        found = statistics_metrics(outcomes)
        metrics = {
            name.replace("teacher/", "eval/", 1): mean for name, mean in found.items() if name.startswith("teacher/")
        }
        first = next(iter(self.teachers.teachers))
        return metrics | {"eval/kl": metrics.get(f"eval/{first}/kl", Mean(0.0, 0.0))}

    def measure(
        self,
        rollouts: Sequence[Rollout],
        scores: Mapping[str, Sequence[TeacherScores | None]],
        temperature: float = 1.0,
    ) -> Outcomes:
        """Per-token statistics of any rollouts, without terms and without a step."""
        rows = [
            Row(rollout, Reward(None), Credit(None), {name: given[i] for name, given in scores.items()}, frozenset())
            for i, rollout in enumerate(rollouts)
        ]
        batch = make_batch(rows, [], self.micro_batch_tokens, self.pad_id)
        objective = Objective(terms=[], weights={}, vocab_size=self.vocab_size, temperature=temperature)
        return self.engine.measure(batch, objective, self.heads)


def check_prompts(prompts: Prompts, count: int) -> list[Prompt]:
    """A few fixed training prompts, for the parity check."""
    return [replace(prompt, samples=1) for prompt in prompts.draw(0)[:count]]
