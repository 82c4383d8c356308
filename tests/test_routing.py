"""Several teachers, chosen per row by the prompt's source."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from opd.losses import Need, ReverseKL
from opd.prompts import Stream
from opd.records import Example, Prompt, Reward, Rollout, SomeTokens, TeacherScores
from opd.scoring import TeacherStage
from opd.terms import Term, terms_on
from tests.composing import prepare, refusal, tiny_opd, write_jsonl
from tests.runs import opd as command
from tests.runs import training_lines
from tests.tiny import tokenizer

SUMS = [{"prompt": f"{n}+{n}=", "answer": str(2 * n), "source": "even" if n % 2 == 0 else "odd"} for n in range(8)]
SECOND = ["+teacher@teacher.other=local", "+loss@loss.other=forward_kl", "loss.other.teacher=other"]
ROUTED = [*SECOND, "loss.distill.sources=[even]", "loss.other.sources=[odd]"]


class Notes:
    """A teacher that remembers which prompts it was asked about."""

    provides: ClassVar[frozenset[Need]] = frozenset({"sampled"})

    def __init__(self) -> None:
        self.asked: list[str] = []

    def tokenizer(self) -> object:
        return tokenizer()

    def start(self) -> None: ...

    def score(self, rollouts: Sequence[Rollout]) -> list[TeacherScores | None]:
        self.asked += [rollout.prompt.id for rollout in rollouts]
        return [SomeTokens(torch.zeros(len(rollout.token_ids))) for rollout in rollouts]

    def close(self) -> None: ...


def asked_of(stream: str, source: str, number: int) -> Rollout:
    prompt = Prompt(str(number), stream, [3], Example("p", source=source))
    return Rollout(prompt, 0, [4, 5], [0.0, 0.0], "", "stop", 0)


STREAMS = {"a": Stream(1), "b": Stream(1, terms=["code"])}
TERMS = [
    Term("maths", ReverseKL(), teacher="m", sources=["algebra", "geometry"]),
    Term("code", ReverseKL(), teacher="c", sources=["python"]),
    Term("all", ReverseKL(), teacher="m", reference="r", sources=None),
]


@pytest.mark.parametrize(
    ("stream", "source", "names"),
    [("a", "algebra", ["maths", "all"]), ("a", "python", ["code", "all"]), ("a", "prose", ["all"]),
     ("b", "python", ["code"]), ("b", "algebra", [])],
)  # fmt: skip
def test_a_term_takes_the_rows_of_its_streams_and_sources(stream: str, source: str, names: list[str]) -> None:
    assert [term.name for term in terms_on(asked_of(stream, source, 0).prompt, TERMS, STREAMS)] == names


def test_a_teacher_scores_only_the_rows_of_its_terms() -> None:
    """Of four rows `c` scores the two of source python; evaluation, which knows no streams, goes by source alone."""
    teachers = {"m": Notes(), "c": Notes(), "r": Notes()}
    stage = TeacherStage(teachers, TERMS[:2], STREAMS)
    kinds = [("a", "algebra"), ("a", "python"), ("b", "python"), ("b", "geometry")]
    rows = [asked_of(stream, source, number) for number, (stream, source) in enumerate(kinds)]
    scores = stage.score(rows, [Reward(None)] * 4)
    assert {name: [score is not None for score in given] for name, given in scores.items()} == {
        "m": [True, False, False, False], "c": [False, True, True, False],
    }  # fmt: skip
    assert (teachers["m"].asked, teachers["c"].asked, teachers["r"].asked) == (["0"], ["1", "2"], [])
    everywhere = stage.score_all(rows, [Reward(None)] * 4)
    assert [score is not None for score in everywhere["m"]] == [True, False, False, True]


@pytest.fixture(scope="module")
def opd(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A tiny distillation on prompts of two sources."""
    folder = tmp_path_factory.mktemp("opd")
    overrides = tiny_opd(folder)
    write_jsonl(folder / "sources.jsonl", SUMS)
    model = next(o.partition("=")[2] for o in overrides if o.startswith("teacher.main.model="))
    return [*overrides, f"data.train.path={folder / 'sources.jsonl'}", f"+teacher.other.model={model}"]


def second(opd: list[str]) -> list[str]:
    """`+teacher.other.model` after the group that makes the teacher."""
    return [o.lstrip("+") if o.startswith("+teacher.other") else o for o in sorted(opd, key=lambda o: "other" in o)]


def test_rows_that_no_term_takes_are_refused(opd: list[str]) -> None:
    message = refusal(*SECOND, *second(opd), "loss.distill.sources=[even]", "loss.other.sources=[even]")
    assert message.startswith("data.streams.main: examples of source 'odd' match no loss term; add the source to")


def test_a_source_that_no_prompt_has_is_refused(opd: list[str]) -> None:
    message = refusal(*SECOND, *second(opd), "loss.distill.sources=[even,evne]", "loss.other.sources=null")
    assert message.startswith("loss.distill.sources: no example of its streams has the source 'evne' (there are: even,")


def test_a_routed_run_trains_each_row_under_its_own_teacher(opd: list[str], tmp_path: Path) -> None:
    """Two teachers, each with metrics of its own; of eight prompts four are of each source."""
    assert prepare(*ROUTED, *second(opd))
    ended = command(
        "train", *ROUTED, *second(opd), "steps=2", "data.streams.main.prompts=8", "engine.resident_heads=1",
        "logger=none", "eval.problems=0", f"run_dir={tmp_path / 'run'}",
    )  # fmt: skip
    assert ended.code == 0, ended.err
    for line in training_lines(tmp_path / "run"):
        assert line["loss/distill"] > 0 and line["loss/other"] > 0
        assert line["teacher/main/kl"] > 0 and line["teacher/other/kl"] > 0


@pytest.mark.parametrize("keep", ["host", "disk"])
def test_teachers_loaded_in_turn_give_the_same_run(opd: list[str], tmp_path: Path, keep: str) -> None:
    """Losses of two steps, bit for bit; with `disk` no teacher's weights are left between scorings."""
    lines = {}
    for where in ("device", keep):
        few = ["steps=2", "logger=none", "eval.problems=0", f"run_dir={tmp_path / where}"]
        kept = [f"teacher.{name}.keep={where}" for name in ("main", "other")]
        ended = command("train", *ROUTED, *second(opd), *kept, *few, "engine.resident_heads=1")
        assert ended.code == 0, ended.err
        lines[where] = [(line["loss/distill"], line["loss/other"]) for line in training_lines(tmp_path / where)]
    assert lines[keep] == lines["device"] != []
