"""Checkpoints are complete or absent; the newest few and the best stay; damage is named, never passed over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from opd.checkpoint import CheckpointConfig, Checkpoints, lock_run_dir, move_aside, read_state
from tests.runs import Pair, checkpoint, checkpoint_steps, lines, opd, save_pair, training_lines


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return save_pair(tmp_path_factory.mktemp("models"))


def write(folder: Path) -> None:
    (folder / "engine").mkdir()
    (folder / "engine" / "state.pt").write_bytes(b"0123456789")
    (folder / "weights").write_bytes(b"abc")


def saved(run_dir: Path, values: list[float | None], **config: Any) -> Checkpoints:
    """Checkpoints of steps 1, 2, ... whose metric `m` has the given values."""
    checkpoints = Checkpoints(run_dir, CheckpointConfig(**config))
    for step, value in enumerate(values, 1):
        checkpoints.save(step, {"metrics": {"m": value}}, write)
    return checkpoints


def steps_in(run_dir: Path) -> list[int]:
    return checkpoint_steps(run_dir)


@pytest.mark.parametrize(("keep", "kept"), [(1, [4]), (2, [3, 4]), (9, [1, 2, 3, 4])])
def test_the_newest_stay(tmp_path: Path, keep: int, kept: list[int]) -> None:
    saved(tmp_path, [None] * 4, keep=keep)
    assert steps_in(tmp_path) == kept


@pytest.mark.parametrize(
    ("values", "mode", "best", "kept"),
    [
        ([0.2, 0.9, 0.5, 0.1], "max", 2, [2, 4]),
        ([0.2, 0.9, 0.5, 0.1], "min", 4, [4]),
        ([0.9, 0.2, 0.9, 0.1], "max", 3, [3, 4]),  # the newest of equals
        ([float("nan"), 0.3, float("nan"), None], "max", 2, [2, 4]),  # what is no number is never the best
        ([None] * 4, "max", None, [4]),
    ],
)
def test_the_best_by_a_metric_stays(
    tmp_path: Path, values: list[float | None], mode: str, best: int | None, kept: list[int]
) -> None:
    checkpoints = saved(tmp_path, values, keep=1, best_metric="m", best_mode=mode)
    assert checkpoints.best() == (None if best is None else checkpoint(tmp_path, best))
    assert steps_in(tmp_path) == kept


def test_the_state_comes_back(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, [0.5])
    state = read_state(checkpoint(tmp_path, 1))
    assert (state["step"], state["metrics"]) == (1, {"m": 0.5})
    assert checkpoints.latest() == checkpoint(tmp_path, 1)
    assert Checkpoints(tmp_path / "elsewhere", CheckpointConfig()).latest() is None


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("file write failed")])
def test_a_failed_save_leaves_the_previous_one_and_nothing_of_its_own(tmp_path: Path, error: Exception) -> None:
    checkpoints = saved(tmp_path, [0.5])

    def fail(folder: Path) -> None:
        write(folder)
        raise error

    with pytest.raises(OSError, match=r"checkpoint of step 2 could not be written.*(No space left|write failed)"):
        checkpoints.save(2, {"metrics": {}}, fail)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_00000001"]
    assert checkpoints.latest() == checkpoint(tmp_path, 1)


def test_a_kill_while_writing_leaves_no_checkpoint(tmp_path: Path) -> None:
    """What the writer of step 2 sees is hidden from `latest`; a later save of another step clears it away."""
    checkpoints = saved(tmp_path, [0.5])

    def killed(folder: Path) -> None:
        write(folder)
        assert checkpoints.latest() == checkpoint(tmp_path, 1)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        checkpoints.save(2, {"metrics": {}}, killed)
    for name in (".writing-step_00000002", ".removing-step_00000000"):
        (tmp_path / "checkpoints" / name / "engine").mkdir(parents=True)
    assert checkpoints.latest() == checkpoint(tmp_path, 1)
    checkpoints.save(3, {"metrics": {}}, write)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step_00000001", "step_00000003"]


def test_the_same_step_may_be_saved_again(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, [0.5])
    checkpoints.save(1, {"metrics": {"m": 0.7}}, write)
    assert read_state(checkpoint(tmp_path, 1))["metrics"] == {"m": 0.7}
    assert len(list((tmp_path / "checkpoints").iterdir())) == 1


@pytest.mark.parametrize("name", ["engine/state.pt", "weights", "state.json"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    checkpoints = saved(tmp_path, [0.5, 0.6], best_metric="m")
    lost = checkpoint(tmp_path, 2) / name
    lost.unlink()
    for find in (checkpoints.latest, checkpoints.best):
        with pytest.raises(ValueError, match="missing") as refused:
            find()
        assert str(refused.value).startswith(f"{lost}: missing")


def test_a_file_cut_short_is_named(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, [0.5])
    (checkpoint(tmp_path, 1) / "engine" / "state.pt").write_bytes(b"0123")
    with pytest.raises(ValueError, match=r"state\.pt: 4 bytes long where 10 were written"):
        checkpoints.latest()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b'{"step": 1, "metr', "cut short or overwritten"),
        (b"", "cut short or overwritten"),
        (b"\xff\xfe", "cut short or overwritten"),
        (b'{"step": 1, "metrics": {}}', "without files"),
        (b"[]", "without step, metrics, files"),
    ],
)
def test_a_damaged_state_is_named(tmp_path: Path, content: bytes, says: str) -> None:
    checkpoints = saved(tmp_path, [0.5], best_metric="m")
    state = checkpoint(tmp_path, 1) / "state.json"
    state.write_bytes(content)
    for find in (checkpoints.latest, checkpoints.best):
        with pytest.raises(ValueError, match="this checkpoint cannot be used") as refused:
            find()
        assert str(refused.value).startswith(f"{state}: {says}")


def test_other_folders_are_no_checkpoints(tmp_path: Path) -> None:
    """A copy that a user made beside them is neither gone on from nor removed."""
    checkpoints = saved(tmp_path, [0.1, 0.2, 0.3], keep=2)
    for name in ("step_00000003.bak", "step_final", "step_3"):
        (tmp_path / "checkpoints" / name).mkdir()
    assert checkpoints.latest() == checkpoint(tmp_path, 3)
    checkpoints.save(4, {"metrics": {}}, write)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "step_00000003", "step_00000003.bak", "step_00000004", "step_3", "step_final",
    ]  # fmt: skip


def test_a_run_folder_belongs_to_one_run_at_a_time(tmp_path: Path) -> None:
    """The claim ends with its holder; a folder that is moved aside takes it along."""
    held = lock_run_dir(tmp_path / "new" / "run")
    assert held is not None
    with pytest.raises(ValueError, match=r"another run is at work in this folder.*give another") as refused:
        lock_run_dir(tmp_path / "new" / "run")
    assert str(refused.value).startswith(f"run_dir={tmp_path}/new/run: ")
    move_aside(tmp_path / "new" / "run")
    anew = lock_run_dir(tmp_path / "new" / "run")
    with pytest.raises(ValueError, match="another run"):
        lock_run_dir(tmp_path / "new" / "run.old-1")
    for handle in (held, anew):
        assert handle is not None
        handle.close()
    again = lock_run_dir(tmp_path / "new" / "run")
    assert again is not None
    again.close()


@pytest.mark.parametrize("settings", [{"every": 0}, {"keep": 0}])
def test_settings_out_of_range_are_refused(settings: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        CheckpointConfig(**settings)


def test_move_aside_counts_up_and_overwrites_nothing(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "mark").write_text(str(number))
        move_aside(tmp_path / "run")
    move_aside(tmp_path / "run")
    assert {path.name: (path / "mark").read_text() for path in tmp_path.iterdir()} == {
        "run.old-1": "1", "run.old-2": "2", "run.old-3": "3",
    }  # fmt: skip


def test_a_run_with_a_damaged_newest_checkpoint_stops_and_names_the_file(pair: Pair, tmp_path: Path) -> None:
    """Neither a silent restart, nor silently the checkpoint before; removing the folder goes on from that one."""
    assert opd(*pair.train(tmp_path, "stop_after=4")).code == 0
    (state,) = (checkpoint(tmp_path, 4) / "engine").iterdir()
    state.unlink()
    ended = opd(*pair.train(tmp_path))
    assert ended.code != 0
    assert f"{state}: missing" in ended.err
    assert [line["step"] for line in training_lines(tmp_path)] == [1, 2, 3, 4]
    for path in sorted(checkpoint(tmp_path, 4).rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    checkpoint(tmp_path, 4).rmdir()
    ended = opd(*pair.train(tmp_path))
    assert ended.code == 0, ended.err
    assert "step 3/6" in ended.out
    assert "step 2/6" not in ended.out
    assert [line["step"] for line in training_lines(tmp_path)] == [1, 2, 3, 4, 5, 6]


def test_the_best_of_a_run_is_judged_by_its_own_evaluation(pair: Pair, tmp_path: Path) -> None:
    """Checkpoints at 2, 4, 6 between evaluations at 3 and 6: each is evaluated at its own step, so eval/kl is its own.

    The divergence falls while training, so `max` makes an early checkpoint the best one: with keep=1 two remain.
    """
    best = ["checkpoint.keep=1", "checkpoint.best_metric=eval/kl", "checkpoint.best_mode=max", "eval.teacher=false"]
    ended = opd(*pair.train(tmp_path, *best))
    assert ended.code == 0, ended.err
    kl = {line["step"]: line["eval/kl"] for line in lines(tmp_path) if "eval/kl" in line}
    assert sorted(kl) == [0, 2, 3, 4, 6]
    expected = max((2, 4, 6), key=lambda step: kl[step])
    assert expected != 6
    assert checkpoint_steps(tmp_path) == [expected, 6]
    for step in (expected, 6):
        assert read_state(checkpoint(tmp_path, step))["metrics"]["eval/kl"] == kl[step]
