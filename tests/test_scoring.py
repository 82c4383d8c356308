"""The teachers' stage: heads fetched when they are needed, and dropped when too many would stay."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
import torch

from opd.heads import Head
from opd.losses import Need, SampledKL
from opd.prompts import Stream
from opd.records import Example, Mean, Prompt, Reward, Rollout, SomeTokens
from opd.scoring import Heads, TeacherStage
from opd.terms import Term


class Loads:
    """A teacher that reads its head anew each time, and knows how many of all of them are alive."""

    alive: ClassVar[weakref.WeakSet[torch.Tensor]] = weakref.WeakSet()
    most: ClassVar[int] = 0

    def __init__(self, number: int) -> None:
        self.number, self.loads = number, 0

    def head(self) -> Head:
        gc.collect()
        self.loads += 1
        weight = torch.full((5, 2), float(self.number))
        Loads.alive.add(weight)
        Loads.most = max(Loads.most, len(Loads.alive))
        return Head(weight)


@pytest.mark.parametrize(
    ("resident", "loads", "most"),
    [(None, [1, 1, 1], 3), (3, [1, 1, 1], 3), (2, [2, 1, 1], 2), (1, [2, 1, 2], 1)],
)
def test_at_most_so_many_heads_stay(resident: int | None, loads: list[int], most: int) -> None:
    """Asked for in the order 0 2 2 1 2 0. With room for two, 1 drives out 0 (2 was asked for later) and 0 then 1."""
    Loads.most = 0
    Loads.alive.clear()
    teachers: dict[str, Any] = {str(number): Loads(number) for number in range(3)}
    heads = Heads(teachers, vocab_size=4, resident=resident)
    for name in "022120":
        head = heads[name]
        assert head.weight[0, 0] == float(name) and head.vocab_size == 4
        del head
    assert (list(heads), len(heads)) == (["0", "1", "2"], 3)
    assert ([teacher.loads for teacher in teachers.values()], Loads.most) == (loads, most)


class Scripted:
    """A teacher with the given answers."""

    provides: ClassVar[frozenset[Need]] = frozenset({"sampled"})

    def __init__(self, answers: list[SomeTokens | None]) -> None:
        self.answers = answers

    def tokenizer(self) -> object:
        return None

    def start(self) -> None: ...

    def score(self, rollouts: Sequence[Rollout]) -> list[SomeTokens | None]:
        return self.answers

    def close(self) -> None: ...


def test_tokens_without_a_score_are_counted() -> None:
    """Answers of 4, 3 and 2 tokens: the first scored but for one token, the second not at all, the third whole."""
    lengths = (4, 3, 2)
    prompt = Prompt("p", "main", [3], Example("p"))
    rollouts = [Rollout(prompt, 0, [5] * n, [0.0] * n, "", "stop", 0) for n in lengths]
    partly = SomeTokens(torch.zeros(4), present=torch.tensor([True, False, True, True]))
    teachers: dict[str, Any] = {"main": Scripted([partly, None, SomeTokens(torch.zeros(2))])}
    stage = TeacherStage(teachers, [Term("kl", SampledKL(), teacher="main")], {"main": Stream(1)})
    stage.score(rollouts, [Reward(None)] * 3)
    assert stage.metrics == {"teacher/main/missing": Mean(4.0, 9.0)}
