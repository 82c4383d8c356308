"""Tokenizers trained on the spot: two kinds whose pieces are bytes, as real models have them."""

from __future__ import annotations

import json
from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SAMPLE = (
    "The quick brown fox jumps over the lazy dog. Twelve thousand three hundred and forty-five = 12345; 3.14159.",
    "Über den Wolken muß die Freiheit wohl grenzenlos sein. Ça va très bien, merci, à bientôt!",
    "def add(a, b):\n    return a + b  # twice\n\n\tx = {'key': [1, 2, 3]}",
    "数学の問題を解く。答えは四十二です。 Привет, мир! שלום عالم",
    "a😀é 数 👩‍👩‍👧 🇨🇭 ½ ≤ ∑ → ❤️",
)
TEMPLATE = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}[assistant]"


def byte_level(
    texts: Sequence[str] = SAMPLE, vocab_size: int = 300, *, end: str = "<end>", start: str | None = None
) -> PreTrainedTokenizerFast:
    """A byte-level BPE as GPT-2's, trained on the texts; of 256 pieces and specials alone it has one token per byte."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    specials = ["<pad>", end, *([start] if start else [])]
    core.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=alphabet, special_tokens=specials, show_progress=False
    ))  # fmt: skip
    return _wrapped(core, end, start)


def byte_fallback(texts: Sequence[str] = SAMPLE, vocab_size: int = 200) -> PreTrainedTokenizerFast:
    """As Llama 2's: pieces are text with a mark for the space, one is put in front, and other characters are bytes."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.train_from_iterator(
        [text for line in texts for text in line.split("数")],
        trainers.BpeTrainer(vocab_size=vocab_size, show_progress=False),
    )
    model = json.loads(trained.to_str())["model"]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *model["vocab"]]
    core = Tokenizer(models.BPE(
        vocab={piece: index for index, piece in enumerate(dict.fromkeys(pieces))},
        merges=[tuple(merge) for merge in model["merges"]],
        unk_token="<unk>", fuse_unk=True, byte_fallback=True,
    ))  # fmt: skip
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    core.add_special_tokens(["<unk>", "<s>", "</s>"])
    return _wrapped(core, "</s>", "<s>")


def _wrapped(core: Tokenizer, end: str, start: str | None) -> PreTrainedTokenizerFast:
    fast = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=end, bos_token=start, pad_token=end)
    fast.chat_template = TEMPLATE
    return fast
