"""Checkpoints: complete or absent, the newest few and the best kept."""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from omegaconf import OmegaConf
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from opd import ranks

STATE, LOCK = "state.json", ".lock"


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
        settings = OmegaConf.load(saved).checkpoint if saved.exists() else {}
        return cls(run_dir, CheckpointConfig(**{str(key): value for key, value in settings.items()}))

    def save(self, step: int, state: dict[str, Any], write: Callable[[Path], None]) -> Path:
        """Writes one checkpoint; all ranks call. `write(folder)` puts the engine's state and the weights there.

        Everything is written under a temporary name and renamed last, so an interrupted save leaves no checkpoint and
        the previous one stays.

        Raises:
            OSError: it could not be written; what was written of it is removed.
        """
        final, aside = self.folder / _name(step), self.folder / f".writing-{_name(step)}"
        lead = ranks.rank() == 0
        try:
            if lead:
                self._discard_leftovers()
                aside.mkdir(parents=True)
            ranks.barrier()
            write(aside)
            ranks.barrier()
            if lead:
                (aside / STATE).write_text(json.dumps({"step": step, **state, "files": _sizes(aside)}, indent=1))
                _flush(aside)
                if final.exists():
                    _remove(final)
                os.replace(aside, final)
                _flush(self.folder, below=False)
                self._prune()
        except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
            free = shutil.disk_usage(self.folder.parent).free / 2**20
            raise OSError(
                f"the checkpoint of step {step} could not be written to {self.folder} ({free:,.0f} MiB free there): "
                f"{error}; the one before it is intact, and the same command goes on from it"
            ) from error
        finally:
            if lead:
                shutil.rmtree(aside, ignore_errors=True)
        ranks.barrier()
        return final

    def present(self) -> list[Path]:
        """Checkpoint folders, oldest first. They bear their final names, so only damage can leave one incomplete."""
        return sorted(path for path in self.folder.glob("step_*") if re.fullmatch(r"step_\d{8}", path.name))

    def latest(self) -> Path | None:
        """The newest checkpoint.

        Raises:
            ValueError: a file of it is missing or cut short; names the file.
        """
        return _verified(self.present()[-1]) if self.present() else None

    def best(self) -> Path | None:
        """The best by `best_metric` among those kept; the newest of equals. Raises as `latest` does."""
        metric = self.config.best_metric
        scored = [(read_state(path)["metrics"].get(metric), path) for path in self.present()] if metric else []
        sign = 1.0 if self.config.best_mode == "max" else -1.0
        known = [(sign * value, path) for value, path in scored if value is not None and math.isfinite(value)]
        return _verified(max(known)[1]) if known else None

    def _prune(self) -> None:
        keep = {*self.present()[-self.config.keep :], self.best()}
        for path in self.present():
            if path not in keep:
                _remove(path)

    def _discard_leftovers(self) -> None:
        """Removes what a killed process left half written or half removed."""
        for path in [*self.folder.glob(".writing-*"), *self.folder.glob(".removing-*")]:
            shutil.rmtree(path)


def read_state(checkpoint: Path) -> dict[str, Any]:
    """What `save` was given as state, the step, and the sizes of all files.

    Raises:
        ValueError: the file is missing, cut short or otherwise damaged.
    """
    file = checkpoint / STATE
    try:
        state = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(_damage(file, "missing")) from error
    except ValueError as error:  # neither JSON nor text
        raise ValueError(_damage(file, f"cut short or overwritten ({error})")) from error
    lacking = [key for key in ("step", "metrics", "files") if not isinstance(state, dict) or key not in state]
    if lacking:
        raise ValueError(_damage(file, f"without {', '.join(lacking)}"))
    return state


def _verified(checkpoint: Path) -> Path:
    """The checkpoint, once every file that it was saved with has been found at its full size."""
    for name, size in read_state(checkpoint)["files"].items():
        file = checkpoint / name
        if not file.is_file():
            raise ValueError(_damage(file, "missing"))
        if file.stat().st_size != size:
            raise ValueError(_damage(file, f"{file.stat().st_size} bytes long where {size} were written"))
    return checkpoint


def _damage(file: Path, what: str) -> str:
    return (
        f"{file}: {what}, so this checkpoint cannot be used; put the file back, remove the checkpoint's folder "
        "to go on from the one before it, or set resume=never to start anew"
    )


def lock_run_dir(run_dir: Path) -> IO[str] | None:
    """Claims a run folder, which it makes, for as long as the handle is open; all ranks call, rank 0 has the handle.

    The claim belongs to the folder, not to its name: one that is moved aside takes it along, and a new one needs its
    own. A process that dies by whatever cause gives it up.

    Raises:
        ValueError: another run, in this process or another on this machine, holds the folder.
    """
    if ranks.rank() != 0:
        return None
    run_dir.mkdir(parents=True, exist_ok=True)
    handle = (run_dir / LOCK).open("a", encoding="utf-8")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        handle.close()
        raise ValueError(
            f"run_dir={run_dir}: another run is at work in this folder; wait until it has ended, or give another "
            "run_dir"
        ) from error
    return handle


def move_aside(run_dir: Path) -> None:
    """Renames a run folder out of the way (run.old-1, run.old-2, ...); all ranks call."""
    if ranks.rank() == 0 and run_dir.exists():
        number = next(n for n in range(1, 10**6) if not run_dir.with_name(f"{run_dir.name}.old-{n}").exists())
        run_dir.rename(run_dir.with_name(f"{run_dir.name}.old-{number}"))
    ranks.barrier()


def _name(step: int) -> str:
    return f"step_{step:08d}"


def _sizes(folder: Path) -> dict[str, int]:
    """Relative path -> bytes of every file below the folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.stat().st_size for path in files}


def _remove(checkpoint: Path) -> None:
    """Renames before removing, so that a kill leaves no half checkpoint under a good name."""
    doomed = checkpoint.with_name(f".removing-{checkpoint.name}")
    os.replace(checkpoint, doomed)
    shutil.rmtree(doomed)


def _flush(folder: Path, below: bool = True) -> None:
    """Forces the folder, and all below it, to disk, so that a rename cannot overtake the contents."""
    for path in [*(folder.rglob("*") if below else ()), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def save_tensors(state: Mapping[str, Tensor], file: Path) -> None:
    """Writes named tensors into a safetensors file, whose folder is made where it is missing.

    Raises:
        OSError: it could not be written.
    """
    file.parent.mkdir(exist_ok=True)
    try:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}, file)
    except SafetensorError as error:
        raise OSError(f"{file}: {error}") from error
