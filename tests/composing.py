"""Runs composed from conf/ as the command line does, on tiny models and files."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig

from opd.commands import prepared
from opd.resolvers import register
from opd.run import Run
from tests.tiny import save_model

GRPO = ["+loss@loss.grpo=grpo", "credit=grpo", "data.streams.main.samples=4"]


@functools.cache
def composed(*overrides: str) -> DictConfig:
    """What Hydra makes of conf/ and the overrides."""
    register()
    GlobalHydra.instance().clear()
    with initialize_config_module("opd.conf", version_base="1.3"):
        return compose("train", overrides=list(overrides))


def prepare(*overrides: str) -> Run:
    """The checked run, as every command begins."""
    return prepared(composed(*overrides))


def refusal(*overrides: str) -> str:
    """Why the run is refused."""
    with pytest.raises(ValueError) as caught:
        prepare(*overrides)
    return str(caught.value)


def write_jsonl(path: Path, rows: Sequence[object]) -> Path:
    """One JSON value per line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def tiny_parts(folder: Path) -> list[str]:
    """Overrides that give student, sampler and data: six sums to train on, two held out; no loss, no teacher."""
    student = save_model(folder / "student", seed=0)
    sums = write_jsonl(folder / "sums.jsonl", [{"prompt": f"{n}+{n}=", "answer": str(2 * n)} for n in range(6)])
    heldout = write_jsonl(folder / "heldout.jsonl", [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(2)])
    return [
        f"student.model={student}",
        f"data.train.path={sums}",
        f"data.heldout={{_target_: opd.prompts.JsonlSource, path: {heldout}, limit: null}}",
        "data.max_prompt_tokens=16",
        "data.streams.main.prompts=4",
        "sampler=hf",
        "sampler.params.max_tokens=4",
        "steps=2",
        f"run_dir={folder}/run",
    ]


def tiny_opd(folder: Path) -> list[str]:
    """Overrides of a whole on-policy distillation: `tiny_parts`, a teacher, reverse KL, a reward."""
    teacher = save_model(folder / "teacher", seed=1)
    return [
        *tiny_parts(folder),
        "+teacher@teacher.main=local",
        f"teacher.main.model={teacher}",
        "+loss@loss.distill=reverse_kl",
        "+reward@reward.correct=exact",
    ]
