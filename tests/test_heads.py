"""The head apart from the body: logits of both together are the model's, or the model is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedConfig,
    Qwen3ForCausalLM,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

from opd.heads import Head, check_split, split_model
from tests.tiny import save_model

SHAPE = {
    "vocab_size": 40, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 64, "initializer_range": 0.5,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1,
}  # fmt: skip
PHI = {key: value for key, value in SHAPE.items() if key not in ("head_dim", "num_key_value_heads")}
MODELS: dict[str, tuple[type[nn.Module], PreTrainedConfig]] = {
    "learned positions": (GPT2LMHeadModel, GPT2Config(vocab_size=40, n_positions=64, n_embd=32, n_layer=1, n_head=2)),
    "soft cap": (Gemma2ForCausalLM, Gemma2Config(**SHAPE, final_logit_softcapping=2.0, query_pre_attn_scalar=16)),
    "soft cap off": (Gemma3ForCausalLM, Gemma3TextConfig(**SHAPE)),
    "soft cap of Gemma 3": (Gemma3ForCausalLM, Gemma3TextConfig(**SHAPE, final_logit_softcapping=3.0)),
    "scale": (CohereForCausalLM, CohereConfig(**SHAPE, logit_scale=0.25)),
    "divisor": (GraniteForCausalLM, GraniteConfig(**SHAPE, logits_scaling=8.0)),
    "bias": (PhiForCausalLM, PhiConfig(**PHI)),
}
IDS = torch.arange(5, 25)[None]


def build(kind: tuple[type[nn.Module], PreTrainedConfig]) -> nn.Module:
    """A random model of the kind, its head's bias (if any) not zero."""
    torch.manual_seed(0)
    model = kind[0](kind[1]).eval()
    bias = model.get_output_embeddings().bias
    if bias is not None:
        nn.init.normal_(bias)
    return model


@torch.no_grad()
def recomposed(model: nn.Module) -> Tensor:
    """Logits of the head on the body's last hidden states."""
    body, head = split_model(model)
    check_split(model, body, head, "student.model")
    return head.logits(body(input_ids=IDS, use_cache=False).last_hidden_state[0])


@pytest.mark.parametrize("kind", MODELS.values(), ids=MODELS)
def test_body_and_head_give_the_models_own_logits(kind: tuple[type[nn.Module], PreTrainedConfig]) -> None:
    model = build(kind)
    torch.testing.assert_close(recomposed(model), model(IDS).logits[0].detach(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("tied", [True, False])
def test_the_heads_weight_is_the_models_own_parameter(tmp_path: Path, tied: bool) -> None:
    model = Qwen3ForCausalLM.from_pretrained(save_model(tmp_path, tied=tied))
    torch.testing.assert_close(recomposed(model), model(IDS).logits[0].detach(), atol=1e-5, rtol=1e-5)
    head = split_model(model)[1]
    assert head.weight is model.lm_head.weight
    assert (head.weight is model.model.embed_tokens.weight) is tied


def test_soft_cap_matters_in_these_tests() -> None:
    """Without the cap of 2 the same model's logits reach beyond it."""
    model = build(MODELS["soft cap"])
    body, head = split_model(model)
    assert (head.softcap, head.scale) == (2.0, 1.0)
    uncapped = head.raw_logits(body(input_ids=IDS).last_hidden_state[0], None)
    assert uncapped.abs().max() > 2 > recomposed(model).abs().max()


class Altered(Qwen3ForCausalLM):
    """A model that does something to its logits that no configuration entry tells."""

    factor, shift = 1.0, 0.0

    def forward(self, input_ids: Tensor, **settings: object) -> CausalLMOutputWithPast:
        """Logits times `factor`, plus `shift` on one id."""
        output = super().forward(input_ids=input_ids, **settings)
        output.logits = output.logits * self.factor
        output.logits[..., 7] += self.shift
        return output


@pytest.mark.parametrize(("factor", "shift"), [(0.5, 0.0), (1.0, 3.0), (0.995, 0.0)])
def test_a_model_that_changes_its_logits_otherwise_is_refused(tmp_path: Path, factor: float, shift: float) -> None:
    model = Altered.from_pretrained(save_model(tmp_path))
    check_split(model, *split_model(model), "teacher.main.model")
    model.factor, model.shift = factor, shift
    with pytest.raises(ValueError, match=r"teacher\.main\.model: Altered changes its logits"):
        check_split(model, *split_model(model), "teacher.main.model")


def test_check_split_leaves_the_mode_as_it_was(tmp_path: Path) -> None:
    model = Qwen3ForCausalLM.from_pretrained(save_model(tmp_path)).train()
    check_split(model, *split_model(model), "student.model")
    assert model.training


def test_a_bf16_model_is_accepted(tmp_path: Path) -> None:
    model = Qwen3ForCausalLM.from_pretrained(save_model(tmp_path, dtype=torch.bfloat16), dtype=torch.bfloat16)
    check_split(model, *split_model(model), "student.model")
    assert split_model(model)[1].logits(torch.zeros(1, 32)).dtype == torch.float32


def test_a_narrowed_head_leaves_padding_rows_out_of_the_softmax() -> None:
    """Rows beyond the real vocabulary hold logit 50: cut before the softmax they take no mass."""
    weight = torch.tensor([[1.0], [0.0], [50.0]])
    head = Head(weight, bias=torch.tensor([0.5, 0.0, 9.0])).narrowed(2)
    torch.testing.assert_close(head.logits(torch.tensor([[2.0]])), torch.tensor([[2.5, 0.0]]))


def test_logits_are_scaled_before_they_are_capped() -> None:
    """h = 4, w = (1, -2), scale 1/2, cap 3: raw (4, -8), scaled (2, -4), capped 3 tanh(2/3), 3 tanh(-4/3)."""
    head = Head(torch.tensor([[1.0], [-2.0]]), scale=0.5, softcap=3.0)
    torch.testing.assert_close(head.raw_logits(torch.tensor([[4.0]]), None), torch.tensor([[4.0, -8.0]]))
    torch.testing.assert_close(head.logits(torch.tensor([[4.0]])), torch.tensor([[1.7483, -2.6102]]), atol=1e-3, rtol=0)
