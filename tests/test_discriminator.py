"""The discriminator: what it learns, from which pairs, and that nothing of it is lost at a stop."""

from __future__ import annotations

from math import exp, log
from pathlib import Path

import pytest
import torch

from opd.discriminator import Discriminator
from opd.records import Example, Finish, Mean, Prompt, Rollout
from opd.students import HFStudent
from tests.composing import prepare, refusal, tiny_opd
from tests.faults.test_api_faults import pair as pair
from tests.runs import Pair, assert_same_run, checkpoint, opd, training_lines
from tests.tiny import save_model, tokenizer

TOKENIZER = tokenizer()


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> HFStudent:
    return HFStudent(str(save_model(tmp_path_factory.mktemp("student"), seed=0)))


def begun(student: HFStudent, **settings: object) -> Discriminator:
    discriminator = Discriminator("main", **{"lr": 1e-2, "max_grad_norm": 0.0, **settings})
    discriminator.begin(student, TOKENIZER)
    return discriminator


def answer(text: str, prompt: str = "1+1=", finish: Finish = "stop", stream: str = "main") -> Rollout:
    ids = TOKENIZER(text)["input_ids"]
    example = Prompt(prompt, stream, TOKENIZER(prompt)["input_ids"], Example(prompt))
    return Rollout(example, 0, ids, [0.0] * len(ids), text, finish, 0)


PAIRS = [(answer("abc", prompt), answer("xyz", prompt)) for prompt in ("1+1=", "2+3=", "7=")]


def test_at_first_no_answer_is_better_and_the_loss_is_log_two(student: HFStudent) -> None:
    """A zero head gives D = 0 everywhere: ties (accuracy 1/2), margin 0, and -log sigmoid(0) = log 2."""
    discriminator = begun(student)
    assert discriminator([answer("abc"), answer("0")]) == [0.0, 0.0]
    found = discriminator.learn(PAIRS)
    assert found["accuracy"] == Mean(1.5, 3.0) and found["margin"] == Mean(0.0, 3.0)
    assert found["pairs"] == Mean(3.0, 3.0)


def test_one_step_follows_the_bradley_terry_gradient(student: HFStudent) -> None:
    """With the head at 0 only the head has a gradient: d/dw mean(-log sigmoid(w (h_T - h_S))) = -mean(h_T - h_S) / 2.

    AdamW's first step is lr * sign(gradient) (both moments are bias-corrected to g and g^2): w = lr * sign(h_T - h_S).
    """
    discriminator = begun(student)
    gaps = []
    for better, worse in PAIRS:
        states = []
        for rollout in (better, worse):
            ids = torch.tensor([[*rollout.prompt.token_ids, *rollout.token_ids, 1]])
            states.append(student.load().eval().model(input_ids=ids).last_hidden_state[0, -1])  # type: ignore[operator]
        gaps.append(states[0] - states[1])
    expected = 1e-2 * torch.stack(gaps).mean(0).sign()
    discriminator.learn(PAIRS)
    head = discriminator.state()["model.head.weight"][0]
    assert torch.allclose(head, expected, atol=1e-5)


def test_it_learns_to_tell_them_apart_and_its_score_is_the_reward(student: HFStudent) -> None:
    """After some steps every pair is ordered, also on a prompt that it has not learned from."""
    discriminator = begun(student)
    for _ in range(30):
        found = discriminator.learn(PAIRS)
    assert found["accuracy"].value == 1.0 and found["margin"].value > 1.0
    good, bad = discriminator([answer("abc", "9="), answer("xyz", "9=")])
    assert good is not None and bad is not None and good > bad


@pytest.mark.parametrize("tokens", [1, 40, 8192])
def test_micro_batches_change_nothing(tokens: int, student: HFStudent) -> None:
    whole, parts = begun(student), begun(student, micro_batch_tokens=tokens)
    for _ in range(3):
        first, second = whole.learn(PAIRS), parts.learn(PAIRS)
    assert second["margin"].value == pytest.approx(first["margin"].value, abs=1e-4)
    rollouts = [answer("abc"), answer("a longer one"), answer("x", finish="length")]
    assert parts(rollouts) == pytest.approx(whole(rollouts), abs=1e-4)


def test_pairs_of_very_different_lengths_are_left_out(student: HFStudent) -> None:
    """Lengths with the end: 4 against 4, 6, 7 and 2; within a factor of 1.5 are the first two. Then no step at all."""
    discriminator = begun(student)
    pairs = [(answer("abc"), answer(text)) for text in ("xyz", "vwxyz", "uvwxyz", "z")]
    assert discriminator.learn(pairs)["pairs"] == Mean(2.0, 4.0)
    before = {name: tensor.clone() for name, tensor in discriminator.state().items()}
    found = discriminator.learn(pairs[2:])
    assert found["pairs"] == Mean(0.0, 2.0) and found["accuracy"].count == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in discriminator.state().items())
    assert begun(student, length_ratio=None).learn(pairs)["pairs"] == Mean(4.0, 4.0)


def test_an_answer_that_is_the_teachers_own_teaches_nothing(student: HFStudent) -> None:
    assert begun(student).learn([(answer("abc"), answer("abc")), PAIRS[0]])["pairs"] == Mean(1.0, 2.0)


def test_the_correlation_with_length_is_pearsons(student: HFStudent) -> None:
    """Whatever D says of answers of 2, 4 and 6 tokens (end included), compared with the definition."""
    discriminator = begun(student, length_ratio=None)
    pairs = [(answer("abc"), answer(text)) for text in ("z", "xyz", "vwxyz")]
    discriminator.learn(pairs)
    scores = [score for score in discriminator([worse for _, worse in pairs]) if score is not None]
    mean = sum(scores) / 3
    covariance = sum((n - 4) * (s - mean) for n, s in zip((2, 4, 6), scores, strict=True))
    expected = covariance / (8 * sum((s - mean) ** 2 for s in scores)) ** 0.5
    assert discriminator.learn(pairs)["length_corr"].value == pytest.approx(expected, abs=1e-5)


def test_what_is_not_judged(student: HFStudent) -> None:
    discriminator = begun(student, streams=["main"])
    judged = discriminator([answer("abc"), answer("", finish="aborted"), answer("abc", stream="heldout")])
    assert judged == [0.0, None, None]


def test_the_way_a_text_was_cut_into_tokens_tells_nothing(student: HFStudent) -> None:
    """Two rollouts of one text with other ids (as real tokenizers allow) get one score; a cut one has no end token."""
    discriminator = begun(student)
    discriminator.learn(PAIRS)
    odd = Rollout(answer("abc").prompt, 0, [7], [0.0], "abc", "stop", 0)
    whole, other, cut = discriminator([answer("abc"), odd, answer("abc", finish="length")])
    assert whole == other != cut


def test_its_state_restores_it_exactly(student: HFStudent) -> None:
    first, second = begun(student), begun(student)
    for _ in range(2):
        first.learn(PAIRS)
    second.restore({name: tensor.clone() for name, tensor in first.state().items()})
    for _ in range(2):
        assert first.learn(PAIRS) == second.learn(PAIRS)
    assert all(torch.equal(tensor, first.state()[name]) for name, tensor in second.state().items())


def test_the_loss_at_a_known_gap() -> None:
    """-log sigmoid(2) = log(1 + e^-2) = 0.126928: the formula that `learn` minimises, at a margin of 2."""
    assert -torch.nn.functional.logsigmoid(torch.tensor(2.0)).item() == pytest.approx(log(1 + exp(-2)), abs=1e-6)


@pytest.mark.parametrize(
    ("settings", "says"),
    [({"lr": 0.0}, "lr=0"), ({"length_ratio": 0.5}, "length_ratio=0.5"), ({"max_grad_norm": -1.0}, "max_")],
)
def test_settings_that_make_no_sense(settings: dict[str, float], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Discriminator("main", **settings)


def test_a_teacher_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    parts = [*tiny_opd(tmp_path), "+reward@reward.gad=discriminator", "reward.gad.teacher=mian"]
    assert refusal(*parts).startswith("reward.gad.teacher: no teacher 'mian'; did you mean main?")


# -------------------------------------------------------------------------------------------------------- whole runs


def gad(pair: Pair, run_dir: Path, *changes: str) -> list[str]:
    """Four steps of 2 prompts x 3 samples under a discriminator alone, which learns from the demo teacher's texts."""
    return [
        *pair.train(run_dir, "steps=4", "checkpoint.every=1", "~loss.distill", "~reward.correct"),
        "student.model=${demo_model:student}", "teacher.main.model=${demo_model:teacher}",
        "sampler.params.max_tokens=7", "+loss@loss.grpo=grpo",
        "credit=grpo", "data.streams.main.prompts=2", "data.streams.main.samples=3", "eval.every=4",
        "+reward@reward.gad=discriminator", "reward.gad.teacher=main", "reward.gad.lr=0.01", *changes,
    ]  # fmt: skip


def test_a_discriminator_is_trained_in_the_loop_and_resumes_bitwise(pair: Pair, tmp_path: Path) -> None:
    whole = opd(*gad(pair, tmp_path / "whole"))
    assert whole.code == 0, whole.err
    stopped = opd(*gad(pair, tmp_path / "run", "stop_after=2"))
    assert stopped.code == 0, stopped.err
    ended = opd(*gad(pair, tmp_path / "run"))
    assert ended.code == 0, ended.err
    assert_same_run(tmp_path / "whole", tmp_path / "run", 4)
    files = [checkpoint(tmp_path / run, 4) / "rewards" / "gad.safetensors" for run in ("whole", "run")]
    assert files[0].read_bytes() == files[1].read_bytes()
    lines = training_lines(tmp_path / "whole")
    assert lines[0]["reward/mean"] == lines[0]["reward/gad/margin"] == 0.0, "the head starts at zero"
    assert all(line["reward/gad/margin"] != 0.0 for line in lines[1:])
    assert all(0.0 < line["reward/gad/pairs"] <= 1.0 for line in lines)


def test_the_experiment_warms_up_by_imitation_alone(tmp_path: Path) -> None:
    run = prepare("experiment=quickstart_gad", "data.train.size=16", "data.heldout.size=16", f"run_dir={tmp_path}")
    weights = {term.name: [term.weight(progress) for progress in (0.0, 0.2, 0.25, 0.9)] for term in run.terms}
    assert weights == {"imitate": [1, 1, 1, 1], "grpo": [0, 0, 0.1, 0.1]}
    assert run.teachers.teachers == {} and set(run.teachers.answering) == {"main"}, "its texts alone are used"
