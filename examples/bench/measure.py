"""Checks, times and weighs variants on one problem."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from problem import Answer, Goal, Problem, Variant, exact
from torch import Tensor

CHECKED_TOKENS = 320  # more than one chunk, so that sums over chunks are checked too
# Of the relative error (Euclidean norm) of the gradients against fp64. In bf16 the logits themselves carry eight bits.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1}


@dataclass(frozen=True)
class Result:
    """What was found of one variant; numbers are NaN where it is absent or computes no loss."""

    variant: str
    over_floor: float = float("nan")  # CPU time, median over the repeats of its ratio to the floor of the same repeat
    seconds: float = float("nan")  # CPU seconds, median
    peak_extra_mib: float = float("nan")
    loss_error: float = float("nan")  # relative, against fp64
    gradient_error: float = float("nan")  # relative, the larger one of the two gradients
    absent: str = ""


def measured(variants: Sequence[Variant], problem: Problem, repeats: int) -> list[Result]:
    """One result per variant; the first variant is the floor.

    Raises:
        ValueError: a variant's loss or gradient is not the one of its definition.
    """
    torch._dynamo.reset()  # what was compiled for the problem before
    there = {variant.name: variant.run for variant in variants if variant.run is not None}
    errors = checked(variants, problem.first(CHECKED_TOKENS))
    memory = {}
    for name, run in there.items():
        run(problem)  # compiles, and lets the allocator settle
        memory[name] = peak_extra_mib(run, problem)
    seconds: dict[str, list[float]] = {name: [] for name in there}
    for _ in range(repeats):
        for name, run in there.items():
            began = time.process_time()
            run(problem)
            seconds[name].append(time.process_time() - began)
    base = seconds[variants[0].name]
    results = []
    for variant in variants:
        if variant.run is None:
            results.append(Result(variant.name, absent=variant.absent))
            continue
        own = seconds[variant.name]
        over_floor = statistics.median(mine / floor for mine, floor in zip(own, base, strict=True))
        results.append(
            Result(variant.name, over_floor, statistics.median(own), memory[variant.name], *errors[variant.name])
        )
    return results


def checked(variants: Sequence[Variant], problem: Problem) -> dict[str, tuple[float, float]]:
    """Relative errors of loss and gradient by variant, NaN for one that computes no loss.

    Raises:
        ValueError: an error exceeds the tolerance.
    """
    truth: dict[Goal, Answer] = {}
    errors = {}
    for variant in variants:
        errors[variant.name] = (float("nan"), float("nan"))
        if variant.run is None or variant.goal is None:
            continue
        if variant.goal not in truth:
            truth[variant.goal] = exact(problem, variant.goal)
        answer, right = variant.run(problem), truth[variant.goal]
        loss, *gradients = (_relative_error(vars(answer)[name], vars(right)[name]) for name in vars(right))
        errors[variant.name] = (loss, max(gradients))
        if not max(loss, *gradients) < TOLERANCE[problem.hidden.dtype]:
            raise ValueError(
                f"{variant.name} does not compute the loss that it is compared on: relative errors of loss, gradient "
                f"of the hidden states and of the head are {loss:.2g}, {gradients[0]:.2g}, {gradients[1]:.2g}"
            )
    return errors


def _relative_error(found: Tensor, right: Tensor) -> float:
    return ((found.double() - right).norm() / right.norm()).item()


def peak_extra_mib(run: Callable[[Problem], Answer], problem: Problem) -> float:
    """How far the resident set rises above what stood before the call (Linux, glibc)."""
    ctypes.CDLL(None).malloc_trim(0)  # what earlier variants freed must not look like room that was there
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before = _status("VmRSS")
    run(problem)
    return (_status("VmHWM") - before) / 1024


def _status(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1])
