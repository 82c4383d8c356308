"""Checkpoints: complete or absent, the newest few and the best kept."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from omegaconf import OmegaConf

from opd import ranks

STATE = "state.json"


@dataclass(frozen=True)
class CheckpointConfig:
    """Every `every` steps, at the end and on SIGTERM; `keep` newest stay, and the best by `best_metric`."""

    every: int = 50
    keep: int = 2
    best_metric: str | None = None
    best_mode: Literal["max", "min"] = "max"

    def __post_init__(self) -> None:
        if self.every < 1 or self.keep < 1:
            raise ValueError(f"every={self.every}, keep={self.keep}: both must be at least 1")


class Checkpoints:
    """The folder `run_dir/checkpoints`."""

    def __init__(self, run_dir: Path, config: CheckpointConfig) -> None:
        self.folder, self.config = run_dir / "checkpoints", config

    @classmethod
    def of_run(cls, run_dir: Path) -> Checkpoints:
        """The checkpoints of a run folder, under the settings it was run with."""
        saved = run_dir / "config.yaml"
        settings = OmegaConf.to_container(OmegaConf.load(saved))["checkpoint"] if saved.exists() else {}
        return cls(run_dir, CheckpointConfig(**settings))

    def save(self, step: int, state: dict[str, Any], write: Callable[[Path], None]) -> Path:
        """Writes one checkpoint; all ranks call. `write(folder)` puts the engine's state and the weights there.

        Everything is written under a temporary name and renamed last, so an interrupted save leaves no checkpoint and
        the previous one stays.
        """
        final, aside = self.folder / _name(step), self.folder / f".writing-{_name(step)}"
        if ranks.rank() == 0:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
        ranks.barrier()
        write(aside)
        ranks.barrier()
        if ranks.rank() == 0:
            (aside / STATE).write_text(json.dumps({"step": step, **state}, indent=1))
            _flush(aside)
            shutil.rmtree(final, ignore_errors=True)
            os.replace(aside, final)
            _flush_folder(self.folder)
            self._prune()
        ranks.barrier()
        return final

    def complete(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        return sorted(path.parent for path in self.folder.glob(f"step_*/{STATE}"))

    def latest(self) -> Path | None:
        """The newest complete checkpoint."""
        return (self.complete() or [None])[-1]

    def best(self) -> Path | None:
        """The best by `best_metric` among those kept; the newest of equals."""
        metric = self.config.best_metric
        scored = [(read_state(path)["metrics"].get(metric), path) for path in self.complete()] if metric else []
        sign = 1.0 if self.config.best_mode == "max" else -1.0
        known = [(sign * value, path) for value, path in scored if value is not None]
        return max(known)[1] if known else None

    def _prune(self) -> None:
        keep = {*self.complete()[-self.config.keep :], self.best()}
        for path in self.complete():
            if path not in keep:
                shutil.rmtree(path)


def read_state(checkpoint: Path) -> dict[str, Any]:
    """What `save` was given as state, and the step."""
    return json.loads((checkpoint / STATE).read_text())


def move_aside(run_dir: Path) -> None:
    """Renames a run folder out of the way (run.old-1, run.old-2, ...); all ranks call."""
    if ranks.rank() == 0 and run_dir.exists():
        number = next(n for n in range(1, 10**6) if not run_dir.with_name(f"{run_dir.name}.old-{n}").exists())
        run_dir.rename(run_dir.with_name(f"{run_dir.name}.old-{number}"))
    ranks.barrier()


def _name(step: int) -> str:
    return f"step_{step:08d}"


def _flush(folder: Path) -> None:
    """Forces every file below the folder to disk, so that the rename cannot overtake the contents."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
