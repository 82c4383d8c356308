"""Signs that a run goes wrong, read from the history of its metrics: one rule, one threshold, one likely cause each."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from math import isfinite
from typing import Any, NamedTuple

Points = Sequence[tuple[int, float]]  # (step, finite value) in the order logged
History = Mapping[str, Points]  # metric -> its points

SMOOTH = 5  # logged values of which a rule takes the mean
FLAT = 0.01  # an overlap that moved by no more has not moved
SATURATED = 0.95  # an overlap above this has nowhere to rise


@dataclass(frozen=True)
class AlarmConfig:
    """The thresholds; null switches an alarm off. Every rule looks at the mean of a metric's last five values.

    Args:
        truncation: rise of the share of truncated answers in 20 steps.
        repetition: share of answers that go round in circles.
        entropy_low: nats of the student's entropy per token, below.
        entropy_rise: relative rise of the student's entropy in 100 steps.
        overlap: nats between the entropies of student and teacher while their top-16 overlap has not moved by 0.01 in
            100 steps and lies below 0.95.
        excess_mass: the student's minus the teacher's probability of the teacher's top 16.
        stop_mass: probability of stopping where the student stopped, of the student or a teacher, below.
        verdicts: fall of the share of answers with a verdict in 20 steps.
        delta: p99 of the size of the teacher's minus the student's log-prob of a sampled token, nats.
        ess: effective sample size of the sampled tokens as a share, below.
        cosine: between the gradients of two terms, below; needs `diagnostics.every`.
    """

    truncation: float | None = 0.1
    repetition: float | None = 0.05
    entropy_low: float | None = 0.05
    entropy_rise: float | None = 0.5
    overlap: float | None = 0.3
    excess_mass: float | None = 0.02
    stop_mass: float | None = 1e-3
    verdicts: float | None = 0.05
    delta: float | None = 10.0
    ess: float | None = 0.3
    cosine: float | None = -0.2

    def __post_init__(self) -> None:
        for name, threshold in asdict(self).items():
            if threshold is not None and not isfinite(threshold):
                raise ValueError(f"{name}={threshold}: must be a finite number, or null for no such alarm")


@dataclass(frozen=True)
class Alarm:
    """A rule that holds. `key` is the rule and what it is about: `delta/main`."""

    key: str
    metric: str
    value: float
    threshold: float
    text: str  # what was measured, and what it usually means

    def __str__(self) -> str:
        return f"alarm {self.key}: {self.metric} {self.text.format(value=self.value, threshold=self.threshold)}"


class Rule(NamedTuple):
    """One kind of alarm; the group of the metric's pattern, if any, names what it is about."""

    key: str  # of its threshold in AlarmConfig
    metric: str
    measure: Callable[[str, History], float | None]  # None where too little is known
    above: bool  # holds above the threshold, or below it
    text: str


def recent(metric: str, history: History) -> float | None:
    """Mean of the last values."""
    return _mean(history.get(metric, ())[-SMOOTH:])


def rise(window: int) -> Callable[[str, History], float | None]:
    """Last values minus those of `window` steps before."""

    def measure(metric: str, history: History) -> float | None:
        now, before = _now_and_before(history[metric], window)
        return None if now is None or before is None else now - before

    return measure


def relative_rise(window: int) -> Callable[[str, History], float | None]:
    """The rise as a share of what it was before."""

    def measure(metric: str, history: History) -> float | None:
        now, before = _now_and_before(history[metric], window)
        return None if now is None or before is None or before <= 0 else now / before - 1.0

    return measure


def gap_at_flat_overlap(metric: str, history: History) -> float | None:
    """Size of the entropy gap where the overlap has stood still; None elsewhere."""
    now, before = _now_and_before(history[metric], 100)
    gap = recent(metric.replace("overlap16", "entropy_gap"), history)
    if now is None or before is None or gap is None or now > SATURATED or abs(now - before) > FLAT:
        return None
    return abs(gap)


def excess_mass(metric: str, history: History) -> float | None:
    """The student's minus the teacher's probability of the teacher's top 16."""
    student, teacher = recent(metric, history), recent(metric.replace("_student_", "_teacher_"), history)
    return None if student is None or teacher is None else student - teacher


def _now_and_before(points: Points, window: int) -> tuple[float | None, float | None]:
    """Mean of the last values, and of the last that lie `window` steps and more before them."""
    end = len(points)
    while end and points[end - 1][0] > points[-1][0] - window:
        end -= 1
    return _mean(points[-SMOOTH:]), _mean(points[end - SMOOTH : end]) if end >= SMOOTH else None


def _mean(points: Points) -> float | None:
    return sum(value for _, value in points) / len(points) if points else None


RULES = (
    Rule("truncation", "rollout/truncated", rise(20), True,
         "rose by {value:.3g} in 20 steps (over {threshold:g}): answers grow until they are cut, from repetition or a "
         "stop that is unlearned; look at samples.jsonl, at the loss stop_class and at sampler.params.max_tokens"),
    Rule("repetition", "rollout/repetitive", recent, True,
         "is {value:.3g} (over {threshold:g}): answers go round in circles, which a teacher may score highly; stop "
         "earlier, shorten answers or add a reward"),
    Rule("entropy_low", "student/entropy", recent, False,
         "is {value:.3g} nats (under {threshold:g}): the student has stopped exploring; reward terms learn little from "
         "here, so lower their weight or the learning rate, or use a forward KL"),
    Rule("entropy_rise", "student/entropy", relative_rise(100), True,
         "rose by {value:.0%} in 100 steps (over {threshold:.0%}): the student dissolves; lower the learning rate, and "
         "check that sampling and scoring have one temperature"),
    Rule("overlap", "teacher/(.+)/overlap16", gap_at_flat_overlap, True,
         "has not moved for 100 steps while the entropies are {value:.3g} nats apart (over {threshold:g}): the student "
         "no longer approaches the teacher; it may need a warm start, or a teacher nearer to it"),
    Rule("excess_mass", "teacher/(.+)/teacher16_student_mass", excess_mass, True,
         "exceeds the teacher's own by {value:.3g} (over {threshold:g}): the student becomes sharper than the teacher, "
         "as a forward KL truncated without its tail makes it"),
    Rule("stop_mass", "(student|teacher/.+)/stop_mass_end", recent, False,
         "is {value:.2g} (under {threshold:g}): it would hardly stop where the student stopped; their stop tokens or "
         "chat templates differ, which the loss stop_class mends"),
    Rule("verdicts", "reward/missing", rise(20), True,
         "rose by {value:.3g} in 20 steps (over {threshold:g}): fewer answers can be judged; their format drifts, or a "
         "reward function fails"),
    Rule("delta", "teacher/(.+)/delta_p99", recent, True,
         "is {value:.3g} nats (over {threshold:g}): the teacher finds sampled tokens all but impossible, which a few "
         "tokens' gradients then drown in; its template or tokens may differ, or its log-probs need a floor"),
    Rule("ess", "mismatch/ess", recent, False,
         "is {value:.3g} (under {threshold:g}): sampler and trainer disagree so much that few tokens carry all weight; "
         "check precision and weight sync, or correct it by loss.NAME.correction"),
    Rule("cosine", "diagnostics/cosine/(.+)", recent, False,
         "is {value:.2f} (under {threshold:g}): the two terms pull different ways; schedule one after the other, "
         "or lower a weight"),
)  # fmt: skip


def check(history: History, config: AlarmConfig) -> list[Alarm]:
    """The alarms that hold at the end of the history; a metric that was never logged raises none."""
    thresholds, alarms = asdict(config), []
    for rule in RULES:
        threshold = thresholds[rule.key]
        if threshold is None:
            continue
        for metric in history:
            match = re.fullmatch(rule.metric, metric)
            value = None if match is None else rule.measure(metric, history)
            if match and value is not None and (value > threshold if rule.above else value < threshold):
                key = "/".join([rule.key, *match.groups()])
                alarms.append(Alarm(key, metric, value, threshold, rule.text))
    return alarms


@dataclass
class Episode:
    """An alarm from the step at which it began to hold to the last step at which it did; None while it holds."""

    alarm: Alarm
    first: int
    last: int | None = None

    def __str__(self) -> str:
        if self.last is None:
            return str(self.alarm)
        return f"alarm {self.alarm.key} is over: it held from step {self.first} to {self.last}"

    def record(self) -> dict[str, Any]:
        """For summary.json; value and text are those of the beginning."""
        alarm = self.alarm
        facts = {"key": alarm.key, "metric": alarm.metric, "value": alarm.value, "threshold": alarm.threshold}
        return {**facts, "from": self.first, "to": self.last, "text": str(alarm)}


@dataclass
class Watch:
    """Follows a run step by step, from its beginning: keeps the history that `check` needs."""

    config: AlarmConfig
    episodes: list[Episode] = field(default_factory=list)
    holding: dict[str, Episode] = field(default_factory=dict)
    _history: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    _seen: int = 0  # the last step

    def see(self, step: int, metrics: Mapping[str, float]) -> tuple[list[Alarm], list[Episode]]:
        """The alarms that hold after this step, and the episodes that it began or ended."""
        for name, value in metrics.items():
            if isfinite(value) and WATCHED.fullmatch(name):
                self._history.setdefault(name, []).append((step, value))
        alarms = {alarm.key: alarm for alarm in check(self._history, self.config)}
        begun = [Episode(alarm, step) for key, alarm in alarms.items() if key not in self.holding]
        ended = [self.holding.pop(key) for key in list(self.holding) if key not in alarms]
        for episode in ended:
            episode.last = self._seen
        self.holding |= {episode.alarm.key: episode for episode in begun}
        self.episodes += begun
        self._seen = step
        return list(alarms.values()), [*ended, *begun]


WATCHED = re.compile("|".join([rule.metric for rule in RULES] + ["teacher/.+/(entropy_gap|teacher16_teacher_mass)"]))


def replayed(config: AlarmConfig, lines: Iterable[Mapping[str, Any]]) -> Watch:
    """A watch that has seen the lines of metrics.jsonl."""
    watch = Watch(config)
    for line in lines:
        watch.see(line["step"], {name: value for name, value in line.items() if value is not None})
    return watch


def configured(settings: Mapping[str, Any]) -> AlarmConfig:
    """The thresholds of a run's configuration as it was saved, defaults where it names none."""
    known = {f.name for f in fields(AlarmConfig)}
    return AlarmConfig(**{name: value for name, value in settings.items() if name in known})
