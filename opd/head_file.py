"""The head of a model whose body runs elsewhere: two tensors of the checkpoint at most, and nothing else of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.hub import cached_file

from opd.heads import Head, logit_maps

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def read_head(model: str, dtype: torch.dtype, trust_remote_code: bool = False) -> Head:
    """The head of a folder or hub name, tied, biased, scaled or soft-capped; read anew every time.

    Raises:
        ValueError: the checkpoint has no safetensors file, or not the tensors that the configuration promises.
    """
    config = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    layer = skeleton.get_output_embeddings()
    if not isinstance(layer, nn.Linear):
        raise ValueError(f"model={model}: its head is a {type(layer).__name__}, not a linear layer")
    ends = (layer, skeleton.get_input_embeddings())
    owners = {id(module): name for name, module in skeleton.named_modules()}
    names = [f"{owners[id(module)]}.weight" for module in (ends if config.tie_word_embeddings else ends[:1])]
    weight = _read(model, names, skeleton.base_model_prefix, layer.weight.shape)
    bias = None
    if layer.bias is not None:
        bias = _read(model, [f"{owners[id(layer)]}.bias"], skeleton.base_model_prefix, layer.bias.shape).to(dtype)
    return replace(Head(weight.to(dtype), bias), **logit_maps(config))


def _read(model: str, names: list[str], prefix: str, shape: torch.Size) -> Tensor:
    """The first tensor of these names, with the inner model's prefix or without, that the checkpoint has."""
    for name in [*names, *(name.removeprefix(f"{prefix}.") for name in names)]:
        path = _file_with(model, name)
        tensor = None if path is None else _tensor(path, name)
        if tensor is not None:
            if tensor.shape != shape:
                raise ValueError(
                    f"model={model}: {name} has shape {tuple(tensor.shape)}, and the configuration promises "
                    f"{tuple(shape)}"
                )
            return tensor
    raise ValueError(
        f"model={model}: no tensor {' or '.join(names)} in {SINGLE} or {INDEX}; the head of a served teacher is read "
        "from a safetensors checkpoint"
    )


def _tensor(path: Path, name: str) -> Tensor | None:
    try:
        with safe_open(path, "pt") as file:
            return file.get_tensor(name) if name in set(file.keys()) else None
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: cannot be read ({error}); copy or download the checkpoint again") from error


def _file_with(model: str, name: str) -> Path | None:
    """The checkpoint's file that should hold the tensor; None where there is none."""
    index = _cached(model, INDEX)
    if index is None:
        return _cached(model, SINGLE)
    shard = json.loads(index.read_text(encoding="utf-8"))["weight_map"].get(name)
    return None if shard is None else _cached(model, shard)


def _cached(model: str, name: str) -> Path | None:
    found = cached_file(model, name, _raise_exceptions_for_missing_entries=False)
    return None if found is None else Path(found)
