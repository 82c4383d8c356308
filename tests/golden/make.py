"""The golden losses: four fixed steps of a small run, at full precision, with the versions they were made under.

`python -m tests.golden.make` writes `quickstart.json` anew, on purpose: whoever does it says in the commit why the
numbers moved.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.runs import opd, save_pair, training_lines

FILE = Path(__file__).with_name("quickstart.json")
WATCHED = ("loss/distill", "loss/grpo", "teacher/main/kl", "student/entropy", "grad_norm", "lr", "rollout/tokens_total")
CHANGES = (
    "steps=4", "eval=none", "data.streams.main.prompts=8", "data.streams.main.terms=[distill]",
    "+data.streams.rl.prompts=2", "+data.streams.rl.samples=4", "~reward.correct",
    "+loss@loss.grpo=grpo", "credit=grpo", "+reward.letters._target_=tests.faults.parts.Letters",
)  # fmt: skip


def measure(folder: Path) -> dict[str, Any]:
    """Reverse KL on two streams and GRPO on one of them, on random models: steps and versions."""
    torch.set_num_threads(1)
    ended = opd(*save_pair(folder / "models").train(folder / "run", *CHANGES))
    assert ended.code == 0, ended.err
    steps = [{name: line[name] for name in WATCHED} for line in training_lines(folder / "run")]
    return {"versions": {"torch": torch.__version__, "transformers": transformers.__version__}, "steps": steps}


def main() -> None:
    """Writes the file."""
    with tempfile.TemporaryDirectory() as folder:
        FILE.write_text(json.dumps(measure(Path(folder)), indent=1) + "\n")
    print(FILE)


if __name__ == "__main__":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    main()
