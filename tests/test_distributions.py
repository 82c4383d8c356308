"""Arithmetic on blocks of rows, against the plain way to write it."""

from dataclasses import replace

import pytest
import torch

from opd.distributions import Distribution, LogitMap, Pool, likeliest, row_dots
from opd.losses import PPOClip
from opd.records import TokenChunk


@pytest.mark.parametrize("vocabulary", [40, 8192, 9001])
@pytest.mark.parametrize("k", [1, 16, 64])
def test_the_likeliest_are_those_of_a_sort(vocabulary: int, k: int) -> None:
    """9,001 = 281 groups of 32 and 9 tokens more; 40 tokens are too few for groups."""
    k = min(k, vocabulary)
    logp = torch.randn(5, vocabulary, generator=torch.Generator().manual_seed(0))
    logp[0, -1], logp[1, :3] = 9.0, torch.tensor([7.0, 8.0, 9.0])
    assert torch.equal(likeliest(logp, k), logp.sort(-1, descending=True).indices[:, :k])


def test_a_distribution_of_logits_is_their_softmax() -> None:
    """Also where a large peak, or minus infinity, is among them; log-probabilities have a floor, probabilities none."""
    logits = torch.randn(4, 1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logits[1] += 1e4
    logits[2, 5], logits[3, 7] = -torch.inf, 1e4
    found = Distribution.of_logits(logits.float(), floor=-100.0)
    exact = torch.log_softmax(logits.float().double(), -1)
    assert torch.allclose(found.logp.double(), exact.clamp(min=-100.0), rtol=0, atol=2e-6 * 100)
    assert torch.allclose(found.p.double(), exact.exp(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("rows", [3, 40])
def test_row_dots_are_sums_of_products(rows: int) -> None:
    x, y = torch.randn(2, rows, 500, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(row_dots(x, y), (x.double() * y.double()).sum(-1).float())


def test_a_logit_map_gives_the_slope_that_autograd_gives() -> None:
    raw = torch.randn(3, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64).mul_(4).requires_grad_()
    (2.0 * torch.tanh(0.5 * raw / 2.0)).sum().backward()
    logits = raw.detach().clone()
    slope = LogitMap(0.5, 2.0)(logits)
    assert slope is not None
    torch.testing.assert_close(slope, raw.grad)
    torch.testing.assert_close(logits, 2.0 * torch.tanh(0.5 * raw.detach() / 2.0))


def test_a_pool_gives_the_same_memory_to_every_block_and_to_none_twice() -> None:
    pool, like = Pool(), torch.zeros(4, 6)
    first, second = pool.take(like), pool.take(like)
    assert first.data_ptr() != second.data_ptr()
    pool.take_all_back()
    assert pool.take(like[:2]).data_ptr() == first.data_ptr() and pool.take(like[:2]).shape == (2, 6)


@pytest.mark.parametrize("dual_clip", [None, 1.5])
def test_the_slope_of_ppo_is_what_autograd_gives(dual_clip: float | None) -> None:
    """Log-ratios of 0 (both sides of the minimum equal), about +-2, and 57, beyond what is computed."""
    draw = torch.Generator().manual_seed(0)
    token_logp, sampler_logp, advantages = torch.randn(3, 400, generator=draw) * 1.5 - torch.tensor([[3.0], [3.0], [0]])
    sampler_logp[:20], sampler_logp[20:30], advantages[40] = token_logp[:20], -60.0, 0.0
    leaf, loss = token_logp.clone().requires_grad_(), PPOClip(0.2, 0.28, dual_clip)
    one = Distribution(torch.zeros(400, 1))
    chunk = TokenChunk(one, leaf, torch.zeros(400, dtype=torch.long), sampler_logp, advantages)
    loss(chunk).sum().backward()
    value, slope = loss.value_and_slope(replace(chunk, token_logp=token_logp))
    torch.testing.assert_close(value, loss(replace(chunk, token_logp=token_logp)))
    torch.testing.assert_close(slope, leaf.grad)
