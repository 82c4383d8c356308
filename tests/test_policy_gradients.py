"""Policy-gradient surrogates and corrections, values by hand."""

from __future__ import annotations

from dataclasses import replace
from math import log

import pytest
import torch
from torch import Tensor

from opd.losses import (
    BPO,
    CISPO,
    GSPO,
    MIS,
    SAPO,
    TIS,
    Loss,
    PPOClip,
    ScoreCentering,
    SequenceMask,
    TeacherModulated,
    TokenMask,
)
from opd.records import Distribution, TokenChunk, TopK


def tokens(ratios: list[float], advantages: list[float]) -> TokenChunk:
    """Tokens with sampler probability 0.1 and student probability 0.1 * ratio."""
    sampler = torch.full((len(ratios),), log(0.1), dtype=torch.float64)
    token_logp = (sampler + torch.tensor(ratios, dtype=torch.float64).log()).requires_grad_()
    nobody = Distribution(torch.empty(len(ratios), 0))
    token_ids = torch.zeros(len(ratios), dtype=torch.long)
    return TokenChunk(nobody, token_logp, token_ids, sampler, torch.tensor(advantages, dtype=torch.float64))


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
    chunk = replace(chunk, sampler_logp=chunk.sampler_logp - 1e4)
    assert torch.isfinite(PPOClip()(chunk)).all()


@pytest.mark.parametrize("bad", [{"clip_low": -0.1}, {"clip_low": 1.0}, {"clip_high": -1.0}, {"dual_clip": 0.5}])
def test_bounds_out_of_range_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        PPOClip(**bad)


def slope(loss: object, chunk: TokenChunk) -> list[float]:
    """d loss / d log p per token."""
    return torch.autograd.grad(loss(chunk).sum(), chunk.token_logp)[0].tolist()


ON_POLICY = [PPOClip(), CISPO(), CISPO(cap=None), SAPO(1.0, 1.0), GSPO(), BPO()]


@pytest.mark.parametrize("loss", ON_POLICY, ids=str)
def test_on_policy_every_surrogate_is_the_plain_policy_gradient(loss: object) -> None:
    """At rho = 1 the slope is -A, up to BPO's weight omega = (1.1 - .1) / (1.1 - .1) = 1."""
    chunk = replace(tokens([1.0, 1.0], [2.0, -1.0]), row_log_ratio=torch.zeros(2, dtype=torch.float64))
    assert slope(loss, chunk) == pytest.approx([-2.0, 1.0])


def test_cispo_caps_the_weight_and_keeps_the_gradient() -> None:
    assert slope(CISPO(cap=5.0), tokens([2.0, 9.0], [1.0, 1.0])) == pytest.approx([-2.0, -5.0])
    assert slope(CISPO(cap=None), tokens([9.0], [1.0])) == pytest.approx([-9.0])


def test_sapo_gate() -> None:
    """f' = 4 s (1 - s) rho with s = sigmoid(tau (rho - 1)): at rho = 2, tau = 1, s = .7311, slope -A .7864 * 2."""
    assert slope(SAPO(), tokens([2.0], [1.0])) == pytest.approx([-2 * 0.78645], abs=1e-4)
    with pytest.raises(ValueError, match="tau_positive"):
        SAPO(1.1, 1.0)


@pytest.mark.parametrize(
    ("sampler_p", "student_p", "omega"),
    [(0.001, 0.01, 1.0083), (0.5, 0.9, 3.0), (0.9, 0.5, 0.3333), (0.5, 0.5, 1.0), (0.0, 1.0, 3.0)],
)
def test_bpo_weights(sampler_p: float, student_p: float, omega: float) -> None:
    got = BPO().omega(torch.tensor([sampler_p]), torch.tensor([student_p])).item()
    assert got == pytest.approx(omega, abs=1e-4)


def test_bpo_drops_what_ppo_clips() -> None:
    assert slope(BPO(), tokens([1.5, 1.5, 0.5, 0.5], [1.0, -1.0, 1.0, -1.0]))[0] == 0.0
    assert slope(BPO(), tokens([0.5], [-1.0])) == [0.0]
    assert slope(BPO(), tokens([1.5], [-1.0]))[0] != 0.0


def test_gspo_uses_the_ratio_of_the_row() -> None:
    """Row ratio 1.0003 inside [1 - 3e-4, 1 + 4e-4]: slope -A s; 1.001 beyond it: clipped for A > 0, not for A < 0."""
    rows = torch.tensor([1.0003, 1.001, 1.001], dtype=torch.float64).log()
    chunk = replace(tokens([3.0, 3.0, 3.0], [1.0, 1.0, -1.0]), row_log_ratio=rows)
    assert slope(GSPO(), chunk) == pytest.approx([-1.0003, 0.0, 1.001], abs=1e-6)


def test_modulation_keeps_the_sign_of_the_verifier() -> None:
    """Gap log q - log p = 2: A = 1 is scaled by 1.2 (clipped), A = -1 by .8; a gap of .1 by exp(.1) = 1.105."""
    chunk = tokens([1.0, 1.0, 1.0], [1.0, -1.0, 1.0])
    chunk = replace(chunk, teacher_token_logp=chunk.token_logp.detach() + torch.tensor([2.0, 2.0, 0.1]))
    assert slope(TeacherModulated(PPOClip()), chunk) == pytest.approx([-1.2, 0.8, -1.1052], abs=1e-4)
    with pytest.raises(ValueError, match="clip"):
        TeacherModulated(PPOClip(), clip=1.0)


def test_corrections() -> None:
    chunk = tokens([0.4, 1.0, 3.0], [1.0] * 3)
    assert TIS(cap=2.0)(chunk).tolist() == pytest.approx([0.4, 1.0, 2.0])
    assert MIS(0.5, 2.0)(chunk).tolist() == pytest.approx([0.0, 1.0, 0.0])
    assert MIS(0.1, 5.0)(chunk).tolist() == pytest.approx([0.4, 1.0, 3.0])
    assert TokenMask(0.5, 5.0)(chunk).tolist() == [0.0, 1.0, 1.0]
    rows = replace(chunk, row_log_ratio=torch.tensor([0.005, 0.02, -0.02]))
    assert SequenceMask(0.99, 1.01)(rows).tolist() == [1.0, 0.0, 0.0]
    assert not TIS()(chunk).requires_grad
    with pytest.raises(ValueError, match="low"):
        MIS(1.5, 2.0)


# ------------------------------------------------------------------------------------------------------ score centering

P, MU = [0.5, 0.3, 0.15, 0.05], [0.15, 0.5, 0.25, 0.1]  # token 0: p / mu = 3.33, beyond a cap of 2


def centred(token: int, k: int, advantage: float = 1.0) -> tuple[TokenChunk, Tensor]:
    """One token drawn from MU, the sampler's k likeliest tokens, and the logits of P to differentiate in."""
    z = torch.tensor([P], dtype=torch.float64).log().requires_grad_()
    logp = torch.log_softmax(z, -1)
    mu = torch.tensor([MU], dtype=torch.float64)
    top = mu.topk(k)
    return TokenChunk(
        student=Distribution(logp), token_logp=logp[:, token], token_ids=torch.tensor([token]),
        sampler_logp=mu[:, token].log(), advantages=torch.tensor([advantage], dtype=torch.float64),
        sampler_top=TopK(top.indices, top.values.log()),
    ), z  # fmt: skip


def mean_gradient(loss: Loss, k: int) -> Tensor:
    """E over tokens drawn from MU of the logit gradient under A = 1."""
    total = torch.zeros(4, dtype=torch.float64)
    for token, weight in enumerate(MU):
        chunk, z = centred(token, k)
        total += weight * torch.autograd.grad(loss(chunk).sum(), z)[0][0]
    return total


def test_centred_scores_of_a_constant_advantage_cancel() -> None:
    """With every token in the head: E[w score] - sum_v mu_v w_v score_v = 0, though the cap binds at token 0."""
    assert mean_gradient(ScoreCentering(), k=4).abs().max() < 1e-12
    assert mean_gradient(CISPO(cap=2.0), k=4).abs().max() > 0.05


def test_score_centering_by_hand() -> None:
    """Head {1, 2} of mu: left are mu .25, p .55, rho .4545, alpha = min(1, .9091). min(p, 2 mu) = p there, so the
    centre is (p - .9091 p) log p over the head: .0909 (.3 ln .3 + .15 ln .15) = -.05870. Token 0 at A = 2:
    -2 (2 ln .5 + .05870) = 2.65519.
    """
    chunk, _ = centred(0, k=2, advantage=2.0)
    assert ScoreCentering()(chunk).item() == pytest.approx(2.65519, abs=1e-4)


def test_empty_places_of_the_head_count_for_nothing() -> None:
    """A row with fewer known tokens than its neighbours is filled up by places of log-probability -inf."""
    grads = []
    for empty in (0, 3):
        chunk, z = centred(0, k=2)
        ids, logp = torch.zeros(1, empty, dtype=torch.long), torch.full((1, empty), -torch.inf, dtype=torch.float64)
        filled = TopK(torch.cat([chunk.sampler_top.ids, ids], -1), torch.cat([chunk.sampler_top.logp, logp], -1))
        grads.append(torch.autograd.grad(ScoreCentering()(replace(chunk, sampler_top=filled)).sum(), z)[0])
    assert grads[0].abs().max() > 0.1
    assert torch.equal(*grads)


def test_a_cap_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match=r"cap=0\.5"):
        ScoreCentering(cap=0.5)
