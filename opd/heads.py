"""The language-model head apart from the body: what turns hidden states into logits."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel


@dataclass(frozen=True)
class Head:
    """A language-model head: logits = softcap(scale * (hidden @ weight.T + bias)), cut to the real vocabulary."""

    weight: Tensor  # [V', H], V' >= vocab_size
    bias: Tensor | None = None
    vocab_size: int | None = None
    scale: float = 1.0
    softcap: float | None = None

    def raw_logits(self, hidden: Tensor) -> Tensor:
        """Logits [c, V] in fp32 before the soft cap, of hidden states [c, H]."""
        weight, bias = self.cut()
        raw = torch.nn.functional.linear(hidden.to(weight.dtype), weight, bias).float()
        return raw if self.scale == 1.0 else raw.mul_(self.scale)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [c, V] in fp32 of hidden states [c, H]."""
        raw = self.raw_logits(hidden)
        return raw if self.softcap is None else raw.div_(self.softcap).tanh_().mul_(self.softcap)

    def cut(self) -> tuple[Tensor, Tensor | None]:
        """Weight [V, H] and bias [V] of the real vocabulary: padding rows are cut before any softmax sees them."""
        return self.weight[: self.vocab_size], None if self.bias is None else self.bias[: self.vocab_size]

    def narrowed(self, vocab_size: int) -> Head:
        """The same head over the first `vocab_size` ids."""
        return replace(self, vocab_size=vocab_size)


def split_model(model: nn.Module) -> tuple[nn.Module, Head]:
    """A causal language model's body (token ids to last hidden states, final norm included) and its head.

    The head's weight is the model's own parameter, so a gradient in it reaches the model (tied embeddings too).
    """
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    assert isinstance(base, PreTrainedModel), f"expected a transformers model, got {type(base).__name__}"
    layer = base.get_output_embeddings()
    if type(layer) is not nn.Linear:
        raise ValueError(
            f"student.lora: the head of {type(base).__name__} is a {type(layer).__name__}, not a plain linear layer; "
            "an adapter on the head is not supported: leave lm_head out of target_modules and modules_to_save"
        )
    return base.get_decoder(), replace(Head(layer.weight, layer.bias), **_logit_maps(base.config))


def _logit_maps(config: PreTrainedConfig) -> dict[str, float]:
    """Scale and soft cap that some architectures put on their logits."""
    settings = config.to_dict()
    maps: dict[str, float] = {}
    if settings.get("final_logit_softcapping"):
        maps["softcap"] = float(settings["final_logit_softcapping"])
    if settings.get("logit_scale"):
        maps["scale"] = float(settings["logit_scale"])
    if settings.get("logits_scaling"):
        maps["scale"] = 1.0 / float(settings["logits_scaling"])
    return maps


def check_split(model: nn.Module, body: nn.Module, head: Head, key: str) -> None:
    """Refuses a model whose logits are not its head applied to its last hidden states.

    Raises:
        ValueError: naming the config key `key` of the model.
    """
    ids = torch.arange(4, device=head.weight.device)[None] % head.weight.shape[0]
    training = model.training
    model.eval()
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits[0].float()
        got = head.logits(body(input_ids=ids, use_cache=False).last_hidden_state[0])
    model.train(training)
    worst = (expected - got).abs().max().item()
    tolerance = 1e-2 if head.weight.dtype == torch.bfloat16 else 1e-4  # of the largest logit
    if worst > tolerance * max(1.0, expected.abs().max().item()):
        raise ValueError(
            f"{key}: {type(model).__name__} changes its logits after the head in a way that is not known here "
            f"(largest difference {worst:.3g}); supported are a plain linear head with scale, bias and soft cap"
        )
