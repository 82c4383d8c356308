"""A head read from a checkpoint alone is the model's own, however it is tied, named, split or bent."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedConfig,
)

from opd.head_file import INDEX, SINGLE, read_head
from opd.heads import Head, split_model
from tests.test_heads import IDS, MODELS, build
from tests.tiny import save_model

TIED_GPT2 = GPT2Config(vocab_size=40, n_positions=64, n_embd=32, n_layer=1, n_head=2)
MORE_MODELS = {"Bloom": (BloomForCausalLM, BloomConfig(vocab_size=40, hidden_size=32, n_layer=1, n_head=2))}


@torch.no_grad()
def assert_own(model: nn.Module, head: Head) -> None:
    """The head on the model's last hidden states gives the model's own logits."""
    body, _ = split_model(model)
    logits = head.logits(body(input_ids=IDS, use_cache=False).last_hidden_state[0])
    torch.testing.assert_close(logits, model(IDS).logits[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", [*MODELS.values(), *MORE_MODELS.values()], ids=[*MODELS, *MORE_MODELS])
def test_a_bent_head_is_the_models_own(kind: tuple[type[nn.Module], PreTrainedConfig], tmp_path: Path) -> None:
    """Tied, biased, scaled, divided, soft-capped."""
    model = build(kind)
    model.save_pretrained(tmp_path)
    head = read_head(str(tmp_path), torch.float32)
    assert_own(model, head)
    own = split_model(model)[1]
    assert (head.scale, head.softcap, head.bias is None) == (own.scale, own.softcap, own.bias is None)


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shards", [False, True])
def test_tied_or_not_in_one_file_or_several(family: str, tied: bool, shards: bool, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(save_model(tmp_path / "whole", family=family, tied=tied)).eval()
    folder = tmp_path / "whole"
    if shards:
        folder = tmp_path / "shards"
        model.save_pretrained(folder, max_shard_size="8KB")
        assert (folder / INDEX).is_file() and not (folder / SINGLE).exists()
    assert_own(model, read_head(str(folder), torch.float32))


def test_only_the_heads_own_shard_is_read(tmp_path: Path) -> None:
    """All other shards are gone."""
    model = AutoModelForCausalLM.from_pretrained(save_model(tmp_path / "whole", tied=False)).eval()
    model.save_pretrained(tmp_path / "shards", max_shard_size="8KB")
    kept = json.loads((tmp_path / "shards" / INDEX).read_text())["weight_map"]["lm_head.weight"]
    others = [path for path in (tmp_path / "shards").glob("*.safetensors") if path.name != kept]
    assert len(others) > 3
    for path in others:
        path.unlink()
    assert_own(model, read_head(str(tmp_path / "shards"), torch.float32))


def renamed(folder: Path, rename: dict[str, str]) -> dict[str, Tensor]:
    """Rewrites the checkpoint with other names."""
    tensors = {
        next((name.replace(a, b) for a, b in rename.items() if name.startswith(a)), name): t
        for name, t in load_file(folder / SINGLE).items()
    }
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
    return tensors


def test_a_tied_checkpoint_saved_without_the_outer_models_prefix(tmp_path: Path) -> None:
    """As the first GPT-2 on the hub: wte.weight, not transformer.wte.weight. transformers loads it, and so do we."""
    torch.manual_seed(0)
    GPT2LMHeadModel(TIED_GPT2).save_pretrained(tmp_path)
    assert "wte.weight" in renamed(tmp_path, {"transformer.": ""})
    model = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert_own(model, read_head(str(tmp_path), torch.float32))


def test_the_dtype_is_the_one_asked_for(tmp_path: Path) -> None:
    save_model(tmp_path, dtype=torch.bfloat16)
    for dtype in (torch.float32, torch.bfloat16):
        assert read_head(str(tmp_path), dtype).weight.dtype == dtype


def test_a_checkpoint_without_safetensors_is_refused(tmp_path: Path) -> None:
    save_model(tmp_path)
    torch.save(load_file(tmp_path / SINGLE), tmp_path / "pytorch_model.bin")
    (tmp_path / SINGLE).unlink()
    with pytest.raises(
        ValueError, match=r"no tensor lm_head\.weight or .*embed_tokens\.weight .*safetensors checkpoint"
    ):
        read_head(str(tmp_path), torch.float32)


def test_a_checkpoint_without_its_head_is_refused(tmp_path: Path) -> None:
    """Untied, so the embedding is no substitute."""
    save_model(tmp_path, tied=False)
    save_file({n: t for n, t in load_file(tmp_path / SINGLE).items() if n != "lm_head.weight"}, tmp_path / SINGLE)
    with pytest.raises(ValueError, match=r"no tensor lm_head\.weight in "):
        read_head(str(tmp_path), torch.float32)


def test_a_head_of_another_shape_than_the_configuration_says_is_refused(tmp_path: Path) -> None:
    save_model(tmp_path, tied=False)
    tensors = load_file(tmp_path / SINGLE)
    save_file({**tensors, "lm_head.weight": torch.zeros(48, 16)}, tmp_path / SINGLE)
    with pytest.raises(
        ValueError, match=r"lm_head\.weight has shape \(48, 16\), and the configuration promises \(48, 32\)"
    ):
        read_head(str(tmp_path), torch.float32)


@pytest.mark.parametrize("damage", [b"", b"{", b"\x00" * 64])
def test_a_damaged_file_is_refused(damage: bytes, tmp_path: Path) -> None:
    save_model(tmp_path)
    (tmp_path / SINGLE).write_bytes(damage)
    with pytest.raises(ValueError, match=r"model\.safetensors: cannot be read"):
        read_head(str(tmp_path), torch.float32)


def test_a_shard_that_is_missing_is_refused(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(save_model(tmp_path / "whole", tied=False))
    model.save_pretrained(tmp_path / "shards", max_shard_size="8KB")
    shard = json.loads((tmp_path / "shards" / INDEX).read_text())["weight_map"]["lm_head.weight"]
    (tmp_path / "shards" / shard).unlink()
    with pytest.raises(ValueError, match=r"no tensor lm_head\.weight in "):
        read_head(str(tmp_path / "shards"), torch.float32)
