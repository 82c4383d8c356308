"""The student's current weights under their Hugging Face names, whole and merged, whatever holds them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from peft import PeftModel
from peft.tuners import lora
from peft.tuners.lora import LoraLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn

Gather = Callable[[Sequence[nn.Parameter]], AbstractContextManager[None]]  # makes sharded parameters whole inside
ADAPTER_NAME = "default"  # the name that peft gives to a model's only adapter


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
        if isinstance(layer, LoraLayer) and name.endswith("base_layer.weight"):
            with gather(list(layer.parameters())):
                yield hf_name(name), _merged(layer, parameter)
        else:
            with gather([parameter]):
                yield hf_name(name), parameter.detach()


def hf_name(name: str) -> str:
    """The Hugging Face name of a parameter of a model that may be wrapped by an adapter."""
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".").replace(".modules_to_save.default.", ".")


def check_adapter(model: nn.Module) -> None:
    """Refuses adapters that cannot be merged exactly, and one that binds to nothing trainable.

    Raises:
        ValueError: naming the key, what was found and the way out.
    """
    if not isinstance(model, PeftModel):
        return
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    if not layers or not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            f"student.lora: the adapter binds to {len(layers)} layers and leaves nothing to train; check "
            "lora.target_modules and lora.inference_mode"
        )
    if any(layer.use_dora.get(ADAPTER_NAME, False) for layer in layers):
        raise ValueError("student.lora.use_dora: merging DoRA exactly is not supported; use plain LoRA")
    unknown = sorted({type(layer).__name__ for layer in layers if type(layer) not in (lora.Linear, lora.Embedding)})
    unknown += sorted({type(variant).__name__ for layer in layers for variant in layer.lora_variant.values()})
    unknown += ["lora_bias"] if any(layer.lora_bias.get(ADAPTER_NAME, False) for layer in layers) else []
    if unknown:
        raise ValueError(
            f"student.lora: merging {', '.join(unknown)} is not supported; use plain LoRA on linear or embedding layers"
        )
    base: Any = model.get_base_model()
    ends = (base.get_input_embeddings(), base.get_output_embeddings())
    adapted = any(isinstance(layer, LoraLayer | AuxiliaryTrainingWrapper) for layer in ends)
    if adapted and base.config.get_text_config().tie_word_embeddings:
        raise ValueError(
            "student.lora: the embedding is tied to the head, and an adapter on either would part the two; leave both "
            "out of target_modules, modules_to_save and trainable_token_indices"
        )


def _merged(layer: Any, weight: nn.Parameter) -> Tensor:
    """W + scale * B A, in fp32 whatever the dtypes; W as the layer stores it."""
    if isinstance(layer, lora.Embedding):
        down, up = layer.lora_embedding_A[ADAPTER_NAME], layer.lora_embedding_B[ADAPTER_NAME]
        transposed = True
    else:
        down, up = layer.lora_A[ADAPTER_NAME].weight, layer.lora_B[ADAPTER_NAME].weight
        transposed = layer.fan_in_fan_out
    delta = layer.scaling[ADAPTER_NAME] * (up.float() @ down.float())
    return (weight.float() + (delta.T if transposed else delta)).to(weight.dtype)
