"""Where metrics go: `metrics.jsonl` and TensorBoard, both in the run's folder.

A logger is any object with the three methods of `Logger`; a user's own is named by `_target_` like every other part.
Training metrics and an evaluation of one step may arrive in two calls, so a step may hold several lines.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TextIO, runtime_checkable

if TYPE_CHECKING:
    from torch.utils.tensorboard.writer import SummaryWriter


@runtime_checkable
class Logger(Protocol):
    """Takes the metrics of a run. Only the main process calls it."""

    def start(self, run_dir: Path, resume_step: int) -> None:
        """Open for a run whose first `resume_step` steps are done; whatever was logged beyond them is forgotten.

        0 is a run from its beginning: everything that an earlier try logged is forgotten, its evaluation at step 0 too.
        """
        ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record metrics as of `step` finished optimiser steps; safe against a kill once it has returned."""
        ...

    def close(self) -> None:
        """Release what `start` opened; harmless when repeated or never started."""
        ...


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Every record of a file with one JSON object per line; a last line that a kill cut short is left out.

    Raises ValueError, with the line, where any other line is broken: that is damage, not an interruption.
    """
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")  # splitlines() would split inside strings
    last = max((number for number, line in enumerate(lines) if line.strip()), default=-1)
    records = []
    for number, line in enumerate(lines[: last + 1]):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number < last:
                where = f"{path}:{number + 1}"
                raise ValueError(f"{where}: not JSON ({error}); remove the line or use another run_dir") from error
    return records


@dataclass
class Jsonl:
    """Writes `run_dir/metrics.jsonl`: one `{"step": n, "time": unix seconds, "<metric>": float}` per line.

    A value that is not finite is written as null, so that every JSON reader takes the file.
    """

    _file: TextIO | None = field(default=None, init=False, repr=False)

    def start(self, run_dir: Path, resume_step: int) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        path = run_dir / "metrics.jsonl"
        if path.exists():
            forget_after(path, resume_step)
        self._file = path.open("a", encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        assert self._file is not None, "Jsonl.start comes before Jsonl.log"
        assert metrics.keys().isdisjoint({"step", "time"}), "`step` and `time` are Jsonl's own keys, not metrics"
        values = {name: float(value) for name, value in metrics.items()}
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._file.write(json.dumps({"step": step, "time": time.time(), **finite}, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def forget_after(path: Path, step: int) -> None:
    """Keep the records up to `step`, none at 0; the file is at all times the old one or the new one."""
    kept = [record for record in read_jsonl(path) if step > 0 and record["step"] <= step]
    aside = path.with_suffix(".tmp")
    with aside.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in kept)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)


@dataclass
class TensorBoard:
    """Writes `run_dir/tensorboard`; TensorBoard's own purge mark hides the points beyond a resumed step."""

    _writer: SummaryWriter | None = field(default=None, init=False, repr=False)

    def start(self, run_dir: Path, resume_step: int) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        first_step = resume_step + 1 if resume_step else 0
        self._writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=first_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        assert self._writer is not None, "TensorBoard.start comes before TensorBoard.log"
        for name, value in metrics.items():
            self._writer.add_scalar(name, float(value), step)
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
