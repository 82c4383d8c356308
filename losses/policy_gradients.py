"""Policy-gradient surrogates: functions of the sampled token's log-probability and its advantage."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from opd.losses.protocol import Loss, Need, needs
from opd.records import TokenChunk

MAX_LOG_RATIO = 20.0  # exp(20) ~ 5e8: beyond it the ratio would overflow before any clip could act


@dataclass(frozen=True)
class PPOClip:
    """-min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A), rho = student / sampler probability of the sampled token.

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
        return self._value(token_ratio(chunk), chunk.advantages)

    def value_and_slope(self, chunk: TokenChunk) -> tuple[Tensor, Tensor]:
        """Values [n], and -rho A where no bound holds."""
        ratio, advantages = token_ratio(chunk), chunk.advantages
        held = self._cut(ratio, advantages) | ((chunk.token_logp - chunk.sampler_logp).abs() > MAX_LOG_RATIO)
        return self._value(ratio, advantages), (ratio * advantages).neg_().masked_fill_(held, 0.0)

    def clipped(self, chunk: TokenChunk) -> Tensor:
        """Tokens [n] without a gradient: beyond a bound in the direction of their advantage."""
        return self._cut(token_ratio(chunk), chunk.advantages)

    def _value(self, ratio: Tensor, advantages: Tensor) -> Tensor:
        clipped = ratio.clamp(1.0 - self.clip_low, 1.0 + self.clip_high)
        loss = -torch.minimum(ratio * advantages, clipped * advantages)
        if self.dual_clip is None:
            return loss
        return torch.where(advantages < 0, torch.minimum(loss, -self.dual_clip * advantages), loss)

    def _cut(self, ratio: Tensor, advantages: Tensor) -> Tensor:
        cut = _beyond(ratio, advantages, self.clip_low, self.clip_high)
        return cut if self.dual_clip is None else cut | ((advantages < 0) & (ratio > self.dual_clip))


@dataclass(frozen=True)
class GSPO:
    """PPO clip on the row's ratio s = exp(mean_t log rho_t) instead of the token's (2507.18071).

    The gradient goes through each token by s_t = sg(s) p_t / sg(p_t). Meant for `aggregation: sequence_mean`.
    """

    clip_low: float = 3e-4
    clip_high: float = 4e-4
    needs: ClassVar[frozenset[Need]] = needs("advantage", "sampler_logp", "row_ratio")

    def __call__(self, chunk: TokenChunk) -> Tensor:
        """Values [n]."""
        ratio = _row_ratio(chunk) * (chunk.token_logp - chunk.token_logp.detach()).exp()
        clipped = ratio.clamp(1.0 - self.clip_low, 1.0 + self.clip_high)
        return -torch.minimum(ratio * chunk.advantages, clipped * chunk.advantages)

    def clipped(self, chunk: TokenChunk) -> Tensor:
        """Tokens [n] of rows beyond a bound in the direction of their advantage."""
        return _beyond(_row_ratio(chunk), chunk.advantages, self.clip_low, self.clip_high)


@dataclass(frozen=True)
class CISPO:
    """-sg(min(rho, cap)) A log p: a clipped weight, so that no token loses its gradient (2506.13585; cap 5: ScaleRL).

    `cap` null is the plain off-policy policy gradient of FlashREINFORCE.
    """

    cap: float | None = 5.0
    needs: ClassVar[frozenset[Need]] = needs("advantage", "sampler_logp")

    def __call__(self, chunk: TokenChunk) -> Tensor:
        """Values [n]."""
        ratio = token_ratio(chunk).detach()
        weight = ratio if self.cap is None else ratio.clamp(max=self.cap)
        return -weight * chunk.advantages * chunk.token_logp

    def clipped(self, chunk: TokenChunk) -> Tensor:
        """Tokens [n] whose weight is the cap."""
        return token_ratio(chunk) > (torch.inf if self.cap is None else self.cap)


@dataclass(frozen=True)
class SAPO:
    """-f(rho) A with the soft gate f = 4/tau sigmoid(tau (rho - 1)), whose slope is 1 at rho = 1 (2511.20347).

    `tau_negative` must not be below `tau_positive`: the reverse order is unstable.
    """

    tau_positive: float = 1.0
    tau_negative: float = 1.05
    needs: ClassVar[frozenset[Need]] = needs("advantage", "sampler_logp")

    def __post_init__(self) -> None:
        if not 0.0 < self.tau_positive <= self.tau_negative:
            raise ValueError(
                f"tau_positive={self.tau_positive}, tau_negative={self.tau_negative}: "
                "need 0 < tau_positive <= tau_negative"
            )

    def __call__(self, chunk: TokenChunk) -> Tensor:
        """Values [n]."""
        tau = torch.where(chunk.advantages > 0, self.tau_positive, self.tau_negative)
        return -torch.sigmoid(tau * (token_ratio(chunk) - 1.0)) * 4.0 / tau * chunk.advantages


@dataclass(frozen=True)
class BPO:
    """-A M min(sg(omega), cap) log p with omega = (1 + eps - mu) / (1 + eps - p) (2609.15987).

    mu is the sampler's probability; M drops the tokens that PPO's clip would drop.
    """

    epsilon: float = 0.1
    cap: float = 3.0
    clip_low: float = 0.2
    clip_high: float = 0.28
    needs: ClassVar[frozenset[Need]] = needs("advantage", "sampler_logp")

    def __call__(self, chunk: TokenChunk) -> Tensor:
        """Values [n]."""
        weight = self.omega(chunk.sampler_logp.exp(), chunk.token_logp.detach().exp())
        return -chunk.advantages * weight.masked_fill(self.clipped(chunk), 0.0) * chunk.token_logp

    def clipped(self, chunk: TokenChunk) -> Tensor:
        """Tokens [n] that M drops."""
        return _beyond(token_ratio(chunk).detach(), chunk.advantages, self.clip_low, self.clip_high)

    def omega(self, sampler_p: Tensor, student_p: Tensor) -> Tensor:
        """The capped weight [n]."""
        return ((1.0 + self.epsilon - sampler_p) / (1.0 + self.epsilon - student_p)).clamp(max=self.cap)


@dataclass(frozen=True)
class ScoreCentering:
    """A truncated ratio whose scores are centred, so that an advantage common to all tokens moves nothing (2609.20807).

    With mu the sampler, w(r) = min(r, cap), H the sampler's top k tokens (`sampler.params.top_logprobs`, 128) and the
    tail taken to differ from mu by one factor rho = (1 - sum_H mu) / (1 - sum_H p), alpha = min(1, cap rho):
    -A (sg(w(p/mu)) log p - sum_{v in H} sg(mu_v w(p_v/mu_v) - alpha p_v) log p_v).
    Without the sum the mean gradient of a constant A is not zero once the cap binds.
    """

    cap: float = 2.0
    needs: ClassVar[frozenset[Need]] = needs("advantage", "sampler_logp", "sampler_top")

    def __post_init__(self) -> None:
        if not self.cap >= 1.0:
            raise ValueError(f"cap={self.cap}: must be at least 1, or on-policy tokens would be cut")

    def __call__(self, chunk: TokenChunk) -> Tensor:
        """Values [n]."""
        top = chunk.sampler_top
        assert top is not None, "score centering needs the sampler's likeliest tokens"
        known = top.logp > -torch.inf
        logp = chunk.student_logp.gather(-1, top.ids)
        p, mu = (torch.where(known, each.detach().exp(), 0.0) for each in (logp, top.logp))
        left_p, left_mu = ((1.0 - each.sum(-1, keepdim=True)).clamp(min=0.0) for each in (p, mu))
        alpha = torch.where(left_p > 0.0, self.cap * left_mu / left_p.clamp(min=1e-30), 1.0).clamp(max=1.0)
        centre = (torch.minimum(p, self.cap * mu) - alpha * p) * torch.where(known, logp, 0.0)
        weight = token_ratio(chunk).detach().clamp(max=self.cap)
        return -chunk.advantages * (weight * chunk.token_logp - centre.sum(-1))


@dataclass(frozen=True)
class TeacherModulated:
    """A policy gradient whose advantage the teacher scales and the verifier signs (RLSD, 2604.03128).

    A' = A clip(exp(sign(A) (log q - log p)), 1 - clip, 1 + clip): the sign of A never changes.
    """

    loss: Loss
    clip: float = 0.2

    def __post_init__(self) -> None:
        if not 0.0 <= self.clip < 1.0:
            raise ValueError(f"clip={self.clip}: must lie in [0, 1), or the verifier's sign is lost")

    @property
    def needs(self) -> frozenset[Need]:
        """Those of the loss, and the teacher's score of the sampled token."""
        return self.loss.needs | needs("sampled")

    def __call__(self, chunk: TokenChunk) -> Tensor:
        """Values [n]."""
        assert chunk.teacher_token_logp is not None, "modulation needs the teacher's score of the sampled token"
        gap = chunk.teacher_token_logp - chunk.token_logp.detach()
        scale = (chunk.advantages.sign() * gap).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        scaled = chunk.advantages * scale.clamp(1.0 - self.clip, 1.0 + self.clip)
        return self.loss(replace(chunk, advantages=scaled))


def token_ratio(chunk: TokenChunk) -> Tensor:
    """Student over sampler probability of the sampled token [n]."""
    return (chunk.token_logp - chunk.sampler_logp).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _row_ratio(chunk: TokenChunk) -> Tensor:
    """The geometric mean of the ratios of each token's row [n], constant."""
    assert chunk.row_log_ratio is not None, "this loss needs the row's ratio"
    return chunk.row_log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _beyond(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """Where the ratio has left [1 - low, 1 + high] in the direction in which the advantage pushes it [n]."""
    return ((advantages > 0) & (ratio > 1.0 + high)) | ((advantages < 0) & (ratio < 1.0 - low))
