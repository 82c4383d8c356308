"""Which output predicts which token: a one-position shift, ragged rows, padding, and where gradients may fall."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput

from opd.batching import make_batch
from opd.engine import _Trainee
from opd.heads import Head
from opd.losses import ReverseKL
from opd.objective import Objective
from opd.padding import predictor_index
from opd.records import FullVocab, MicroBatch, Rollout
from opd.teachers import LocalTeacher
from opd.terms import Term
from tests.rows import answer_logp, rollout, row
from tests.tiny import save_model

VOCABULARY = 11
KL = Term("kl", ReverseKL(), teacher="main")


class SuccessorConfig(PreTrainedConfig):
    model_type = "successor"
    vocab_size = VOCABULARY


class SuccessorBody(PreTrainedModel):
    """One-hot states; `nudge` is added to the states of each column."""

    config_class = SuccessorConfig

    def __init__(self, config: SuccessorConfig) -> None:
        super().__init__(config)
        self.nudge = nn.Parameter(torch.zeros(16, VOCABULARY))
        self.post_init()

    def forward(self, input_ids: Tensor, **_: object) -> BaseModelOutput:
        states = nn.functional.one_hot(input_ids, VOCABULARY) + self.nudge[: input_ids.shape[1]]
        return BaseModelOutput(last_hidden_state=states)


class Successor(PreTrainedModel):
    """Puts logit 20 on (id + 1) mod 11 and 0 elsewhere."""

    config_class = SuccessorConfig
    base_model_prefix = "model"

    def __init__(self, config: SuccessorConfig) -> None:
        super().__init__(config)
        self.model = SuccessorBody(config)
        self.lm_head = nn.Linear(VOCABULARY, VOCABULARY, bias=False)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, input_ids: Tensor, **_: object) -> CausalLMOutput:
        return CausalLMOutput(logits=self.lm_head(self.model(input_ids).last_hidden_state))


@pytest.fixture(scope="module")
def successor(tmp_path_factory: pytest.TempPathFactory) -> LocalTeacher:
    """The model as a local teacher; `AutoModelForCausalLM.from_pretrained(successor.model)` is the equal student."""
    AutoConfig.register("successor", SuccessorConfig)
    AutoModelForCausalLM.register(SuccessorConfig, Successor)
    model = Successor(SuccessorConfig())
    with torch.no_grad():
        model.lm_head.weight.copy_(20 * torch.eye(VOCABULARY).roll(1, 0))
    folder = tmp_path_factory.mktemp("successor")
    model.save_pretrained(folder)
    teacher = LocalTeacher(str(folder), attention="eager")
    teacher.start()
    return teacher


def through_engine(
    model: nn.Module, sample: Rollout, scores: FullVocab, head: Head
) -> tuple[Tensor, dict[str, Tensor], MicroBatch]:
    """Loss, statistics and the micro-batch of one row under the KL term."""
    batch = make_batch([row(sample, scores=scores)], [KL], 100, 0)
    micro = batch.micro_batches[0]
    loss, _, statistics = _Trainee(model)(micro, {"main": head}, Objective([KL], {"kl": 1.0}, len(head.weight)))
    return loss, dict(statistics), micro


def test_no_position_is_shifted(successor: LocalTeacher) -> None:
    """Prompt [3, 4], answer [5, 6, 7]: every id follows its predecessor, so each has log-prob -log(1 + 10 exp(-20)) =
    -2e-8; a shift by one in either direction would give about -20.
    """
    sample = rollout([3, 4], [5, 6, 7])
    student = AutoModelForCausalLM.from_pretrained(successor.model)
    loss, statistics, micro = through_engine(student, sample, successor.score([sample])[0], successor.head())
    assert len(micro.tokens.token_ids) == 3
    assert (statistics["student/token_logp"] > -1e-5).all()
    assert (statistics["teacher/main/token_logp"] > -1e-5).all()
    assert statistics["teacher/main/kl"].abs().max().item() < 1e-5
    assert abs(loss.item()) < 1e-5


def test_a_teacher_moved_by_one_column_costs_more_than_10(successor: LocalTeacher) -> None:
    """Where the student is sure of id, the moved teacher gives it log-prob -20: the KL is 20 a token."""
    student = AutoModelForCausalLM.from_pretrained(successor.model)
    sample = rollout([3, 4], [5, 6, 7])
    moved = successor.score([rollout([3, 4, 5], [6, 7, 8])])[0]
    loss, _, _ = through_engine(student, sample, moved, successor.head())
    assert loss.item() == pytest.approx(20.0, abs=1e-3)


@pytest.mark.parametrize(("column", "matters"), [(0, False), (1, True), (2, True), (3, True), (4, False)])
def test_the_last_prompt_position_predicts_and_the_last_answer_position_does_not(
    successor: LocalTeacher, column: int, matters: bool
) -> None:
    """Columns 0 1 are the prompt, 2 3 4 the answer: columns 1 2 3 predict it. The nudge is equal to a state of id 9."""
    sample = rollout([3, 4], [5, 6, 7])
    student = AutoModelForCausalLM.from_pretrained(successor.model)
    with torch.no_grad():
        student.model.nudge[column, 9] = 1.0
    loss, _, _ = through_engine(student, sample, successor.score([sample])[0], successor.head())
    loss.backward()
    assert (loss.item() > 1e-3) == matters
    assert bool(student.model.nudge.grad[column].abs().max() > 1e-3) == matters


def test_a_prompt_of_one_token_predicts_the_first_answer_token(successor: LocalTeacher) -> None:
    sample = rollout([4], [5])
    student = AutoModelForCausalLM.from_pretrained(successor.model)
    _, statistics, micro = through_engine(student, sample, successor.score([sample])[0], successor.head())
    assert micro.tokens.predictor.tolist() == [0]
    assert statistics["student/token_logp"].item() > -1e-5


def test_predictor_index_by_hand() -> None:
    """Row 2 of width 10, prompt of 4: the first answer token stands in column 4, its predictor in 3: 2 * 10 + 3."""
    assert predictor_index(2, 10, 4, 0) == 23
    assert predictor_index(0, 10, 4, 5) == 8


def save_gpt2(folder: Path, seed: int) -> Path:
    """Learned positions, tied head."""
    torch.manual_seed(seed)
    config = GPT2Config(vocab_size=48, n_positions=64, n_embd=16, n_layer=2, n_head=2, initializer_range=0.3,
                        attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)  # fmt: skip
    GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=["rotary", "learned"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LocalTeacher]:
    """A student folder and a started teacher of one kind of positions."""
    folder = tmp_path_factory.mktemp(request.param)
    save = save_gpt2 if request.param == "learned" else save_model
    student, teacher = save(folder / "student", 0), LocalTeacher(str(save(folder / "teacher", 1)))
    teacher.start()
    return student, teacher


RAGGED = [rollout([7, 9], [11, 12, 13, 14, 15]), rollout([5, 6, 7, 8, 9, 10, 11, 12, 13], [20, 21, 22])]


def ragged_batch(teacher: LocalTeacher) -> MicroBatch:
    """Prompts of 2 and 9 tokens, answers of 5 and 3, in one micro-batch."""
    rows = [row(sample, scores=scores) for sample, scores in zip(RAGGED, teacher.score(RAGGED), strict=True)]
    return make_batch(rows, [KL], 100, 0).micro_batches[0]


def widened(micro: MicroBatch, extra: int) -> MicroBatch:
    """The same rows with more padding on the right."""
    width, pads = micro.input_ids.shape[1], torch.zeros(micro.input_ids.shape[0], extra, dtype=torch.long)
    predictor = micro.tokens.predictor
    return replace(
        micro,
        input_ids=torch.cat([micro.input_ids, pads], 1),
        attention_mask=torch.cat([micro.attention_mask, pads], 1),
        tokens=replace(micro.tokens, predictor=predictor // width * (width + extra) + predictor % width),
    )


def test_scores_in_a_ragged_batch_are_those_of_each_row_alone(pair: tuple[Path, LocalTeacher]) -> None:
    student, teacher = pair
    model = AutoModelForCausalLM.from_pretrained(student)
    micro = ragged_batch(teacher)
    goal = Objective([KL], {"kl": 1.0}, 48)
    _, values, statistics = _Trainee(model)(micro, {"main": teacher.head()}, goal)
    assert len(values["kl"]) == 8
    assert micro.input_ids.shape == (2, 12)
    longest_first = [RAGGED[1], RAGGED[0]]
    with torch.no_grad():
        alone = [(answer_logp(model, s), answer_logp(teacher.network, s), s.token_ids) for s in longest_first]
    picked = [[logp[range(len(ids)), ids] for logp in (p, q)] for p, q, ids in alone]
    kl = torch.cat([(p.exp() * (p - q)).sum(-1) for p, q, _ in alone])
    for name, expected in {
        "student/token_logp": torch.cat([p for p, _ in picked]),
        "teacher/main/token_logp": torch.cat([q for _, q in picked]),
        "teacher/main/kl": kl,
    }.items():
        assert torch.allclose(statistics[name].double(), expected, atol=1e-5), name


def test_wider_padding_changes_nothing(pair: tuple[Path, LocalTeacher]) -> None:
    student, teacher = pair
    results = []
    for extra in (0, 7):
        model = AutoModelForCausalLM.from_pretrained(student)
        micro, goal = widened(ragged_batch(teacher), extra), Objective([KL], {"kl": 1.0}, 48)
        loss, _, statistics = _Trainee(model)(micro, {"main": teacher.head()}, goal)
        loss.backward()
        results.append((loss.item(), statistics, {name: p.grad for name, p in model.named_parameters()}))
    (loss, statistics, grads), (loss_too, statistics_too, grads_too) = results
    assert loss_too == pytest.approx(loss, abs=1e-5)
    assert all(torch.allclose(statistics[name], statistics_too[name], atol=1e-5) for name in statistics)
    assert all(torch.allclose(grads[name], grads_too[name], atol=1e-5) for name in grads)


def test_a_teacher_scores_a_ragged_batch_as_each_row_alone(pair: tuple[Path, LocalTeacher]) -> None:
    _, teacher = pair
    for sample, together in zip(RAGGED, teacher.score(RAGGED), strict=True):
        assert torch.allclose(together.hidden, teacher.score([sample])[0].hidden, atol=1e-5)
        assert together.hidden.shape[0] == len(sample.token_ids)


def test_gradients_fall_on_predicting_positions_only(pair: tuple[Path, LocalTeacher]) -> None:
    """Row of 9 + 3 first: columns 8 9 10 predict; row of 2 + 5: columns 1 to 5."""
    student, teacher = pair
    model = AutoModelForCausalLM.from_pretrained(student)
    states: list[Tensor] = []

    def keep(_module: nn.Module, _inputs: object, output: BaseModelOutput) -> None:
        output.last_hidden_state.retain_grad()
        states.append(output.last_hidden_state)

    model.get_decoder().register_forward_hook(keep)
    goal = Objective([KL], {"kl": 1.0}, 48)
    _Trainee(model)(ragged_batch(teacher), {"main": teacher.head()}, goal)[0].backward()
    touched = (states[0].grad != 0).any(-1)
    assert [row_flags.nonzero()[:, 0].tolist() for row_flags in touched] == [[8, 9, 10], [1, 2, 3, 4, 5]]
