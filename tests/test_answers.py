"""A step's answers: sampled, given by the data, refilled where a group teaches nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isnan

import pytest

from opd.answers import Answers, inside_vocabulary
from opd.metrics import rollout_metrics
from opd.prompts import DataConfig, Prompts, Stream
from opd.records import Example, Prompt, Rollout
from opd.rewards import RewardStage, RewardTerm
from opd.students import SamplingParams
from opd.verifiers import Overlong
from tests.tiny import tokenizer

TOKENIZER = tokenizer()


@dataclass(frozen=True)
class Digits:
    """Prompts "0" to "9", each its own answer."""

    def load(self) -> list[Example]:
        """The examples."""
        return [Example(str(n), str(n)) for n in range(10)]


@dataclass
class Scripted:
    """A sampler whose answer is the sample's number; it remembers what it was asked."""

    params: SamplingParams = field(default_factory=lambda: SamplingParams(max_tokens=3))
    asked: list[list[str]] = field(default_factory=list)

    def sample(self, prompts: Sequence[Prompt], params: SamplingParams, seed: int) -> list[Rollout]:
        """`prompt.samples` answers each."""
        self.asked.append([prompt.text for prompt in prompts])
        return [
            Rollout(prompt, index, [4, 1], [-0.5, -0.5], str(index), "stop", 7)
            for prompt in prompts
            for index in range(prompt.samples)
        ]


def even_digits_teach(rollouts: Sequence[Rollout]) -> list[float | None]:
    """Groups of an even digit have differing rewards, groups of an odd one do not."""
    return [float(r.sample_index == 0 and int(r.prompt.text) % 2 == 0) for r in rollouts]


even_digits_teach.in_process = True  # no worker for a test


def answers(*streams: Stream) -> tuple[Answers, Scripted]:
    named = {f"s{number}": stream for number, stream in enumerate(streams)}
    prompts = Prompts(DataConfig(Digits(), streams=named), TOKENIZER, seed=0)
    sampler = Scripted()
    return Answers(prompts, sampler, RewardStage([RewardTerm("even", even_digits_teach)]), TOKENIZER), sampler


def test_given_answers_are_the_examples_own_and_end_once() -> None:
    stage, sampler = answers(Stream(4, answers="given"), Stream(2, samples=3))
    rollouts = stage.sample(0, seed=1)
    given = [rollout for rollout in rollouts if rollout.finish == "given"]
    assert len(given) == 4
    assert len(rollouts) == 10
    assert len(sampler.asked[0]) == 2  # the sampler never sees the others
    for rollout in given:
        assert rollout.token_ids == [*TOKENIZER(rollout.prompt.text)["input_ids"], TOKENIZER.eos_token_id]
        assert all(isnan(logp) for logp in rollout.logp)  # nobody sampled them
    verdicts = stage.judge(rollouts)
    assert [v.value for r, v in zip(rollouts, verdicts, strict=True) if r.finish == "given"] == [None] * 4
    assert rollout_metrics(rollouts)["rollout/length"].count == 6


def test_groups_without_a_difference_are_replaced() -> None:
    """All ten digits: five odd groups are idle; each round draws as many fresh prompts and keeps those that teach."""
    stage, sampler = answers(Stream(10, samples=2, refill_rounds=20))
    rollouts = stage.sample(0, seed=1)
    refilled, rewards = stage.refill(0, 1, rollouts, stage.judge(rollouts))
    groups = {rollout.group: int(rollout.prompt.text) for rollout in refilled}
    assert len(groups) == 10
    assert len(refilled) == len(rewards) == 20
    assert all(digit % 2 == 0 for digit in groups.values())
    assert len(sampler.asked) > 2
    assert stage.metrics["reward/mean"].count == 2 * sum(map(len, sampler.asked))  # every judged answer is counted


def test_rounds_are_limited_and_what_is_left_stays() -> None:
    stage, sampler = answers(Stream(10, samples=2, refill_rounds=1))
    rollouts = stage.sample(0, seed=1)
    refilled, _ = stage.refill(0, 1, rollouts, stage.judge(rollouts))
    assert len(sampler.asked) == 2
    assert len(refilled) == 20
    assert any(int(rollout.prompt.text) % 2 for rollout in refilled)


def test_without_rounds_nothing_is_drawn() -> None:
    stage, sampler = answers(Stream(10, samples=2))
    rollouts = stage.sample(0, seed=1)
    refilled, _ = stage.refill(0, 1, rollouts, stage.judge(rollouts))
    assert refilled == rollouts
    assert len(sampler.asked) == 1


def test_refilling_follows_from_seed_and_step() -> None:
    first, again, other = (answers(Stream(10, samples=2, refill_rounds=3))[0] for _ in range(3))
    runs = []
    for stage, step in ((first, 4), (again, 4), (other, 5)):
        rollouts = stage.sample(step, seed=step)
        runs.append([r.prompt.text for r in stage.refill(step, step, rollouts, stage.judge(rollouts))[0]])
    assert runs[0] == runs[1] != runs[2]


def test_over_long_answers_lose_step_by_step() -> None:
    """limit 20, margin 8: 12 tokens free, 16 cost a half, 20 and more one."""
    prompt = Prompt("0", "main", [3], Example("x"))
    rollouts = [Rollout(prompt, 0, [4] * n, [0.0] * n, "", "length", 0) for n in (0, 12, 16, 20, 30)]
    assert Overlong(20, 8)(rollouts) == [0.0, 0.0, -0.5, -1.0, -1.0]
    with pytest.raises(ValueError, match="margin"):
        Overlong(8, 8)


def test_given_streams_have_one_answer_and_an_answer_each() -> None:
    with pytest.raises(ValueError, match="answers=given"):
        Stream(4, samples=2, answers="given")

    @dataclass(frozen=True)
    class Unanswered:
        def load(self) -> list[Example]:
            return [Example("x")]

    with pytest.raises(ValueError, match=r"data\.streams\.main\.answers=given"):
        Prompts(DataConfig(Unanswered(), streams={"main": Stream(1, answers="given")}), TOKENIZER, 0)


def test_every_stream_refills_its_own_groups() -> None:
    """Only prompts of stream 1 can teach: stream 0 keeps its groups, and all drawn tokens are counted."""

    @dataclass(frozen=True)
    class Odd:
        def load(self) -> list[Example]:
            return [Example(str(n), str(n)) for n in (1, 3, 5, 7)]

    dull = Stream(4, samples=2, refill_rounds=2, source=Odd())
    stage, sampler = answers(dull, Stream(10, samples=2, refill_rounds=2))
    rollouts = stage.sample(0, seed=1)
    refilled, _ = stage.refill(0, 1, rollouts, stage.judge(rollouts))
    assert sum(rollout.prompt.stream == "s0" for rollout in refilled) == 8
    assert sum(rollout.prompt.stream == "s1" for rollout in refilled) == 20
    assert stage.sampled_tokens == 2 * 2 * sum(map(len, sampler.asked))


def test_an_answer_ends_before_an_id_that_the_teacher_lacks() -> None:
    prompt = Prompt("0", "main", [3], Example("x"))
    whole = Rollout(prompt, 0, [4, 5], [-1.0, -1.0], "ab", "stop", 0)
    foreign = Rollout(prompt, 1, [4, 54, 5], [-1.0, -2.0, -3.0], "a?b", "length", 0)
    kept, cut = inside_vocabulary([whole, foreign], vocab_size=48)
    assert kept is whole
    assert (cut.token_ids, cut.logp, cut.finish) == ([4], [-1.0], "aborted")
