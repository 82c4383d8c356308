"""What produces rollouts: the contract that every sampler keeps."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from opd.records import Prompt, Rollout
from opd.students.model import HFStudent


@dataclass(frozen=True)
class SamplingParams:
    """How answers are drawn; `temperature` 0 is greedy. Log-probs are those of the distribution that was sampled.

    `top_logprobs`: of how many of the likeliest tokens they are kept too, for losses that need `sampler_top`.
    """

    max_tokens: int = 512
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    top_logprobs: int = 0

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens={self.max_tokens}: must be at least 1")
        if self.temperature < 0:
            raise ValueError(f"temperature={self.temperature}: must not be negative (0 is greedy)")
        if not 0.0 < self.top_p <= 1.0 or not 0.0 <= self.min_p < 1.0 or self.top_k < 0:
            raise ValueError(
                f"top_p={self.top_p}, top_k={self.top_k}, min_p={self.min_p}: need 0 < top_p <= 1, top_k >= 0 "
                "(0 = all) and 0 <= min_p < 1"
            )

        if self.top_logprobs < 0:
            raise ValueError(f"top_logprobs={self.top_logprobs}: must not be negative (0 keeps none)")

    @property
    def truncates(self) -> bool:
        """Whether low-probability tokens are cut, so that sampler log-probs are not those of the full softmax."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0


@runtime_checkable
class Sampler(Protocol):
    """Draws rollouts from the student's current weights.

    Sampled ids are the trained ids. `sync` replaces every weight, clears whatever was cached under the old ones and
    stamps `version` on all later rollouts; a weight that is missing or unknown is an error.
    """

    @property
    def params(self) -> SamplingParams:
        """How training rollouts are drawn."""
        ...

    def start(
        self, student: HFStudent, tokenizer: PreTrainedTokenizerBase, stop_ids: Sequence[int], max_len: int
    ) -> None:
        """Loads the engine for sequences of up to `max_len` tokens."""
        ...

    def sample(self, prompts: Sequence[Prompt], params: SamplingParams, seed: int) -> list[Rollout]:
        """`prompt.samples` rollouts per prompt, side by side. A draw depends on seed, prompt and sample index alone."""
        ...

    def sync(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Takes all weights under their Hugging Face names."""
        ...

    def close(self) -> None:
        """Releases the engine."""
        ...


def request_seed(seed: int, prompt: Prompt, sample_index: int) -> int:
    """A 32-bit seed of its own for each answer, independent of batch order and rank."""
    digest = hashlib.blake2b(f"{seed}/{prompt.stream}/{prompt.id}/{sample_index}".encode(), digest_size=4)
    return int.from_bytes(digest.digest(), "big") & 0x7FFFFFFF


def text_of(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> str:
    """The answer as text, without special tokens."""
    return str(tokenizer.decode(list(token_ids), skip_special_tokens=True))


class WeightNames:
    """Checks that every sync brings the same complete set of weights."""

    def __init__(self, expected: Iterable[str]) -> None:
        self.expected = frozenset(expected)

    def check(self, got: Iterable[str]) -> None:
        """Raises RuntimeError on a weight that is missing or that the engine does not have."""
        names = frozenset(got)
        missing, unknown = sorted(self.expected - names), sorted(names - self.expected)
        if missing or unknown:
            raise RuntimeError(
                "weight sync stopped: the trainer and the sampler hold different weights "
                f"(missing: {missing[:5]}, unknown: {unknown[:5]}); the sampler would go on with old values"
            )
