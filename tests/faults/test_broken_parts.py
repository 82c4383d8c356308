"""Broken rewards, losses and disks inside a whole run: each ends as promised, and nothing is lost."""

from __future__ import annotations

import json
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.runs import (
    Ended,
    Pair,
    assert_same_run,
    checkpoint_steps,
    opd,
    save_pair,
    training_lines,
)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return save_pair(tmp_path_factory.mktemp("models"))


def judged_by(pair: Pair, run_dir: Path, reward: str, *changes: str) -> Ended:
    """A run of three steps of six rows whose only reward is one of `tests.faults.parts` or `tests.reward_functions`."""
    short = ["steps=3", "checkpoint.every=1", "eval=none", "~reward.correct"]
    return opd(*pair.train(run_dir, *short, f"+reward.judge._target_={reward}", *changes))


def test_a_reward_that_raises_stops_the_run_by_its_name(pair: Pair, tmp_path: Path) -> None:
    ended = judged_by(pair, tmp_path, "tests.faults.parts.Raises")
    assert ended.code == 1
    last = ended.err.strip().splitlines()[-1]
    assert "opd: failed on rank 0: RewardError: reward function tests.faults.parts.Raises (reward.judge) failed" in last
    assert "no such judge" in last
    assert checkpoint_steps(tmp_path) == []


def test_a_reward_that_raises_is_counted_when_errors_are_skipped(pair: Pair, tmp_path: Path) -> None:
    """All 6 rows of each step: no verdict, 6 errors, and the mean of nothing is nothing (null), not 0."""
    ended = judged_by(pair, tmp_path, "tests.faults.parts.Raises", "reward_policy.on_error=skip")
    assert ended.code == 0, ended.err
    assert [line["reward/errors"] for line in training_lines(tmp_path)] == [6.0, 6.0, 6.0]
    assert [line["reward/missing"] for line in training_lines(tmp_path)] == [1.0, 1.0, 1.0]
    assert [line["reward/mean"] for line in training_lines(tmp_path)] == [None, None, None]


HANGING = "tests.reward_functions.hang_on"


def test_a_reward_that_hangs_stops_the_run_by_its_name(pair: Pair, tmp_path: Path) -> None:
    ended = judged_by(pair, tmp_path, HANGING, "+reward.judge.rows=[0]", "reward_policy.time_limit=1")
    assert ended.code == 1
    told = "reward function tests.reward_functions.hang_on (reward.judge) ran past reward_policy.time_limit = 1 s"
    assert told in ended.err.strip().splitlines()[-1]


def test_a_reward_that_hangs_is_counted_when_errors_are_skipped(pair: Pair, tmp_path: Path) -> None:
    """Two prompts x 2 samples; the function hangs on sample 1: two of four rows are lost, the others count 0."""
    ended = judged_by(
        pair, tmp_path, HANGING, "+reward.judge.rows=[1]", "reward_policy.time_limit=1", "steps=1",
        "reward_policy.on_error=skip", "data.streams.main.prompts=2", "data.streams.main.samples=2",
    )  # fmt: skip
    assert ended.code == 0, ended.err
    (line,) = training_lines(tmp_path)
    assert (line["reward/timeouts"], line["reward/missing"], line["reward/mean"]) == (2.0, 0.5, 0.0)


@pytest.mark.parametrize(("value", "invalid"), [("nan", 6.0), ("inf", 6.0), ("null", 0.0)])
@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_rewards_without_a_number_are_counted_under_either_policy(
    pair: Pair, tmp_path: Path, value: str, invalid: float, policy: str
) -> None:
    constant = ["tests.faults.parts.Constant", f"+reward.judge.value={value}"]
    ended = judged_by(pair, tmp_path, *constant, f"reward_policy.on_error={policy}", "steps=1")
    assert ended.code == 0, ended.err
    (line,) = training_lines(tmp_path)
    assert (line["reward/invalid"], line["reward/missing"], line["reward/mean"]) == (invalid, 1.0, None)
    assert line["loss/distill"] > 0.0


def test_an_update_without_any_reward_is_skipped_and_says_so(pair: Pair, tmp_path: Path) -> None:
    """GRPO alone, and no row has a reward: no loss of 0 is shown, the weights stay."""
    grpo = ["~loss.distill", "+loss@loss.grpo=grpo", "credit=grpo", "data.streams.main.samples=2"]
    ended = judged_by(pair, tmp_path, "tests.faults.parts.Constant", "+reward.judge.value=null", *grpo)
    assert ended.code == 0, ended.err
    for line in training_lines(tmp_path):
        assert line["update/skipped"] == 1.0
        assert "loss/grpo" not in line


def test_a_loss_that_is_not_finite_stops_the_run_and_names_its_term(pair: Pair, tmp_path: Path) -> None:
    """NaN at the second update: step 1 is saved and stays; without the fault the run goes on from there."""
    broken = ["+loss.odd._target_=tests.faults.parts.NotANumber", "+loss.odd.at_call=2", "checkpoint.every=1"]
    ended = opd(*pair.train(tmp_path, *broken))
    assert ended.code == 1
    assert "opd: failed on rank 0: FloatingPointError: loss/odd is not finite" in ended.err.splitlines()[-1]
    assert checkpoint_steps(tmp_path) == [1]
    assert [line["step"] for line in training_lines(tmp_path)] == [1]
    mended = ["+loss.odd._target_=tests.faults.parts.NotANumber", "+loss.odd.at_call=0", "checkpoint.every=1"]
    assert opd(*pair.train(tmp_path, *mended)).code == 0
    straight = tmp_path / "straight"
    assert opd(*pair.train(straight, *mended)).code == 0
    assert_same_run(straight, tmp_path, 6)


LORA = ["student=lora", "student.lora.r=4"]


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Writes beyond `size` bytes of a file fail, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(
    ("size", "student"), [(50_000, []), (150_000, []), pytest.param(50_000, LORA, marks=pytest.mark.slow)]
)
def test_a_disk_that_fills_up_costs_no_checkpoint(pair: Pair, tmp_path: Path, size: int, student: list[str]) -> None:
    """The engine state is some 250 kB and the weights some 100 kB: 50 kB cuts either, 150 kB the engine state."""
    command = pair.train(tmp_path / "run", *student)
    assert opd(*command, "stop_after=2").code == 0
    before = {path: path.read_bytes() for path in (tmp_path / "run" / "checkpoints").rglob("*") if path.is_file()}
    with files_of_at_most(size):
        ended = opd(*command)
    assert ended.code == 1
    message = ended.err.strip().splitlines()[-1]
    assert "opd: failed on rank 0: OSError: the checkpoint of step 4 could not be written to " in message
    assert "MiB free there" in message
    after = {path: path.read_bytes() for path in (tmp_path / "run" / "checkpoints").rglob("*") if path.is_file()}
    assert after == before
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_00000002"]
    assert opd(*command).code == 0
    straight = pair.train(tmp_path / "straight", *student)
    assert opd(*straight).code == 0
    assert_same_run(tmp_path / "straight", tmp_path / "run", 6)


def test_weights_that_cannot_be_read_end_with_one_reason(pair: Pair, tmp_path: Path) -> None:
    """Weights of another shape than the config's: the reason comes last, and parts that never started add none."""
    folder = tmp_path / "teacher"
    shutil.copytree(pair.teacher, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 48}))
    ended = opd(*Pair(pair.student, folder).train(tmp_path / "run"))
    assert ended.code == 1
    assert "opd: failed on rank 0: " in ended.err.splitlines()[-1]
    assert "AttributeError" not in ended.err
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
