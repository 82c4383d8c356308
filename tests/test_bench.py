"""The benchmark of the objective: its check before timing, and its command on a tiny problem."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.source_tree import ROOT

FOLDER = ROOT / "examples" / "bench"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """The benchmark's modules, which import each other as scripts of one folder do."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import measure
    import ours
    import problem

    return {"measure": measure, "ours": ours, "problem": problem}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_variant_of_ours_computes_its_loss(bench: dict[str, ModuleType], dtype: torch.dtype) -> None:
    """300 tokens are two chunks of 256 and 44; V = 9,001 is above 2^13, so the top-k of the statistics are sampled."""
    variants = [v for v in bench["ours"].variants() if v.name != "naive, compiled"]
    errors = bench["measure"].checked(variants, bench["problem"].made(300, 16, 9001, dtype))
    found = [gradient for _, gradient in errors.values() if gradient == gradient]
    assert len(found) == len([v for v in variants if v.goal]) >= 6
    assert max(found) < (1e-5 if dtype == torch.float32 else 0.03)


def test_a_variant_of_another_loss_is_refused(bench: dict[str, ModuleType]) -> None:
    """Half of a loss is off by 1/2, far beyond the tolerance of 1e-4."""
    naive = next(v for v in bench["ours"].variants() if v.name == "naive")

    def half(given: Any) -> Any:
        answer = naive.run(given)
        return replace(answer, loss=answer.loss / 2, by_hidden=answer.by_hidden / 2, by_head=answer.by_head / 2)

    with pytest.raises(ValueError, match="half does not compute the loss"):
        bench["measure"].checked(
            [replace(naive, name="half", run=half)], bench["problem"].made(8, 4, 64, torch.float32)
        )


def test_the_command_writes_its_table(tmp_path: Path) -> None:
    """The floor is 1 by definition; what is not installed here is listed with the reason."""
    command = [sys.executable, str(FOLDER / "objective.py"), "--shapes", "20,8,512", "--dtypes", "float32"]
    words = ["--repeats", "1", "--variants", "opd: KL", "TRL GKD", "--json", "out.json", "--markdown", "out.md"]
    subprocess.run([*command, *words], cwd=tmp_path, check=True, capture_output=True)
    rows = {row["variant"]: row for row in json.loads((tmp_path / "out.json").read_text())}
    assert rows["floor: four products"]["over_floor"] == 1.0
    assert rows["opd: KL + GRPO"]["gradient_error"] < 1e-5 and rows["opd: KL + GRPO"]["peak_extra_mib"] >= 0
    assert rows["TRL GKD"]["absent"] == "trl is not installed" or rows["TRL GKD"]["gradient_error"] < 1e-5
    assert "| opd: KL + GRPO |" in (tmp_path / "out.md").read_text()
