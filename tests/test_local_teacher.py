"""The local teacher's scores are the model's own log-probs of each answer position, whatever else is in the batch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import Gemma2Config, Gemma2ForCausalLM, GPT2Config, GPT2LMHeadModel

from opd.records import Example, Prompt, Rollout
from opd.students import SamplingParams
from opd.teachers import LocalTeacher, Teacher
from tests.tiny import save_model, tokenizer

ROWS = [(2, 5), (9, 3), (1, 1), (4, 0), (3, 12)]  # prompt and answer tokens; the first two are those of CASES 4


def gemma2(folder: Path) -> Path:
    """A model whose logits are capped."""
    config = Gemma2Config(
        vocab_size=48, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, head_dim=16,
        num_key_value_heads=1, initializer_range=0.5, final_logit_softcapping=2.0, query_pre_attn_scalar=16,
        pad_token_id=0, eos_token_id=1, bos_token_id=1, max_position_embeddings=64,
    )  # fmt: skip
    Gemma2ForCausalLM(config).save_pretrained(folder)
    return folder


def gpt2(folder: Path) -> Path:
    """A model with learned positions."""
    shape = {"vocab_size": 48, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2}
    config = GPT2Config(**shape, bos_token_id=None, eos_token_id=1, initializer_range=0.3)
    GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


MAKERS = {"rotary": save_model, "learned": gpt2, "capped": gemma2}


@pytest.fixture(scope="module", params=MAKERS)
def teacher(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LocalTeacher:
    """A started teacher of each kind."""
    torch.manual_seed(0)
    folder = MAKERS[request.param](tmp_path_factory.mktemp(request.param))
    tokenizer().save_pretrained(folder)
    teacher = LocalTeacher(str(folder))
    teacher.start()
    return teacher


def rollouts() -> list[Rollout]:
    """Random ids of ragged lengths."""
    generator = torch.Generator().manual_seed(2)
    made = []
    for number, (prompt, answer) in enumerate(ROWS):
        ids = torch.randint(3, 48, (prompt + answer,), generator=generator).tolist()
        asked = Prompt(str(number), "main", ids[:prompt], Example("p"))
        made.append(Rollout(asked, 0, ids[prompt:], [0.0] * answer, "", "length", 0))
    return made


@torch.no_grad()
def own_logp(teacher: LocalTeacher, rollout: Rollout) -> Tensor:
    """The model's log-softmax [R, V] at the answer's positions, from its own forward pass over the row alone."""
    ids = torch.tensor([rollout.prompt.token_ids + rollout.token_ids])
    logits = teacher.network(input_ids=ids).logits[0]
    return torch.log_softmax(logits[len(rollout.prompt.token_ids) - 1 : -1].double(), -1)


def scored(teacher: LocalTeacher, given: Sequence[Rollout]) -> list[Tensor]:
    """Log-probs [R, V] that follow from the teacher's scores and its head."""
    scores = [score for score in teacher.score(given) if score is not None]
    assert len(scores) == len(given)
    return [torch.log_softmax(teacher.head().logits(score.hidden).double(), -1) for score in scores]


@pytest.mark.parametrize("budget", [10_000, 24, 1], ids=["one batch", "some", "row by row"])
def test_scores_are_the_models_own_log_probs(teacher: LocalTeacher, budget: int) -> None:
    assert isinstance(teacher, Teacher)
    teacher.micro_batch_tokens = budget
    for rollout, logp in zip(rollouts(), scored(teacher, rollouts()), strict=True):
        assert logp.shape == (len(rollout.token_ids), 48)
        torch.testing.assert_close(logp, own_logp(teacher, rollout), atol=1e-5, rtol=0)


def test_a_row_does_not_depend_on_the_others(teacher: LocalTeacher) -> None:
    """Alone, in reverse order, and beside a row that makes the batch wider."""
    teacher.micro_batch_tokens = 10_000
    given = rollouts()
    together = scored(teacher, given)
    for number, rollout in enumerate(given):
        torch.testing.assert_close(scored(teacher, [rollout])[0], together[number], atol=1e-5, rtol=0)
        torch.testing.assert_close(scored(teacher, given[::-1])[-1 - number], together[number], atol=1e-5, rtol=0)
        torch.testing.assert_close(scored(teacher, [given[-1], rollout])[1], together[number], atol=1e-5, rtol=0)


def test_the_shift_is_one_position(teacher: LocalTeacher) -> None:
    """The last answer token changes no score, the last prompt token changes the first."""
    rollout = rollouts()[0]
    before = scored(teacher, [rollout])[0]
    last = Rollout(rollout.prompt, 0, [*rollout.token_ids[:-1], 3], rollout.logp, "", "length", 0)
    torch.testing.assert_close(scored(teacher, [last])[0], before, atol=1e-6, rtol=0)
    other = Prompt("p", "main", [*rollout.prompt.token_ids[:-1], 3], Example("p"))
    moved = scored(teacher, [Rollout(other, 0, rollout.token_ids, rollout.logp, "", "length", 0)])[0]
    assert (moved[0] - before[0]).abs().max() > 1e-2


def test_nothing_of_a_teacher_is_trained(teacher: LocalTeacher) -> None:
    assert not any(parameter.requires_grad for parameter in teacher.network.parameters())
    assert not any(score.hidden.requires_grad for score in teacher.score(rollouts()) if score is not None)


def test_the_teachers_own_greedy_answers_are_its_likeliest_tokens(teacher: LocalTeacher) -> None:
    answers = teacher.sample([rollout.prompt for rollout in rollouts()], SamplingParams(6, temperature=0.0), seed=0)
    for answer in answers:
        logp = own_logp(teacher, answer)
        assert answer.token_ids == logp.argmax(-1).tolist()
        assert answer.logp == pytest.approx(logp.max(-1).values.tolist(), abs=1e-4)


def test_a_closed_teacher_holds_no_weights(tmp_path: Path) -> None:
    teacher = LocalTeacher(str(save_model(tmp_path)))
    teacher.start()
    teacher.close()
    assert not [value for value in vars(teacher).values() if isinstance(value, torch.nn.Module | torch.Tensor)]
