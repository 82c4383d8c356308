"""Time and peak memory of the streamed reverse KL (forward and backward), against naive code and the floor.

    python examples/bench/objective.py [--shapes N,H,V ...] [--dtype float32|bfloat16] [--repeats 5]

The floor is the four matrix products that nobody can avoid: student logits, teacher logits, gradient of the hidden
states, gradient of the head, in chunks of 256 tokens. All variants alternate in one run, so that a noisy machine
disturbs them alike; times are medians of CPU seconds over the floor's.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from opd.heads import Head
from opd.losses import PPOClip, ReverseKL
from opd.objective import Objective, streamed_loss
from opd.records import MicroBatch, TeacherPayload, TokenFields
from opd.terms import Term

SHAPES = ["1024,256,32768", "4096,256,32768", "512,512,32768", "256,256,151936"]
CHUNK = 256
Problem = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # hidden, head, teacher hidden, teacher head, token ids


def make_problem(tokens: int, hidden: int, vocabulary: int, dtype: torch.dtype) -> Problem:
    """Random states and heads; logits of a realistic spread."""
    torch.manual_seed(0)
    states = [torch.randn(tokens, hidden, dtype=dtype) for _ in range(2)]
    heads = [torch.randn(vocabulary, hidden, dtype=dtype) / hidden**0.5 * 2 for _ in range(2)]
    return states[0], heads[0], states[1], heads[1], torch.randint(0, vocabulary, (tokens,))


def floor(problem: Problem) -> None:
    """The four products alone."""
    hidden, head, teacher_hidden, teacher_head, _ = problem
    grad_head, grad_hidden = torch.zeros_like(head), torch.empty_like(hidden)
    for start in range(0, len(hidden), CHUNK):
        rows = slice(start, start + CHUNK)
        logits = hidden[rows] @ head.T
        _ = teacher_hidden[rows] @ teacher_head.T
        grad_hidden[rows] = logits @ head
        grad_head.addmm_(logits.T, hidden[rows])


def naive(problem: Problem) -> None:
    """Full logits, log-softmax in fp32, autograd."""
    hidden, head = problem[0].detach().requires_grad_(), problem[1].detach().requires_grad_()
    student = torch.log_softmax((hidden @ head.T).float(), -1)
    teacher = torch.log_softmax((problem[2] @ problem[3].T).float(), -1)
    (student.exp() * (student - teacher)).sum(-1).mean().backward()


def streamed(problem: Problem, with_grpo: bool = False) -> None:
    """The objective of this project: reverse KL and every statistic of the dashboard; optionally GRPO on top."""
    hidden, head = problem[0].detach().requires_grad_(), problem[1].detach().requires_grad_()
    tokens = len(hidden)
    terms = [Term("distill", ReverseKL(), teacher="main")] + ([Term("grpo", PPOClip())] if with_grpo else [])
    weight = torch.full((tokens,), 1.0 / tokens)
    batch = MicroBatch(
        input_ids=torch.zeros(1, 1, dtype=torch.long),
        attention_mask=torch.ones(1, 1, dtype=torch.long),
        tokens=TokenFields(
            torch.arange(tokens), problem[4], torch.full((tokens,), -10.0), torch.ones(tokens), torch.zeros(tokens)
        ),
        term_weights={term.name: weight for term in terms},
        teachers={"main": TeacherPayload(problem[2], torch.ones(tokens, dtype=torch.bool))},
        rows=1,
    )
    objective = Objective(terms, {term.name: 1.0 for term in terms}, len(head), chunk_tokens=CHUNK)
    loss, _ = streamed_loss(hidden, Head(head), batch, {"main": Head(problem[3])}, objective)
    loss.backward()


VARIANTS: dict[str, Callable[[Problem], None]] = {
    "floor (4 products)": floor,
    "naive, full logits": naive,
    "opd, reverse KL": streamed,
    "opd, reverse KL + GRPO": lambda problem: streamed(problem, with_grpo=True),
}


def peak_extra_mib(run: Callable[[Problem], None], problem: Problem) -> float:
    """How far the resident set rises above what stood before the call (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before = _status("VmRSS")
    run(problem)
    return (_status("VmHWM") - before) / 1024


def _status(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1])


def measure(shape: str, dtype: torch.dtype, repeats: int) -> list[tuple[str, float, float]]:
    """(variant, time over the floor, peak extra MiB) for one shape."""
    tokens, hidden, vocabulary = map(int, shape.split(","))
    problem = make_problem(tokens, hidden, vocabulary, dtype)
    memory = {name: peak_extra_mib(run, problem) for name, run in VARIANTS.items()}  # also warms up
    seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for _ in range(repeats):
        for name, run in VARIANTS.items():
            began = time.process_time()
            run(problem)
            seconds[name].append(time.process_time() - began)
    base = statistics.median(seconds["floor (4 products)"])
    return [(name, statistics.median(seconds[name]) / base, memory[name]) for name in VARIANTS]


def main() -> None:
    """Prints one table per shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="N,H,V")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for shape in arguments.shapes:
        table = Table(title=f"N, H, V = {shape}, {arguments.dtype}")
        for column in ("variant", "CPU time over floor", "peak extra MiB"):
            table.add_column(column, justify="left" if column == "variant" else "right")
        for name, ratio, mib in measure(shape, getattr(torch, arguments.dtype), arguments.repeats):
            table.add_row(name, f"{ratio:.2f}", f"{mib:,.0f}")
        Console().print(table)


if __name__ == "__main__":
    main()
