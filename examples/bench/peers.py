"""The same loss by TRL and Liger, called as their trainers call it."""

from __future__ import annotations

import os
from functools import partial
from importlib.util import find_spec

import torch
from problem import CHUNK, CLIP, Answer, Problem, Variant, answered

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")


def trl_gkd(problem: Problem) -> Answer:
    """`GKDTrainer.generalized_jsd_loss` on full logits; it sums over tokens and vocabulary, hence the count."""
    from trl.experimental.gkd.gkd_trainer import GKDTrainer

    leaves = problem.leaves()
    student = (leaves[0] @ leaves[1].T)[None]
    with torch.no_grad():
        teacher = (problem.teacher_hidden @ problem.teacher_head.T)[None]
    loss = GKDTrainer.generalized_jsd_loss(student, teacher, beta=1.0, num_items_in_batch=len(problem.hidden))
    return answered(loss, leaves)


def trl_chunked(problem: Problem, with_grpo: bool = False) -> Answer:
    """The function of TRL's `DistillationTrainer`; for GRPO, that of its chunked log-probabilities beside it."""
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction

    leaves = problem.leaves()
    value, _ = ChunkedDivergenceFunction.apply(*leaves, None, problem.teacher_hidden, problem.teacher_head, None, 1.0)
    if with_grpo:
        logp, *_ = ChunkedLogProbFunction.apply(*leaves, None, problem.token_ids, 1.0, 32768, None, 1.0, ("entropy",))
        ratio, a = (logp - problem.sampler_logp).exp(), problem.advantages
        value = value - torch.minimum(ratio * a, ratio.clamp(1 - CLIP, 1 + CLIP) * a)
    return answered(value.mean(), leaves)


def liger(problem: Problem, compiled: bool = False) -> Answer:
    """Liger's fused linear JSD with the labels' loss off; it takes the mean over tokens itself."""
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

    leaves = problem.leaves()
    jsd = LigerFusedLinearJSDLoss(
        weight_hard_loss=0.0, weight_soft_loss=1.0, beta=1.0, compiled=compiled, chunk_size=CHUNK
    )
    return answered(jsd(*leaves, problem.teacher_hidden, problem.teacher_head, problem.token_ids), leaves)


def variants() -> list[Variant]:
    """All peers; those whose library is not installed are listed as absent."""
    found = [
        ("trl", Variant("TRL GKD", "kl", trl_gkd)),
        ("trl", Variant("TRL chunked", "kl", trl_chunked)),
        ("trl", Variant("TRL chunked: KL + GRPO", "kl+grpo", partial(trl_chunked, with_grpo=True))),
        ("liger_kernel", Variant("Liger", "kl", liger)),
        ("liger_kernel", Variant("Liger, compiled", "kl", partial(liger, compiled=True))),
    ]
    return [
        variant if find_spec(library) else Variant(variant.name, variant.goal, None, f"{library} is not installed")
        for library, variant in found
    ]
