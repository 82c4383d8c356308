"""The student as its own teacher: what it is shown, whose weights it has, and that a stop changes neither."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from opd.records import Example, FullVocab, Prompt, Reward, Rollout
from opd.students import HFStudent, SamplingParams
from opd.teachers import LocalTeacher, SelfTeacher, Teacher
from opd.teachers.privileged import View, correct_siblings, quotes
from opd.teachers.self_weights import Copy
from tests.composing import composed, prepare, refusal, tiny_parts
from tests.rows import Setting, engine, weights_of
from tests.runs import Pair, assert_same_run, checkpoint, lines, opd, save_pair
from tests.tiny import save_model, tokenizer

SUMS = [("1+1=", "2"), ("12+30=", "42"), ("7+8=", None), ("9+9=", "18")]
TOLD = "{{ answer }}={{ prompt }}"
UNJUDGED = Reward(None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("student"))


def rollout(example: Example, answer: str, group: str = "0", version: int = 0) -> Rollout:
    """An answer to a plain prompt."""
    encode = tokenizer()
    assert isinstance(example.prompt, str)
    prompt = Prompt(group, "main", encode(example.prompt)["input_ids"], example)
    ids = encode(answer)["input_ids"]
    return Rollout(prompt, 0, ids, [0.0] * len(ids), answer, "stop", version)


def rollouts(version: int = 0) -> list[Rollout]:
    """Answers of ragged lengths; the third example has no known answer."""
    answers = ["2$", "43 or so$", "15$", "1"]
    return [
        rollout(Example(prompt, answer), text, str(number), version)
        for number, ((prompt, answer), text) in enumerate(zip(SUMS, answers, strict=True))
    ]


def started(folder: Path, student: nn.Module | None = None, **settings: Any) -> SelfTeacher:
    teacher = SelfTeacher(HFStudent(str(folder)), **settings)
    if student is not None:
        teacher.attach(student)
    teacher.start()
    return teacher


def hidden(scores: Sequence[Any]) -> list[Tensor | None]:
    return [score.hidden if isinstance(score, FullVocab) else None for score in scores]


def assert_equal(mine: Sequence[Tensor | None], theirs: Sequence[Tensor | None]) -> None:
    assert [one is None for one in mine] == [one is None for one in theirs]
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True) if a is not None and b is not None)


# ------------------------------------------------------------------------------------------------------------ the view


def seen(template: str, example: Example, reward: Reward = UNJUDGED, sibling: str | None = None) -> Any:
    found = View(template).of(example, reward, sibling)
    return None if found is None else found.prompt


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (TOLD, "2=1+1="),
        ("{{ prompt }} ({{ columns.hint }})", "1+1= (carry)"),
        ("{{ columns.unknown }}{{ prompt }}", None),
        ("{{ columns.empty }}{{ prompt }}", None),  # null is not the word None
        ("{% if columns.unknown is defined %}x{% endif %}{{ prompt }}", "1+1="),
        ("{{ sibling }}={{ prompt }}", None),
        ("{{ parts.form }} {{ reward }}", "0.0 1.5"),
        ("{% if parts.form < 0.5 %}bad form: {% endif %}{{ prompt }}\n", "bad form: 1+1=\n"),
        ("{{ parts.correct }}", None),  # no verdict was reached
        ("{{ columns.values }} {{ columns.keys | length }}", "own 4"),  # whatever methods a mapping has
        ("{{ columns.items }}", None),
        ("{{ parts.count }}", "2.0"),
    ],
)
def test_a_template_sees_what_exists(template: str, text: str | None) -> None:
    example = Example("1+1=", "2", columns={"hint": "carry", "empty": None, "values": "own", "keys": "four"})
    assert seen(template, example, Reward(1.5, {"form": 0.0, "correct": None, "count": 2.0})) == text


def test_a_sibling_is_shown() -> None:
    assert seen("{{ sibling }}={{ prompt }}", Example("1+1="), sibling="2") == "2=1+1="


def test_data_is_never_a_template() -> None:
    assert seen(TOLD, Example("{{ answer }}", "{% raw %}")) == "{% raw %}={{ answer }}"


def test_of_a_chat_the_last_user_message_changes() -> None:
    chat = [
        {"role": "system", "content": "s"}, {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"}, {"role": "assistant", "content": "<"},
    ]  # fmt: skip
    assert seen(TOLD, Example(chat, "2")) == [*chat[:3], {"role": "user", "content": "2=c"}, chat[4]]
    assert seen(TOLD, Example(chat[:1], "2")) == [{"role": "system", "content": "2=s"}]
    assert chat[3]["content"] == "c"


@pytest.mark.parametrize(
    ("template", "says"),
    [
        (
            "{{ hint }}",
            "template: there is no 'hint'; it may use answer, columns, parts, prompt, reward,",
        ),
        ("{{ prompt", "template: no valid Jinja (unexpected end"),
        ("{{ prompt.__class__.__mro__ }}", "template: fails for the prompt '1+1=': access to attribute '__class__'"),
        ("{{ answer + 1 }}", "template: fails for the prompt '1+1=': can only concatenate str"),
        ("{{ range(1000000000) | list }}", "template: fails for the prompt '1+1=': Range too big"),
    ],
)
def test_a_bad_template_is_refused(template: str, says: str) -> None:
    with pytest.raises(ValueError) as caught:
        seen(template, Example("1+1=", "2"))
    assert str(caught.value).startswith(says)


def test_a_sibling_is_the_first_other_correct_answer_of_the_group() -> None:
    """Group a: wrong, right, right, unjudged; b: right alone; c: wrong alone."""
    given = [rollout(Example("x"), text, group) for text, group in zip("pqrstu", "aaaabc", strict=True)]
    rewards = [Reward(value) for value in (0.0, 1.0, 0.5, None, 1.0, 0.4)]
    assert correct_siblings(given, rewards, 0.5) == ["q", "r", "q", "q", None, None]
    assert correct_siblings(given, rewards, 0.6) == ["q", None, "q", "q", None, None]


def test_a_quotation_is_a_run_that_only_the_view_has() -> None:
    """The answer holds 4 5 6 of the view; the student's own prompt holds 4 5 and, in the last case, all three."""
    answer, view = [9, 4, 5, 6], [1, 4, 5, 6, 2]
    assert quotes(answer, view, [4, 5], 3)
    assert not quotes(answer, view, [4, 5], 4)
    assert not quotes(answer, view, [7, 4, 5, 6], 3)
    assert not quotes([4, 5], view, [], 3)


# ---------------------------------------------------------------------------------------------------------- the scores


def test_scores_are_those_of_the_start_weights_after_the_other_prompt(folder: Path) -> None:
    """The third row has no answer to show, so it has no score; response ids are the student's own."""
    teacher, local = started(folder, template=TOLD), LocalTeacher(str(folder))
    local.start()
    assert isinstance(teacher, Teacher)
    given = rollouts()
    shown = []
    for one in (given[0], given[1], given[3]):
        text = f"{one.prompt.example.answer}={one.prompt.text}"
        shown.append(replace(one, prompt=replace(one.prompt, token_ids=tokenizer()(text)["input_ids"])))
    by_hand = hidden(local.score(shown))
    assert_equal(hidden(teacher.score(given)), [*by_hand[:2], None, by_hand[2]])
    assert torch.equal(teacher.head().weight, local.head().weight)
    assert [len(states) for states in hidden(teacher.score(given)) if states is not None] == [2, 9, 1]
    assert teacher.metrics()["scored"].value == 0.75
    plain = hidden(started(folder).score(given))
    assert_equal(plain, hidden(local.score(given)))


def test_scores_with_a_correct_sibling(folder: Path) -> None:
    """Two right answers of one group are shown to each other and to the wrong one; the other group has none."""
    teacher, local = started(folder, template="{{ sibling }}={{ prompt }}"), LocalTeacher(str(folder))
    local.start()
    example = Example("1+1=")
    given = [rollout(example, text, group) for text, group in (("3", "a"), ("2", "a"), ("02", "a"), ("2", "b"))]
    rewards = [Reward(value) for value in (0.0, 1.0, 1.0, 1.0)]
    shown = [
        replace(one, prompt=replace(one.prompt, token_ids=tokenizer()(f"{sibling}=1+1=")["input_ids"]))
        for one, sibling in zip(given[:3], ("2", "02", "2"), strict=True)
    ]
    assert_equal(hidden(teacher.score_judged(given, rewards)), [*hidden(local.score(shown)), None])
    assert hidden(teacher.score(given)) == [None] * 4
    assert hidden(teacher.score([])) == []


def test_a_view_that_does_not_fit_the_model_has_no_score(folder: Path) -> None:
    """512 positions: 508 tokens of the view and 4 of the prompt leave no room for the answer; 507 do for one token."""
    teacher = started(folder, template="{{ columns.long }}{{ prompt }}")
    given = [rollout(Example("1+1=", columns={"long": "0" * count}), "2") for count in (508, 507)]
    assert [score is None for score in teacher.score(given)] == [True, False]


def test_the_leak_test_compares_the_same_tokens_with_and_without_the_view(folder: Path) -> None:
    """Mean |log q(y | told) - log q(y | plain)| over 2 + 9 + 1 tokens; "42" of the view is quoted by one of three."""
    teacher, local = started(folder, template=TOLD, leak_every=5, quote_tokens=2), LocalTeacher(str(folder))
    local.start()
    given = [replace(one, token_ids=tokenizer()("42 or so$")["input_ids"]) if i == 1 else one
             for i, one in enumerate(rollouts(version=10))]  # fmt: skip
    gaps = []
    for one in (given[0], given[1], given[3]):
        told = tokenizer()(f"{one.prompt.example.answer}={one.prompt.text}")["input_ids"]
        logp = [
            torch.log_softmax(local.network(torch.tensor([ids + one.token_ids])).logits[0, len(ids) - 1 : -1], -1)
            for ids in (told, one.prompt.token_ids)
        ]
        index = torch.tensor(one.token_ids)[:, None]
        gaps.append((logp[0] - logp[1]).gather(-1, index)[:, 0].abs())
    teacher.score(given)
    metrics = teacher.metrics()
    assert metrics["leak"].value == pytest.approx(torch.cat(gaps).mean().item(), abs=1e-5)
    assert (metrics["leak"].count, metrics["leak"].value > 0.1) == (12.0, True)
    assert (metrics["quoted"].sum, metrics["quoted"].count) == (1.0, 3.0)


@pytest.mark.parametrize(("version", "template", "measured"), [(9, TOLD, False), (10, None, False), (0, TOLD, True)])
def test_the_leak_test_runs_every_k_steps(folder: Path, version: int, template: str | None, measured: bool) -> None:
    teacher = started(folder, template=template, leak_every=5)
    teacher.score(rollouts(version))
    assert ("leak" in teacher.metrics()) == measured


def test_its_own_answers_follow_its_own_prompts(folder: Path) -> None:
    """Greedy, as a plain model's after the other prompt; the row without a view has an empty, aborted answer."""
    teacher, local = started(folder, template=TOLD), LocalTeacher(str(folder))
    local.start()
    asked = [replace(one.prompt, samples=2) for one in rollouts()]
    greedy = SamplingParams(5, temperature=0.0)
    answers = teacher.sample(asked, greedy, seed=0)
    told = [replace(p, token_ids=tokenizer()(f"{p.example.answer}={p.text}")["input_ids"]) for p in asked]
    expected = local.sample(told, greedy, seed=0)
    assert [a.prompt for a in answers] == [p for p in asked for _ in range(2)]
    for answer, other in zip(answers, expected, strict=True):
        if answer.prompt.example.answer is None:
            assert (answer.token_ids, answer.finish) == ([], "aborted")
        else:
            assert answer.token_ids == other.token_ids


# --------------------------------------------------------------------------------------------------------- the weights


def moved(network: nn.Module, seed: int) -> dict[str, Tensor]:
    """Weights of a student that has learned something; a tied head is given under its own name too."""
    random = torch.Generator().manual_seed(seed)
    named = dict(network.named_parameters())
    given = {name: p.detach() + torch.randn(p.shape, generator=random) for name, p in named.items()}
    given.setdefault("lm_head.weight", given["model.embed_tokens.weight"])
    return given


def source(weights: dict[str, Tensor], asked: list[int] | None = None) -> Callable[[], Iterator[tuple[str, Tensor]]]:
    def gather() -> Iterator[tuple[str, Tensor]]:
        if asked is not None:
            asked.append(1)
        yield from weights.items()

    return gather


@pytest.mark.parametrize("tied", [True, False])
def test_the_running_mean_by_hand(tmp_path: Path, tied: bool) -> None:
    """t1 = .75 t0 + .25 s1, t2 = .75 t1 + .25 s2; a tied head moves once, not twice."""
    teacher = started(save_model(tmp_path, tied=tied), weights="ema", ema_share=0.25)
    network = teacher._held.network
    start = {name: p.detach().clone() for name, p in network.named_parameters()}
    first, second = moved(network, 1), moved(network, 2)
    teacher.follow(source(first), 1)
    teacher.follow(source(second), 2)
    for name, parameter in network.named_parameters():
        by_hand = 0.75 * (0.75 * start[name] + 0.25 * first[name]) + 0.25 * second[name]
        torch.testing.assert_close(parameter.detach(), by_hand, atol=1e-6, rtol=0)
        assert (parameter - start[name]).abs().max() > 0.1
    assert torch.equal(teacher.head().weight, network.lm_head.weight)


def test_the_mean_of_a_bf16_student_is_kept_in_fp32() -> None:
    """From 1 toward 2 by 1/1024 a step: a bf16 sum would stay at 1, whose next number is 1 + 1/128."""
    network: Any = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16).requires_grad_(False)
    network.weight.fill_(1.0)
    copy = Copy(network, 1, 1 / 1024)
    for step in range(1, 101):
        copy.follow(source({"weight": torch.full((1, 1), 2.0, dtype=torch.bfloat16)}), step)
    exact = 2 - (1 - 1 / 1024) ** 100
    assert copy.state()["weight"].item() == pytest.approx(exact, abs=1e-5)
    assert network.weight.item() == torch.tensor(exact).bfloat16().item() > 1.0
    other: Any = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16).requires_grad_(False)
    restored = Copy(other, 1, 1 / 1024)
    restored.restore(copy.state())
    assert restored.state()["weight"].item() == copy.state()["weight"].item()
    assert other.weight.item() == network.weight.item()


def test_a_refresh_copies_the_student_every_k_steps(folder: Path) -> None:
    """Every 3: steps 1, 2, 4 and 5 do not even gather the student's weights."""
    teacher = started(folder, weights="refresh", refresh_every=3)
    network = teacher._held.network
    given, asked = {step: moved(network, step) for step in range(1, 7)}, []
    held = {name: p.detach().clone() for name, p in network.named_parameters()}
    for step in range(1, 7):
        teacher.follow(source(given[step], asked), step)
        held = {name: given[step][name] for name in held} if step in (3, 6) else held
        assert all(torch.equal(p, held[name]) for name, p in network.named_parameters())
        assert len(asked) == step // 3


@pytest.mark.parametrize("stage", [0, 3])
def test_it_takes_the_weights_that_the_engine_gives(folder: Path, stage: int) -> None:
    """Whole and merged, also of parameters that ZeRO 3 has taken apart: a refreshed teacher is the student."""
    trained = engine(folder, stage)
    with torch.no_grad():
        for parameter in trained.module.parameters():
            (parameter.ds_tensor if stage == 3 else parameter).mul_(1.25)
    teacher = started(folder, trained.module.model, weights="refresh", refresh_every=1)
    teacher.follow(trained.weights, 1)
    mine, student = dict(teacher._held.network.named_parameters()), weights_of(trained)
    start = load_file(folder / "model.safetensors")
    assert all(torch.equal(mine[name], student[name]) and not torch.equal(mine[name], start[name]) for name in mine)


def test_a_student_without_a_weight_stops_the_run(folder: Path) -> None:
    teacher = started(folder, weights="ema")
    given = moved(teacher._held.network, 1)
    del given["model.norm.weight"]
    with pytest.raises(RuntimeError, match=r"the student has no weights \['model.norm.weight'\]"):
        teacher.follow(source(given), 1)


def test_frozen_weights_stay_and_leave_nothing_in_a_checkpoint(folder: Path) -> None:
    teacher = started(folder, template=TOLD)
    before = hidden(teacher.score(rollouts()))
    teacher.follow(source(moved(teacher._held.network, 1)), 1)
    assert_equal(hidden(teacher.score(rollouts())), before)
    assert teacher.state() == {}


# ---------------------------------------------------------------------------------------------------------- the adapter


def adapted(folder: Path, **settings: Any) -> nn.Module:
    """A LoRA student that has learned something, in every part that it trains."""
    lora = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, **settings)
    model = HFStudent(str(folder), lora=lora).load()
    random = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=random)
    return model


def looks(model: nn.Module) -> tuple[Any, ...]:
    """What a teacher must leave as it is."""
    return (
        {name: tensor.clone() for name, tensor in model.state_dict().items()},
        [parameter.requires_grad for parameter in model.parameters()],
        [module.training for module in model.modules()],
        model.get_base_model().generation_config if isinstance(model, PeftModel) else None,
    )


ADAPTERS = {
    "layers": {"target_modules": "all-linear"},
    "head too": {"target_modules": ["q_proj", "lm_head"]},
    "saved head": {"target_modules": "all-linear", "modules_to_save": ["lm_head", "norm"]},
}


@pytest.mark.parametrize("kind", ADAPTERS)
def test_without_its_adapter_the_student_is_the_model_it_started_from(tmp_path: Path, kind: str) -> None:
    """Bitwise in states and head, whatever the adapter trains; and the student is as it was."""
    folder = save_model(tmp_path, tied=False)
    student, local = adapted(folder, **ADAPTERS[kind]), LocalTeacher(str(folder))
    local.start()
    before = looks(student)
    teacher = started(folder, student, weights="adapter_off")
    assert_equal(hidden(teacher.score(rollouts())), hidden(local.score(rollouts())))
    assert torch.equal(teacher.head().weight, local.head().weight) and teacher.head().up is None
    teacher.sample([one.prompt for one in rollouts()], SamplingParams(3), seed=0)
    after = looks(student)
    assert before[1:] == after[1:]
    assert all(torch.equal(before[0][name], tensor) for name, tensor in after[0].items())
    assert any(not torch.equal(a, b) for a, b in zip(
        hidden(started(folder, student, weights="live").score(rollouts())), hidden(local.score(rollouts())), strict=True
    ))  # fmt: skip


def test_a_live_teacher_is_the_student_of_now(folder: Path) -> None:
    student = HFStudent(str(folder)).load()
    teacher = started(folder, student, weights="live", template=TOLD)
    for parameter in student.parameters():
        parameter.data.mul_(1.1)
    assert student.training
    states = hidden(teacher.score(rollouts()))
    assert student.training and all(parameter.requires_grad for parameter in student.parameters())
    ids = torch.tensor([tokenizer()("2=1+1=2$")["input_ids"]])
    expected = torch.log_softmax(student(ids, use_cache=False).logits[0, 5:7], -1)
    assert states[0] is not None
    got = torch.log_softmax(teacher.head().logits(states[0]), -1)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_borrowing_the_student_does_not_touch_its_training(tmp_path: Path, stage: int) -> None:
    """Two updates with a teacher's passes before each are bitwise those without: switching the adapter resets flags."""
    setting = Setting.of(save_model(tmp_path / "s", tied=False), save_model(tmp_path / "t", 1, tied=False))
    lora = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear", modules_to_save=["lm_head"])
    student, ends = HFStudent(str(setting.student), lora=lora), []
    for borrows in (False, True):
        torch.manual_seed(0)
        trained = engine(student, stage)
        for _ in range(2):
            if borrows:
                teacher = started(setting.student, trained.module.model, weights="adapter_off")
                teacher.score(rollouts())
            trained.update(setting.batch(), setting.objective(), setting.heads())
        ends.append(weights_of(trained))
    plain, borrowed = ends
    assert all(torch.equal(plain[name], borrowed[name]) for name in plain)
    start = dict(AutoModelForCausalLM.from_pretrained(setting.student).named_parameters())
    assert any(not torch.equal(plain[name], start[name]) for name in start)


# ------------------------------------------------------------------------------------------------------------ refusals

SELF = ["+teacher@teacher.main=self", "+loss@loss.distill=reverse_kl"]
OTHER = "teacher.main.student={_target_: opd.students.HFStudent, model: '${student.model}', dtype: bfloat16}"


def told(template: str) -> str:
    return f"teacher.main.template='{template}'"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (["teacher.main.weights=live"], "teacher.main: weights=live are the student's of now, and without a template"),
        (["teacher.main.weights=refresh", "teacher.main.refresh_every=1"], "weights=refresh are the student's of now"),
        (["teacher.main.weights=ema", "teacher.main.ema_share=1"], "weights=ema are the student's of now"),
        (["teacher.main.weights=live", told("{{ prompt }}")], "teacher.main.template: shows the teacher the"),
        (["teacher.main.weights=adapter_off"], "adapter_off: the student has no adapter; use student=lora, or"),
        (["teacher.main.weights=adapter_off", "student=lora", "engine.zero_stage=3"], "set engine.zero_stage=2, or"),
        ([told("{{ sibling }}")], "teacher.main (SelfTeacher) needs rewards, and there is none"),
        ([told("{{ sibling }}"), "+reward@reward.correct=exact"], "data.streams.main.samples=1: teacher.main shows a"),
        ([told("{{ columns.hint }}")], "teacher.main.template: none of the 6 examples has all that it uses"),
        ([told("{{ hint }}")], "a column of the data by columns.hint"),
        ([told("{{ answer + 1 }}")], "teacher.main.template: fails for the prompt '0+0='"),
        (["teacher.main.ema_share=0"], "ema_share=0.0: must lie above 0"),
        (["teacher.main.refresh_every=0"], "refresh_every=0: must be at least 1"),
        (["teacher.main.leak_every=-1"], "leak_every=-1: must be at least 0"),
        ([OTHER], "under other settings than the student's; leave it at '${student}', or use teacher=local"),
    ],
)  # fmt: skip
def test_what_cannot_teach_is_refused(tmp_path: Path, changes: list[str], says: str) -> None:
    assert says in refusal(*tiny_parts(tmp_path), *SELF, *changes)


@pytest.mark.parametrize(
    "changes",
    [
        [],  # frozen, same view: an anchor
        ["teacher.main.weights=ema"],
        ["teacher.main.weights=live", told(TOLD)],
        ["teacher.main.weights=adapter_off", "student=lora"],
        [told("{{ sibling }}{{ prompt }}"), "+reward@reward.correct=exact", "data.streams.main.samples=4"],
    ],
)
def test_what_can_teach_is_not(tmp_path: Path, changes: list[str]) -> None:
    run = prepare(*tiny_parts(tmp_path), *SELF, *changes)
    assert isinstance(run.config.teacher["main"], SelfTeacher)


def test_the_teacher_is_the_run_s_own_student() -> None:
    cfg = composed("experiment=method/opsd", "student.dtype=bfloat16", "student.lora.r=2")
    assert (cfg.teacher.main.student.dtype, cfg.teacher.main.student.lora.r) == ("bfloat16", 2)


# ---------------------------------------------------------------------------------------------------------- whole runs


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return save_pair(tmp_path_factory.mktemp("models"))


def command(pair: Pair, run_dir: Path, *changes: str) -> list[str]:
    """Six steps under a self teacher, checkpoints every second."""
    base = [override for override in pair.train(run_dir) if "teacher" not in override]
    return [*base, "+teacher@teacher.main=self", told(TOLD), "teacher.main.leak_every=2", *changes]


LORA = ["student=lora", "student.lora.r=4", "teacher.main.weights=adapter_off"]


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(["teacher.main.weights=ema", "teacher.main.ema_share=0.3"], id="ema"),
        pytest.param(["teacher.main.weights=refresh", "teacher.main.refresh_every=2"], id="refresh"),
        pytest.param(LORA, id="adapter_off", marks=pytest.mark.slow),
    ],
)
def test_stop_and_go_equals_straight_through(pair: Pair, tmp_path: Path, changes: list[str]) -> None:
    """6 steps against 3 + 3, bitwise, the teacher's weights too; a refresh happens at 2 and 4, the cut is at 3."""
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    for run_dir, last in ((straight, []), (broken, ["stop_after=3"]), (broken, [])):
        ended = opd(*command(pair, run_dir, *changes, *last))
        assert ended.code == 0, ended.err
    assert_same_run(straight, broken, 6)
    logged = [line for line in lines(straight) if "teacher/main/scored" in line]
    assert [line["teacher/main/scored"] for line in logged] == [1.0] * 6
    assert [line["step"] for line in logged if "teacher/main/leak" in line] == [1, 3, 5]  # of versions 0, 2, 4
    if changes is not LORA:
        (file,) = checkpoint(straight, 6).glob("teachers/*.safetensors")
        held, now = load_file(file), load_file(checkpoint(straight, 6) / "hf" / "model.safetensors")
        start = load_file(pair.student / "model.safetensors")
        name = "model.layers.0.mlp.up_proj.weight"
        assert not torch.equal(held[name], start[name])
        assert torch.equal(held[name], now[name]) == ("teacher.main.weights=refresh" in changes)


def test_a_checkpoint_without_the_teacher_s_weights_is_refused(pair: Pair, tmp_path: Path) -> None:
    assert opd(*command(pair, tmp_path, "stop_after=1")).code == 0
    ended = opd(*command(pair, tmp_path, "teacher.main.weights=ema"))
    assert ended.code != 0
    assert "teacher.main: its weights follow the student's, and the checkpoint" in ended.err


def test_siblings_reach_the_teacher_in_a_run(pair: Pair, tmp_path: Path) -> None:
    """Letters judges by the text, so some groups have a correct answer: 0 < scored < 1 somewhere."""
    changes = [
        "~reward.correct", "+reward.letters._target_=tests.faults.parts.Letters", "data.streams.main.samples=3",
        told("{{ sibling }}{{ prompt }}"), "steps=2", "teacher.main.correct_from=0.3",
    ]  # fmt: skip
    ended = opd(*command(pair, tmp_path, *changes))
    assert ended.code == 0, ended.err
    shares = [line["teacher/main/scored"] for line in lines(tmp_path) if "teacher/main/scored" in line]
    assert len(shares) == 2 and any(share > 0.0 for share in shares)
