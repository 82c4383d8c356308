"""Weights that undo the mismatch between the sampler and the trained student; constant, one per token.

rho = student / sampler probability of the sampled token at the weights of the update. Any term may carry a correction:
a divergence is then the expectation under the student's own prefixes, as far as single tokens go.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from opd.losses.policy_gradients import token_ratio
from opd.losses.protocol import Need, needs
from opd.records import TokenChunk


@runtime_checkable
class Correction(Protocol):
    """`correction(chunk) -> [n]` weights."""

    @property
    def needs(self) -> frozenset[Need]:
        """What the weights are made of."""
        ...

    @property
    def multiplies(self) -> bool:
        """Whether rho itself is in the weights: a loss that has rho already would count it twice."""
        ...

    def __call__(self, chunk: TokenChunk) -> Tensor:
        """Weights [n]."""
        ...


@dataclass(frozen=True)
class TIS:
    """min(rho, cap): truncated importance sampling (FlashRL; cap 2)."""

    cap: float = 2.0
    multiplies: ClassVar[bool] = True
    needs: ClassVar[frozenset[Need]] = needs("sampler_logp")

    def __call__(self, chunk: TokenChunk) -> Tensor:
        """Weights [n]."""
        return token_ratio(chunk).detach().clamp(max=self.cap)


@dataclass(frozen=True)
class MIS:
    """rho inside [low, high], 0 outside: masked importance sampling (IcePop: .5 and 5; MiMo, GLM-5: .5 and 2)."""

    low: float = 0.5
    high: float = 2.0
    multiplies: ClassVar[bool] = True
    needs: ClassVar[frozenset[Need]] = needs("sampler_logp")

    def __post_init__(self) -> None:
        _check_band(self.low, self.high)

    def __call__(self, chunk: TokenChunk) -> Tensor:
        """Weights [n]."""
        ratio = token_ratio(chunk).detach()
        return torch.where((ratio >= self.low) & (ratio <= self.high), ratio, 0.0)


@dataclass(frozen=True)
class TokenMask:
    """1 inside [low, high], 0 outside: for losses that have rho themselves."""

    low: float = 0.5
    high: float = 2.0
    multiplies: ClassVar[bool] = False
    needs: ClassVar[frozenset[Need]] = needs("sampler_logp")

    def __post_init__(self) -> None:
        _check_band(self.low, self.high)

    def __call__(self, chunk: TokenChunk) -> Tensor:
        """Weights [n]."""
        ratio = token_ratio(chunk).detach()
        return ((ratio >= self.low) & (ratio <= self.high)).to(ratio.dtype)


@dataclass(frozen=True)
class SequenceMask:
    """1 for rows whose geometric mean of rho lies in [low, high], 0 for the others; dropped rows stay in the count."""

    low: float = 0.99
    high: float = 1.01
    multiplies: ClassVar[bool] = False
    needs: ClassVar[frozenset[Need]] = needs("sampler_logp", "row_ratio")

    def __post_init__(self) -> None:
        _check_band(self.low, self.high)

    def __call__(self, chunk: TokenChunk) -> Tensor:
        """Weights [n]."""
        assert chunk.row_log_ratio is not None, "a sequence mask needs the row's ratio"
        inside = (chunk.row_log_ratio >= log(self.low)) & (chunk.row_log_ratio <= log(self.high))
        return inside.to(chunk.row_log_ratio.dtype)


def _check_band(low: float, high: float) -> None:
    if not 0.0 < low <= 1.0 <= high:
        raise ValueError(f"low={low}, high={high}: need 0 < low <= 1 <= high, so that rho = 1 is kept")
