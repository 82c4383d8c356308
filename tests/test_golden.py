"""Per-step losses of a small fixed run against those on file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.golden.make import FILE, WATCHED, measure

RELATIVE = {"grad_norm": 1e-5}  # a root of sums of squares; SSE and AVX-512 part by 2e-6 here, and not in the losses


def test_four_steps_give_the_losses_on_file(tmp_path: Path) -> None:
    """Equal to 1e-6 of each number, the float noise of another machine; a change that moves them explains itself."""
    golden, found = json.loads(FILE.read_text()), measure(tmp_path)
    assert [list(step) for step in golden["steps"]] == [list(WATCHED)] * 4
    moved = [
        f"step {number} {name}: {found['steps'][number - 1][name]!r}, on file {value!r}"
        for number, step in enumerate(golden["steps"], 1)
        for name, value in step.items()
        if found["steps"][number - 1][name] != pytest.approx(value, rel=RELATIVE.get(name, 1e-6), abs=1e-6)
    ]
    assert not moved, (
        "\n".join(moved) + f"\nmade under {golden['versions']}, running {found['versions']}; if this is meant, say why "
        "and write the file anew by `python -m tests.golden.make`"
    )
