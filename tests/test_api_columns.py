"""Hints and critiques by an API as columns: who is asked how often, who reads them, and what comes of a refusal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from opd.answers import Answers
from opd.api_columns import ApiColumn
from opd.api_plan import expected
from opd.prompts import DataConfig, Prompts, Stream
from opd.records import Example, Prompt, Rollout
from opd.rewards import RewardStage
from tests.chat_server import api, chat_server, completion
from tests.composing import prepare, tiny_parts
from tests.faults.test_api_faults import pair as pair
from tests.runs import Pair, opd, training_lines
from tests.test_answers import Digits, Scripted
from tests.tiny import tokenizer

TOKENIZER = tokenizer()


def drawn(column: ApiColumn, *streams: Stream, told: int) -> Sequence[Rollout]:
    """What a step samples, `told` answers of it with the column `hint`."""
    named = {f"s{number}": stream for number, stream in enumerate(streams)}
    prompts = Prompts(DataConfig(Digits(), streams=named, columns={"hint": column}), TOKENIZER, seed=0)
    stage = Answers(prompts, Scripted(), RewardStage([]), TOKENIZER)
    column.start()
    rollouts = stage.sample(0, seed=1)
    stage.judge(rollouts)
    assert stage.metrics["answers/hint/usable"].count == told
    column.close()
    return rollouts


def test_a_hint_is_asked_for_once_per_prompt_and_every_sample_has_it(tmp_path: Path) -> None:
    """Ten prompts with three samples each: ten requests."""
    with chat_server(lambda body, number: completion(f"think of {body['messages'][-1]['content']}")) as server:
        column = ApiColumn("m", "{{ prompt }}", api(server.url, tmp_path))
        rollouts = drawn(column, Stream(10, samples=3), told=30)
        assert len(server.bodies) == 10
    assert [rollout.prompt.example.columns for rollout in rollouts] == [
        {"hint": f"think of {rollout.prompt.text}"} for rollout in rollouts
    ]
    assert len({rollout.group for rollout in rollouts}) == 10


def test_a_critique_is_of_every_answer(tmp_path: Path) -> None:
    """The scripted sampler's answers to a prompt are "0", "1", "2": 4 prompts x 3 requests."""
    with chat_server(lambda body, number: completion(f"no: {body['messages'][-1]['content']}")) as server:
        column = ApiColumn("m", "{{ prompt }} {{ answer }}", api(server.url, tmp_path))
        rollouts = drawn(column, Stream(4, samples=3), told=12)
        assert len(server.bodies) == 12
    for rollout in rollouts:
        assert rollout.prompt.example.columns["hint"] == f"no: {rollout.prompt.text} {rollout.text}"


def test_without_a_usable_text_the_column_does_not_exist(tmp_path: Path) -> None:
    """Also where the data brought one of that name: an old hint is not this one."""
    odd = {"1", "3", "5", "7", "9"}

    def script(body: dict[str, Any], number: int) -> dict[str, Any]:
        return completion("I can't help.") if body["messages"][-1]["content"] in odd else completion("h")

    with chat_server(script) as server:
        column = ApiColumn("m", "{{ prompt }}", api(server.url, tmp_path))
        for rollout in drawn(column, Stream(10), told=10):
            assert rollout.prompt.example.columns == ({} if rollout.prompt.text in odd else {"hint": "h"})
        assert column.fill([]) == []


def test_only_the_named_streams_get_it(tmp_path: Path) -> None:
    with chat_server(lambda body, number: completion("h")) as server:
        column = ApiColumn("m", "{{ prompt }}", api(server.url, tmp_path), streams=["s1"])
        rollouts = drawn(column, Stream(3), Stream(2), Stream(2, answers="given"), told=2)
        assert len(server.bodies) == 2
    told = {"s0": {}, "s1": {"hint": "h"}, "s2": {}}
    assert all(rollout.prompt.example.columns == told[rollout.prompt.stream] for rollout in rollouts)


def test_a_template_that_reads_what_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no 'anwser'"):
        ApiColumn("m", "{{ anwser }}", api("http://x", tmp_path))


def test_a_row_that_lacks_what_the_template_uses_is_not_asked_about(tmp_path: Path) -> None:
    """Digits have no topic; of ten only those above 4 are asked for it."""
    with chat_server(lambda body, number: completion("h")) as server:
        column = ApiColumn("m", "{% if prompt | int < 5 %}{{ columns.topic }}{% endif %}x", api(server.url, tmp_path))
        for rollout in drawn(column, Stream(10), told=5):
            columns = rollout.prompt.example.columns
            assert columns == ({} if int(rollout.prompt.text) < 5 else {"hint": "h"})


def test_a_template_that_fails_names_its_column(tmp_path: Path) -> None:
    column = ApiColumn("m", "{{ 1 // 0 }}", api("http://x", tmp_path))
    with pytest.raises(ValueError, match=r"^data\.columns\.hint\.template: fails for the prompt '\d'"):
        drawn(column, Stream(3), told=0)


def test_the_plan_counts_hints_once_and_critiques_per_answer(tmp_path: Path) -> None:
    """2 steps x 4 prompts x 2 samples = 16 answers to at most 6 examples."""
    parts = [*tiny_parts(tmp_path), "+loss@loss.ce=cross_entropy", "data.streams.main.samples=2",
             "+column@data.columns.hint=api", "data.columns.hint.model=m"]  # fmt: skip
    for template, requests in (("{{ prompt }}", 6), ("{{ answer }}", 16)):
        run = prepare(*parts, f"data.columns.hint.template='{template}'")
        (found,) = expected(run.config, run.prompts)
        assert (found.key, found.requests) == ("data.columns.hint", requests)


def test_a_self_teacher_sees_the_hint_of_an_api(pair: Pair, tmp_path: Path) -> None:
    """Whole runs: with the hint the teacher's view differs, so the divergence of the same weights is not 0, and without
    a usable hint no row has a score. Three steps of 6 prompts, so at most 18 requests.
    """
    hinted = [
        "~teacher.main", "+teacher@teacher.me=self", "loss.distill.teacher=me", "+column@data.columns.hint=api",
        "teacher.me.template='{{ columns.hint }} {{ prompt }}'", "data.columns.hint.model=m",
        "data.columns.hint.template='{{ prompt }}'", "steps=3", "eval=none", "eval.problems=0",
    ]  # fmt: skip
    with chat_server(lambda body, number: completion("12345")) as server:
        url = f"data.columns.hint.api.remote.urls=[{server.url}]"
        ended = opd(*pair.train(tmp_path / "hint", *hinted, url))
        assert ended.code == 0, ended.err
        assert 0 < len(server.bodies) <= 18
    first = training_lines(tmp_path / "hint")[0]
    assert first["loss/distill"] > 0 and first["teacher/me/scored"] == 1.0
    with chat_server(lambda body, number: completion("")) as server:
        ended = opd(*pair.train(tmp_path / "none", *hinted, f"data.columns.hint.api.remote.urls=[{server.url}]"))
        assert ended.code == 0, ended.err
    assert [line["teacher/me/scored"] for line in training_lines(tmp_path / "none")] == [0.0] * 3
    assert [line["update/skipped"] for line in training_lines(tmp_path / "none")] == [1.0] * 3


def test_a_prompt_is_otherwise_as_it_was(tmp_path: Path) -> None:
    """Messages, answer and other columns are kept."""
    example = Example([{"role": "user", "content": "q"}], "a", "s", {"topic": "t", "hint": "old"})
    rollout = Rollout(Prompt("0", "main", [3], example), 0, [4], [0.0], "x", "stop", 0)
    from opd.answers import _with_column

    told = _with_column(rollout, "hint", "new").prompt.example
    assert told == Example(example.prompt, "a", "s", {"topic": "t", "hint": "new"})
    assert _with_column(rollout, "hint", None).prompt.example.columns == {"topic": "t"}
