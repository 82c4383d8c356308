"""`opd export`: folders that Transformers, PEFT and vLLM load, with the trainer's own logits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from tests.runs import Pair, checkpoint, checkpoint_steps, engine_state, opd, save_pair
from tests.tiny import save_model, tokenizer

IDS = torch.tensor([[4, 9, 13, 20, 33, 7, 2, 1]])
LORA = ["student=lora", "student.lora.r=4", "student.lora.lora_alpha=8"]
BEST = ["checkpoint.best_metric=eval/kl", "checkpoint.best_mode=max", "checkpoint.keep=1", "eval.teacher=false"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """The student has a chat template and generation settings of its own."""
    pair = save_pair(tmp_path_factory.mktemp("models"))
    GenerationConfig(temperature=0.7, eos_token_id=[1, 2], do_sample=True).save_pretrained(pair.student)
    return pair


@pytest.fixture(scope="module")
def full(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that trained all weights; its divergence falls, so by `max` an early checkpoint is the best."""
    run_dir = tmp_path_factory.mktemp("full") / "run"
    assert opd(*pair.train(run_dir, *BEST)).code == 0
    return run_dir


@pytest.fixture(scope="module")
def adapted(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that trained an adapter."""
    run_dir = tmp_path_factory.mktemp("adapted") / "run"
    assert opd(*pair.train(run_dir, *LORA, "engine.optimizer.lr=0.03")).code == 0
    return run_dir


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    return model.eval()(input_ids=IDS).logits


def trained(pair: Pair, run_dir: Path, step: int = 6, lora: LoraConfig | None = None) -> Tensor:
    """Logits of the trainer's own module: DeepSpeed's saved state in a fresh model, an adapter kept apart."""
    model = AutoModelForCausalLM.from_pretrained(pair.student)
    if lora is not None:
        model = get_peft_model(model, lora)
    saved = engine_state(checkpoint(run_dir, step))["module"]
    model.load_state_dict({name.split(".", 1)[1]: tensor for name, tensor in saved.items()})
    return logits(model)


def test_a_full_run_exports_the_trainers_logits(pair: Pair, full: Path, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    ended = opd("export", str(full), f"out={out}")
    assert ended.code == 0, ended.err
    assert str(out) in ended.out
    found = logits(AutoModelForCausalLM.from_pretrained(out))
    torch.testing.assert_close(found, trained(pair, full), rtol=0, atol=1e-5)
    start = logits(AutoModelForCausalLM.from_pretrained(pair.student))
    assert (found - start).abs().max() > 0.01


def test_tokenizer_template_and_generation_settings_come_along(full: Path, adapted: Path, tmp_path: Path) -> None:
    for number, run_dir in enumerate((full, adapted)):
        out = tmp_path / str(number)
        assert opd("export", str(run_dir), f"out={out}").code == 0
        loaded = AutoTokenizer.from_pretrained(out)
        assert loaded.get_vocab() == tokenizer().get_vocab()
        assert loaded.chat_template == tokenizer().chat_template
        generation = json.loads((out / "generation_config.json").read_text())
        assert (generation["temperature"], generation["eos_token_id"]) == (0.7, [1, 2])
        assert AutoModelForCausalLM.from_pretrained(out).generation_config.eos_token_id == [1, 2]


def test_best_and_latest_are_different_checkpoints(pair: Pair, full: Path, tmp_path: Path) -> None:
    best, latest = checkpoint_steps(full)
    for which, step in (("best", best), ("latest", latest)):
        assert opd("export", str(full), f"out={tmp_path / which}", f"which={which}").code == 0
        exported = logits(AutoModelForCausalLM.from_pretrained(tmp_path / which))
        torch.testing.assert_close(exported, trained(pair, full, step), rtol=0, atol=1e-5)
    weights = [(tmp_path / which / "model.safetensors").read_bytes() for which in ("best", "latest")]
    assert weights[0] != weights[1]


def test_an_adapter_run_exports_merged_logits(pair: Pair, adapted: Path, tmp_path: Path) -> None:
    """The trainer computes W x + s B A x, the export (W + s B A) x."""
    lora = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules="all-linear")
    expected = trained(pair, adapted, lora=lora)
    assert (expected - logits(AutoModelForCausalLM.from_pretrained(pair.student))).abs().max() > 0.01
    assert opd("export", str(adapted), f"out={tmp_path / 'merged'}").code == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(merged), expected, rtol=0, atol=1e-5)
    assert not [name for name in load_file(tmp_path / "merged" / "model.safetensors") if "lora" in name]
    assert opd("export", str(adapted), f"out={tmp_path / 'adapter'}", "adapter=true").code == 0
    apart = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    torch.testing.assert_close(logits(apart), expected, rtol=0, atol=1e-5)
    assert not (tmp_path / "adapter" / "model.safetensors").exists()
    assert AutoTokenizer.from_pretrained(tmp_path / "adapter").chat_template == tokenizer().chat_template


def test_the_merge_has_the_dtype_of_the_run(pair: Pair, tmp_path: Path) -> None:
    """An fp32 run on weights stored in bf16: the merged weights are fp32 and hold W + s B A to fp32 precision."""
    half = Pair(save_model(tmp_path / "half", dtype=torch.bfloat16), pair.teacher)
    run_dir = tmp_path / "run"
    assert opd(*half.train(run_dir, *LORA, "steps=2", "engine.optimizer.lr=0.03")).code == 0
    assert opd("export", str(run_dir), f"out={tmp_path / 'out'}").code == 0
    saved = engine_state(checkpoint(run_dir, 2))["module"]
    layer = "model.layers.0.mlp.up_proj"
    stem = next(name for name in saved if name.endswith(f"{layer}.base_layer.weight")).removesuffix("base_layer.weight")
    parts = ("base_layer", "lora_A.default", "lora_B.default")
    base, down, up = (saved[f"{stem}{part}.weight"].double() for part in parts)
    expected = base + 2.0 * up @ down
    found = load_file(tmp_path / "out" / "model.safetensors")[f"{layer}.weight"]
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-7)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float32"


def test_an_existing_folder_is_not_touched(full: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    ended = opd("export", str(full), f"out={tmp_path / 'out'}")
    assert ended.code == 2
    assert "exists already" in ended.err
    assert list((tmp_path / "out").iterdir()) == []


def test_what_cannot_be_exported_is_refused(full: Path, tmp_path: Path) -> None:
    out = f"out={tmp_path / 'out'}"
    for arguments, told in (
        ([str(full), out, "adapter=true"], "trained all weights, there is no adapter"),
        ([str(full), out, "which=worst"], "best"),
        ([str(tmp_path / "nowhere"), out], "no latest checkpoint there"),
        ([str(full)], "usage: opd export"),
    ):
        ended = opd("export", *arguments)
        assert ended.code == 2
        assert told in ended.err
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_checkpoint_is_not_exported(full: Path, tmp_path: Path) -> None:
    weights = checkpoint(full, 6) / "hf" / "model.safetensors"
    kept = weights.read_bytes()
    weights.write_bytes(kept[:-1])
    ended = opd("export", str(full), f"out={tmp_path / 'out'}")
    weights.write_bytes(kept)
    assert ended.code == 2
    assert str(weights) in ended.err


@pytest.mark.slow
@pytest.mark.vllm
def test_vllm_loads_both_exports_with_the_trainers_log_probs(
    pair: Pair, full: Path, adapted: Path, tmp_path: Path
) -> None:
    from vllm import LLM, SamplingParams

    lora = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules="all-linear")
    for name, run_dir, adapter in (("full", full, None), ("merged", adapted, lora)):
        out = tmp_path / name
        assert opd("export", str(run_dir), f"out={out}").code == 0
        engine = LLM(
            str(out), dtype="float32", max_model_len=32, max_num_seqs=4, enforce_eager=True, seed=0,
            kv_cache_memory_bytes=2**25, disable_log_stats=True,
        )  # fmt: skip
        request = SamplingParams(max_tokens=1, prompt_logprobs=1, temperature=0.0)
        ids = IDS[0].tolist()
        (answer,) = engine.generate([{"prompt_token_ids": ids}], [request], use_tqdm=False)
        given = [scores[token].logprob for token, scores in zip(ids[1:], answer.prompt_logprobs[1:], strict=True)]
        logp = trained(pair, run_dir, lora=adapter)[0].log_softmax(-1)[:-1].gather(-1, IDS[0, 1:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(given), logp, rtol=0, atol=1e-4)
        engine.llm_engine.engine_core.shutdown()


def test_an_adapter_whose_base_was_moved(pair: Pair, tmp_path: Path) -> None:
    """The adapter alone can still be exported."""
    base = tmp_path / "base"
    shutil.copytree(pair.student, base)
    run_dir = tmp_path / "run"
    assert opd(*Pair(base, pair.teacher).train(run_dir, *LORA, "steps=1")).code == 0
    base.rename(tmp_path / "elsewhere")
    ended = opd("export", str(run_dir), f"out={tmp_path / 'out'}")
    assert ended.code == 2
    assert f"student.model={base}: the run trained an adapter on it, and it cannot be read there" in ended.err
    assert [path.name for path in tmp_path.iterdir() if "out" in path.name] == []
    assert opd("export", str(run_dir), f"out={tmp_path / 'out'}", "adapter=true").code == 0
