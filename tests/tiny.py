"""Tiny real models: random weights, a character vocabulary, saved as Hugging Face folders."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

CHARACTERS = "0123456789+-*/=^ abcdefghijklmnopqrstuvwxyz"


def tokenizer(order: str = CHARACTERS) -> PreTrainedTokenizerFast:
    """One token per character; `order` decides the ids."""
    vocabulary = {"<pad>": 0, "$": 1, "<unk>": 2} | {character: number + 3 for number, character in enumerate(order)}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="$", pad_token="<pad>", unk_token="<unk>")
    fast.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}="
    return fast


def save_model(
    folder: Path, seed: int = 0, *, family: str = "qwen3", tied: bool = True, vocab_size: int = 48, layers: int = 2,
    hidden: int = 32, order: str = CHARACTERS, dtype: torch.dtype = torch.float32,
) -> Path:  # fmt: skip
    """A random model with its tokenizer; larger initial weights than usual, so that distributions are not flat."""
    torch.manual_seed(seed)
    config_class, model_class = {
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
        "llama": (LlamaConfig, LlamaForCausalLM),
    }[family]
    config = config_class(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        initializer_range=0.3,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
    )
    model = model_class(config).to(dtype)
    model.save_pretrained(folder)
    tokenizer(order).save_pretrained(folder)
    return folder
