"""Rewards, losses and samplers that behave badly inside a run, named by `_target_`."""

from __future__ import annotations

import hashlib
import json
import math
import os
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from opd.losses import Need
from opd.records import Prompt, Rollout, TokenChunk
from opd.students import HFSampler, HFStudent, SamplingParams


@dataclass(frozen=True)
class Letters:
    """Share of letters in the text: a reward that differs between samples of a random model."""

    in_process: ClassVar[bool] = True

    def __call__(self, rollouts: Sequence[Rollout]) -> list[float | None]:
        return [sum(c.isalpha() for c in rollout.text) / max(1, len(rollout.text)) for rollout in rollouts]


@dataclass(frozen=True)
class Constant:
    """Gives every row the same value, whatever it is."""

    value: float | None
    in_process: ClassVar[bool] = True

    def __call__(self, rollouts: Sequence[Rollout]) -> list[float | None]:
        return [self.value] * len(rollouts)


@dataclass(frozen=True)
class Raises:
    """Raises whatever it is asked."""

    in_process: ClassVar[bool] = True

    def __call__(self, rollouts: Sequence[Rollout]) -> list[float | None]:
        raise KeyError("no such judge")


@dataclass(frozen=True)
class SignalsOnce:
    """Sends its own process a signal when it judges training rows under the given weights, once per marker file."""

    marker: str
    version: int
    signal: str
    in_process: ClassVar[bool] = True

    def __call__(self, rollouts: Sequence[Rollout]) -> list[float | None]:
        training = rollouts[0].prompt.stream == "main"
        if training and rollouts[0].version == self.version and not Path(self.marker).exists():
            Path(self.marker).touch()
            os.kill(os.getpid(), signal.Signals[self.signal])
        return [0.0] * len(rollouts)


@dataclass
class NotANumber:
    """-log p of the sampled token, and NaN at one call; an update of a small batch calls it once."""

    at_call: int
    calls: int = field(default=0, init=False)
    needs: ClassVar[frozenset[Need]] = frozenset()

    def __call__(self, chunk: TokenChunk) -> Tensor:
        self.calls += 1
        return -chunk.token_logp * (math.nan if self.calls == self.at_call else 1.0)


@dataclass
class WatchedSampler:
    """`HFSampler` that writes down what it samples with, and may stamp rollouts with a wrong version."""

    log: str
    params: SamplingParams = field(default_factory=SamplingParams)
    lag: int = 0
    batch_size: int = 128
    dtype: str | None = None

    def start(
        self, student: HFStudent, tokenizer: PreTrainedTokenizerBase, stop_ids: Sequence[int], max_len: int
    ) -> None:
        """Loads the model."""
        self.inner = HFSampler(self.params)
        self.inner.start(student, tokenizer, stop_ids, max_len)

    def sample(self, prompts: Sequence[Prompt], params: SamplingParams, seed: int) -> list[Rollout]:
        """Notes stream, version and a digest of the weights."""
        rollouts = self.inner.sample(prompts, params, seed)
        with open(self.log, "a") as file:
            entry = {"seed": seed, "version": self.inner.version, "weights": digest(self.inner.weights)}
            file.write(json.dumps(entry) + "\n")
        return [replace(rollout, version=rollout.version - self.lag) for rollout in rollouts]

    def sync(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copies every weight."""
        self.inner.sync(weights, version)

    def close(self) -> None:
        """Drops the model."""
        self.inner.close()


def digest(weights: Mapping[str, Tensor]) -> str:
    """One number for all weights; a tied head counts once."""
    found = hashlib.sha256()
    for name in sorted(weights):
        if name != "lm_head.weight":
            found.update(name.encode() + weights[name].detach().to(torch.float32).numpy().tobytes())
    return found.hexdigest()
