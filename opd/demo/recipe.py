"""Trains the demo's models from scratch and writes them: `python -m opd.demo.recipe DIR`, some ten CPU minutes.

`DIR/teacher` is right almost always, `DIR/weak_teacher` about four times in five, `DIR/student` less than one time
in three; `DIR/pair_teacher` is as good as the teacher, and has another tokenizer: it reads and writes two digits as one
token, and all its ids are others. The two unfinished models stop at a set accuracy on fresh training problems: one that
rises this fast depends on the machine's rounding if it is stopped at a set step.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from opd.demo.addition import Addition
from opd.records import Example

PAD, UNKNOWN, STOP = "<pad>", "<unk>", "$"
TOKENS = (PAD, UNKNOWN, STOP, "^", "+", "=", *"0123456789")
PAIRS = tuple(f"{number:02d}" for number in range(100))


@dataclass(frozen=True)
class Plan:
    """How one model is made.

    Attributes:
        name: its folder.
        num_layers: transformer layers; width and heads are the same for all.
        steps: length of the cosine schedule.
        stop_at: greedy accuracy at which training ends early, None to go to the end.
        learning_rate: peak, after 20 steps of warm-up.
        seed: of the initial weights and the data.
        pairs: whether two digits are one token.
    """

    name: str
    num_layers: int
    steps: int
    stop_at: float | None = None
    learning_rate: float = 3e-3
    seed: int = 0
    pairs: bool = False


PLANS = (
    Plan("teacher", num_layers=4, steps=400),
    Plan("weak_teacher", num_layers=2, steps=300, stop_at=0.76, learning_rate=2e-3, seed=1),
    Plan("student", num_layers=2, steps=250, stop_at=0.28, seed=4),
    Plan("pair_teacher", num_layers=2, steps=3000, pairs=True),
)


def tokenizer(pairs: bool = False) -> PreTrainedTokenizerFast:
    """One token per character, none added; `$` ends a sequence and padding is a token of its own.

    `pairs`: from the left, two digits that stand together are one token; the ids are shuffled.
    """
    tokens = [*TOKENS, *PAIRS] if pairs else list(TOKENS)
    if pairs:
        random.Random(0).shuffle(tokens)
    core = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=UNKNOWN))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("[0-9]{2}|." if pairs else "."), behavior="isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=STOP,
        pad_token=PAD,
        unk_token=UNKNOWN,
        padding_side="left",
        model_max_length=128,
        clean_up_tokenization_spaces=False,
    )


def new_model(num_layers: int, seed: int, tokens: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """Qwen3 of width 128. Its usual initial scale of 0.02 takes hundreds of steps more to leave the first plateau."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokens),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=128,
        initializer_range=0.08,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokens.get_vocab()[STOP],
        pad_token_id=tokens.get_vocab()[PAD],
    )
    return Qwen3ForCausalLM(config)


def encode(examples: list[Example], tokens: PreTrainedTokenizerFast) -> tuple[Tensor, int]:
    """Token ids of prompt, answer and stop, [B, T], and the length of the prompts, which is the same for all."""
    rows = tokens([f"{row.prompt}{row.answer}{STOP}" for row in examples])["input_ids"]
    return torch.tensor(rows), len(tokens(str(examples[0].prompt))["input_ids"])


@torch.no_grad()
def greedy_accuracy(model: Qwen3ForCausalLM, problems: Addition, tokens: PreTrainedTokenizerFast) -> float:
    """Share of problems that greedy decoding answers exactly, the stop token included.

    A greedy continuation equals the answer if and only if every token of the answer is the most likely one after
    the right tokens before it, so one forward pass over the right answers decides.
    """
    ids, prompt_length = encode(problems.load(), tokens)
    logits = model(ids[:, :-1], logits_to_keep=ids.shape[1] - prompt_length).logits
    return (logits.argmax(-1) == ids[:, prompt_length:]).all(1).float().mean().item()


def batches(data: Addition, size: int, seed: int, tokens: PreTrainedTokenizerFast) -> Iterator[tuple[Tensor, int]]:
    """Endless random batches."""
    ids, prompt_length = encode(data.load(), tokens)
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield ids[torch.randint(len(ids), (size,), generator=generator)], prompt_length


def train(plan: Plan) -> Qwen3ForCausalLM:
    """Cross-entropy on the answers: batch 128, AdamW, 20 steps of warm-up, cosine to zero, gradient norm at most 1.

    Many small operands among the training problems get the model off its first plateau early and at any seed.
    """
    data, check = Addition(size=50000, seed=plan.seed, min_digits=1), Addition(size=512, seed=1000)
    tokens = tokenizer(plan.pairs)
    model = new_model(plan.num_layers, plan.seed, tokens)
    optimizer = torch.optim.AdamW(model.parameters(), lr=plan.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 20) * 0.5 * (1 + math.cos(math.pi * step / plan.steps))
    )
    for step, (ids, prompt_length) in zip(range(plan.steps), batches(data, 128, plan.seed, tokens), strict=False):
        logits = model(ids[:, :-1], logits_to_keep=ids.shape[1] - prompt_length).logits
        loss = cross_entropy(logits.flatten(0, 1), ids[:, prompt_length:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if plan.stop_at is not None and step % 5 == 4 and greedy_accuracy(model, check, tokens) >= plan.stop_at:
            break
    return model


def save(model: Qwen3ForCausalLM, folder: Path, tokens: PreTrainedTokenizerFast) -> None:
    """Writes bf16 weights, the tokenizer and the generation settings."""
    model.generation_config = GenerationConfig(
        eos_token_id=tokens.get_vocab()[STOP], pad_token_id=tokens.get_vocab()[PAD], do_sample=True, temperature=1.0
    )
    model.bfloat16()
    model.save_pretrained(folder)
    tokens.save_pretrained(folder)


def main() -> None:
    """Makes the models and prints their accuracy as they lie on disk."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the models go")
    parser.add_argument("--only", choices=[plan.name for plan in PLANS], help="make one of them")
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    torch.set_num_threads(1)
    for plan in [plan for plan in PLANS if arguments.only in (None, plan.name)]:
        tokens = tokenizer(plan.pairs)
        save(train(plan), folder / plan.name, tokens)
        model = Qwen3ForCausalLM.from_pretrained(folder / plan.name, dtype=torch.float32)
        accuracy = greedy_accuracy(model, Addition("test", size=1024), tokens)
        print(f"{plan.name}: {accuracy:.3f} of 1024 held-out problems, greedy")


if __name__ == "__main__":
    main()
