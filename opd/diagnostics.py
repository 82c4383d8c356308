"""How the gradients of an update agree with each other and with their estimates; asked for every k steps.

All is measured in the space of the student's last hidden states [N, H] on the first micro-batches of the step: what a
term sends into the body of the model, token by token. That costs a forward pass and the head, knows nothing of how the
weights are sharded, and leaves weights, optimizer and random numbers as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, combinations, combinations_with_replacement
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from opd import ranks
from opd.engine import Engine
from opd.heads import Head
from opd.losses import OnTopK, ReverseKL, SampledReverseKL
from opd.metrics import of_all_ranks
from opd.objective import Objective, streamed_loss
from opd.records import Batch, Mean, MicroBatch
from opd.terms import Term

FULL: Any = ReverseKL()  # Any: pyright takes no ClassVar for a protocol's property
ESTIMATES: Mapping[str, Any] = {"sampled": SampledReverseKL(), "top16": OnTopK(FULL, k=16)}


@dataclass(frozen=True)
class DiagnosticsConfig:
    """Every `every` steps (0: never) on micro-batches of at least `tokens` trainable tokens of each rank, if it has so
    many.
    """

    every: int = 0
    tokens: int = 1024

    def __post_init__(self) -> None:
        if self.every < 0 or self.tokens < 1:
            raise ValueError(f"every={self.every}, tokens={self.tokens}: need every >= 0 and tokens >= 1")


def diagnose(
    engine: Engine, batch: Batch, objective: Objective, heads: Mapping[str, Head], tokens: int
) -> dict[str, Mean]:
    """Metrics of the batch before its update, exact over ranks (all must call).

    With g_a the gradient of term a, under its weight in the update, in the hidden states of all tokens looked at:
    `diagnostics/<a>/grad_norm` is |g_a|; `diagnostics/cosine/<a>/<b>` is <g_a, g_b> / (|g_a| |g_b|).
    With g the gradient of the reverse KL to a teacher that gives the full vocabulary and e that of an estimate of it,
    at every token that was sampled and scored: `diagnostics/<teacher>/<estimate>_noise` is |e - g| / |g|, `..._bias` is
    <e - g, g> / |g|^2, whose mean over draws of the tokens is 0 for an unbiased estimate. Estimates: `sampled`, the
    sampled token's log q - log p as its advantage (unbiased at sampling temperature 1), and `top16`, the teacher's top
    16 and one bucket for the rest.
    What would be divided by zero is left out, and the cosine of terms that share no token (of two streams): in this
    space they meet nowhere, whatever they do to the weights.
    """
    sizes = [len(micro_batch.tokens.token_ids) for micro_batch in batch.micro_batches]
    enough = next((count for count, total in enumerate(accumulate(sizes), 1) if total >= tokens), len(sizes))
    total = dict.fromkeys(_keys(objective, heads), 0.0)
    for micro_batch in batch.micro_batches[: max(ranks.gather(enough))]:
        for key, product in engine.look(micro_batch, objective, heads, inner_products).items():
            total[key] += product
    return {name: of_all_ranks(value) for name, value in _readings(objective, heads, ranks.sums(total)).items()}


def inner_products(
    hidden: Tensor, head: Head, batch: MicroBatch, heads: Mapping[str, Head], objective: Objective
) -> dict[str, float]:
    """Inner products of a micro-batch's gradients [N, H], see `_keys`."""

    def gradient(term: Term, weight: float, seen: MicroBatch) -> Tensor:
        goal = replace(objective, terms=[term], weights={term.name: weight})
        with torch.enable_grad():
            states = hidden.detach().requires_grad_()
            loss, _ = streamed_loss(states, constant, seen, heads, goal)
            return torch.autograd.grad(loss, states)[0].double()

    tensors = {name: part.detach() for name, part in vars(head).items() if isinstance(part, Tensor)}
    constant: Head = replace(head, **tensors)
    own = {term.name: gradient(term, objective.weights[term.name], batch) for term in objective.terms}
    products = {f"{a} {b}": _product(own[a], own[b]) for a, b in combinations_with_replacement(own, 2)}
    for teacher in heads:
        payload, sampled = batch.teachers.get(teacher), ~batch.tokens.sampler_logp.isnan()
        scored = torch.zeros_like(sampled) if payload is None or payload.hidden is None else payload.present
        seen = replace(batch, term_weights={"estimate": (sampled & scored).float()})
        full = gradient(Term("estimate", FULL, teacher=teacher), 1.0, seen)
        products[f"teacher {teacher}"] = _product(full, full)
        for name, loss in ESTIMATES.items():
            error = gradient(Term("estimate", loss, teacher=teacher), 1.0, seen) - full
            products[f"noise {teacher} {name}"] = _product(error, error)
            products[f"bias {teacher} {name}"] = _product(error, full)
    return products


def _product(a: Tensor, b: Tensor) -> float:
    return (a * b).sum().item()


def _keys(objective: Objective, heads: Mapping[str, Head]) -> list[str]:
    """Pairs of terms; per teacher the full gradient alone, and every estimate's error alone and with it."""
    keys = [f"{a.name} {b.name}" for a, b in combinations_with_replacement(objective.terms, 2)]
    for teacher in heads:
        keys.append(f"teacher {teacher}")
        keys += [f"{what} {teacher} {name}" for what in ("noise", "bias") for name in ESTIMATES]
    return keys


def _readings(objective: Objective, heads: Mapping[str, Head], total: Mapping[str, float]) -> dict[str, float]:
    names = [term.name for term in objective.terms]
    norms = {name: sqrt(total[f"{name} {name}"]) for name in names}
    found = {f"diagnostics/{name}/grad_norm": norm for name, norm in norms.items()}
    for a, b in combinations(names, 2):
        if norms[a] > 0 and norms[b] > 0 and total[f"{a} {b}"]:  # exactly 0 only where they share no token
            found[f"diagnostics/cosine/{a}/{b}"] = total[f"{a} {b}"] / (norms[a] * norms[b])
    for teacher in heads:
        full = total[f"teacher {teacher}"]
        for name in ESTIMATES if full > 0 else ():
            found[f"diagnostics/{teacher}/{name}_noise"] = sqrt(total[f"noise {teacher} {name}"] / full)
            found[f"diagnostics/{teacher}/{name}_bias"] = total[f"bias {teacher} {name}"] / full
    return found
