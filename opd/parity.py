"""Does the sampler really hold the trainer's weights?"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from opd import ranks


@dataclass(frozen=True)
class ParityConfig:
    """At start and every `every` steps, p95 of the log-prob difference on `prompts` fixed prompts must stay <= `limit`.

    The default suits fp32; a bf16 sampler beside a bf16 trainer differs by about 0.1 at p95.
    """

    every: int = 50
    limit: float = 0.15
    prompts: int = 16

    def __post_init__(self) -> None:
        if self.every < 1 or self.prompts < 1 or self.limit <= 0:
            raise ValueError(f"every={self.every}, prompts={self.prompts}, limit={self.limit}: all must be positive")


def check_parity(gaps: torch.Tensor, limit: float) -> float:
    """p95 (nats) of |trainer - sampler| log-prob over all ranks' tokens; `gaps` [N] are this rank's differences.

    Raises:
        RuntimeError: it exceeds `limit`.
    """
    differences = [gap for part in ranks.gather(gaps.abs().tolist()) for gap in part]
    if not differences:
        return 0.0
    p95 = torch.tensor(differences).quantile(0.95).item()
    if not p95 <= limit:
        raise RuntimeError(
            f"sampler and trainer part: p95 of their log-prob difference is {p95:.4g} nats, over parity.limit={limit}; "
            "either the weights did not reach the sampler, or the two compute at different precision (if so, raise the "
            "limit)"
        )
    return p95
