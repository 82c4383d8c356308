"""Whole runs: stop and go equals straight through, and what a run leaves behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from opd.loggers import read_jsonl
from tests.faults.parts import digest
from tests.runs import (
    Pair,
    assert_same_run,
    checkpoint,
    checkpoint_steps,
    differences,
    lines,
    opd,
    opd_process,
    save_pair,
    training_lines,
)

LETTERS = ["+reward.letters._target_=tests.faults.parts.Letters"]
MIX = [
    "+loss@loss.grpo=grpo", "credit=grpo", "~reward.correct", *LETTERS,
    "+data.streams.rl.prompts=2", "+data.streams.rl.samples=3", "+data.streams.rl.terms=[grpo]",
    "+data.streams.main.terms=[distill]",
]  # fmt: skip
LORA = ["student=lora", "student.lora.r=4", "student.lora.lora_alpha=8"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return save_pair(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def finished(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps in one go."""
    run_dir = tmp_path_factory.mktemp("finished") / "run"
    ended = opd(*pair.train(run_dir, "logger=tensorboard"))
    assert ended.code == 0, ended.err
    return run_dir


def twelve_prompts(folder: Path) -> Path:
    rows = [{"prompt": f"^{i:05d}+{7 * i:05d}=", "answer": str(8 * i)} for i in range(12)]
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def stop_and_go(pair: Pair, folder: Path, *changes: str) -> None:
    """6 steps against 3 + 3. The cut falls between two checkpoints of the schedule."""
    straight, broken = folder / "straight", folder / "broken"
    for run_dir, last in ((straight, []), (broken, ["stop_after=3"]), (broken, [])):
        ended = opd(*pair.train(run_dir, *changes, *last))
        assert ended.code == 0, ended.err
        assert (run_dir / "summary.json").exists() == (not last)
    assert_same_run(straight, broken, 6)


def test_three_and_three_steps_equal_six(pair: Pair, finished: Path, tmp_path: Path) -> None:
    """In mid-epoch: 40 prompts, 6 a step. The same command twice, `stop_after` included."""
    command = pair.train(tmp_path, "stop_after=3", "logger=tensorboard")
    assert opd(*command).code == 0
    assert checkpoint_steps(tmp_path) == [2, 3]
    assert not (tmp_path / "summary.json").exists()
    assert opd(*command).code == 0
    assert_same_run(finished, tmp_path, 6)


def test_stop_and_go_at_the_end_of_an_epoch(pair: Pair, tmp_path: Path) -> None:
    """12 prompts, 4 a step: the cut after 3 steps is the end of the first epoch."""
    data = ["data=jsonl", f"data.train.path={twelve_prompts(tmp_path)}", "data.max_prompt_tokens=16"]
    held_out = ["++data.heldout._target_=opd.prompts.JsonlSource", f"++data.heldout.path={tmp_path / 'prompts.jsonl'}"]
    sizes = ["data.streams.main.prompts=4", "~data.train.size", "~data.heldout.size"]
    stop_and_go(pair, tmp_path, *data, *held_out, *sizes)
    assert [line["step"] for line in training_lines(tmp_path / "broken")] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(LORA, id="lora"),
        pytest.param(["engine.micro_batch_tokens=60"], id="micro_batches", marks=pytest.mark.slow),
        pytest.param(MIX, id="two_streams", marks=pytest.mark.slow),
        pytest.param([*MIX, *LORA, "engine.micro_batch_tokens=60"], id="all"),
    ],
)
def test_stop_and_go(pair: Pair, tmp_path: Path, changes: list[str]) -> None:
    """Six rows of 17 tokens in micro-batches of 60 make two of three rows."""
    stop_and_go(pair, tmp_path, *changes)
    if "credit=grpo" in changes:
        assert all(line["reward/informative_groups"] > 0 for line in training_lines(tmp_path / "broken"))


@pytest.mark.slow
@pytest.mark.vllm
def test_stop_and_go_with_vllm(pair: Pair, tmp_path: Path) -> None:
    changes = ["sampler=vllm", "sampler.params.max_tokens=5", "sampler.kv_cache_gib=0.03", "sampler.max_num_seqs=16"]
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    for run_dir, last in ((straight, []), (broken, ["stop_after=3"]), (broken, [])):
        ended = opd_process(*pair.train(run_dir, *changes, *last))
        assert ended.code == 0, ended.err
    assert_same_run(straight, broken, 6)


def test_a_finished_run_of_another_configuration_is_refused(pair: Pair, finished: Path) -> None:
    """Not "done", with exit code 0, to somebody who asked for another loss."""
    ended = opd(*pair.train(finished, "loss.distill.weight=0.5"))
    assert ended.code == 2
    assert "loss.distill.weight: 1.0 -> 0.5" in ended.err
    assert "choose another run_dir" in ended.err


def test_a_finished_run_says_so_and_does_nothing(pair: Pair, finished: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*") if path.is_file()}
    ended = opd(*pair.train(finished, "logger=tensorboard"))
    assert ended.code == 0
    assert "all 6 steps are done" in ended.out
    assert {path: path.stat().st_mtime_ns for path in finished.rglob("*") if path.is_file()} == before


def test_more_steps_continue_a_finished_run(pair: Pair, tmp_path: Path) -> None:
    assert opd(*pair.train(tmp_path, "steps=2")).code == 0
    first = lines(tmp_path)
    ended = opd(*pair.train(tmp_path, "steps=4"))
    assert ended.code == 0, ended.err
    assert "config differs from the run's last start: steps: 2 -> 4" in ended.out
    assert lines(tmp_path)[: len(first)] == first
    assert [line["step"] for line in training_lines(tmp_path)] == [1, 2, 3, 4]
    assert json.loads((tmp_path / "summary.json").read_text())["steps"] == 4


def test_resume_never_moves_the_old_run_aside(pair: Pair, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    for number in range(3):
        ended = opd(*pair.train(run_dir, "steps=1", "resume=never", f"seed={number}"))
        assert ended.code == 0, ended.err
    assert "config differs" not in ended.out
    seeds = [
        next(line for line in (path / "config.yaml").read_text().splitlines() if line.startswith("seed"))
        for path in (tmp_path / "run.old-1", tmp_path / "run.old-2", run_dir)
    ]
    assert seeds == ["seed: 0", "seed: 1", "seed: 2"]
    assert [line["step"] for line in training_lines(run_dir)] == [1]


def test_config_differences_are_listed_by_their_keys(pair: Pair, tmp_path: Path) -> None:
    """The teacher's path, a loss's weight, a key that one side lacks: all by dotted key, old and new value."""
    assert opd(*pair.train(tmp_path, "stop_after=1")).code == 0
    changed = Pair(pair.student, pair.student)
    ended = opd(*changed.train(tmp_path, "loss.distill.weight=0.5", *LETTERS, "stop_after=1"))
    assert ended.code == 0, ended.err
    notes = [line.split("start: ")[1] for line in ended.out.splitlines() if line.startswith("config differs")]
    assert notes == [
        "loss.distill.weight: 1.0 -> 0.5",
        "reward.letters._target_: (not there) -> tests.faults.parts.Letters",
        f"teacher.main.model: {pair.teacher} -> {pair.student}",
    ]


def test_each_step_is_logged_once_and_evaluations_stand_beside(finished: Path) -> None:
    """Six steps; evaluated before the first, every third, and after the last."""
    assert [line["step"] for line in training_lines(finished)] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in lines(finished) if "eval/accuracy" in line] == [0, 3, 6]
    assert len(lines(finished)) == 9


def test_the_summary_has_its_fixed_names(finished: Path) -> None:
    """6 steps x 6 prompts x 5 tokens at most; the seconds by stage add up to the total."""
    summary = json.loads((finished / "summary.json").read_text())
    assert summary["steps"] == 6
    trained = training_lines(finished)
    assert summary["sampled_tokens"] == sum(round(6 * line["rollout/length"]) for line in trained)
    assert summary["sampled_tokens"] == trained[-1]["rollout/tokens_total"] <= 180
    evals = [line for line in lines(finished) if "eval/accuracy" in line]
    assert summary["eval"]["before"] == evals[0]["eval/accuracy"]
    assert summary["eval"]["after"] == evals[-1]["eval/accuracy"]
    assert summary["eval"]["kl_before"] == evals[0]["eval/kl"] > summary["eval"]["kl_after"] == evals[-1]["eval/kl"]
    assert 0.0 <= summary["eval"]["teacher"] <= 1.0
    seconds = summary["wall_seconds"]
    assert {"sample", "reward", "score", "update", "sync", "eval", "checkpoint", "total"} <= set(seconds)
    assert seconds["total"] == pytest.approx(sum(v for name, v in seconds.items() if name != "total"), abs=0.01)
    assert min(seconds.values()) >= 0.0
    assert summary["final_metrics"]["loss/distill"] == trained[-1]["loss/distill"]
    assert {"python", "opd", "torch", "transformers", "deepspeed", "git"} <= set(summary["versions"])


def test_the_run_keeps_its_resolved_config_and_versions(finished: Path) -> None:
    config = (finished / "config.yaml").read_text()
    assert "${" not in config
    assert "num_training_steps: 6" in config
    assert json.loads((finished / "versions.json").read_text())["torch"] == torch.__version__
    assert list((finished / "tensorboard").glob("events.out.tfevents.*"))


def test_wall_seconds_and_tokens_go_on_after_a_stop(pair: Pair, tmp_path: Path) -> None:
    """The stages of both processes are in the sum: each step sampled for some time."""
    assert opd(*pair.train(tmp_path, "stop_after=3")).code == 0
    assert opd(*pair.train(tmp_path)).code == 0
    logged = read_jsonl(tmp_path / "metrics.jsonl")
    seconds = json.loads((tmp_path / "summary.json").read_text())["wall_seconds"]
    for stage in ("sample", "update"):
        assert seconds[stage] == pytest.approx(sum(line.get(f"time/{stage}", 0.0) for line in logged), abs=0.01)


def test_without_held_out_problems_nothing_is_evaluated(pair: Pair, tmp_path: Path) -> None:
    ended = opd(*pair.train(tmp_path, "steps=1", "eval=none", "data.heldout=null"))
    assert ended.code == 0, ended.err
    assert not [line for line in lines(tmp_path) if any(name.startswith("eval/") for name in line)]
    assert set(json.loads((tmp_path / "summary.json").read_text())["eval"].values()) == {None}


def watched(pair: Pair, run_dir: Path, log: Path, *changes: str) -> list[str]:
    sampler = ["sampler._target_=tests.faults.parts.WatchedSampler", f"+sampler.log={log}"]
    return pair.train(run_dir, *sampler, "eval=none", "parity.every=100", *changes)


def test_the_first_rollouts_after_a_resume_come_from_the_restored_policy(pair: Pair, tmp_path: Path) -> None:
    """After a stop at step 3: parity check and first step sample under version 3, with the weights saved there."""
    run_dir, log = tmp_path / "run", tmp_path / "log.jsonl"
    assert opd(*watched(pair, run_dir, log, "stop_after=3")).code == 0
    log.unlink()
    ended = opd(*watched(pair, run_dir, log, "stop_after=1"))
    assert ended.code == 0, ended.err
    saved = digest(load_file(checkpoint(run_dir, 3) / "hf" / "model.safetensors"))
    start = digest(load_file(pair.student / "model.safetensors"))
    calls = [json.loads(line) for line in log.read_text().splitlines()]
    assert [call["version"] for call in calls] == [3, 3]
    assert {call["weights"] for call in calls} == {saved} != {start}


def test_rollouts_of_another_version_stop_the_run(pair: Pair, tmp_path: Path) -> None:
    ended = opd(*watched(pair, tmp_path / "run", tmp_path / "log.jsonl", "+sampler.lag=1"))
    assert ended.code == 1
    assert "rollouts of weight versions [-1] reached the update of version 0" in ended.err
    assert checkpoint_steps(tmp_path / "run") == []


def test_the_learning_rate_follows_the_schedule_across_the_stop(finished: Path) -> None:
    """Two warm-up steps to 0.003, then a cosine down to 5 %: lr(t) / 0.003 = 0.05 + 0.95 (1 + cos(pi (t - 2) / 4)) / 2
    at step t of 6: t = 1: 0.5, t = 2: 1, t = 4: 0.525; the rate of update n is that of n - 1 finished steps."""
    rates = {line["step"]: line["lr"] / 0.003 for line in training_lines(finished)}
    assert [rates[1], rates[2], rates[3], rates[5]] == pytest.approx([0.0, 0.5, 1.0, 0.525])


def test_differences_are_seen() -> None:
    """The comparison of these tests finds one changed bit, a missing key and another type."""
    tensor = torch.tensor([1.0, 2.0])
    nudged = torch.nextafter(tensor, torch.tensor(3.0))
    assert not differences({"a": [tensor, 1]}, {"a": [tensor.clone(), 1]})
    assert differences({"a": [tensor]}, {"a": [nudged]}) == [".a[0]: other numbers"]
    assert differences({"a": tensor}, {"a": tensor.double()})
    assert differences({"a": 1}, {})
