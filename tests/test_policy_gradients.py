"""PPO clip: -min(rho A, clip(rho) A), values by hand."""

from __future__ import annotations

from math import log

import pytest
import torch

from opd.losses import PPOClip
from opd.records import TokenChunk


def tokens(ratios: list[float], advantages: list[float]) -> TokenChunk:
    """Tokens with sampler probability 0.1 and student probability 0.1 * ratio."""
    sampler = torch.full((len(ratios),), log(0.1), dtype=torch.float64)
    token_logp = (sampler + torch.tensor(ratios, dtype=torch.float64).log()).requires_grad_()
    return TokenChunk(torch.empty(len(ratios), 0), token_logp, torch.zeros(len(ratios), dtype=torch.long), sampler,
                      torch.tensor(advantages, dtype=torch.float64), None)  # fmt: skip


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "slope"),  # slope: d loss / d log p = -A rho where not clipped
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.5, 2.0, -2 * 1.28, 0.0),  # above 1 + clip_high, A > 0: clipped
        (1.5, -2.0, 3.0, 3.0),  # A < 0: the ratio still counts
        (0.5, 2.0, -1.0, -1.0),
        (0.5, -2.0, 1.6, 0.0),  # below 1 - clip_low, A < 0: clipped
        (1.0, 0.0, 0.0, 0.0),
    ],
)
def test_clip_with_two_bounds(ratio: float, advantage: float, value: float, slope: float) -> None:
    chunk = tokens([ratio], [advantage])
    loss = PPOClip(clip_low=0.2, clip_high=0.28)(chunk)
    assert loss.item() == pytest.approx(value)
    loss.sum().backward()
    assert chunk.token_logp.grad.item() == pytest.approx(slope)


def test_dual_clip_bounds_a_negative_advantage() -> None:
    """rho = 10, A = -1: 10 without, 3 with dual clip 3; A > 0 is untouched."""
    assert PPOClip()(tokens([10.0], [-1.0])).item() == pytest.approx(10.0)
    assert PPOClip(dual_clip=3.0)(tokens([10.0, 1.0], [-1.0, 1.0])).tolist() == pytest.approx([3.0, -1.0])


def test_a_ratio_beyond_overflow_stays_finite() -> None:
    chunk = tokens([1.0], [-1.0])
    chunk = TokenChunk(chunk.student_logp, chunk.token_logp, chunk.token_ids, chunk.sampler_logp - 1e4, chunk.advantages, None)
    assert torch.isfinite(PPOClip()(chunk)).all()


@pytest.mark.parametrize("bad", [{"clip_low": -0.1}, {"clip_low": 1.0}, {"clip_high": -1.0}, {"dual_clip": 0.5}])
def test_bounds_out_of_range_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        PPOClip(**bad)
