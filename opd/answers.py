"""The answers of a step and their verdicts: sampled, given by data or teachers, refilled where they teach nothing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from math import nan

from transformers import PreTrainedTokenizerBase

from opd import ranks
from opd.learning import PairLearning
from opd.prompts import Prompts
from opd.records import Mean, Prompt, Reward, Rollout
from opd.remote import on_all_ranks
from opd.rewards import Measured, RewardStage
from opd.students import HFStudent, Sampler
from opd.teachers import AnsweringTeacher
from opd.templates import TemplateFault


class Answers:
    """Draws this rank's share of a step's answers and has them judged."""

    def __init__(
        self,
        prompts: Prompts,
        sampler: Sampler,
        rewards: RewardStage,
        tokenizer: PreTrainedTokenizerBase,
        teachers: Mapping[str, AnsweringTeacher] | None = None,
    ) -> None:
        self.prompts, self.sampler, self.rewards, self.tokenizer = prompts, sampler, rewards, tokenizer
        self.teachers = teachers or {}  # those that answer prompts
        self.learning = PairLearning(rewards.terms, self.teachers)
        self._started = ExitStack()
        self._taught: dict[str, Mean] = {}  # of their answers in the step
        self.metrics: dict[str, Mean] = {}  # of all that was judged in the step
        self.vocab_size = len(tokenizer)  # ids below it are shared by student and teachers; set when both are loaded
        self.sampled_tokens = 0  # in the step, the answers that were replaced included

    def start(self, student: HFStudent) -> None:
        """Starts rewards and what fills columns; makes the rewards that learn.

        Raises:
            RemoteError: on all ranks.
            RewardError: a reward function cannot be imported.
        """
        self._started.callback(self.rewards.close)  # also of one that starts in part
        on_all_ranks(self.rewards.start)
        for column in self.prompts.columns.values():
            on_all_ranks(column.start)
            self._started.callback(column.close)
        self.learning.begin(student, self.tokenizer)

    def close(self) -> None:
        """Stops what `start` started."""
        self._started.close()

    def sample(self, step: int, seed: int) -> list[Rollout]:
        """The student's answers at weights of version `step`, those that the data give, and those of teachers.

        Raises:
            RemoteError: a teacher or what fills a column does not answer; on all ranks.
        """
        prompts = ranks.share(self.prompts.draw(step))
        by: dict[str, list[Prompt]] = {"student": [], "given": [], "teacher": []}
        for prompt in prompts:
            by[self.prompts.streams[prompt.stream].answers].append(prompt)
        rollouts = on_all_ranks(lambda: self._draw(by["student"], seed) if by["student"] else [])
        self.sampled_tokens = sum(len(rollout.token_ids) for rollout in rollouts)
        given = [self._imitated(prompt, 0, str(prompt.example.answer), step) for prompt in by["given"]]
        return rollouts + given + self._of_teachers(by["teacher"], step, seed)

    def _of_teachers(self, prompts: Sequence[Prompt], version: int, seed: int) -> list[Rollout]:
        """The teachers' whole answers as the student would write them; refusals, empty and cut ones are left out."""
        asked: dict[str, list[Prompt]] = {
            stream.teacher: [] for stream in self.prompts.streams.values() if stream.teacher is not None
        }
        for prompt in prompts:
            asked[str(self.prompts.streams[prompt.stream].teacher)].append(prompt)
        if not asked:
            return []
        answers = on_all_ranks(
            lambda: {
                name: self.teachers[name].sample(each, self.sampler.params, seed) if each else []
                for name, each in asked.items()
            }
        )
        self._taught, rollouts = {}, []
        for name, texts in answers.items():
            whole = [text for text in texts if text.finish == "stop" and text.text.strip()]
            rollouts += [self._imitated(text.prompt, text.sample_index, text.text, version) for text in whole]
            found, teacher = {"used": Mean(float(len(whole)), float(len(texts)))}, self.teachers[name]
            found |= teacher.metrics() if isinstance(teacher, Measured) else {}
            self._taught |= {f"answers/{name}/{key}": mean for key, mean in found.items()}
        return rollouts

    def _draw(self, prompts: Sequence[Prompt], seed: int) -> list[Rollout]:
        rollouts = inside_vocabulary(self.sampler.sample(prompts, self.sampler.params, seed), self.vocab_size)
        for name, column in self.prompts.columns.items():
            try:
                texts = column.fill(rollouts)
            except TemplateFault as fault:
                raise TemplateFault(f"data.columns.{name}.{fault}") from None
            rollouts = [_with_column(r, name, text) for r, text in zip(rollouts, texts, strict=True)]
        return rollouts

    def judge(self, rollouts: Sequence[Rollout]) -> list[Reward]:
        """One verdict per rollout; a given answer has none. Rewards that are trained learn from them afterwards."""
        sampled = [rollout for rollout in rollouts if rollout.finish != "given"]
        verdicts = iter(on_all_ranks(lambda: self.rewards.score(sampled)))
        learned = self.learning.step(sampled, self.sampler.params)
        self.metrics = {**self._taught, **self._of_columns(), **self.rewards.metrics(), **learned}
        return [Reward(None) if rollout.finish == "given" else next(verdicts) for rollout in rollouts]

    def _of_columns(self) -> dict[str, Mean]:
        measured = {name: column for name, column in self.prompts.columns.items() if isinstance(column, Measured)}
        return {f"answers/{name}/{key}": m for name, column in measured.items() for key, m in column.metrics().items()}

    def refill(
        self, step: int, seed: int, rollouts: Sequence[Rollout], rewards: Sequence[Reward]
    ) -> tuple[list[Rollout], list[Reward]]:
        """Replaces groups whose rewards do not differ by fresh prompts, `refill_rounds` times at most.

        DAPO's dynamic sampling (2503.14476). What is still without a difference after the last round stays. Streams say
        by `refill_rounds` whether they want it; extra prompts follow from seed and step, like all others.

        Raises:
            RemoteError: a reward's server is gone; on all ranks.
        """
        return on_all_ranks(lambda: self._refill(step, seed, rollouts, rewards))

    def _refill(
        self, step: int, seed: int, rollouts: Sequence[Rollout], rewards: Sequence[Reward]
    ) -> tuple[list[Rollout], list[Reward]]:
        kept_rollouts, kept_rewards = list(rollouts), list(rewards)
        for turn in range(max((stream.refill_rounds for stream in self.prompts.streams.values()), default=0)):
            idle = self._idle_groups(kept_rollouts, kept_rewards, turn)
            if not idle:
                break
            prompts = [
                prompt
                for name, stream in self.prompts.streams.items()
                for prompt in self.prompts.extra(name, step, turn, sum(group[0] == name for group in idle))
            ]
            fresh = self._draw(prompts, seed + 1 + turn)
            self.sampled_tokens += sum(len(rollout.token_ids) for rollout in fresh)
            verdicts = self.rewards.score(fresh)
            self.metrics |= {name: mean + self.metrics[name] for name, mean in self.rewards.metrics().items()}
            dull = set(self._idle_groups(fresh, verdicts, 0))
            better = [group for group in _groups(fresh, verdicts) if group not in dull]
            spared = {
                group
                for name in self.prompts.streams
                for group in [g for g in idle if g[0] == name][: sum(g[0] == name for g in better)]
            }
            rows = [(r, v) for r, v in zip(kept_rollouts, kept_rewards, strict=True) if r.group not in spared]
            rows += [(r, v) for r, v in zip(fresh, verdicts, strict=True) if r.group in better]
            kept_rollouts, kept_rewards = [r for r, _ in rows], [v for _, v in rows]
        return kept_rollouts, kept_rewards

    def _idle_groups(self, rollouts: Sequence[Rollout], rewards: Sequence[Reward], turn: int) -> list[tuple[str, str]]:
        return [
            group
            for group, values in _groups(rollouts, rewards).items()
            if self.prompts.streams[group[0]].refill_rounds > turn and len(set(values)) < 2
        ]

    def _imitated(self, prompt: Prompt, index: int, text: str, version: int) -> Rollout:
        end = [] if self.tokenizer.eos_token_id is None else [self.tokenizer.eos_token_id]
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"] + end
        ids = ids[: self.sampler.params.max_tokens]
        return Rollout(prompt, index, ids, [nan] * len(ids), text, "given", version)


def inside_vocabulary(rollouts: Sequence[Rollout], vocab_size: int) -> list[Rollout]:
    """Answers cut before the first id that student and teachers do not share, and then counted as aborted.

    A student's head may be padded beyond a teacher's; such an id has no embedding there.
    """
    return [
        rollout if max(rollout.token_ids, default=0) < vocab_size else _cut(rollout, vocab_size) for rollout in rollouts
    ]


def _with_column(rollout: Rollout, name: str, text: str | None) -> Rollout:
    """The same answer to an example that has one more column; without a text the column does not exist."""
    example = rollout.prompt.example
    columns = {key: value for key, value in example.columns.items() if key != name}
    columns |= {} if text is None else {name: text}
    return replace(rollout, prompt=replace(rollout.prompt, example=replace(example, columns=columns)))


def _cut(rollout: Rollout, vocab_size: int) -> Rollout:
    end = next(place for place, token in enumerate(rollout.token_ids) if token >= vocab_size)
    return replace(rollout, token_ids=rollout.token_ids[:end], logp=rollout.logp[:end], finish="aborted")


def _groups(rollouts: Sequence[Rollout], rewards: Sequence[Reward]) -> dict[tuple[str, str], list[float]]:
    """The rewards of every group of sampled answers, in order of appearance."""
    groups: dict[tuple[str, str], list[float]] = defaultdict(list)
    for rollout, reward in zip(rollouts, rewards, strict=True):
        if rollout.finish != "given" and reward.value is not None:
            groups[rollout.group].append(reward.value)
    return groups
