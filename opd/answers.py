"""The answers of a step and their verdicts: sampled or given by the data, and refilled where they teach nothing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from math import nan

from transformers import PreTrainedTokenizerBase

from opd import ranks
from opd.prompts import Prompts
from opd.records import Mean, Prompt, Reward, Rollout
from opd.rewards import RewardStage
from opd.students import Sampler


class Answers:
    """Draws this rank's share of a step's answers and has them judged."""

    def __init__(
        self, prompts: Prompts, sampler: Sampler, rewards: RewardStage, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        self.prompts, self.sampler, self.rewards, self.tokenizer = prompts, sampler, rewards, tokenizer
        self.metrics: dict[str, Mean] = {}  # of all that was judged in the step
        self.vocab_size = len(tokenizer)  # ids below it are shared by student and teachers; set when both are loaded
        self.sampled_tokens = 0  # in the step, the answers that were replaced included

    def sample(self, step: int, seed: int) -> list[Rollout]:
        """The student's answers at weights of version `step`, and the given answers of streams that bring their own."""
        prompts = ranks.share(self.prompts.draw(step))
        drawn = [prompt for prompt in prompts if not self._is_given(prompt)]
        rollouts = self._draw(drawn, seed) if drawn else []
        self.sampled_tokens = sum(len(rollout.token_ids) for rollout in rollouts)
        return rollouts + [self._given(prompt, step) for prompt in prompts if self._is_given(prompt)]

    def _draw(self, prompts: Sequence[Prompt], seed: int) -> list[Rollout]:
        return inside_vocabulary(self.sampler.sample(prompts, self.sampler.params, seed), self.vocab_size)

    def judge(self, rollouts: Sequence[Rollout]) -> list[Reward]:
        """One verdict per rollout; a given answer has none."""
        sampled = [rollout for rollout in rollouts if rollout.finish != "given"]
        verdicts = iter(self.rewards.score(sampled))
        self.metrics = self.rewards.metrics()
        return [Reward(None) if rollout.finish == "given" else next(verdicts) for rollout in rollouts]

    def refill(
        self, step: int, seed: int, rollouts: Sequence[Rollout], rewards: Sequence[Reward]
    ) -> tuple[list[Rollout], list[Reward]]:
        """Replaces groups whose rewards do not differ by fresh prompts, `refill_rounds` times at most.

        DAPO's dynamic sampling (2503.14476). What is still without a difference after the last round stays. Streams say
        by `refill_rounds` whether they want it; extra prompts follow from seed and step, like all others.
        """
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
            self.metrics = {name: mean + self.metrics[name] for name, mean in self.rewards.metrics().items()}
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

    def _is_given(self, prompt: Prompt) -> bool:
        return self.prompts.streams[prompt.stream].answers == "given"

    def _given(self, prompt: Prompt, version: int) -> Rollout:
        text = str(prompt.example.answer)
        end = [] if self.tokenizer.eos_token_id is None else [self.tokenizer.eos_token_id]
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"] + end
        ids = ids[: self.sampler.params.max_tokens]
        return Rollout(prompt, 0, ids, [nan] * len(ids), text, "given", version)


def inside_vocabulary(rollouts: Sequence[Rollout], vocab_size: int) -> list[Rollout]:
    """Answers cut before the first id that student and teachers do not share, and then counted as aborted.

    A student's head may be padded beyond a teacher's; such an id has no embedding there.
    """
    return [
        rollout if max(rollout.token_ids, default=0) < vocab_size else _cut(rollout, vocab_size) for rollout in rollouts
    ]


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
