"""The metrics file and TensorBoard, through a kill and a resume."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import pytest

from opd.loggers import Jsonl, Logger, TensorBoard, read_jsonl


def run_of(run_dir: Path, logger: Logger, steps: range, resume_step: int) -> None:
    logger.start(run_dir, resume_step)
    for step in steps:
        logger.log(step, {"reward/mean": step / 10})
    logger.close()


def steps_in(run_dir: Path) -> list[int]:
    return [record["step"] for record in read_jsonl(run_dir / "metrics.jsonl")]


@pytest.mark.parametrize("kind", [Jsonl, TensorBoard])
def test_construction_needs_nothing_and_opens_nothing(
    kind: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    logger = kind()
    assert isinstance(logger, Logger)
    logger.close()
    assert list(tmp_path.iterdir()) == []


def test_a_line_is_on_disk_when_log_returns(tmp_path: Path) -> None:
    logger = Jsonl()
    logger.start(tmp_path / "new" / "run", 0)
    before = time.time()
    logger.log(1, {"loss/distill": 0.1, "rollout/tokens_total": 2048})
    (record,) = [json.loads(line) for line in (tmp_path / "new/run/metrics.jsonl").read_text().splitlines()]
    logger.close()
    assert list(record) == ["step", "time", "loss/distill", "rollout/tokens_total"]
    assert record["step"] == 1
    assert before <= record["time"] <= time.time()
    assert record["loss/distill"] == 0.1
    assert isinstance(record["rollout/tokens_total"], float)


def test_what_is_not_finite_becomes_null(tmp_path: Path) -> None:
    logger = Jsonl()
    logger.start(tmp_path, 0)
    logger.log(1, {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 0.0})
    logger.close()
    text = (tmp_path / "metrics.jsonl").read_text()
    record = json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert (record["a"], record["b"], record["c"], record["d"]) == (None, None, None, 0.0)


def test_resume_keeps_every_step_once(tmp_path: Path) -> None:
    """Five steps logged, the checkpoint holds three: 4 and 5 are dropped, then made again, values and all."""
    run_of(tmp_path, Jsonl(), range(1, 6), 0)
    run_of(tmp_path, Jsonl(), range(4, 7), 3)
    assert steps_in(tmp_path) == [1, 2, 3, 4, 5, 6]
    assert [record["reward/mean"] for record in read_jsonl(tmp_path / "metrics.jsonl")] == [
        0.1,
        0.2,
        0.3,
        0.4,
        0.5,
        0.6,
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_resume_keeps_both_lines_of_a_step(tmp_path: Path) -> None:
    logger = Jsonl()
    logger.start(tmp_path, 0)
    logger.log(0, {"eval/accuracy": 0.3})
    logger.log(1, {"reward/mean": 0.4})
    logger.log(1, {"eval/accuracy": 0.5})
    logger.log(2, {"reward/mean": 0.6})
    logger.close()
    logger.start(tmp_path, 1)
    logger.close()
    assert steps_in(tmp_path) == [0, 1, 1]


def test_a_run_from_its_beginning_forgets_an_earlier_try(tmp_path: Path) -> None:
    """Killed before its first checkpoint, a run evaluates at step 0 again; that line must not be there twice."""
    run_of(tmp_path, Jsonl(), range(0, 3), 0)
    run_of(tmp_path, Jsonl(), range(0, 2), 0)
    assert steps_in(tmp_path) == [0, 1]


@pytest.mark.parametrize("torn", ['{"step": 3, "ti', '{"step": 3, "time": 1.0, "a": 0.5', "\x00\x00\x00", "{", "\xff"])
def test_a_torn_last_line_is_dropped_and_the_next_starts_on_its_own(torn: str, tmp_path: Path) -> None:
    run_of(tmp_path, Jsonl(), range(1, 3), 0)
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(torn.encode("latin-1"))
    assert steps_in(tmp_path) == [1, 2]
    run_of(tmp_path, Jsonl(), range(3, 4), 2)
    assert steps_in(tmp_path) == [1, 2, 3]


def test_a_last_line_that_lacks_only_its_newline_is_kept(tmp_path: Path) -> None:
    run_of(tmp_path, Jsonl(), range(1, 3), 0)
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text().removesuffix("\n"))
    run_of(tmp_path, Jsonl(), range(3, 4), 2)
    assert steps_in(tmp_path) == [1, 2, 3]


def test_damage_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"ste\n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2: not JSON.*remove the line"):
        Jsonl().start(tmp_path, 3)


def test_a_separator_inside_a_text_is_not_a_line_end(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_text('{"text": "a\u2028b\x85c"}\n', encoding="utf-8")
    assert read_jsonl(path) == [{"text": "a\u2028b\x85c"}]


def test_tensorboard_shows_every_step_once_after_a_resume(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run_of(tmp_path, TensorBoard(), range(1, 6), 0)
    run_of(tmp_path, TensorBoard(), range(4, 7), 3)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    points = [(event.step, round(event.value, 6)) for event in events.Scalars("reward/mean")]
    assert points == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4), (5, 0.5), (6, 0.6)]


def test_tensorboard_has_a_point_on_disk_when_log_returns(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorBoard()
    logger.start(tmp_path, 0)
    logger.log(1, {"loss/distill": 0.5, "grad_norm": math.nan})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    logger.close()
    assert [event.value for event in events.Scalars("loss/distill")] == [0.5]
    assert math.isnan(events.Scalars("grad_norm")[0].value)
