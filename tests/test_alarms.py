"""Every alarm on a scripted history: where it must speak, where it must not, and what it says."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import pytest

from opd.alarms import RULES, AlarmConfig, Watch, check, replayed

SCRIPTS: dict[str, tuple[dict[str, list[float]], float]] = {
    # 25 steps: the last five are .30, those that end 20 steps before (1 to 5) .15: a rise of .15
    "truncation": ({"rollout/truncated": [0.15] * 20 + [0.30] * 5}, 0.15),
    "repetition": ({"rollout/repetitive": [0.02, 0.1]}, 0.06),  # (.02 + .1) / 2
    "entropy_low": ({"student/entropy": [0.04]}, 0.04),
    "entropy_rise": ({"student/entropy": [0.4] * 100 + [0.7] * 5}, 0.75),  # .7 / .4 - 1
    "overlap/main": ({"teacher/main/overlap16": [0.5] * 105, "teacher/main/entropy_gap": [-0.4] * 105}, 0.4),
    "excess_mass/main": (
        {"teacher/main/teacher16_student_mass": [0.99], "teacher/main/teacher16_teacher_mass": [0.96]},
        0.03,
    ),
    "stop_mass/teacher/main": ({"teacher/main/stop_mass_end": [5e-4]}, 5e-4),
    "stop_mass/student": ({"student/stop_mass_end": [0.0]}, 0.0),
    "verdicts": ({"reward/missing": [0.0] * 20 + [0.1] * 5}, 0.1),
    "delta/main": ({"teacher/main/delta_p99": [11.0]}, 11.0),
    "ess": ({"mismatch/ess": [0.25]}, 0.25),
    "cosine/kl/pg": ({"diagnostics/cosine/kl/pg": [-0.5]}, -0.5),
}
SILENT: dict[str, dict[str, list[float]]] = {
    "a share that was always high": {"rollout/truncated": [0.9] * 60},
    "a rise over a longer time": {"rollout/truncated": [0.004 * step for step in range(60)]},  # .08 in 20 steps
    "too few steps to compare": {"rollout/truncated": [0.0] * 19 + [0.9] * 5},
    "a fall of the entropy": {"student/entropy": [0.9] * 100 + [0.3] * 5},
    "an overlap that rises": {"teacher/main/overlap16": [0.004 * step for step in range(105)],
                              "teacher/main/entropy_gap": [0.5] * 105},
    "an overlap without room": {"teacher/main/overlap16": [0.97] * 105, "teacher/main/entropy_gap": [0.5] * 105},
    "a flat overlap at equal entropies": {"teacher/main/overlap16": [0.5] * 105,
                                          "teacher/main/entropy_gap": [0.1] * 105},
    "no entropy gap known": {"teacher/main/overlap16": [0.5] * 105},
    "one side of the mass": {"teacher/main/teacher16_student_mass": [0.99]},
    "another teacher's mass": {"teacher/a/teacher16_student_mass": [0.99], "teacher/b/teacher16_teacher_mass": [0.5]},
    "values that are not finite": {"student/entropy": [math.nan], "teacher/main/delta_p99": [math.inf]},
    "one bad value of five": {"mismatch/ess": [1.0, 1.0, 1.0, 1.0, 0.1]},
    "no metric at all": {},
}  # fmt: skip


def history(script: Mapping[str, Sequence[float]]) -> dict[str, list[tuple[int, float]]]:
    """The n-th value of each metric as that of step n."""
    return {name: list(enumerate(values, 1)) for name, values in script.items()}


def watched(script: Mapping[str, Sequence[float]], config: AlarmConfig | None = None) -> Watch:
    """A watch that saw the script step by step."""
    watch = Watch(config or AlarmConfig())
    for step in range(1, max(map(len, script.values()), default=0) + 1):
        watch.see(step, {name: values[step - 1] for name, values in script.items() if len(values) >= step})
    return watch


@pytest.mark.parametrize("key", SCRIPTS)
def test_an_alarm_speaks(key: str) -> None:
    script, value = SCRIPTS[key]
    (alarm,) = check(history(script), AlarmConfig())
    assert alarm.key == key
    assert alarm.metric == next(iter(script))
    assert alarm.value == pytest.approx(value)
    text = str(alarm)
    assert text.startswith(f"alarm {key}: {alarm.metric} ")
    assert "{" not in text
    assert len(text) < 300


@pytest.mark.parametrize("key", SCRIPTS)
def test_null_switches_one_alarm_off_and_a_threshold_moves_it(key: str) -> None:
    script, value = SCRIPTS[key]
    name = key.partition("/")[0]
    (above,) = [rule.above for rule in RULES if rule.key == name]
    assert check(history(script), AlarmConfig(**{name: None})) == []
    assert check(history(script), AlarmConfig(**{name: value + (1e-9 if above else -1e-9)})) == []
    assert check(history(script), AlarmConfig(**{name: value - (1e-9 if above else -1e-9)})) != []


def test_every_rule_has_a_threshold_and_a_script() -> None:
    assert {rule.key for rule in RULES} == set(vars(AlarmConfig())) == {key.partition("/")[0] for key in SCRIPTS}


@pytest.mark.parametrize("why", SILENT)
def test_no_alarm(why: str) -> None:
    assert watched(SILENT[why]).episodes == []


def test_an_alarm_holds_until_its_mean_is_back() -> None:
    """Means of the last five: .2 up to step 5, at step 6 (.2 * 4 + 1) / 5 = .36, which is over .3; at step 14 of four
    bad values .36 again, at step 15 of five .2. A metric that a step did not log keeps its last word.
    """
    watch = watched({"mismatch/ess": [0.2] * 5 + [1.0] * 5 + [0.2] * 5})
    assert [(episode.alarm.key, episode.first, episode.last) for episode in watch.episodes] == [
        ("ess", 1, 5),
        ("ess", 15, None),
    ]
    assert list(watch.holding) == ["ess"]
    alarms, changes = watch.see(16, {"rollout/truncated": 0.0})
    assert [alarm.key for alarm in alarms] == ["ess"]
    assert changes == []
    _, changes = watch.see(17, {"mismatch/ess": 1.0})
    assert [str(change) for change in changes] == ["alarm ess is over: it held from step 15 to 16"]


def test_a_replay_of_the_log_is_the_same_watch() -> None:
    """Lines as metrics.jsonl holds them: null for what was not finite, evaluations between, other metrics."""
    values = [0.2, None, 0.2, 1.0, 1.0]
    lines = [{"step": step, "time": 1e9, "mismatch/ess": value, "alarm/ess": 0.2} for step, value in enumerate(values)]
    watch = replayed(AlarmConfig(), [*lines[:3], {"step": 2, "time": 1e9, "eval/kl": 0.1}, *lines[3:]])
    assert [(episode.first, episode.last) for episode in watch.episodes] == [(0, 2)]


@pytest.mark.parametrize("threshold", [math.nan, math.inf])
def test_a_threshold_is_a_number(threshold: float) -> None:
    with pytest.raises(ValueError, match=r"delta=(nan|inf): must be a finite number, or null"):
        AlarmConfig(delta=threshold)
