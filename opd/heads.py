"""The language-model head apart from the body: what turns hidden states into logits."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from peft import PeftModel
from peft.tuners import lora
from peft.utils.other import ModulesToSaveWrapper
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from opd.distributions import LogitMap
from opd.shared_vocabulary import InStudentIds, Translation


@dataclass(frozen=True)
class Head:
    """A language-model head: logits = softcap(scale * (hidden @ weight.T + bias)), cut to the real vocabulary.

    Under a LoRA adapter `low` (hidden) @ up.T joins the sum, so that nothing of the weight's size is made or held.
    """

    weight: Tensor  # [V', H], V' >= vocab_size
    bias: Tensor | None = None
    vocab_size: int | None = None
    scale: float = 1.0
    softcap: float | None = None
    down: Tensor | None = None  # [r, H], the adapter's A
    up: Tensor | None = None  # [V', r], the adapter's B
    gain: float = 1.0  # of the adapter
    onto: Translation | None = None  # of a teacher with other tokens: how its ids become the student's

    @property
    def parameters(self) -> list[Tensor]:
        """The head's own tensors."""
        return [tensor for tensor in (self.weight, self.bias, self.down, self.up) if tensor is not None]

    def low(self, hidden: Tensor) -> Tensor | None:
        """The adapter's inner states gain * hidden @ down.T [N, r]; None without an adapter."""
        return None if self.down is None else self.gain * torch.nn.functional.linear(hidden, self.down)

    @property
    def logits_dtype(self) -> torch.dtype:
        """In which raw logits and their gradient are held: bfloat16 or fp64 where the head is, else fp32."""
        own = {tensor.dtype for tensor in (self.weight, self.up) if tensor is not None}
        return own.pop() if own in ({torch.bfloat16}, {torch.float64}) else torch.float32

    def raw_logits(self, hidden: Tensor, low: Tensor | None, out: Tensor | None = None) -> Tensor:
        """Logits [c, V] before scale and soft cap, in `logits_dtype`, of hidden states [c, H] and `low(hidden)`.

        `out` [c, V] takes them, where gradients are off.
        """
        weight, bias = self.cut()
        hidden = hidden.to(weight.dtype)
        if weight.dtype != self.logits_dtype:
            raw = torch.nn.functional.linear(hidden, weight, bias).to(self.logits_dtype)
        else:
            raw = torch.mm(hidden, weight.T, out=out) if bias is None else torch.addmm(bias, hidden, weight.T, out=out)
        if low is None or self.up is None:
            return raw
        return raw.addmm_(low.to(raw.dtype), self.up[: self.vocab_size].to(raw.dtype).T)

    @property
    def onward(self) -> LogitMap:
        """From raw logits to logits."""
        return LogitMap(self.scale, self.softcap)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [c, V] in fp32 of hidden states [c, H]."""
        logits = self.raw_logits(hidden, self.low(hidden)).float()
        self.onward(logits)
        return logits

    def in_student_ids(self, hidden: Tensor, places: Tensor | None) -> InStudentIds:
        """A teacher's logits of hidden states [c, H], in the student's ids; `places` [c] as in `FullVocab`."""
        logits = self.logits(hidden)
        return InStudentIds(logits) if self.onto is None else self.onto(logits, places)

    def cut(self) -> tuple[Tensor, Tensor | None]:
        """Weight [V, H] and bias [V] of the real vocabulary: padding rows are cut before any softmax sees them."""
        return self.weight[: self.vocab_size], None if self.bias is None else self.bias[: self.vocab_size]

    def to(self, device: torch.device) -> Head:
        """The same head on another device."""
        return replace(self, **{n: t.to(device) for n, t in vars(self).items() if isinstance(t, Tensor)})

    def narrowed(self, vocab_size: int) -> Head:
        """The same head over the first `vocab_size` ids, of the student where it has others."""
        if self.onto is not None:
            return replace(self, onto=self.onto.narrowed(vocab_size))
        return replace(self, vocab_size=vocab_size)


def split_model(model: nn.Module) -> tuple[nn.Module, Head]:
    """A causal language model's body (token ids to last hidden states, final norm included) and its head.

    The head's weight is the model's own parameter, so a gradient in it reaches the model (tied embeddings too).
    """
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    assert isinstance(base, PreTrainedModel), f"expected a transformers model, got {type(base).__name__}"
    head = _head_of(base.get_output_embeddings(), type(base).__name__)
    return base.get_decoder(), replace(head, **logit_maps(base.config))


def _head_of(layer: nn.Module | None, model: str) -> Head:
    if isinstance(layer, ModulesToSaveWrapper):
        return _head_of(layer.modules_to_save[layer.active_adapters[0]], model)
    if isinstance(layer, lora.Linear):
        name = layer.active_adapters[0]
        adapter = (layer.lora_A[name].weight, layer.lora_B[name].weight, layer.scaling[name])
        return replace(_head_of(layer.base_layer, model), down=adapter[0], up=adapter[1], gain=adapter[2])
    if type(layer) is not nn.Linear:
        raise ValueError(
            f"the head of {model} is a {type(layer).__name__}; supported are a linear layer, whole or under plain LoRA"
        )
    return Head(layer.weight, layer.bias)


def logit_maps(config: PreTrainedConfig) -> dict[str, float]:
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
