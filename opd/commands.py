"""What the commands do with a composed configuration."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from opd import ranks
from opd.checks import check_models, notes
from opd.config import load_config
from opd.exits import DONE, refuse
from opd.loop import train
from opd.observe import config_differences
from opd.plan import plan_table
from opd.remote import RemoteError
from opd.run import Run

HARMLESS = ("steps:", "resume:", "stop_after:", "run_dir:")  # keys that do not make it another run


def prepared(cfg: DictConfig) -> Run:
    """The run that a composed configuration describes, checked; no weights are read.

    Raises:
        ValueError: why it cannot work.
    """
    config = load_config(cfg)
    check_models(config)
    run = Run(config, OmegaConf.to_yaml(cfg, resolve=True))
    run.prepare()
    if ranks.rank() == 0:
        for note in notes(config):
            print(f"opd: note: {note}", file=sys.stderr)
    return run


def train_config(cfg: DictConfig) -> int:
    """Trains what remains of the run."""
    try:
        run = prepared(cfg)
    except ValueError as error:
        return refuse(str(error))
    if run.already_finished():
        changed = [line for line in config_differences(run.run_dir, run.resolved) if not line.startswith(HARMLESS)]
        if changed:
            return refuse(
                f"run_dir: {run.run_dir} holds a finished run of another configuration; choose another run_dir=..., or "
                "move it aside by resume=never\n" + "\n".join(changed)
            )
        way_on = "raise steps to go on, or start anew by resume=never"
        print(f"{run.run_dir}: all {run.config.steps} steps are done; {way_on}")
        return DONE
    try:
        run.load()
        run.begin()
        train(run)
        run.finish()
    except RemoteError:
        if run.step:  # the weights are those of this step: what has been learned is kept
            run.keep()
        raise
    finally:
        run.close()
    return 128 + (run.observer.stop_signal or signal.SIGTERM) if run.terminated else DONE


def check_config(cfg: DictConfig) -> int:
    """Refuses what cannot work and prints the plan; reads no weights."""
    try:
        run = prepared(cfg)
    except ValueError as error:
        return refuse(str(error))
    Console().print(plan_table(run))
    return DONE


def eval_config(cfg: DictConfig) -> int:
    """Evaluates the run's newest checkpoint, or the student as it starts; prints and saves the metrics."""
    cfg.resume = "auto"  # an evaluation moves nothing aside
    try:
        run = prepared(cfg)
    except ValueError as error:
        return refuse(str(error))
    try:
        run.load()
        metrics, _ = run.evaluator.student(run.sampler)
    finally:
        run.close()
    found = {"step": run.step, **{name: mean.value for name, mean in sorted(metrics.items())}}
    if ranks.rank() == 0:
        print(json.dumps(found, indent=1))
        if run.run_dir.is_dir():
            (Path(run.run_dir) / "eval.json").write_text(json.dumps(found, indent=1))
    return DONE
