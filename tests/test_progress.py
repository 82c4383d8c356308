"""What is shown while a run trains, on a terminal and elsewhere."""

from __future__ import annotations

import io
import math

import pytest
from rich.console import Console

from opd.progress import Progress, duration, readings, short_count, stage_times

METRICS = {
    "reward/mean": 0.412,
    "reward/format": 0.9,
    "teacher/main/kl": 0.2314,
    "teacher/main/entropy": 1.0,
    "rollout/tokens_per_s": 1912.0,
    "time/sample": 0.211,
    "time/score": 0.02,
    "time/update": 0.35,
    "time/sync": 0.04,
}


class Clock:
    """A clock that stands still until it is told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def plain(total_steps: int, width: int = 80) -> tuple[Progress, Clock, io.StringIO]:
    clock, out = Clock(), io.StringIO()
    return Progress(total_steps, Console(file=out, force_terminal=False, width=width), clock), clock, out


def test_a_plain_line_holds_everything_and_does_not_wrap() -> None:
    """Steps 1 to 12 take 0.5 s each, so the 148 left take 74 s."""
    progress, clock, out = plain(160, width=40)
    progress.start(0)
    progress.update(0, {"eval/accuracy": 0.62})
    for step in range(1, 13):
        clock.now += 0.5
        progress.update(step, METRICS)
    progress.close()
    lines = out.getvalue().splitlines()
    assert len(lines) == 13
    assert lines[0] == "step   0/160  acc 0.62"
    assert lines[-1] == (
        "step  12/160  reward 0.41  kl(main) 0.231  acc 0.62  1.9k tok/s"
        "  sample 0.21s score 0.02s update 0.35s sync 0.04s  eta 1:14"
    )


def test_a_line_without_a_terminal_has_no_control_codes() -> None:
    progress, _, out = plain(2)
    progress.start(0)
    progress.note("[bold]saved[/bold] :warning: outputs/run")
    progress.update(1, METRICS)
    progress.close()
    assert "\x1b" not in out.getvalue()
    assert out.getvalue().splitlines()[0] == "[bold]saved[/bold] :warning: outputs/run"


def test_a_missing_metric_is_not_shown_and_a_broken_one_is() -> None:
    progress, _, out = plain(9)
    progress.start(0)
    progress.update(1, {})
    progress.update(2, {"reward/mean": math.nan})
    progress.update(3, {"time/sample": 12.34})
    assert out.getvalue() == "step 1/9  eta 0:00\nstep 2/9  reward nan  eta 0:00\nstep 3/9  sample 12.3s  eta 0:00\n"


def test_every_teacher_and_every_stage_has_its_place() -> None:
    assert readings({"teacher/maths/kl": 0.5, "teacher/code/kl": 0.00012}) == ["kl(maths) 0.5", "kl(code) 0.00012"]
    assert stage_times({"time/judge": 1.0, "eval/time": 3.0}) == ["judge 1.00s"]


def test_the_warm_up_step_leaves_the_estimate_when_another_is_known() -> None:
    """First step 60 s, the second 2 s: 60 · 9 = 540 s left, then 2 · 8 = 16 s; 5 s later 11 s."""
    progress, clock, _ = plain(10)
    progress.start(0)
    assert progress.eta() is None
    clock.now += 60
    progress.update(1, {})
    assert progress.eta() == pytest.approx(540)
    clock.now += 2
    progress.update(2, {})
    assert progress.eta() == pytest.approx(16)
    clock.now += 5
    assert progress.eta() == pytest.approx(11)


def test_an_evaluation_counts_into_the_step_it_follows() -> None:
    """Steps of 1 s, each with an evaluation of 3 s in a second call: 4 s a step, five left."""
    progress, clock, _ = plain(10)
    progress.start(0)
    for step in range(1, 6):
        clock.now += 1
        progress.update(step, {})
        clock.now += 3
        progress.update(step, {"eval/accuracy": 0.5})
    assert progress.eta() == pytest.approx(20)


def test_the_estimate_follows_recent_steps() -> None:
    """Forty steps of 10 s, then twenty-one of 1 s: only the latter count, thirty-nine are left."""
    progress, clock, _ = plain(100)
    progress.start(0)
    for step in range(1, 62):
        clock.now += 10 if step <= 40 else 1
        progress.update(step, {})
    assert progress.eta() == pytest.approx(39)


def test_a_resumed_run_counts_from_where_it_was() -> None:
    progress, clock, out = plain(160)
    progress.start(80)
    clock.now += 2
    progress.update(81, {})
    assert out.getvalue() == "step  81/160  eta 2:38\n"


def test_the_live_display_keeps_what_the_last_updates_said() -> None:
    """An evaluation leaves the training metrics on the screen; notes stay above; the cursor comes back."""
    clock, out = Clock(), io.StringIO()
    progress = Progress(160, Console(file=out, force_terminal=True, width=100, _environ={}), clock)
    progress.start(0)
    progress.update(1, METRICS)
    progress.note("checkpoint saved")
    progress.update(1, {"eval/accuracy": 0.62})
    progress.close()
    progress.close()
    text = out.getvalue()
    last = text[text.rindex("step 1/160") :]
    for words in ("reward 0.41", "kl(main) 0.231", "acc 0.62", "1.9k tok/s", "sample 0.21s", "sync 0.04s", "eta"):
        assert words in last
    assert "checkpoint saved" in text
    assert text.rstrip().endswith("\x1b[?25h")


def test_close_before_start_is_harmless() -> None:
    plain(3)[0].close()


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (72, "1:12"), (3599.7, "1:00:00"), (10872, "3:01:12")]
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (850, "850"),
        (999.6, "1.0k"),
        (1912, "1.9k"),
        (9960, "10k"),
        (12345, "12k"),
        (3.4e6, "3.4M"),
        (math.nan, "nan"),
    ],
)
def test_short_count(value: float, text: str) -> None:
    assert short_count(value) == text
