"""Policy-gradient surrogates: functions of the sampled token's log-probability and its advantage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from opd.losses.protocol import Need, needs
from opd.records import TokenChunk

MAX_LOG_RATIO = 20.0  # exp(20) ~ 5e8: beyond it the ratio would overflow before any clip could act


@dataclass(frozen=True)
class PPOClip:
    """-min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A) with rho = student / sampler probability of the sampled token.

    Two bounds as in DAPO (2503.14476); `dual_clip` c > 1 bounds the loss of a token with A < 0 by c |A|. On the first
    update after sampling rho = 1 and the gradient is the plain policy gradient. Source: PPO, GRPO (2402.03300).
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    needs: ClassVar[frozenset[Need]] = needs("advantage", "sampler_logp")

    def __post_init__(self) -> None:
        if not 0.0 <= self.clip_low < 1.0:
            raise ValueError(f"clip_low={self.clip_low}: must lie in [0, 1)")
        if self.clip_high < 0.0:
            raise ValueError(f"clip_high={self.clip_high}: must not be negative")
        if self.dual_clip is not None and self.dual_clip <= 1.0:
            raise ValueError(f"dual_clip={self.dual_clip}: must exceed 1, or null for none")

    def __call__(self, chunk: TokenChunk) -> Tensor:
        """Values [n]."""
        ratio = (chunk.token_logp - chunk.sampler_logp).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        clipped = ratio.clamp(1.0 - self.clip_low, 1.0 + self.clip_high)
        loss = -torch.minimum(ratio * chunk.advantages, clipped * chunk.advantages)
        if self.dual_clip is None:
            return loss
        bound = -self.dual_clip * chunk.advantages
        return torch.where(chunk.advantages < 0, torch.minimum(loss, bound), loss)
