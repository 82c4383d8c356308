"""The DeepSpeed engine against plain torch: updates, norms, clipping, schedules, refusals, adapters, saved state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PhiConfig, PhiForCausalLM

from opd.engine import EngineConfig
from opd.losses import Formula
from opd.records import TokenChunk
from opd.rows import Row
from opd.students import HFStudent
from opd.terms import Term
from tests.rows import (
    TERMS,
    WEIGHTS,
    Setting,
    engine,
    gradients,
    largest_difference,
    masked,
    sgd,
    weights_of,
)
from tests.tiny import save_model, tokenizer

STAGES = [0, 1, 2, 3]
SPLITS = {1000: [5], 36: [3, 2], 12: [1, 1, 1, 2]}  # budget -> rows per micro-batch, of rows of 12, 11, 7, 5, 5
SPLITS_OF_THREE = {1000: [3], 36: [3], 12: [1, 1, 1]}  # the same of rows of 12, 7, 5
LORA = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
ADAM = partial(torch.optim.AdamW, lr=1e-2, betas=(0.9, 0.95))


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    folder = tmp_path_factory.mktemp("models")
    return Setting.of(
        save_model(folder / "student", 0, hidden=16, layers=1), save_model(folder / "teacher", 1, hidden=24, layers=1)
    )


def plain_updates(
    setting: Setting, model: nn.Module, windows: Sequence[Sequence[Row]], *, clip: float = 0.0,
    rates: Sequence[float] = (0.1, 0.1, 0.1),
) -> tuple[list[float], list[float]]:  # fmt: skip
    """SGD by plain torch, in place: one whole-batch loss per window. Losses and gradient norms before clipping."""
    losses, norms = [], []
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained)
    for rows, rate in zip(windows, rates, strict=False):
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        loss = setting.plain_loss(model, rows)
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(trained, clip or float("inf")).item())
        losses.append(loss.item())
        optimizer.step()
    return losses, norms


def all_weights(model: nn.Module) -> dict[str, Tensor]:
    """As `Engine.weights` names them: a tied head under its own name too."""
    return {name: parameter.detach() for name, parameter in model.named_parameters(remove_duplicate=False)}


def total(metrics: Mapping[str, Any]) -> float:
    return sum(weight * metrics[f"loss/{name}"].value for name, weight in WEIGHTS.items())


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("budget", SPLITS)
def test_updates_equal_plain_sgd(setting: Setting, stage: int, budget: int) -> None:
    """Two windows of different length: weights to 1e-6, reported losses and gradient norms too."""
    windows = [setting.rows, [setting.rows[i] for i in (1, 0, 2)]]
    reference = setting.plain_model()
    losses, norms = plain_updates(setting, reference, windows)
    trained = engine(setting.student, stage)
    for rows, loss, norm, split in zip(windows, losses, norms, (SPLITS, SPLITS_OF_THREE), strict=True):
        batch = setting.batch(rows, budget=budget)
        assert [micro.rows for micro in batch.micro_batches] == split[budget]
        metrics = trained.update(batch, setting.objective(), setting.heads())
        assert total(metrics) == pytest.approx(loss, abs=2e-6)
        assert metrics["grad_norm"].value == pytest.approx(norm, rel=1e-5)
    assert largest_difference(weights_of(trained), all_weights(reference)) < 1e-6


@pytest.mark.parametrize("stage", STAGES)
def test_clipping_equals_plain_torch_and_reports_the_norm_before_it(setting: Setting, stage: int) -> None:
    """The gradient's norm is about 4.8, clipped to 0.5."""
    reference = setting.plain_model()
    _, norms = plain_updates(setting, reference, [setting.rows] * 2, clip=0.5)
    trained = engine(setting.student, stage, max_grad_norm=0.5)
    for norm in norms:
        metrics = trained.update(setting.batch(budget=12), setting.objective(), setting.heads())
        assert metrics["grad_norm"].value == pytest.approx(norm, rel=1e-5)
        assert norm > 1.0
    assert largest_difference(weights_of(trained), all_weights(reference)) < 1e-6


@pytest.mark.parametrize("stage", STAGES)
def test_the_schedule_moves_once_per_update_and_the_rate_used_is_reported(setting: Setting, stage: int) -> None:
    """Four micro-batches per update, rates .1, .05, .025."""
    schedule = partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda done: 0.5**done)
    reference = setting.plain_model()
    plain_updates(setting, reference, [setting.rows] * 3, rates=(0.1, 0.05, 0.025))
    trained = engine(setting.student, stage, scheduler=schedule)
    batch = setting.batch(budget=12)
    rates = [trained.update(batch, setting.objective(), setting.heads())["lr"].value for _ in range(3)]
    assert rates == pytest.approx([0.1, 0.05, 0.025])
    assert largest_difference(weights_of(trained), all_weights(reference)) < 2e-6


@pytest.mark.parametrize("stage", STAGES)
def test_a_micro_batch_without_trainable_tokens_changes_no_update(setting: Setting, stage: int) -> None:
    """The row of 12 tokens comes first and is masked, so is a row of 5 that comes last."""
    rows = [setting.rows[0], masked(setting.rows[1]), setting.rows[3], masked(setting.rows[4])]
    reference = setting.plain_model()
    plain_updates(setting, reference, [[setting.rows[0], setting.rows[3]]])
    trained = engine(setting.student, stage)
    batch = setting.batch(rows, budget=1)
    assert [len(micro.tokens.token_ids) for micro in batch.micro_batches] == [0, 8, 5, 0]
    trained.update(batch, setting.objective(), setting.heads())
    assert largest_difference(weights_of(trained), all_weights(reference)) < 1e-6


@pytest.mark.parametrize("stage", STAGES)
def test_a_window_without_trainable_tokens_is_skipped_and_counted(setting: Setting, stage: int) -> None:
    """Weights, moments and schedule stay bit for bit: the next update is that of an engine that never saw it."""
    schedule = partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda done: 0.5**done)
    nothing = setting.batch([masked(r) for r in setting.rows], budget=12)
    results = []
    for windows in ([setting.batch(), nothing, setting.batch()], [setting.batch(), setting.batch()]):
        trained = engine(setting.student, stage, optimizer=ADAM, scheduler=schedule)
        metrics = []
        for batch in windows:
            before = weights_of(trained)
            metrics.append(trained.update(batch, setting.objective(), setting.heads()))
            if batch is nothing:
                assert all(torch.equal(before[name], tensor) for name, tensor in weights_of(trained).items())
        results.append((weights_of(trained), metrics))
    (skipped, of_three), (straight, of_two) = results
    assert [m["update/skipped"].value for m in of_three] == [0.0, 1.0, 0.0]
    assert "grad_norm" not in of_three[1]
    assert of_three[2] == of_two[1]
    assert all(torch.equal(skipped[name], tensor) for name, tensor in straight.items())


def broken(chunk: TokenChunk) -> Tensor:
    """Infinite at one token of the batch."""
    return chunk.token_logp + torch.where(chunk.token_ids == chunk.token_ids.max(), torch.inf, 0.0)


def steep(chunk: TokenChunk) -> Tensor:
    """Value 0 with an infinite slope."""
    return (chunk.token_logp - chunk.token_logp.detach()).sqrt()


@pytest.mark.parametrize("stage", STAGES)
def test_a_loss_that_is_not_finite_is_refused_before_the_step(setting: Setting, stage: int) -> None:
    terms = [TERMS["kl"], Term("bad", Formula(broken))]
    rows = [replace(r, terms=frozenset({"kl", "bad"})) for r in setting.rows]
    trained = engine(setting.student, stage, optimizer=ADAM)
    before = weights_of(trained)
    with pytest.raises(FloatingPointError, match=r"^loss/bad is not finite"):
        trained.update(
            setting.batch(rows, terms, budget=12), setting.objective(terms, {"kl": 1.0, "bad": 1.0}), setting.heads()
        )
    assert all(torch.equal(before[name], tensor) for name, tensor in weights_of(trained).items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_gradient_that_is_not_finite_is_refused(setting: Setting, stage: int, dtype: str) -> None:
    """The loss is 0, so only the gradient tells."""
    term = Term("steep", Formula(steep))
    rows = [replace(r, terms=frozenset({"steep"})) for r in setting.rows]
    trained = engine(HFStudent(str(setting.student), dtype), stage, optimizer=ADAM, max_grad_norm=1.0)
    before = weights_of(trained)
    with pytest.raises(FloatingPointError, match="gradient norm"):
        trained.update(setting.batch(rows, [term]), setting.objective([term], {"steep": 1.0}), setting.heads())
    assert all(torch.equal(before[name], tensor) for name, tensor in weights_of(trained).items())


@pytest.mark.parametrize("stage", STAGES)
def test_a_bf16_step_is_near_the_fp32_one(setting: Setting, stage: int) -> None:
    """bf16 keeps 8 bits: the change is compared with what rounding of weights (2^-8 of each) leaves of it."""
    reference = setting.plain_model()
    start = {name: tensor.clone() for name, tensor in all_weights(reference).items()}
    _, norms = plain_updates(setting, reference, [setting.rows])
    trained = engine(HFStudent(str(setting.student), "bfloat16"), stage)
    metrics = trained.update(setting.batch(budget=36), setting.objective(), setting.heads())
    assert metrics["grad_norm"].value == pytest.approx(norms[0], rel=0.05)
    for name, tensor in weights_of(trained).items():
        assert tensor.dtype == torch.bfloat16
        want = all_weights(reference)[name]
        allowed = 2**-7 * want.abs().max() + 0.1 * (want - start[name]).abs().max()
        assert (tensor.double() - want).abs().max() < allowed, name


@pytest.mark.parametrize("stage", [0, 3])
def test_an_untied_head_equals_plain_torch(setting: Setting, tmp_path: Path, stage: int) -> None:
    untied = replace(setting, student=save_model(tmp_path / "untied", 4, hidden=16, layers=1, tied=False))
    reference = untied.plain_model()
    plain_updates(untied, reference, [untied.rows])
    trained = engine(untied.student, stage)
    trained.update(untied.batch(budget=12), untied.objective(), untied.heads())
    assert largest_difference(weights_of(trained), all_weights(reference)) < 1e-6


@pytest.mark.parametrize("stage", [0, 3])
def test_a_head_with_bias_equals_plain_torch(setting: Setting, tmp_path: Path, stage: int) -> None:
    """At ZeRO 3 the bias is taken apart like the weight, and used outside its own layer."""
    torch.manual_seed(5)
    config = PhiConfig(vocab_size=48, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
                       initializer_range=0.3, resid_pdrop=0.0)  # fmt: skip
    PhiForCausalLM(config).save_pretrained(tmp_path / "phi")
    biased = replace(setting, student=tmp_path / "phi")
    reference = biased.plain_model()
    plain_updates(biased, reference, [biased.rows])
    trained = engine(biased.student, stage)
    trained.update(biased.batch(budget=12), biased.objective(), biased.heads())
    assert largest_difference(weights_of(trained), all_weights(reference)) < 1e-6


def test_a_tied_head_gets_the_embeddings_part_and_the_heads_part(setting: Setting) -> None:
    """The same weights untied give the two parts apart, by plain autograd."""
    model = AutoModelForCausalLM.from_pretrained(setting.student)
    _, grads, _ = gradients(model, setting.batch(), setting.objective(), setting.heads())
    untied = setting.plain_model()
    untied.lm_head.weight = nn.Parameter(untied.lm_head.weight.detach().clone())
    setting.plain_loss(untied).backward()
    of_embedding, of_head = untied.get_input_embeddings().weight.grad, untied.lm_head.weight.grad
    assert min(of_embedding.abs().max().item(), of_head.abs().max().item()) > 1e-2
    tied = grads["model.embed_tokens.weight"].double()
    assert torch.allclose(tied, of_embedding + of_head, atol=1e-6)


ON_HEAD = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
WHOLE_HEAD = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"], init_lora_weights=False)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("lora", [ON_HEAD, WHOLE_HEAD], ids=["adapter", "whole"])
def test_the_head_of_an_untied_model_may_be_adapted(
    setting: Setting, tmp_path: Path, lora: LoraConfig, stage: int
) -> None:
    """Two updates equal plain torch on the model's own logits; the sampler gets the merged head, the base is kept."""
    untied = replace(setting, student=save_model(tmp_path, 0, hidden=16, layers=1, tied=False))
    student = HFStudent(str(untied.student), lora=lora)
    torch.manual_seed(0)
    reference = student.load().double()
    plain_updates(untied, reference, [untied.rows] * 2)
    torch.manual_seed(0)
    trained = engine(student, stage)
    for _ in range(2):
        trained.update(untied.batch(budget=12), untied.objective(), untied.heads())
    merged, original = weights_of(trained), all_weights(AutoModelForCausalLM.from_pretrained(untied.student))
    assert largest_difference(merged, all_weights(reference.merge_and_unload())) < 2e-6
    changed = {name for name in merged if not torch.equal(merged[name], original[name])}
    assert changed == {"lm_head.weight", "model.layers.0.self_attn.q_proj.weight"}


def test_an_adapter_on_a_tied_head_is_refused(setting: Setting) -> None:
    with pytest.raises(ValueError, match="tied to the head"):
        engine(HFStudent(str(setting.student), lora=ON_HEAD))


@pytest.mark.parametrize("stage", [0, 3])
def test_only_the_adapter_is_trained(setting: Setting, stage: int) -> None:
    """Two updates of the adapter alone equal plain torch; every other weight stays bit for bit."""
    student = HFStudent(str(setting.student), lora=LORA)
    torch.manual_seed(0)
    reference = student.load().double()
    plain_updates(setting, reference, [setting.rows] * 2)
    torch.manual_seed(0)
    trained = engine(student, stage)
    start = {name: p.shape for name, p in AutoModelForCausalLM.from_pretrained(setting.student).named_parameters()}
    for _ in range(2):
        trained.update(setting.batch(budget=12), setting.objective(), setting.heads())
    merged = weights_of(trained)
    assert start.keys() <= merged.keys()
    expected = all_weights(reference.merge_and_unload())
    assert largest_difference(merged, expected) < 2e-6
    original = all_weights(AutoModelForCausalLM.from_pretrained(setting.student))
    adapted = {name for name in merged if "q_proj" in name or "down_proj" in name}
    assert len(adapted) == 2
    assert all(torch.equal(merged[name], original[name]) for name in merged.keys() - adapted)
    assert all((merged[name] - original[name]).abs().max() > 1e-3 for name in adapted)


@pytest.mark.parametrize("lora", [None, LORA], ids=["all", "adapter"])
@pytest.mark.parametrize("stage", [0, 3])
def test_gradient_checkpointing_changes_no_gradient(setting: Setting, stage: int, lora: LoraConfig | None) -> None:
    """One SGD step with and without: the layer runs twice with it, the weights are the same."""
    results = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        student = HFStudent(str(setting.student), lora=lora, gradient_checkpointing=checkpointing)
        trained = engine(student, stage)
        calls: list[None] = []
        body = trained.module.model.get_decoder()
        body.layers[0].self_attn.register_forward_hook(lambda *_, calls=calls: calls.append(None))
        trained.update(setting.batch(), setting.objective(), setting.heads())
        results.append((weights_of(trained), len(calls)))
    (plain, once), (checkpointed, twice) = results
    assert (once, twice) == (1, 2)
    assert largest_difference(plain, checkpointed) < 1e-7


def test_all_terms_share_one_student_forward(setting: Setting) -> None:
    """GRPO beside three divergences: as many forwards of the body as micro-batches."""
    trained = engine(setting.student)
    calls: list[None] = []
    trained.module.model.get_decoder().register_forward_hook(lambda *_: calls.append(None))
    batch = setting.batch(budget=12)
    trained.update(batch, setting.objective(), setting.heads())
    assert len(calls) == len(batch.micro_batches) == 4


@pytest.mark.parametrize("stage", STAGES)
def test_measuring_changes_nothing(setting: Setting, stage: int) -> None:
    trained = engine(setting.student, stage)
    before = weights_of(trained)
    batch = setting.batch(budget=12)
    outcomes = trained.measure(batch, setting.objective(), setting.heads())
    assert all(torch.equal(before[name], tensor) for name, tensor in weights_of(trained).items())
    metrics = trained.update(batch, setting.objective(), setting.heads())
    kl = torch.cat([outcome.statistics["teacher/main/kl"] for _, outcome in outcomes])
    assert metrics["teacher/main/kl"].value == pytest.approx(kl.nanmean().item(), abs=1e-6)


@pytest.mark.parametrize("stage", STAGES)
def test_saved_state_continues_bit_for_bit(setting: Setting, stage: int, tmp_path: Path) -> None:
    """Two updates, a save, two more; a fresh engine that loads and makes the same two ends with the same bits."""
    schedule = partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda done: 0.5**done)
    student, batch = HFStudent(str(setting.student)), setting.batch(budget=12)

    def two_updates(trained: Any) -> list[Any]:
        return [trained.update(batch, setting.objective(), setting.heads()) for _ in range(2)]

    first = engine(student, stage, optimizer=ADAM, scheduler=schedule, max_grad_norm=1.0)
    two_updates(first)
    saved = weights_of(first)
    first.save(tmp_path, student, tokenizer())
    metrics = two_updates(first)
    second = engine(student, stage, optimizer=ADAM, scheduler=schedule, max_grad_norm=1.0)
    second.load(tmp_path)
    assert all(torch.equal(saved[name], tensor) for name, tensor in weights_of(second).items())
    assert two_updates(second) == metrics
    assert [m["lr"].value for m in metrics] == pytest.approx([1e-2 / 4, 1e-2 / 8])
    final = weights_of(first)
    assert all(torch.equal(final[name], tensor) for name, tensor in weights_of(second).items())
    assert any(not torch.equal(final[name], saved[name]) for name in final)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert all(torch.equal(saved[name], tensor) for name, tensor in all_weights(exported).items())


def test_loading_what_is_not_there_is_an_error(setting: Setting, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="engine"):
        engine(setting.student).load(tmp_path)


def test_further_settings_are_merged_key_by_key() -> None:
    config = EngineConfig(sgd(), zero_stage=2, deepspeed={"zero_optimization": {"overlap_comm": False}, "wall": True})
    settings = config.settings("float32")
    assert settings["zero_optimization"] == {"stage": 2, "overlap_comm": False}
    assert settings["wall"] is True


@pytest.mark.parametrize(
    ("deepspeed", "message"),
    [
        ({"gradient_accumulation_steps": 4}, r"deepspeed\.gradient_accumulation_steps=4: .*set micro_batch_tokens"),
        ({"gradient_clipping": 1.0}, r"deepspeed\.gradient_clipping=1\.0: .*set max_grad_norm"),
        ({"zero_optimization": {"stage": 1}}, r"deepspeed\.zero_optimization\.stage=1: .*set zero_stage"),
        ({"fp16": {"enabled": True}}, r"deepspeed\.fp16\.enabled=True: .*set student\.dtype"),
    ],
)
def test_settings_that_would_contradict_ours_are_refused(deepspeed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(sgd(), deepspeed=deepspeed)
