"""The student's current weights under their Hugging Face names, whole and merged, whatever holds them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

Gather = Callable[[Sequence[nn.Parameter]], AbstractContextManager[None]]  # makes sharded parameters whole inside


@torch.no_grad()
def named_weights(model: nn.Module, gather: Gather) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of every weight, one at a time; a tied head is given under its own name too.

    Adapters are merged out of place, W + scale * B A in fp32, so the base weights stay bit-identical. Every rank must
    run through the whole iterator. A tensor is valid until the next one is asked for.
    """
    layers = dict(model.named_modules())
    for name, parameter in model.named_parameters(remove_duplicate=False):
        module_name = name.rpartition(".")[0]
        if "lora_" in name or ".original_module." in name:
            continue
        layer = layers[module_name.removesuffix(".base_layer")]
        adapted = isinstance(layer, LoraLayer) and name.endswith("base_layer.weight")
        members = list(layer.parameters()) if adapted else [parameter]
        with gather(members):
            yield hf_name(name), _merged(layer, parameter) if adapted else parameter.detach()


def hf_name(name: str) -> str:
    """The Hugging Face name of a parameter of a model that may be wrapped by an adapter."""
    return (
        name.removeprefix("base_model.model.").replace(".base_layer.", ".").replace(".modules_to_save.default.", ".")
    )


def check_adapter(model: nn.Module) -> None:
    """Refuses adapters that cannot be merged exactly, and one that binds to nothing trainable."""
    if not isinstance(model, PeftModel):
        return
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    if not layers:
        raise ValueError("student.lora: the adapter binds to no layer; check lora.target_modules")
    if any(layer.use_dora.get("default", False) for layer in layers):
        raise ValueError("student.lora.use_dora: merging DoRA exactly is not supported; use plain LoRA")


def _merged(layer: LoraLayer, weight: nn.Parameter) -> Tensor:
    return (weight.float() + layer.get_delta_weight("default").float()).to(weight.dtype)
