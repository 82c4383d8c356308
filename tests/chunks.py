"""Chunks and micro-batches made by hand, and the plain fp64 objective they are compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from opd.records import Distribution, MicroBatch, TeacherPayload, TokenChunk, TokenFields


def chunk_of(p: list[float], q: list[float] | None = None, token: int = 0, advantage: float = 0.0) -> TokenChunk:
    """One token under student p and teacher q, in fp64."""
    student = torch.tensor([p], dtype=torch.float64).log()
    return TokenChunk(
        student=Distribution(student),
        token_logp=student[:, token],
        token_ids=torch.tensor([token]),
        sampler_logp=student[:, token].clone(),
        advantages=torch.tensor([advantage], dtype=torch.float64),
        teacher=None if q is None else Distribution(torch.tensor([q], dtype=torch.float64).log()),
    )


def logit_grad(value: Callable[[Tensor], Tensor], p: list[float]) -> Tensor:
    """Gradient of value(p) with respect to logits whose softmax is p, by autograd in fp64."""
    z = torch.tensor(p, dtype=torch.float64).log().requires_grad_()
    value(torch.softmax(z, -1)).backward()
    return z.grad


def micro_batch(
    token_ids: Tensor, weights: Mapping[str, Tensor], teachers: Mapping[str, Tensor] | None = None, *,
    sampler_logp: Tensor | None = None, advantages: Tensor | None = None, present: Tensor | None = None,
) -> MicroBatch:  # fmt: skip
    """A micro-batch of N tokens whose hidden states are given to the objective directly."""
    count = len(token_ids)
    zeros = torch.zeros(count)
    present = torch.ones(count, dtype=torch.bool) if present is None else present
    return MicroBatch(
        input_ids=torch.zeros(1, 1, dtype=torch.long),
        attention_mask=torch.ones(1, 1, dtype=torch.long),
        tokens=TokenFields(
            torch.arange(count),
            token_ids,
            zeros if sampler_logp is None else sampler_logp,
            zeros if advantages is None else advantages,
            zeros,
        ),
        term_weights=dict(weights),
        teachers={name: TeacherPayload(hidden, present) for name, hidden in (teachers or {}).items()},
        rows=1,
    )
