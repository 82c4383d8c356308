"""How good is each estimate of the distillation gradient? Bias and noise on the samples of a real student and teacher.

    python examples/bench/estimators.py [experiment=quickstart] [draws=24] [key=value ...]

The run is composed as `opd train` would, and stays at its start weights. Every draw samples fresh answers to the same
prompts and takes the gradient in all weights of each term alone. Printed per estimator, against the mean gradient of
the full reverse KL over all draws: the relative distance of its own mean (bias, with what is left of the noise), its
noise over signal per draw, and the cosine of its mean with that of the reward's policy gradient.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace

import torch
from hydra import compose, initialize_config_module
from rich.console import Console
from rich.table import Table
from torch import Tensor

from opd.commands import prepared
from opd.losses import Loss, OnTopK, PPOClip, ReverseKL, SampledKL, SampledReverseKL
from opd.quiet import quiet_libraries
from opd.records import moved
from opd.resolvers import register
from opd.run import Run
from opd.terms import Term

ESTIMATORS: Mapping[str, Loss] = {
    "full vocabulary": ReverseKL(),
    "teacher's top 3 + tail": OnTopK(ReverseKL(), k=3),
    "student's top 3, renormalised": OnTopK(ReverseKL(), k=3, of="student", rest="renormalised"),
    "sampled token, advantage": SampledReverseKL(),
    "sampled token, -KL baseline": SampledReverseKL(baseline="negative_kl"),
    "sampled token, k2": SampledKL(),
}


def gradient(run: Run, term: Term, draw: int) -> Tensor:
    """The gradient of one term in all weights [W], on answers drawn with a seed of their own."""
    run.terms = [term]
    rollouts = run.answers.sample(0, seed=draw)
    rewards = run.answers.judge(rollouts)
    credits = run.credits(rollouts, rewards)
    rows = run.rows(rollouts, rewards, run.teachers.score(rollouts, rewards), credits)
    names = frozenset([term.name])
    batch = run.batch([replace(row, terms=names) for row in rows])
    parameters = [p for p in run.engine.module.parameters() if p.requires_grad]
    total = [torch.zeros_like(p) for p in parameters]
    objective = run.objective(0)
    for micro in batch.micro_batches:
        loss, _, _ = run.engine.module(moved(micro, run.engine.device), run.teacher_heads, objective)
        for mine, found in zip(total, torch.autograd.grad(loss, parameters), strict=True):
            mine += found
    return torch.cat([part.flatten() for part in total]).cpu()


def main() -> None:
    """Composes the run, draws, and prints the table."""
    quiet_libraries()
    register()
    draws = int(next((a.split("=")[1] for a in sys.argv[1:] if a.startswith("draws=")), "24"))
    overrides = [a for a in sys.argv[1:] if not a.startswith("draws=")]
    overrides += [] if any(a.startswith("experiment=") for a in overrides) else ["experiment=quickstart"]
    groups = ["data.streams.main.prompts=32", "data.streams.main.samples=8", "credit=grpo", "sampler=hf"]
    with initialize_config_module("opd.conf", version_base="1.3"):
        run = prepared(compose("train", overrides=[*groups, *overrides, "run_dir=outputs/estimators"]))
    run.load()
    terms = {name: Term("estimate", loss, teacher="main") for name, loss in ESTIMATORS.items()}
    terms["the reward's policy gradient"] = Term("estimate", PPOClip())
    found = {name: torch.stack([gradient(run, term, n) for n in range(draws)]) for name, term in terms.items()}
    run.close()
    Console().print(summary(found))


def summary(found: Mapping[str, Tensor]) -> Table:
    """One row per estimator from its gradients [draws, W]."""
    reference, reward = found["full vocabulary"].mean(0), found["the reward's policy gradient"].mean(0)
    table = Table("estimator", "distance of the mean", "noise / signal", "cosine with the reward's")
    for name, draws in found.items():
        mean = draws.mean(0)
        distance = ((mean - reference).norm() / reference.norm()).item()
        noise = ((draws - mean).square().sum(1).mean().sqrt() / mean.norm()).item()
        cosine = torch.cosine_similarity(mean, reward, dim=0).item()
        compared = ("", "") if name.startswith("the reward") else (f"{distance:.2f}", f"{cosine:+.2f}")
        table.add_row(name, compared[0], f"{noise:.2f}", compared[1])
    return table


if __name__ == "__main__":
    main()
