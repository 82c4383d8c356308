"""Killed, told to stop, cut short while writing: the same command ends as a run that was never stopped."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.runs import Pair, assert_same_run, checkpoint, checkpoint_steps, opd, opd_process, save_pair, start


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return save_pair(tmp_path_factory.mktemp("models"))


def signalled(pair: Pair, run_dir: Path, name: str, version: int) -> list[str]:
    """A run that sends itself a signal, once, in the middle of the step after `version`."""
    return pair.train(
        run_dir, "~reward.correct", "+reward.judge._target_=tests.faults.parts.SignalsOnce",
        f"+reward.judge.marker={run_dir.parent / 'signalled'}", f"+reward.judge.version={version}",
        f"+reward.judge.signal={name}",
    )  # fmt: skip


def unbroken(pair: Pair, run_dir: Path) -> None:
    """The same run, whose marker says that the signal has been sent already."""
    run_dir.parent.mkdir()
    (run_dir.parent / "signalled").touch()
    assert opd(*signalled(pair, run_dir, "SIGUSR1", 99)).code == 0


def test_kill_9_and_the_same_command_equal_an_unbroken_run(pair: Pair, tmp_path: Path) -> None:
    """Killed in step 6, after the checkpoint of step 4; a save and a removal that never ended lie beside it."""
    run_dir = tmp_path / "killed" / "run"
    run_dir.parent.mkdir()
    command = signalled(pair, run_dir, "SIGKILL", 5)
    assert opd_process(*command).code == -signal.SIGKILL
    assert checkpoint_steps(run_dir) == [2, 4]
    shutil.copytree(checkpoint(run_dir, 4), run_dir / "checkpoints" / ".writing-step_00000006")
    (run_dir / "checkpoints" / ".writing-step_00000006" / "state.json").write_text('{"step": 6')
    shutil.copytree(checkpoint(run_dir, 2), run_dir / "checkpoints" / ".removing-step_00000001")
    ended = opd(*command)
    assert ended.code == 0, ended.err
    unbroken(pair, tmp_path / "unbroken" / "run")
    assert_same_run(tmp_path / "unbroken" / "run", run_dir, 6)
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == ["step_00000004", "step_00000006"]


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGINT", 130)])
def test_a_stop_signal_saves_and_leaves_with_its_own_code(pair: Pair, tmp_path: Path, name: str, code: int) -> None:
    """Told in the fourth step: that step ends, is saved, and the run leaves with 128 + the signal's number."""
    run_dir = tmp_path / "told" / "run"
    run_dir.parent.mkdir()
    command = signalled(pair, run_dir, name, 3)
    ended = opd(*command)
    assert ended.code == code, ended.err
    assert checkpoint_steps(run_dir) == [2, 4]
    assert not (run_dir / "summary.json").exists()
    assert opd(*command).code == 0
    unbroken(pair, tmp_path / "unbroken" / "run")
    assert_same_run(tmp_path / "unbroken" / "run", run_dir, 6)


def test_a_kill_between_the_last_checkpoint_and_the_summary(pair: Pair, tmp_path: Path) -> None:
    """All steps are done and saved; the same command only has to write the summary, the same as before."""
    straight, cut = tmp_path / "straight", tmp_path / "cut"
    assert opd(*pair.train(straight)).code == 0
    shutil.copytree(straight, cut)
    (cut / "summary.json").unlink()
    command = pair.train(cut)
    ended = opd(*command)
    assert ended.code == 0, ended.err
    assert_same_run(straight, cut, 6)


@pytest.mark.slow
@pytest.mark.vllm
def test_sigterm_from_outside_with_vllm(pair: Pair, tmp_path: Path) -> None:
    """A run of many steps is told to stop once its first checkpoint stands, and leaves with 143 within the minute."""
    vllm = ["sampler=vllm", "sampler.params.max_tokens=5", "sampler.kv_cache_gib=0.03", "sampler.max_num_seqs=16"]
    command = pair.train(tmp_path, *vllm, "steps=100000", "eval=none")
    with start(*command) as run:
        for line in run.stdout:
            if line.startswith("step      3/"):
                run.send_signal(signal.SIGTERM)
                break
        run.communicate(timeout=60)
    assert run.returncode == 143
    last = checkpoint_steps(tmp_path)[-1]
    ended = opd(*pair.train(tmp_path, "steps=100000", "eval=none", "stop_after=1"))
    assert ended.code == 0, ended.err
    assert checkpoint_steps(tmp_path)[-1] == last + 1


@pytest.mark.slow
def test_kills_at_any_moment(pair: Pair, tmp_path: Path) -> None:
    """Killed again and again, a little later each time, until the run ends; checkpoints at every step."""
    often = ["checkpoint.every=1", "eval.every=1", "steps=12"]
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    assert opd(*pair.train(straight, *often)).code == 0
    draw = random.Random(0)
    for attempt in range(12):
        with start(*pair.train(killed, *often)) as run:
            run.stdout.readline()  # the start is evaluated, or the first step since the resume is done
            try:
                run.communicate(timeout=draw.random() * (0.5 + 0.2 * attempt))
            except subprocess.TimeoutExpired:
                run.kill()
        if run.returncode == 0:
            break
    assert opd(*pair.train(killed, *often)).code == 0
    assert_same_run(straight, killed, 12)
