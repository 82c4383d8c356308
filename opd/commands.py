"""What the commands do with a composed configuration."""

from __future__ import annotations

import json
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from opd import ranks
from opd.cli import DONE, TERMINATED, fail, refuse
from opd.config import load_config
from opd.loop import train
from opd.plan import plan_table
from opd.run import Run


def _prepared(cfg: DictConfig) -> Run:
    run = Run(load_config(cfg), OmegaConf.to_yaml(cfg, resolve=True))
    run.prepare()
    return run


def train_config(cfg: DictConfig) -> int:
    """Trains what remains of the run."""
    try:
        run = _prepared(cfg)
    except ValueError as error:
        return refuse(str(error))
    if run.already_finished():
        print(f"{run.run_dir}: all {run.config.steps} steps are done; raise steps to go on, or start anew by resume=never")
        return DONE
    try:
        run.load()
        run.begin()
        train(run)
        run.finish()
    except (RuntimeError, ArithmeticError, OSError, ValueError) as error:
        return fail(error)
    finally:
        run.close()
    return DONE if not run.terminated else TERMINATED


def check_config(cfg: DictConfig) -> int:
    """Refuses what cannot work and prints the plan; reads no weights."""
    try:
        run = _prepared(cfg)
    except ValueError as error:
        return refuse(str(error))
    Console().print(plan_table(run))
    return DONE


def eval_config(cfg: DictConfig) -> int:
    """Evaluates the run's newest checkpoint, or the student as it starts; prints and saves the metrics."""
    try:
        run = _prepared(cfg)
    except ValueError as error:
        return refuse(str(error))
    try:
        run.load()
        metrics, _ = run.evaluator.student(run.sampler)
    except (RuntimeError, ArithmeticError, OSError, ValueError) as error:
        return fail(error)
    finally:
        run.close()
    found = {"step": run.step, **{name: mean.value for name, mean in sorted(metrics.items())}}
    if ranks.rank() == 0:
        print(json.dumps(found, indent=1))
        if run.run_dir.is_dir():
            (Path(run.run_dir) / "eval.json").write_text(json.dumps(found, indent=1))
    return DONE
