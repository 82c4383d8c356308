"""What a trainer sends: every weight under its Hugging Face name, adapters merged exactly and out of place."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from opd.parity import ParityConfig, check_parity
from opd.students import HFStudent
from opd.weight_sync import check_adapter, hf_name, named_weights
from tests.tiny import save_model

LINEAR = ["q_proj", "v_proj", "down_proj"]


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model's folder."""
    return save_model(tmp_path_factory.mktemp("model"), tied=request.param)


@contextmanager
def whole(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Nothing is sharded here."""
    yield


def sent(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all weights."""
    weights = [(name, tensor.clone()) for name, tensor in named_weights(model, whole)]
    assert len(dict(weights)) == len(weights), "a name was sent twice"
    return dict(weights)


def randomized(model: PeftModel) -> PeftModel:
    """The adapter's matrices far from zero."""
    torch.manual_seed(5)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.3)
    return model


def expected_names(folder: Path) -> set[str]:
    """The names of a plain model of the folder, the head's own included where it is tied."""
    return {name for name, _ in AutoModelForCausalLM.from_pretrained(folder).named_parameters(remove_duplicate=False)}


@pytest.mark.parametrize("lora", [None, LoraConfig(r=2, target_modules=LINEAR)], ids=["whole", "lora"])
def test_every_weight_is_sent_under_its_own_name(folder: Path, lora: LoraConfig | None) -> None:
    """At the start an adapter's B is 0, so what is sent is bit-identical to the file."""
    weights = sent(HFStudent(str(folder), lora=lora).load())
    plain = dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters(remove_duplicate=False))
    assert weights.keys() == plain.keys() == expected_names(folder)
    assert "lm_head.weight" in weights
    assert all(torch.equal(weights[name], plain[name]) for name in plain)


@pytest.mark.parametrize("rslora", [False, True])
def test_an_adapter_is_merged_as_w_plus_scale_b_a(folder: Path, rslora: bool) -> None:
    """scale = alpha / r = 12 / 4 = 3, or with rank stabilisation alpha / sqrt(r) = 6."""
    lora = LoraConfig(r=4, lora_alpha=12, target_modules=LINEAR, use_rslora=rslora)
    model = randomized(HFStudent(str(folder), lora=lora).load())
    weights = sent(model)
    assert weights.keys() == expected_names(folder)
    base = dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters(remove_duplicate=False))
    for name, weight in weights.items():
        if any(f"{target}.weight" in name for target in LINEAR):
            layer = model.get_submodule(f"base_model.model.{name.removesuffix('.weight')}")
            a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
            torch.testing.assert_close(weight, base[name] + (6 if rslora else 3) * (b @ a), atol=1e-6, rtol=1e-6)
            assert (weight - base[name]).abs().max() > 0.1
        else:
            assert torch.equal(weight, base[name])


def test_a_plain_model_with_the_sent_weights_computes_the_same(folder: Path) -> None:
    lora = LoraConfig(r=4, target_modules="all-linear", modules_to_save=["norm", "input_layernorm"])
    model = randomized(HFStudent(str(folder), lora=lora).load())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "modules_to_save" in name:
                parameter.add_(0.5)
    plain = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    plain.load_state_dict(sent(model))
    ids = torch.arange(3, 20)[None]
    torch.testing.assert_close(plain(ids).logits, model(ids).logits, atol=2e-4, rtol=1e-4)


def test_transposed_layers_are_merged_as_they_are_stored() -> None:
    """GPT-2's Conv1D keeps W as [in, out]: W + scale * (B A)^T."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=40, n_positions=32, n_embd=16, n_layer=1, n_head=2)
    plain = GPT2LMHeadModel(config).eval()
    lora = LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    model = randomized(get_peft_model(GPT2LMHeadModel(config).eval(), lora))
    plain.load_state_dict(sent(model), strict=False)
    ids = torch.arange(3, 20)[None]
    torch.testing.assert_close(plain(ids).logits, model(ids).logits, atol=1e-4, rtol=1e-4)


def test_an_adapter_on_an_untied_embedding_is_merged(tmp_path: Path) -> None:
    """E + scale * (B A)^T, with A [r, V] and B [H, r]."""
    lora = LoraConfig(r=2, lora_alpha=2, target_modules=["embed_tokens"])
    model = randomized(HFStudent(str(save_model(tmp_path, tied=False)), lora=lora).load())
    check_adapter(model)
    layer = model.get_base_model().get_input_embeddings()
    expected = layer.base_layer.weight + (layer.lora_embedding_B["default"] @ layer.lora_embedding_A["default"]).T
    torch.testing.assert_close(sent(model)["model.embed_tokens.weight"], expected)


@pytest.mark.parametrize("adapter_dtype", [torch.float32, torch.bfloat16])
def test_a_bf16_base_is_merged_in_fp32_and_rounded_once(tmp_path: Path, adapter_dtype: torch.dtype) -> None:
    """bf16(fp32(W) + scale * fp32(B) fp32(A)), bitwise: the product itself is never rounded to bf16."""
    folder = save_model(tmp_path, dtype=torch.bfloat16)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model = randomized(get_peft_model(base, LoraConfig(r=8, lora_alpha=8, target_modules=["q_proj"])))
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    layer.to(torch.bfloat16)
    layer.lora_A.to(adapter_dtype), layer.lora_B.to(adapter_dtype)
    merged = sent(model)["model.layers.0.self_attn.q_proj.weight"]
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    assert (a.dtype, layer.base_layer.weight.dtype, merged.dtype) == (adapter_dtype, torch.bfloat16, torch.bfloat16)
    assert torch.equal(merged, (layer.base_layer.weight.float() + b.float() @ a.float()).bfloat16())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_200_syncs_leave_the_base_weights_bit_identical(tmp_path: Path, dtype: str) -> None:
    """The adapter changes between syncs, as training does; merging in place would drift by rounding."""
    folder = save_model(tmp_path, dtype=getattr(torch, dtype))
    model = randomized(HFStudent(str(folder), dtype=dtype, lora=LoraConfig(r=2, target_modules=LINEAR)).load())
    frozen = {name: p.detach().clone() for name, p in model.named_parameters() if "lora_" not in name}
    first = sent(model)
    adapter = {name: p.detach().clone() for name, p in model.named_parameters() if "lora_" in name}
    with torch.no_grad():
        for _ in range(200):
            for name in adapter:
                model.get_parameter(name).add_(0.01 * torch.randn(adapter[name].shape).to(adapter[name].dtype))
            for _, _ in named_weights(model, whole):
                pass
        assert all(torch.equal(model.get_parameter(name), tensor) for name, tensor in frozen.items())
        for name, tensor in adapter.items():
            model.get_parameter(name).copy_(tensor)
    assert all(torch.equal(tensor, first[name]) for name, tensor in sent(model).items())


def test_one_layer_is_gathered_at_a_time(folder: Path) -> None:
    """Sharded weights: each is read inside a context that gathers it, an adapted one together with its adapter."""
    model = HFStudent(str(folder), lora=LoraConfig(r=2, target_modules=["q_proj"])).load()
    held: list[int] = []

    @contextmanager
    def gather(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        held.append(len(parameters))
        yield
        held.append(-len(parameters))

    for name, _ in named_weights(model, gather):
        assert sum(held) == (3 if "q_proj" in name else 1), name
    assert sum(held) == 0


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.norm.weight", "model.norm.weight"),
        ("base_model.model.model.layers.0.mlp.up_proj.base_layer.weight", "model.layers.0.mlp.up_proj.weight"),
        ("base_model.model.model.norm.modules_to_save.default.weight", "model.norm.weight"),
    ],
)
def test_hf_name(name: str, expected: str) -> None:
    assert hf_name(name) == expected


REFUSED: list[tuple[PeftConfig, str]] = [
    (LoraConfig(target_modules=["q_proj"], use_dora=True), r"student\.lora\.use_dora"),
    (LoraConfig(target_parameters=["norm.weight"], target_modules=[]), r"student\.lora: .*ParamWrapper"),
    (LoraConfig(target_modules=["q_proj"], inference_mode=True), "nothing to train"),
    (IA3Config(target_modules=["q_proj"], feedforward_modules=[]), "binds to 0 layers"),
]


@pytest.mark.parametrize(("lora", "message"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_adapters_that_cannot_be_merged_exactly_are_refused(folder: Path, lora: PeftConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_adapter(HFStudent(str(folder), lora=lora).load())


def test_an_adapter_bias_is_refused() -> None:
    """`lora_bias` adds a bias beside B, which W + scale * B A leaves out; it needs a layer that has one (GPT-2's)."""
    model = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_positions=32, n_embd=16, n_layer=1, n_head=2))
    with pytest.raises(ValueError, match=r"student\.lora: .*lora_bias"):
        check_adapter(get_peft_model(model, LoraConfig(target_modules=["c_attn"], lora_bias=True, fan_in_fan_out=True)))


def test_an_adapter_that_binds_to_nothing_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"student\.lora: .*nonesuch"):
        HFStudent(str(folder), lora=LoraConfig(target_modules=["nonesuch"])).load()


@pytest.mark.parametrize(
    "lora",
    [
        LoraConfig(target_modules=["embed_tokens"]),
        LoraConfig(target_modules=["q_proj"], modules_to_save=["embed_tokens"]),
        LoraConfig(target_modules=["q_proj"], trainable_token_indices=[3, 4]),
        LoraConfig(target_modules=["lm_head"]),
        LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]),
    ],
    ids=["adapted", "trained", "tokens", "adapted head", "trained head"],
)
def test_an_adapter_that_parts_a_tied_embedding_from_its_head_is_refused(tmp_path: Path, lora: LoraConfig) -> None:
    model = HFStudent(str(save_model(tmp_path, tied=True)), lora=lora).load()
    with pytest.raises(ValueError, match=r"student\.lora: the embedding is tied to the head"):
        check_adapter(model)


def assert_no_dropout(student: HFStudent) -> None:
    """In training mode two passes agree bitwise, and with one in evaluation mode."""
    model = student.load()
    if student.lora is not None:
        randomized(model)
    ids = torch.arange(3, 20)[None]
    first = model(ids).logits
    assert model.training
    assert torch.equal(first, model(ids).logits)
    torch.testing.assert_close(model.eval()(ids).logits, first)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_student_has_no_dropout(tmp_path: Path, attention: str) -> None:
    """GPT-2's configuration asks for 0.1 (modules), Qwen3's for 0.3 in attention (a function), LoRA's for 0.5."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=40, n_positions=32, n_embd=16, n_layer=1, n_head=2)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    assert_no_dropout(HFStudent(str(tmp_path / "gpt2"), attention=attention))
    qwen3 = save_model(tmp_path / "qwen3")
    settings = json.loads((qwen3 / "config.json").read_text())
    (qwen3 / "config.json").write_text(json.dumps(settings | {"attention_dropout": 0.3}))
    assert_no_dropout(HFStudent(str(qwen3), attention=attention))
    lora = LoraConfig(target_modules=LINEAR, lora_dropout=0.5)
    assert_no_dropout(HFStudent(str(save_model(tmp_path / "lora")), attention=attention, lora=lora))


def test_parity_is_the_95th_percentile_of_absolute_differences() -> None:
    """100 tokens: 4 that are off by 9 nats lie above p95 (index 0.95 * 99 = 94.05), 6 reach below it."""
    gaps = torch.full((100,), 0.01, dtype=torch.float64)
    gaps[:4] = -9.0
    assert check_parity(gaps, limit=0.15) == pytest.approx(0.01)
    gaps[:6] = -9.0
    with pytest.raises(RuntimeError, match=r"9 nats, over parity\.limit=0\.15"):
        check_parity(gaps, limit=0.15)


def test_parity_stops_on_nan() -> None:
    with pytest.raises(RuntimeError, match=r"parity\.limit"):
        check_parity(torch.tensor([0.0, float("nan")]), limit=0.15)


@pytest.mark.parametrize("settings", [{"every": 0}, {"limit": 0.0}, {"prompts": 0}], ids=str)
def test_parity_settings_are_checked(settings: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        ParityConfig(**settings)
