"""Teachers that answer in text: imitated by a stream, refused by what needs scores, and announced with their price."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isnan
from pathlib import Path
from typing import Any, ClassVar

import pytest
from rich.console import Console

from opd.answers import Answers
from opd.api_plan import Expected, expected
from opd.ledger import input_bound
from opd.plan import plan_table
from opd.prompts import DataConfig, Prompts, Stream
from opd.records import Example, Message, Prompt, Rollout, TeacherScores
from opd.rewards import RewardStage
from opd.students import SamplingParams
from opd.teachers import AnsweringTeacher, ApiTeacher, Teacher
from tests.chat_server import api, chat_server, completion
from tests.composing import prepare, refusal, tiny_opd
from tests.test_answers import Digits, Scripted
from tests.tiny import tokenizer

TOKENIZER = tokenizer()
IMITATE = [
    "~loss.distill", "~teacher.main", "+loss@loss.imitate=cross_entropy", "+teacher@teacher.api=api",
    "teacher.api.model=big", "data.streams.main.answers=teacher", "data.streams.main.teacher=api",
]  # fmt: skip


@pytest.fixture(scope="module")
def opd(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides of a tiny distillation."""
    return tiny_opd(tmp_path_factory.mktemp("opd"))


@dataclass
class Wordy:
    """A teacher with scripted texts: prompt -> (text, finish)."""

    texts: dict[str, tuple[str, Any]]
    asked: list[list[str]] = field(default_factory=list)
    provides: ClassVar[frozenset[str]] = frozenset({"full_vocab"})

    def tokenizer(self) -> Any:
        """The student's."""
        return TOKENIZER

    def start(self) -> None:
        """Nothing to load."""

    def score(self, rollouts: Sequence[Rollout]) -> list[TeacherScores | None]:
        """No scores."""
        return [None for _ in rollouts]

    def sample(self, prompts: Sequence[Prompt], params: SamplingParams, seed: int) -> list[Rollout]:
        """Every sample of a prompt gets the prompt's text."""
        self.asked.append([prompt.text for prompt in prompts])
        asked = [(prompt, index) for prompt in prompts for index in range(prompt.samples)]
        return [Rollout(p, i, [9, 9], [0.0, 0.0], *self.texts[p.text], version=5) for p, i in asked]

    def close(self) -> None:
        """Nothing to release."""


def answering(teachers: dict[str, AnsweringTeacher], **streams: Stream) -> Answers:
    prompts = Prompts(DataConfig(Digits(), streams=streams), TOKENIZER, seed=0)
    return Answers(prompts, Scripted(), RewardStage([]), TOKENIZER, teachers)


def test_whole_answers_become_the_students_tokens_and_end_once() -> None:
    """Ten digits: "7" is cut, "8" is empty, "9" is aborted; seven are imitated, in the student's ids, with an end."""
    texts: dict[str, tuple[str, Any]] = {str(n): (f"so {n}", "stop") for n in range(7)}
    teacher = Wordy({**texts, "7": ("so", "length"), "8": (" ", "stop"), "9": ("no", "aborted")})
    stage = answering({"big": teacher}, main=Stream(10, answers="teacher", teacher="big"))
    stage.sampler.params = SamplingParams(max_tokens=10)
    rollouts = stage.sample(3, seed=1)
    assert sorted(rollout.prompt.text for rollout in rollouts) == list("0123456")
    for rollout in rollouts:
        assert rollout.token_ids == [*TOKENIZER(rollout.text)["input_ids"], TOKENIZER.eos_token_id]
        assert (rollout.finish, rollout.version) == ("given", 3)
        assert all(isnan(logp) for logp in rollout.logp)
    assert [reward.value for reward in stage.judge(rollouts)] == [None] * 7
    assert stage.metrics["answers/big/used"].value == 0.7
    assert stage.sampled_tokens == 0


def test_an_answer_longer_than_the_students_is_cut_and_has_no_end_token() -> None:
    """max_tokens is 3: "so 4" has four characters, so three ids are left, and none of them ends the answer."""
    teacher = Wordy({str(n): (f"so {n}", "stop") for n in range(10)})
    stage = answering({"big": teacher}, main=Stream(4, answers="teacher", teacher="big"))
    for rollout in stage.sample(0, seed=1):
        assert rollout.token_ids == TOKENIZER("so ")["input_ids"]


def test_streams_of_several_teachers_beside_the_students_own() -> None:
    one, two = (Wordy({str(n): (f"{who}", "stop") for n in range(10)}) for who in "ab")
    stage = answering(
        {"one": one, "two": two},
        a=Stream(3, answers="teacher", teacher="one"),
        b=Stream(2, samples=2, answers="teacher", teacher="two"),
        c=Stream(2),
    )
    rollouts = stage.sample(0, seed=1)
    assert (
        sorted((r.prompt.stream, r.text) for r in rollouts if r.finish == "given")
        == [("a", "a")] * 3 + [("b", "b")] * 4
    )
    assert [rollout.sample_index for rollout in rollouts if rollout.prompt.stream == "b"] == [0, 1, 0, 1]
    assert (len(one.asked[0]), len(two.asked[0]), len(stage.sampler.asked[0])) == (3, 2, 2)


def test_an_api_teacher_is_a_teacher_that_answers_and_never_scores(tmp_path: Path) -> None:
    prompt = Prompt("0", "main", [3], Example([{"role": "user", "content": "hi"}]), samples=2)
    with chat_server(lambda body, number: completion(f"answer {number}")) as server:
        teacher = ApiTeacher("big", api(server.url, tmp_path, remote={"concurrency": 1}), system="be kind")
        assert isinstance(teacher, Teacher) and isinstance(teacher, AnsweringTeacher)
        teacher.start()
        rollouts = teacher.sample([prompt], SamplingParams(), seed=0)
        assert teacher.score(rollouts) == [None, None]
        again = teacher.sample([prompt], SamplingParams(max_tokens=1), seed=1)
        teacher.close()
    assert [(r.text, r.token_ids, r.finish) for r in rollouts] == [("answer 0", [], "stop"), ("answer 1", [], "stop")]
    assert again == rollouts, "an answer depends on the prompt alone"
    assert [body["messages"] for body in server.bodies] == [
        [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]
    ] * 2


# ------------------------------------------------------------------------------------------------------------ refusals


def test_a_divergence_to_a_text_teacher_is_refused_with_both_sides(opd: list[str]) -> None:
    text = ["~teacher.main", "+teacher@teacher.main=api", "teacher.main.model=big"]
    assert refusal(*[o for o in opd if "teacher" not in o], *text[1:]) == (
        "loss.distill (ReverseKL) needs full_vocab scores; teacher.main (ApiTeacher) provides text: let a stream "
        "imitate its answers (data.streams.NAME.answers=teacher data.streams.NAME.teacher=main, with loss "
        "cross_entropy), or take verdicts as a reward (reward=judge)"
    )


def test_a_term_that_reads_no_scores_does_not_take_a_text_teacher_either(opd: list[str]) -> None:
    message = refusal(*opd, *IMITATE, "loss.imitate.teacher=api")
    assert message.startswith(
        "loss.imitate.teacher=api: teacher.api (ApiTeacher) provides text, which no term reads; set"
    )


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (["data.streams.main.teacher=apu"], "data.streams.main.teacher: no teacher 'apu'; did you mean api?"),
        (
            ["+teacher@teacher.far=served", "teacher.far.model=${student.model}", "data.streams.main.teacher=far"],
            "data.streams.main.teacher=far: teacher.far (ServedTeacher) provides full_vocab, and does not answer",
        ),
        (["data.streams.main.answers=student"], "data.streams.main: answers=student, teacher=api: set answers=teacher"),
        (["data.streams.main.refill_rounds=1"], "data.streams.main: answers=teacher: these answers get no reward"),
        (
            [
                "+loss@loss.pg=sampled_reverse_kl",
                "loss.pg.teacher=b",
                "+teacher@teacher.b=local",
                "teacher.b.model=${student.model}",
            ],
            "data.streams.main.answers=teacher: loss.pg",
        ),
    ],
)
def test_streams_and_teachers_that_do_not_fit(changes: list[str], says: str, opd: list[str]) -> None:
    assert refusal(*opd, *IMITATE, *changes).startswith(says)


def test_a_local_teacher_may_answer_too_and_is_started_once(opd: list[str]) -> None:
    run = prepare(*opd, "+loss@loss.imitate=cross_entropy", "data.streams.main.terms=[distill]",
                  "+data.streams.taught={prompts: 2, answers: teacher, teacher: main, terms: [imitate]}")  # fmt: skip
    assert run.teachers.answering.keys() == run.teachers.teachers.keys() == {"main"}


def test_a_missing_key_is_noted_unless_the_server_is_here(
    opd: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MY_KEY", raising=False)
    named = [*opd, *IMITATE, "teacher.api.api.remote.api_key_env=MY_KEY"]
    far = "teacher.api.api.remote.urls=[https://api.example.org]"
    prepare(*named)
    assert "MY_KEY" not in capsys.readouterr().err
    prepare(*named, far)
    assert (
        "teacher.api: the environment variable MY_KEY holds no key for https://api.example" in capsys.readouterr().err
    )
    monkeypatch.setenv("MY_KEY", "x")
    prepare(*named, far)
    assert "MY_KEY" not in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------------- dry run


def test_the_plan_states_requests_tokens_and_money(opd: list[str]) -> None:
    """Two steps of four prompts from six examples: at most six different ones are asked.

    In: 64 + 16 + the bytes of the request, which are as many for each of the six sums. Out: 6 * 100. At 2 and 5 money
    per million: (input * 2 + 600 * 5) / 1e6.
    """
    prices = ["teacher.api.api.account.input_price=2", "teacher.api.api.account.output_price=5"]
    run = prepare(*opd, *IMITATE, *prices, "teacher.api.api.max_tokens=100", "teacher.api.api.account.money=9")
    (found,) = expected(run.config, run.prompts)
    asked = run.config.teacher["api"]
    assert isinstance(asked, ApiTeacher)
    request = (
        f'{{"model": "{asked.model}", "messages": [{{"role": "user", "content": "1+1="}}], "max_tokens": 100, '
        f'"temperature": {asked.api.temperature}}}'
    )
    tokens = 6 * (64 + 16 + len(request))
    assert found == Expected("teacher.api", asked.api, 6, tokens, 600)
    assert found.money == pytest.approx((tokens * 2 + 600 * 5) / 1e6)
    console = Console(width=200)
    with console.capture() as capture:
        console.print(plan_table(run))
    assert "cost of teacher.api" in capture.get()
    assert f"at most 6 requests, {tokens:,} tokens in and 600 out, 0.01 money; budget: money 9" in capture.get()


def test_the_plan_counts_a_judge_that_is_shared_once_and_evaluations_too(opd: list[str]) -> None:
    """Training: 2 steps * 4 prompts * 3 samples = 24. Evaluation of 2 held-out prompts: before, after step 1 and after
    step 2, and the teacher's once: 4 * 2 = 8. `style` differs in the part alone and costs nothing more.
    """
    judges = [
        *("+reward@reward.right=judge", "reward.right.model=j", "reward.right.template='{{ prompt }}{{ answer }}'"),
        *("+reward@reward.style=judge", "reward.style.model=j", "reward.style.template='{{ prompt }}{{ answer }}'"),
        "reward.style.part=style",
    ]
    run = prepare(*opd, *judges, "data.streams.main.samples=3", "eval.every=1")
    (found,) = expected(run.config, run.prompts)
    assert (found.key, found.requests, found.output_tokens) == ("reward.right", 32, 32 * 1024)
    chat: list[Message] = [{"role": "user", "content": "1+1=" + "x" * 16}]  # max_tokens=4, at four bytes
    each = input_bound(found.api.body("j", chat))
    assert found.input_tokens == 32 * each
    run = prepare(
        *opd, *judges, "data.streams.main.samples=3", "reward.right.streams=[main]", "reward.style.streams=[main]"
    )
    assert expected(run.config, run.prompts)[0].requests == 24
