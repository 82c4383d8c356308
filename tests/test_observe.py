"""What a run leaves behind, piece by piece."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from opd.alarms import AlarmConfig
from opd.observe import STAGES, Observer, versions
from opd.records import Example, Prompt, Reward, Rollout
from tests.source_tree import ROOT

METRICS = {"rollout/length": 4.0, "reward/mean": 0.5}


@pytest.fixture
def handler() -> Iterator[None]:
    """SIGTERM as it was."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def observed(run_dir: Path, resolved: str = "steps: 4\n", step: int = 0) -> Observer:
    observer = Observer(run_dir, 4, [], AlarmConfig(), resolved)
    observer.start(step)
    return observer


def records(run_dir: Path) -> list[dict[str, float | None]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def judged(text: str) -> tuple[Rollout, Reward]:
    prompt = Prompt("0", "heldout", [3], Example("1+1=", "2"))
    return Rollout(prompt, 0, [4], [-1.0], text, "stop", 0), Reward(1.0)


def test_stage_times_add_up_and_belong_to_one_step(tmp_path: Path, handler: None) -> None:
    observer = observed(tmp_path)
    for _ in range(2):
        with observer.stage("sample"):
            pass
    observer.log_step(1, METRICS, tokens=8)
    with observer.stage("update"):
        pass
    observer.log_step(2, METRICS, tokens=4)
    observer.close()
    first, second = records(tmp_path)
    assert set(STAGES) & {name.removeprefix("time/") for name in first} == {"sample"}
    assert set(STAGES) & {name.removeprefix("time/") for name in second} == {"update"}
    assert first["time/sample"] == observer.wall["sample"]
    assert (first["rollout/tokens_total"], second["rollout/tokens_total"]) == (8.0, 12.0)


def test_a_stage_that_fails_lets_the_error_through(tmp_path: Path) -> None:
    observer = Observer(tmp_path, 4, [], AlarmConfig(), "")
    with pytest.raises(KeyError, match="lost"), observer.stage("sample"):
        raise KeyError("lost")


def test_sigterm_asks_to_stop_and_is_given_back(tmp_path: Path, handler: None) -> None:
    mine = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        observer = observed(tmp_path)
        assert not observer.asked_to_stop()
        os.kill(os.getpid(), signal.SIGTERM)
        assert observer.asked_to_stop()
        observer.close()
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, mine)


@pytest.mark.parametrize(
    ("old", "new", "notes"),
    [
        ("a: 1\nb: {c: x, d: [1, 2]}\n", "a: 1\nb: {c: x, d: [1, 2]}\n", []),
        ("b: {c: x, d: [1, 2]}\n", "b: {c: y, d: [1, 3]}\n", ["b.c: x -> y", "b.d: [1, 2] -> [1, 3]"]),
        ("b: {c: x}\n", "b: {c: x}\ne: null\n", ["e: (not there) -> None"]),
        ("b: {c: x}\n", "b: {}\n", ["b: (not there) -> {}", "b.c: x -> (not there)"]),
    ],
)
def test_differences_are_named_by_dotted_keys(
    tmp_path: Path, handler: None, capsys: pytest.CaptureFixture[str], old: str, new: str, notes: list[str]
) -> None:
    observed(tmp_path, old).close()
    capsys.readouterr()
    observed(tmp_path, new).close()
    head = "config differs from the run's last start: "
    assert capsys.readouterr().out.splitlines() == [head + note for note in notes]
    assert (tmp_path / "config.yaml").read_text() == new


def finish(observer: Observer, eval_metrics: Mapping[str, float]) -> dict[str, object]:
    observer.log_step(4, METRICS, tokens=8)
    observer.log_eval(4, eval_metrics, [])
    observer.write_summary(4)
    observer.close()
    return json.loads((observer.run_dir / "summary.json").read_text(), parse_constant=pytest.fail)


def test_the_summary_is_plain_json_without_numbers_that_json_lacks(tmp_path: Path, handler: None) -> None:
    """An accuracy of nothing is NaN here, and null in the file."""
    observer = observed(tmp_path)
    observer.log_eval(0, {"eval/accuracy": 0.25, "eval/kl": 2.0}, [])
    summary = finish(observer, {"eval/accuracy": math.nan, "eval/kl": 1.0})
    assert summary["eval"] == {"before": 0.25, "after": None, "teacher": None, "kl_before": 2.0, "kl_after": 1.0}
    assert summary["final_metrics"]["eval/accuracy"] is None
    assert summary["final_metrics"]["reward/mean"] == 0.5


def test_seconds_of_earlier_processes_count_and_stages_with_other_make_the_total(tmp_path: Path, handler: None) -> None:
    """Restored: 100 s in all, 60 of them sampling. Whatever this process adds, the parts make the total."""
    observer = observed(tmp_path)
    observer.log_eval(0, {"eval/accuracy": 0.25}, [])
    state = observer.state(0)
    observer.close()
    again = Observer(tmp_path, 4, [], AlarmConfig(), "steps: 4\n")
    again.restore({**state, "seconds": 100.0, "wall": {"sample": 60.0}, "tokens": 80})
    again.start(2)
    summary = finish(again, {"eval/accuracy": 0.5})
    seconds = summary["wall_seconds"]
    assert seconds["sample"] == 60.0
    assert 100.0 <= seconds["total"] < 200.0
    assert sum(value for name, value in seconds.items() if name != "total") == pytest.approx(seconds["total"], abs=1e-2)
    assert summary["sampled_tokens"] == 88
    assert (summary["eval"]["before"], summary["eval"]["after"]) == (0.25, 0.5)


def test_a_checkpoint_carries_an_evaluation_of_its_own_step_only(tmp_path: Path, handler: None) -> None:
    observer = observed(tmp_path)
    observer.log_step(1, METRICS, tokens=8)
    observer.log_eval(1, {"eval/accuracy": 0.25}, [])
    assert observer.state(1)["metrics"]["eval/accuracy"] == 0.25
    observer.log_step(2, METRICS, tokens=8)
    assert "eval/accuracy" not in observer.state(2)["metrics"]
    observer.close()


def test_samples_beyond_the_resumed_step_are_forgotten(tmp_path: Path, handler: None) -> None:
    observer = observed(tmp_path)
    for step in (0, 2, 4):
        observer.log_eval(step, {}, [judged(f"at {step}")])
    observer.close()
    again = observed(tmp_path, step=2)
    again.log_eval(4, {}, [judged("at 4 again")])
    again.close()
    rows = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [(row["step"], row["text"]) for row in rows] == [(0, "at 0"), (2, "at 2"), (4, "at 4 again")]
    assert rows[0] == {"step": 0, "prompt": "1+1=", "answer": "2", "text": "at 0", "reward": 1.0}
    observed(tmp_path, step=0).close()
    assert (tmp_path / "samples.jsonl").read_text() == ""


class Listed:
    """A logger that remembers its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []

    def start(self, run_dir: Path, resume_step: int) -> None:
        self.calls.append(("start", run_dir, resume_step))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.calls.append(("log", step, metrics["reward/mean"]))

    def close(self) -> None:
        self.calls.append(("close",))


def test_metrics_go_to_every_logger(tmp_path: Path, handler: None) -> None:
    listed = Listed()
    observer = Observer(tmp_path, 4, [listed], AlarmConfig(), "steps: 4\n")
    observer.start(2)
    observer.log_step(3, METRICS, tokens=8)
    observer.close()
    assert listed.calls == [("start", tmp_path, 2), ("log", 3, 0.5), ("close",)]
    assert records(tmp_path)[0]["reward/mean"] == 0.5


def test_versions_name_packages_and_the_commit() -> None:
    found = versions()
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    assert found["git"].startswith(commit.strip())
    assert {"python", "opd", "torch", "transformers", "deepspeed", "peft", "hydra-core"} <= found.keys()


def test_an_alarm_is_printed_once_logged_while_it_holds_and_summed_up(
    tmp_path: Path, handler: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """p99 of 30 at step 1, then 2: means of what there is are 30, 16, 34/3, 9; over 10 from step 1 to 3. The process is
    killed after step 2; the next one reads what was logged and says nothing twice.
    """
    wants = "alarm delta/main: teacher/main/delta_p99 is 30 nats (over 10)"
    observer = observed(tmp_path)
    for step, p99 in ((1, 30.0), (2, 2.0)):
        observer.log_step(step, {"teacher/main/delta_p99": p99}, tokens=8)
    observer.close()
    said = capsys.readouterr().out
    assert said.count(wants) == said.count("alarm ") == 1
    again = observed(tmp_path, step=2)
    for step in (3, 4):
        again.log_step(step, {"teacher/main/delta_p99": 2.0}, tokens=8)
    again.write_summary(4)
    again.close()
    said = capsys.readouterr().out
    assert said.count("alarm ") == said.count("alarm delta/main is over: it held from step 1 to 3") == 1
    assert [line.get("alarm/delta/main") for line in records(tmp_path)] == pytest.approx([30.0, 16.0, 34 / 3, None])
    (alarm,) = json.loads((tmp_path / "summary.json").read_text())["alarms"]
    assert alarm.pop("text").startswith(wants)
    numbers = {"value": 30.0, "threshold": 10.0, "from": 1, "to": 3}
    assert alarm == {"key": "delta/main", "metric": "teacher/main/delta_p99", **numbers}
