"""Verdicts of a language model as a reward: what it is asked, how strictly it is read, and what its faults come to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from opd.api_plan import expected
from opd.credit import GDPO
from opd.judges import Judge
from opd.records import Example, Prompt, Rollout
from opd.remote import RemoteError
from opd.rewards import RewardStage, RewardTerm
from opd.templates import TemplateFault
from tests.chat_server import Fault, api, chat_server, completion
from tests.composing import prepare, refusal, tiny_opd, write_jsonl
from tests.faults.test_api_faults import pair as pair
from tests.runs import Pair, opd, training_lines

TEMPLATE = "{{ prompt }}|{{ answer }}|{{ reference }}|{{ columns.topic }}"


def rollout(text: str, stream: str = "main", index: int = 0, prompt: str = "p") -> Rollout:
    example = Example(prompt, "gold", columns={"topic": "sums"})
    return Rollout(Prompt(prompt, stream, [3], example, 2), index, [4], [-1.0], text, "stop", 0)


def with_columns(columns: dict[str, Any]) -> Rollout:
    return Rollout(Prompt("0", "main", [3], Example("p", "gold", columns=columns)), 0, [4], [-1.0], "a", "stop", 0)


def judge(url: str, folder: Path, **settings: Any) -> Judge:
    return Judge("j", **{"template": TEMPLATE, "api": api(url, folder), **settings})


def test_the_judge_sees_prompt_answer_reference_and_columns(tmp_path: Path) -> None:
    """Scores 7 and 2.5 on a scale of 0 to 10; what the student writes is never taken for a template."""
    scores = {"a": "well <score>7</score>", "{{ reference }}<b>": "<score> 2.5 </score>"}
    with chat_server(lambda body, number: completion(scores[body["messages"][-1]["content"].split("|")[1]])) as server:
        part = judge(server.url, tmp_path, system="be strict")
        stage = RewardStage([RewardTerm("judge", part)])
        stage.start()
        rewards = stage.score([rollout("a"), rollout("{{ reference }}<b>")])
        assert [reward.value for reward in rewards] == [0.7, 0.25]
        assert stage.metrics()["reward/judge/unread"].value == 0.0
        stage.close()
    assert sorted(server.texts) == ["p|a|gold|sums", "p|{{ reference }}<b>|gold|sums"]
    assert server.bodies[0]["messages"][0] == {"role": "system", "content": "be strict"}


@pytest.mark.parametrize(
    ("text", "form", "value"),
    [
        ("<score>7</score>", "tag", 0.7),
        ("I thought of 9.\n<score>\n7\n</score> Done.", "tag", 0.7),
        ("<score>7.25</score>", "tag", 0.725),
        ("<score>10</score>", "tag", 1.0),
        ("<score>0</score>", "tag", 0.0),
        ("7", "tag", None),
        ("<score>7/10</score>", "tag", None),
        ("<score>seven</score>", "tag", None),
        ("<score>70%</score>", "tag", None),
        ("<score>nan</score>", "tag", None),
        ("<score>1e1</score>", "tag", None),
        ("<score>\u0667</score>", "tag", None),
        ("<score>11</score>", "tag", None),
        ("<score>-1</score>", "tag", None),
        ("<score>3</score> or rather <score>9</score>", "tag", None),
        ("<score></score>", "tag", None),
        ("<score>7", "tag", None),
        ('{"score": 7, "why": "good"}', "json", 0.7),
        ('```json\n{"score": 7}\n```', "json", 0.7),
        ('{"score": 7.5}', "json", 0.75),
        ('Sure: {"score": 7}', "json", None),
        ('{"score": "7"}', "json", None),
        ('{"score": true}', "json", None),
        ('{"score": NaN}', "json", None),
        ('{"score": [7]}', "json", None),
        ('{"points": 7}', "json", None),
        ("[7]", "json", None),
        ("7", "json", None),
        ('{"score": 7', "json", None),
    ],
)
def test_a_score_is_read_only_where_it_stands_as_agreed(
    text: str, form: Any, value: float | None, tmp_path: Path
) -> None:
    assert judge("http://x", tmp_path, form=form).read(text) == value


def test_a_judge_may_answer_the_task_itself_and_compare(tmp_path: Path) -> None:
    """Two samples of each prompt cost one request a prompt: the student's answer is no part of the question."""
    with chat_server(lambda body, number: completion(f"{body['messages'][-1]['content']}! ")) as server:
        stage = RewardStage([RewardTerm("judge", judge(server.url, tmp_path, form="same", template="{{ prompt }}"))])
        stage.start()
        rollouts = [rollout(text, prompt=prompt) for prompt in "pq" for text in ("p!", " q!")]
        assert [reward.value for reward in stage.score(rollouts)] == [1.0, 0.0, 0.0, 1.0]
        stage.close()
    assert sorted(server.texts) == ["p", "q"]


def test_a_scale_of_its_own(tmp_path: Path) -> None:
    """-1 on a scale from -2 to 2 is (-1 + 2) / 4 = 0.25."""
    assert judge("http://x", tmp_path, low=-2.0, high=2.0).read("<score>-1</score>") == 0.25


def test_verdicts_that_cannot_be_used_are_none_and_counted(tmp_path: Path) -> None:
    """Of five: one refused, one empty, one cut, one unread, one good; 1 of the 2 usable ones cannot be read."""
    answers = {
        "a": completion("I can't judge this."),
        "b": completion(""),
        "c": completion("<score>3</score> becau", "length"),
        "d": completion("a strong answer"),
        "e": completion("<score>5</score>"),
    }
    with chat_server(lambda body, number: answers[body["messages"][-1]["content"].split("|")[1]]) as server:
        stage = RewardStage([RewardTerm("judge", judge(server.url, tmp_path))])
        stage.start()
        assert [reward.value for reward in stage.score([rollout(c) for c in "abcde"])] == [None, None, None, None, 0.5]
        metrics = {name: mean.value for name, mean in stage.metrics().items()}
        stage.close()
    assert metrics["reward/missing"] == 0.8
    assert {kind: metrics[f"reward/judge/{kind}"] for kind in ("refused", "empty", "cut", "usable", "unread")} == {
        "refused": 0.2, "empty": 0.2, "cut": 0.2, "usable": 0.4, "unread": 0.5,
    }  # fmt: skip


def test_several_parts_of_one_verdict_cost_one_request_and_are_normalised_apart(tmp_path: Path) -> None:
    """Two answers: correct 1 and 0, style 0.2 and 0.4. Each part is normalised by itself, to +1/-1 and -1/+1 (times
    nearly 1, for epsilon), so that the sum is nearly 0 for both, where the sum of raw values would prefer the first.
    """
    texts = {"a": "<correct>10</correct><style>2</style>", "b": "<correct>0</correct><style>4</style>"}
    with chat_server(lambda body, number: completion(texts[body["messages"][-1]["content"].split("|")[1]])) as server:
        terms = [RewardTerm(name, judge(server.url, tmp_path, part=name)) for name in ("correct", "style")]
        stage = RewardStage(terms)
        stage.start()
        rollouts = [rollout("a", index=0), rollout("b", index=1)]
        rewards = stage.score(rollouts)
        stage.close()
    assert len(server.bodies) == 2
    assert [dict(reward.parts) for reward in rewards] == [
        {"correct": 1.0, "style": 0.2},
        {"correct": 0.0, "style": 0.4},
    ]
    advantages = [credit.advantage for credit in GDPO(whiten=False).assign(rollouts, rewards)]
    assert advantages == pytest.approx([0.0, 0.0], abs=2e-3)


def test_only_the_named_streams_are_judged(tmp_path: Path) -> None:
    with chat_server(lambda body, number: completion("<score>5</score>")) as server:
        stage = RewardStage([RewardTerm("judge", judge(server.url, tmp_path, streams=["graded"]))])
        stage.start()
        judged = stage.score([rollout("a"), rollout("b", "graded"), rollout("c", "heldout")])
        stage.close()
    assert [reward.value for reward in judged] == [None, 0.5, None]
    assert len(server.bodies) == 1


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_a_judge_that_is_gone_ends_the_run_whatever_the_policy(on_error: Any, tmp_path: Path) -> None:
    with chat_server(lambda body, number: Fault(503)) as server:
        gone = judge(server.url, tmp_path, api=api(server.url, tmp_path, remote={"give_up_after": 0.5}))
        stage = RewardStage([RewardTerm("judge", gone)], on_error=on_error)
        stage.start()
        with pytest.raises(RemoteError, match=r"judge \(j\): no usable answer"):
            stage.score([rollout("a")])
        stage.close()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"template": "{{ anwser }}"}, "template: there is no 'anwser'; it may use answer, columns, prompt, reference"),
        ({"template": "{% if %}"}, "template: no valid Jinja"),
        ({"low": 1.0, "high": 1.0}, "low must be below high"),
        ({"part": "a b"}, "part="),
    ],
)
def test_a_judge_that_makes_no_sense(settings: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=says):
        judge("http://x", tmp_path, **settings)


@pytest.mark.parametrize(
    "template", ["{{ answer.__class__.__mro__ }}", "{{ columns.__class__ }}", "{{ columns.update({'a': 1}) }}"]
)
def test_a_template_can_do_no_harm(template: str, tmp_path: Path) -> None:
    part = judge("http://x", tmp_path, template=template)
    with pytest.raises(TemplateFault, match="unsafe"):
        part.messages(rollout("a"))


@pytest.mark.parametrize("name", ["items", "values", "keys", "get", "copy", "update", "__class__"])
def test_a_column_may_have_any_name(name: str, tmp_path: Path) -> None:
    """Also one that Python's mappings use; without such a column the name is undefined, not a method."""
    for template in (f"{{{{ columns.{name} }}}}", f"{{{{ columns['{name}'] }}}}"):
        part = judge("http://x", tmp_path, template=template)
        assert part.messages(with_columns({name: "own"}))[-1]["content"] == "own"
    asks = judge("http://x", tmp_path, template=f"{{{{ columns.{name} is defined }}}}")
    assert asks.messages(with_columns({}))[-1]["content"] == "False"


def test_all_columns_can_be_listed(tmp_path: Path) -> None:
    part = judge("http://x", tmp_path, template="{% for k, v in columns.items() %}{{ k }}={{ v }} {% endfor %}")
    assert part.messages(with_columns({"a": 1, "b": 2, "c": None}))[-1]["content"] == "a=1 b=2 "


def test_a_row_that_lacks_what_the_template_uses_is_not_asked_about(tmp_path: Path) -> None:
    """Of three rows the second has no such column, and the third a null."""
    with chat_server(lambda body, number: completion("<score>5</score>")) as server:
        part = judge(server.url, tmp_path, template="{{ columns.rubric }}")
        stage = RewardStage([RewardTerm("judge", part)])
        stage.start()
        judged = stage.score([with_columns({"rubric": "r"}), with_columns({}), with_columns({"rubric": None})])
        metrics = stage.metrics()
        stage.close()
    assert [reward.value for reward in judged] == [0.5, None, None]
    assert server.texts == ["r"] and metrics["reward/missing"].sum == 2


def test_a_template_that_fails_ends_the_run_under_either_policy(tmp_path: Path) -> None:
    """5 // (length - 1) is sound for two characters, and fails for one."""
    part = judge("http://x", tmp_path, template="{{ 5 // (answer | length - 1) }}")
    stage = RewardStage([RewardTerm("judge", part)], on_error="skip")
    stage.start()
    with pytest.raises(ValueError, match=r"^reward\.judge\.template: fails for the prompt 'p': integer division"):
        stage.score([rollout("a")])
    stage.close()


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ columns.rubric }}", "no example of stream main has all that it uses (there is no 'rubric'): correct it"),
        ("{{ answer.lenght }}", "no example of stream main has all that it uses (there is no 'lenght'): correct it"),
        ("{{ 1//0 }}", "fails for the prompt '0+0=': integer division or modulo by zero"),
        ("{{ answer + 1 }}", "fails for the prompt '0+0=': can only concatenate str"),
    ],
)
@pytest.mark.parametrize("part", ["reward.judge", "data.columns.hint"])
def test_a_faulty_template_is_refused_before_anything_is_asked(
    template: str, says: str, part: str, tmp_path: Path
) -> None:
    added = {"reward.judge": "+reward@reward.judge=judge", "data.columns.hint": "+column@data.columns.hint=api"}
    parts = [*tiny_opd(tmp_path), added[part], f"{part}.model=j", f"{part}.template='{template}'"]
    assert refusal(*parts).startswith(f"{part}.template: {says}")


@pytest.mark.parametrize(
    "template",
    [
        "{{ answer.split('####')[1] }}",  # a matter of the answer, which is not known yet
        "{% if columns.rubric is defined %}{{ columns.rubric }}{% endif %}",
        "{{ columns.level }}",  # some examples have it
    ],
)
def test_what_only_some_rows_lack_is_no_fault(template: str, tmp_path: Path) -> None:
    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+2=", "answer": "4", "level": 3}]
    data = write_jsonl(tmp_path / "some.jsonl", rows)
    run = prepare(
        *tiny_opd(tmp_path), f"data.train.path={data}", "+reward@reward.judge=judge", "reward.judge.model=j",
        f'reward.judge.template="{template}"', "reward.judge.streams=[main]",
    )  # fmt: skip
    assert len(expected(run.config, run.prompts)) == 1


def test_a_judge_may_read_a_column_only_where_it_is_made(tmp_path: Path) -> None:
    """A column is made for the answers of training, so held-out answers have none."""
    parts = [
        *tiny_opd(tmp_path), "+column@data.columns.hint=api", "data.columns.hint.model=h",
        "+reward@reward.judge=judge", "reward.judge.model=j", "reward.judge.template='{{ columns.hint }}'",
    ]  # fmt: skip
    says = "reward.judge.template: no example of stream heldout has all that it uses (there is no 'hint')"
    assert refusal(*parts).startswith(says)
    prepare(*parts, "reward.judge.streams=[main]")


def test_the_shipped_template_shows_a_reference_where_there_is_one(tmp_path: Path) -> None:
    made = prepare(*tiny_opd(tmp_path), "+reward@reward.judge=judge", "reward.judge.model=j")
    part = made.config.reward["judge"].function
    assert isinstance(part, Judge)
    assert "A CORRECT ANSWER\ngold\n" in part.messages(rollout("a"))[-1]["content"]
    without = Rollout(Prompt("0", "main", [3], Example("p")), 0, [4], [-1.0], "a", "stop", 0)
    assert "CORRECT ANSWER" not in part.messages(without)[-1]["content"]


def test_a_stream_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    parts = [*tiny_opd(tmp_path), "+reward@reward.judge=judge", "reward.judge.model=j", "reward.judge.streams=[mian]"]
    assert refusal(*parts) == "reward.judge.streams: no stream 'mian'; did you mean main?"


# -------------------------------------------------------------------------------------------------------- a whole run


def test_a_teacher_s_divergence_and_a_judge_s_reward_in_one_update(pair: Pair, tmp_path: Path) -> None:
    """Three steps of 2 prompts x 3 answers: both terms train, and the judge is asked at most once per answer."""

    def script(body: dict[str, Any], number: int) -> dict[str, Any]:
        answer = body["messages"][-1]["content"].rpartition("ANSWER:")[2]
        return completion(f"<score>{sum(c.isdigit() for c in answer)}</score>")

    with chat_server(script) as server:
        ended = opd(
            *pair.train(tmp_path, "steps=3", "eval=none", "~reward.correct", "+loss@loss.grpo=grpo", "credit=grpo"),
            "data.streams.main.prompts=2", "data.streams.main.samples=3", "+reward@reward.judge=judge",
            "reward.judge.model=j", f"reward.judge.api.remote.urls=[{server.url}]",
            "reward.judge.template='{{ prompt }} ANSWER:{{ answer }}'", "reward.judge.streams=[main]",
        )  # fmt: skip
        assert ended.code == 0, ended.err
        asked = len(server.bodies)
    lines = training_lines(tmp_path)
    assert 0 < asked <= 18 and lines[-1]["cost/requests"] == asked
    assert all(line["loss/distill"] > 0 and "loss/grpo" in line for line in lines)
    assert [line["reward/missing"] for line in lines] == [0, 0, 0]
    assert any(line["reward/informative_groups"] > 0 for line in lines)


def test_the_experiment_holds_both(tmp_path: Path) -> None:
    run = prepare("experiment=quickstart_judge", "data.train.size=16", "data.heldout.size=16", f"run_dir={tmp_path}")
    distill, grpo = run.terms
    assert (distill.teacher, grpo.needs_advantage) == ("main", True)
    assert [(term.name, term.weight) for term in run.rewards.terms] == [("correct", 0.0), ("agrees", 1.0)]
