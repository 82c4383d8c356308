"""Whole runs of the real command, small and in this process, and what it takes to compare them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from opd.cli import main
from tests.source_tree import ROOT
from tests.tiny import save_model

OF_PROCESS_GROUP = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
OF_TIME = ("time", "rollout/tokens_per_s")  # what no two runs share


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str


def opd(*arguments: str) -> Ended:
    """`opd ARGUMENTS` in this process: the command line as it is, without another 15 seconds of imports."""
    out, err, before, handler = StringIO(), StringIO(), sys.argv, signal.getsignal(signal.SIGTERM)
    hook = sys.excepthook
    sys.argv = ["opd", *arguments]
    try:
        with redirect_stdout(out), redirect_stderr(err):
            main()
    except SystemExit as ended:
        return Ended(int(ended.code or 0), out.getvalue(), err.getvalue())
    except Exception as error:  # what Python itself does with one that nobody caught
        with redirect_stderr(err):
            sys.excepthook(type(error), error, error.__traceback__)
        return Ended(1, out.getvalue(), err.getvalue())
    finally:
        sys.argv, sys.excepthook = before, hook
        assert signal.getsignal(signal.SIGTERM) == handler, "the run kept the handler of SIGTERM"
    raise AssertionError("opd.cli.main leaves by SystemExit")


def opd_process(*arguments: str, timeout: float = 300.0) -> Ended:
    """`python -m opd ARGUMENTS` in a process of its own."""
    with start(*arguments, stderr=subprocess.PIPE) as process:
        out, err = process.communicate(timeout=timeout)
    return Ended(process.returncode, out, err)


def start(*arguments: str, stderr: int | None = None) -> subprocess.Popen[str]:
    """The same, still running; its process group is its own, not that of an engine in this process."""
    env = {name: value for name, value in os.environ.items() if name not in OF_PROCESS_GROUP}
    command = [sys.executable, "-m", "opd", *arguments]
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=stderr, text=True)


@dataclass(frozen=True)
class Pair:
    """A random student and a random teacher of one vocabulary."""

    student: Path
    teacher: Path

    def train(self, run_dir: Path, *changes: str) -> list[str]:
        """`opd train` of six steps of reverse KL on additions; independent of every shipped experiment's numbers."""
        return ["train", *self.settings(run_dir), *changes]

    def settings(self, run_dir: Path) -> list[str]:
        """The configuration alone."""
        return [
            "+teacher@teacher.main=local", "+loss@loss.distill=reverse_kl", "+reward@reward.correct=exact",
            "data=addition", "sampler=hf", "logger=none",
            f"student.model={self.student}", f"teacher.main.model={self.teacher}", f"run_dir={run_dir}",
            "steps=6", "sampler.params.max_tokens=5", "data.streams.main.prompts=6",
            "++data.train.size=40", "++data.heldout.size=16",
            "engine.optimizer.lr=0.003", "engine.scheduler.num_warmup_steps=2",
            "eval.every=3", "eval.problems=6", "checkpoint.every=2",
        ]  # fmt: skip


def save_pair(folder: Path) -> Pair:
    """Writes both models."""
    return Pair(save_model(folder / "student", seed=0), save_model(folder / "teacher", seed=1))


def lines(run_dir: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without times."""
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [without_times(record) for record in records]


def training_lines(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of optimizer steps, evaluations left out."""
    return [line for line in lines(run_dir) if "rollout/length" in line]


def without_times(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics that two equal runs share."""
    return {name: value for name, value in metrics.items() if name.split("/")[0] != "time" and name not in OF_TIME}


def checkpoint(run_dir: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return run_dir / "checkpoints" / f"step_{step:08d}"


def checkpoint_steps(run_dir: Path) -> list[int]:
    """The steps of the checkpoints kept."""
    return sorted(int(path.name.removeprefix("step_")) for path in (run_dir / "checkpoints").glob("step_*"))


def engine_state(folder: Path) -> dict[str, Any]:
    """Weights, optimizer and schedule as DeepSpeed saved them."""
    (file,) = (folder / "engine").glob("*model_states.pt")
    saved = torch.load(file, weights_only=False)
    return {name: saved[name] for name in ("module", "optimizer", "lr_scheduler")}


def differences(mine: Any, other: Any, path: str = "") -> list[str]:
    """Where two nested structures are not bitwise the same."""
    if isinstance(mine, Mapping) and isinstance(other, Mapping):
        found = [f"{path}.{key}: on one side only" for key in mine.keys() ^ other.keys()]
        for key in mine.keys() & other.keys():
            found += differences(mine[key], other[key], f"{path}.{key}")
        return found
    if isinstance(mine, list | tuple) and isinstance(other, list | tuple) and len(mine) == len(other):
        return [d for i, (a, b) in enumerate(zip(mine, other, strict=True)) for d in differences(a, b, f"{path}[{i}]")]
    if isinstance(mine, torch.Tensor) and isinstance(other, torch.Tensor):
        return [] if mine.dtype == other.dtype and torch.equal(mine, other) else [f"{path}: other numbers"]
    return [] if mine == other else [f"{path}: {mine!r} against {other!r}"]


def assert_same_run(mine: Path, other: Path, step: int) -> None:
    """Two runs ended bitwise alike: weights, optimizer, schedule, all metrics but times, samples, summary."""
    left, right = checkpoint(mine, step), checkpoint(other, step)
    weights = [path.relative_to(left) for path in left.rglob("*.safetensors")]
    assert weights
    for name in weights:
        assert not differences(load_file(left / name), load_file(right / name), str(name))
    moments = engine_state(left)
    assert moments["optimizer"]["state"]
    assert not differences(moments, engine_state(right))
    assert lines(mine) == lines(other)
    assert (mine / "samples.jsonl").read_text() == (other / "samples.jsonl").read_text()
    first, second = (json.loads((run / "summary.json").read_text()) for run in (mine, other))
    for name in ("steps", "sampled_tokens", "eval"):
        assert first[name] == second[name]
    assert without_times(first["final_metrics"]) == without_times(second["final_metrics"])
