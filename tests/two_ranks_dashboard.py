"""The dashboard on two ranks: `torchrun --nproc-per-node 2 -m tests.two_ranks_dashboard STUDENT TEACHER OUT`."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import torch

from opd import ranks
from opd.diagnostics import diagnose
from opd.engine import init_distributed
from opd.metrics import rollout_metrics
from opd.records import Reward
from tests.rows import TERMS, Setting, engine
from tests.two_ranks import DEALS, mine, values

VERDICTS = [1.0, 0.0, 0.0, None, 1.0]


def scenario(setting: Setting) -> dict[str, dict[str, float]]:
    """Every metric of one update, its diagnostics and its rollouts, merged over ranks, for every deal of the rows and
    for weights whole and sharded.

    The last token of every answer counts as a stop.
    """
    init_distributed()
    terms = [TERMS["kl"], TERMS["pg"]]
    rows = [replace(row, reward=Reward(value)) for row, value in zip(setting.rows, VERDICTS, strict=True)]
    goal = replace(setting.objective(terms), stop_ids=tuple({row.rollout.token_ids[-1] for row in rows}))
    found = {}
    for name, stage in [(name, stage) for name in DEALS for stage in (0, 3)]:
        own = mine(rows, DEALS[name])
        trainee, batch = engine(setting.student, stage), setting.batch(own, terms, budget=12)
        findings = diagnose(trainee, batch, goal, setting.heads(), 10**6)
        update = trainee.update(batch, goal, setting.heads())
        found[f"{name} {stage}"] = values({**findings, **update, **rollout_metrics([row.rollout for row in own])})
    return found


def main(student: str, teacher: str, out: str) -> None:
    """One rank's work; rank 0 writes the results."""
    init_distributed()
    found = scenario(Setting.of(Path(student), Path(teacher)))
    if ranks.rank() == 0:
        torch.save(found, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
