"""Two gloo ranks under torchrun against one process on the same global batch. One launch serves all tests here."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from opd import ranks
from opd.records import Mean
from tests.catalogue import catalogue
from tests.mixed import Found, Mixed, apart, save_models
from tests.rows import Setting, largest_difference
from tests.tiny import save_model
from tests.two_ranks import CONSTANT_DEALS, DEALS, SAVED_STAGES, STAGES, TERM_DEALS, scenarios

ROOT = Path(__file__).resolve().parents[1]
LAUNCHED = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}  # of this process: not for the ranks
TIME_LIMIT = 400  # seconds; a rank that waits for another for ever fails here


def launch(*arguments: str | Path, module: str = "tests.two_ranks") -> None:
    """Runs a worker script on two ranks; a hang ends with its processes and an error."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    process = subprocess.Popen(
        [*command, "-m", module, *map(str, arguments)], cwd=ROOT, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env={name: value for name, value in os.environ.items() if name not in LAUNCHED},
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=TIME_LIMIT)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, output[-6000:]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    save_model(folder / "student", 0, hidden=16, layers=1)
    save_model(folder / "teacher", 1, hidden=24, layers=1)
    save_models(folder / "terms")
    (folder / "terms.pickle").write_bytes(pickle.dumps(catalogue()))
    return folder


@pytest.fixture(scope="module")
def two(folder: Path) -> dict[str, Any]:
    """Results of the two ranks."""
    launch(folder / "student", folder / "teacher", folder / "two.pt")
    return torch.load(folder / "two.pt", weights_only=True)


@pytest.fixture(scope="module")
def one(folder: Path) -> dict[str, Any]:
    """Results of one process on all rows."""
    return scenarios(Setting.of(folder / "student", folder / "teacher"), folder / "one")


def same(mine: dict[str, float], theirs: dict[str, float]) -> None:
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        assert value == pytest.approx(theirs[name], abs=1e-5, rel=1e-5), name


@pytest.mark.parametrize("deal", DEALS)
@pytest.mark.parametrize("stage", STAGES)
def test_two_ranks_equal_one_process(two: dict[str, Any], one: dict[str, Any], stage: int, deal: str) -> None:
    """Losses, every other metric, gradient norms and weights after two clipped updates."""
    got, expected = two[f"updates {stage} {deal}"], one[f"updates {stage} {deal}"]
    for mine, theirs in zip(got["metrics"], expected["metrics"], strict=True):
        same(mine, theirs)
    assert {"loss/kl", "loss/pg", "grad_norm", "teacher/main/kl", "mismatch/logp_diff_p95"} <= got["metrics"][0].keys()
    assert got["metrics"][0]["grad_norm"] > 1.0
    assert largest_difference(got["weights"], expected["weights"]) < 1e-5


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_makes_the_same_update(one: dict[str, Any], stage: int) -> None:
    assert largest_difference(one[f"updates {stage} 4+1"]["weights"], one["updates 0 4+1"]["weights"]) < 1e-6


@pytest.mark.parametrize("deal", CONSTANT_DEALS)
def test_the_token_mean_is_that_of_all_ranks(two: dict[str, Any], one: dict[str, Any], deal: str) -> None:
    """Answers of 1, 9, 4, 2 tokens at 2, 1, .5, 3 a token: 19 / 16 = 1.1875 however ranks divide them."""
    got = two[f"constant {deal}"]
    assert got["metrics"]["loss/distill"] == pytest.approx(1.1875, abs=1e-5)
    assert got["metrics"]["loss/reward"] == pytest.approx(1.1875, abs=1e-5)
    assert largest_difference(got["weights"], one[f"constant {deal}"]["weights"]) < 1e-6


@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_without_trainable_tokens_takes_part(two: dict[str, Any], one: dict[str, Any], stage: int) -> None:
    """No hang, equal weights on both ranks (the worker checks it), the update of the other rank's tokens."""
    got, expected = two[f"masked {stage}"], one[f"masked {stage}"]
    same(got["metrics"], expected["metrics"])
    assert largest_difference(got["weights"], expected["weights"]) < 1e-5
    assert got["skipped"] == {"update/skipped": 1.0}


@pytest.mark.parametrize("stage", STAGES)
def test_an_infinite_loss_on_one_rank_stops_all_before_the_step(two: dict[str, Any], stage: int) -> None:
    messages = two[f"broken {stage}"]["messages"]
    assert len(messages) == 2
    assert all(message.startswith("loss/bad is not finite") for message in messages)


@pytest.fixture(scope="module")
def terms_alone(folder: Path) -> dict[str, Found]:
    """Every term's update by one process without DeepSpeed."""
    mixed = Mixed.of(folder / "terms")
    model = AutoModelForCausalLM.from_pretrained(mixed.student)
    return {label: mixed.plain(model, term, mixed.rows) for label, term in catalogue().items()}


@pytest.mark.parametrize("deal", TERM_DEALS)
def test_two_ranks_compute_every_term_as_one_process(
    two: dict[str, Any], terms_alone: dict[str, Found], deal: str
) -> None:
    """Losses and the gradients that the optimizer gets, to fp32 rounding of different sums."""
    gaps = {}
    for label, expected in terms_alone.items():
        got = two["terms"][f"{deal} {label}"]
        gaps[label] = apart(Found(got["loss"], expected.total, got["grads"]), expected)
    assert {label: gap for label, gap in gaps.items() if not gap < 5e-6} == {}


@pytest.mark.parametrize("stage", SAVED_STAGES)
def test_saved_state_continues_on_two_ranks(two: dict[str, Any], one: dict[str, Any], stage: int) -> None:
    """The worker compares the continued run bit for bit; here with one process. AdamW turns a gradient's rounding into
    a change of the size of its rate where the gradient is about zero, so only most weights can be close.
    """
    got, expected = two[f"saved {stage}"]["weights"], one[f"saved {stage}"]["weights"]
    difference = torch.cat([(got[name] - expected[name]).abs().flatten() for name in got])
    assert difference.quantile(0.95) < 1e-5


def test_values_of_all_ranks(two: dict[str, Any]) -> None:
    """Rank 0 holds a = 1, b = 0, rank 1 a = 2, b = 10; the means merge as sums and counts; rank 1 lacks one."""
    found = two["helpers"]
    assert found["world_size"] == 2
    assert found["share"] == [["a", "c", "e"], ["b", "d"]]
    assert found["gather"] == [{"rank": 0}, {"rank": 1}]
    assert found["sums"] == {"a": 3.0, "b": 10.0}
    assert found["merged"] == {"both": (3.0, 4.0), "first": (5.0, 2.0)}


def test_one_process_needs_no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)
    assert (ranks.rank(), ranks.world_size()) == (0, 1)
    assert ranks.share("abc") == ["a", "b", "c"]
    assert ranks.gather(7) == [7]
    assert ranks.sums({"a": 1.0}) == {"a": 1.0}
    assert ranks.merged({"a": Mean(1.0, 2.0)}) == {"a": Mean(1.0, 2.0)}
    ranks.barrier()
