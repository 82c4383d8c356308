"""What two ranks do, written to a file: `torchrun --nproc-per-node 2 -m tests.two_ranks STUDENT TEACHER OUT`.

Imported, the same scenarios run in one process: each scenario names the rows of every rank, and one process takes all.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from opd import ranks
from opd.engine import Engine, init_distributed
from opd.losses import Formula
from opd.objective import Objective
from opd.records import Mean, TokenChunk
from opd.rows import Row
from opd.students import HFStudent
from opd.terms import Term
from tests.mixed import Mixed
from tests.rows import CONSTANT_WEIGHTS, TERMS, Setting, constant_terms, engine, masked, weights_of
from tests.tiny import tokenizer

STAGES = [0, 1, 2, 3]
SAVED_STAGES = [1, 3]  # replicated and sharded weights under a sharded optimizer; test_engine.py has every stage
DEALS = {"4+1": ([0, 1, 3, 4], [2]), "5+0": ([0, 1, 2, 3, 4], [])}
CONSTANT_DEALS = {"2+2": ([0, 1], [2, 3]), "3+1": ([0, 1, 2], [3]), "4+0": ([0, 1, 2, 3], [])}

TERM_DEALS = {  # groups stay whole; in the second rank 1 has no sampled answer, for most terms no row at all
    "6+2": ([0, 1, 2, 3, 4, 6], [5, 7]),
    "none": ([0, 1, 2, 3, 4, 5], [6, 7]),
}


def mine(rows: Sequence[Row], deal: tuple[list[int], list[int]]) -> list[Row]:
    """This rank's rows; all of them in one process."""
    chosen = deal[ranks.rank()] if ranks.world_size() == 2 else sorted(deal[0] + deal[1])
    return [rows[index] for index in chosen]


def values(metrics: dict[str, Mean]) -> dict[str, float]:
    """Merged over ranks."""
    return {name: mean.value for name, mean in ranks.merged(metrics).items()}


def agreed(trained: Engine) -> dict[str, Tensor]:
    """The weights, which every rank must hold bit for bit."""
    weights = weights_of(trained)
    others = ranks.gather(weights)
    assert all(torch.equal(other[name], weights[name]) for other in others for name in weights)
    return weights


def updates(setting: Setting, stage: int, deal: tuple[list[int], list[int]]) -> dict[str, Any]:
    """Two clipped updates; at budget 12 the ranks have different numbers of micro-batches."""
    trained = engine(setting.student, stage, max_grad_norm=1.0)
    metrics = []
    for _ in range(2):
        batch = setting.batch(mine(setting.rows, deal), budget=12)
        metrics.append(values(trained.update(batch, setting.objective(), setting.heads())))
    return {"metrics": metrics, "weights": agreed(trained)}


def constant(setting: Setting, deal: tuple[list[int], list[int]]) -> dict[str, Any]:
    """Answers of 1, 9, 4, 2 tokens at 2, 1, .5, 3 a token."""
    fixed, terms = setting.constant(), constant_terms()
    trained = engine(setting.student, 0)
    goal = Objective(terms, CONSTANT_WEIGHTS, setting.vocab_size)
    batch = fixed.batch(mine(fixed.rows, deal), terms, budget=20)
    return {"metrics": values(trained.update(batch, goal, setting.heads())), "weights": agreed(trained)}


def one_rank_masked(setting: Setting, stage: int) -> dict[str, Any]:
    """Rank 1 has no trainable token; then no rank has one."""
    rows = [*setting.rows[:3], masked(setting.rows[3]), masked(setting.rows[4])]
    trained = engine(setting.student, stage)
    batch = setting.batch(mine(rows, ([0, 1, 2], [3, 4])), budget=12)
    metrics = values(trained.update(batch, setting.objective(), setting.heads()))
    weights = agreed(trained)
    nothing = setting.batch(mine([masked(row) for row in rows], DEALS["4+1"]), budget=12)
    skipped = values(trained.update(nothing, setting.objective(), setting.heads()))
    assert all(torch.equal(weights[name], tensor) for name, tensor in agreed(trained).items())
    return {"metrics": metrics, "skipped": skipped, "weights": weights}


def broken(chunk: TokenChunk) -> Tensor:
    """Infinite at the tokens of the row with advantage -0.6."""
    return chunk.token_logp + torch.where(chunk.advantages == -0.6, torch.inf, 0.0)


def broken_on_one_rank(setting: Setting, stage: int) -> dict[str, Any]:
    """Only rank 1 meets the infinite loss; every rank refuses and keeps its weights."""
    terms = [TERMS["kl"], Term("bad", Formula(broken))]
    rows = [replace(row, terms=frozenset({"kl", "bad"})) for row in setting.rows]
    trained = engine(setting.student, stage)
    before, message = weights_of(trained), ""
    batch = setting.batch(mine(rows, ([0, 1, 2, 3], [4])), terms)
    try:
        trained.update(batch, setting.objective(terms, {"kl": 1.0, "bad": 1.0}), setting.heads())
    except FloatingPointError as error:
        message = str(error)
    assert all(torch.equal(before[name], tensor) for name, tensor in agreed(trained).items())
    return {"messages": ranks.gather(message)}


def saved(setting: Setting, stage: int, folder: Path) -> dict[str, Any]:
    """An update, a save, an update; a fresh engine that loads and makes the same update must end with the same bits."""
    student, settings = HFStudent(str(setting.student)), {"optimizer": torch.optim.AdamW, "max_grad_norm": 1.0}
    batch = setting.batch(mine(setting.rows, DEALS["4+1"]), budget=12)
    first = engine(student, stage, **settings)
    first.update(batch, setting.objective(), setting.heads())
    first.save(folder, student, tokenizer())
    ranks.barrier()
    first.update(batch, setting.objective(), setting.heads())
    second = engine(student, stage, **settings)
    second.load(folder)
    second.update(batch, setting.objective(), setting.heads())
    weights, again = agreed(first), agreed(second)
    assert all(torch.equal(weights[name], tensor) for name, tensor in again.items())
    return {"weights": weights}


class Keeps(torch.optim.SGD):
    """Leaves the weights as they are and keeps the gradients that it was given."""

    kept: list[Tensor]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Copies every gradient."""
        self.kept = [parameter.grad.clone() for group in self.param_groups for parameter in group["params"]]


def every_term(mixed: Mixed, terms: dict[str, Term]) -> dict[str, Any]:
    """Loss and gradients of every term, as the optimizer of each rank gets them: the same bits."""
    trained = engine(mixed.student, 0, optimizer=Keeps)
    names = [name for name, _ in trained.module.model.named_parameters()]
    results = {}
    for label, term in terms.items():
        for deal, shares in TERM_DEALS.items():
            batch, objective = mixed.update(term, mine(mixed.rows, shares), trained.measure, budget=24, chunk=5)
            metrics = values(trained.update(batch, objective, mixed.heads()))
            grads = dict(zip(names, trained.deepspeed.basic_optimizer.kept, strict=True))
            assert all(torch.equal(other[name], grads[name]) for other in ranks.gather(grads) for name in names)
            results[f"{deal} {label}"] = {"loss": metrics["loss/term"], "grads": grads}
    return results


def helpers() -> dict[str, Any]:
    """The small collective functions on values that differ by rank."""
    number = float(ranks.rank())
    partial = {"both": Mean(1.0 + number, 2.0)} | ({"first": Mean(5.0, 2.0)} if number == 0 else {})
    return {
        "world_size": ranks.world_size(),
        "share": ranks.gather(ranks.share("abcde")),
        "gather": ranks.gather({"rank": ranks.rank()}),
        "sums": ranks.sums({"a": number + 1.0, "b": 10.0 * number}),
        "merged": {name: (mean.sum, mean.count) for name, mean in ranks.merged(partial).items()},
    }


def scenarios(setting: Setting, folder: Path) -> dict[str, Any]:
    """Every scenario's results by name."""
    init_distributed()
    results = {f"constant {name}": constant(setting, deal) for name, deal in CONSTANT_DEALS.items()}
    for stage in STAGES:
        for name, deal in DEALS.items():
            results[f"updates {stage} {name}"] = updates(setting, stage, deal)
        results[f"masked {stage}"] = one_rank_masked(setting, stage)
        results[f"broken {stage}"] = broken_on_one_rank(setting, stage)
    for stage in SAVED_STAGES:
        results[f"saved {stage}"] = saved(setting, stage, folder / f"stage{stage}")
    return results


def main(student: str, teacher: str, out: str) -> None:
    """One rank's work; rank 0 writes the results."""
    init_distributed()
    small = helpers()
    folder = Path(out).parent
    terms = pickle.loads((folder / "terms.pickle").read_bytes())  # composing them takes seconds
    results = scenarios(Setting.of(Path(student), Path(teacher)), folder / "two")
    results |= {"helpers": small, "terms": every_term(Mixed.of(folder / "terms"), terms)}
    if ranks.rank() == 0:
        torch.save(results, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
