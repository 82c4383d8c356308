"""Rewards: functions judge rollouts; the stage runs them, adds them up and gives every fault one counted outcome.

    value(rollout) = sum over terms of weight * part;  None ("no verdict") as soon as one part is None

What a function can do wrong, and what comes of it (`on_error` is the policy, config key `reward_policy.on_error`):

| the function                            | on_error "raise" | on_error "skip"                                    |
|-----------------------------------------|------------------|----------------------------------------------------|
| answers None                            | that row has no reward: `reward/missing`                              |
| answers NaN, an infinity, a non-number  | that row has no reward: `reward/missing` and `reward/invalid`         |
| answers with another number of values   | RewardError      | RewardError                                        |
| raises, or its process dies             | RewardError      | the bad rows have no reward: `reward/errors`       |
| runs past `time_limit`                  | RewardTimeout    | the bad rows have no reward: `reward/timeouts`     |
| raises RemoteError (a judge is gone)    | RemoteError      | RemoteError: it would fail for every row           |
| raises TemplateFault (a judge's config) | TemplateFault    | TemplateFault, likewise                            |

To find the bad rows, the rows are asked one by one. A row alone gets an eighth of `time_limit`, all of them together
`time_limit` plus an eighth of what they might take; rows not reached by then are lost too. The start of a process after
each kill comes on top.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal, Protocol, runtime_checkable

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from opd.records import Mean, Reward, Rollout
from opd.remote import RemoteError
from opd.reward_worker import Answer, ContractError, RewardWorker, TimedOut, run_function
from opd.students import HFStudent
from opd.templates import TemplateFault

log = logging.getLogger(__name__)

ROW_SHARE = 8  # a row asked alone gets 1/8 of the time limit; 1/8 of the rows may use up theirs
RESERVED_NAMES = frozenset({"mean", "missing", "invalid", "errors", "timeouts"})


@runtime_checkable
class RewardFunction(Protocol):
    """Any callable of a batch: one value per rollout in the same order, None where it has no verdict.

    It is sent to another process by pickle, so it is importable: a function, a `functools.partial` of one, a dataclass.
    """

    def __call__(self, rollouts: Sequence[Rollout], /) -> Sequence[float | None]: ...


@runtime_checkable
class InProcess(Protocol):
    """Declared by functions that cannot hang: called in the trainer's process, without a time limit."""

    in_process: ClassVar[bool]


@runtime_checkable
class Connects(Protocol):
    """Declared by functions in the trainer's process that open something; a RemoteError of theirs ends the run."""

    def start(self) -> None:
        """Called once before the first batch."""
        ...

    def close(self) -> None:
        """Called once after the last."""
        ...


@runtime_checkable
class Measured(Protocol):
    """Declared by functions and teachers that count what they do."""

    def metrics(self) -> Mapping[str, Mean]:
        """Since the last call; always under the same names."""
        ...


@runtime_checkable
class LearnsFromPairs(Protocol):
    """Declared by functions in the trainer's process that are trained in the loop, on a teacher's answers and ours."""

    @property
    def teacher(self) -> str:
        """Name of the teacher whose answers are the better ones."""
        ...

    def judges(self, stream: str) -> bool:
        """Whether it learns from answers of this stream."""
        ...

    def begin(self, student: HFStudent, tokenizer: PreTrainedTokenizerBase) -> None:
        """Makes what is to learn; called once before the first batch, on all ranks."""
        ...

    def learn(self, pairs: Sequence[tuple[Rollout, Rollout]]) -> Mapping[str, Mean]:
        """Learns from (teacher's, student's) answers to the same prompts, those of all ranks on every rank; metrics."""
        ...

    def state(self) -> dict[str, Tensor]:
        """All that `restore` needs to go on as if never stopped; the same on all ranks."""
        ...

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Goes on from what `state` gave."""
        ...


@runtime_checkable
class RowLimited(Protocol):
    """Declared by functions whose time depends on what the student wrote: each row is asked alone.

    A row that is not answered after `row_limit` seconds is killed and has no verdict under either policy, so that no
    single answer can end a run. The batch is bounded as in the table above, under the policy.
    """

    @property
    def row_limit(self) -> float: ...


@dataclass(frozen=True)
class RewardTerm:
    """One summand of the reward: config key `reward.<name>`, metric `reward/<name>`."""

    name: str
    function: RewardFunction
    weight: float = 1.0

    @property
    def label(self) -> str:
        """How messages name it: import path and config key."""
        function = self.function.func if isinstance(self.function, partial) else self.function
        named = function if inspect.isroutine(function) or inspect.isclass(function) else type(function)
        return f"reward function {named.__module__}.{named.__qualname__} (reward.{self.name})"


class RewardError(RuntimeError):
    """A reward function broke its contract, or failed under `on_error="raise"`."""


class RewardTimeout(RewardError):
    """A reward function ran past the time limit under `on_error="raise"`."""


class RewardStage:
    """Scores rollouts with weighted reward functions. Not for concurrent use; any one thread at a time may call it.

    `time_limit`: seconds per call of one function on one batch. `on_error`: what exceptions and time-outs do.
    """

    def __init__(
        self, terms: Sequence[RewardTerm], time_limit: float = 30.0, on_error: Literal["raise", "skip"] = "raise"
    ) -> None:
        names = [term.name for term in terms]
        if duplicates := [name for name, times in Counter(names).items() if times > 1]:
            raise ValueError(f"reward: two terms are named {duplicates[0]!r}; give each its own name")
        for name in RESERVED_NAMES.intersection(names):
            raise ValueError(f"reward.{name}: reward/{name} is a metric of the stage itself; rename the term")
        for term in terms:
            if not math.isfinite(term.weight):
                raise ValueError(f"reward.{term.name}.weight must be a finite number, got {term.weight}")
        if not (math.isfinite(time_limit) and time_limit > 0):
            raise ValueError(f"reward_policy.time_limit must be a positive number of seconds, got {time_limit}")
        if on_error not in ("raise", "skip"):
            raise ValueError(f"reward_policy.on_error must be 'raise' or 'skip', got {on_error!r}")
        self.terms = list(terms)
        self.time_limit = time_limit
        self.on_error = on_error
        self._worker = RewardWorker()
        self._connected: list[Connects] = []
        self._lost: Counter[str] = Counter()  # rows of the last batch by metric: errors, timeouts, invalid
        self._metrics: dict[str, Mean] = {}

    def start(self) -> None:
        """Start the worker if a function needs one, and import the functions there: faults show before step 1."""
        for term in self.terms:
            if isinstance(term.function, Connects):
                term.function.start()
                self._connected.append(term.function)
            if not _runs_in_process(term) and (problem := self._worker.load(term.function)) is not None:
                raise RewardError(f"{term.label} {problem}") from problem.__cause__

    def score(self, rollouts: Sequence[Rollout]) -> list[Reward]:
        """One Reward per rollout, in order; without terms each has value None and no parts."""
        self._lost = Counter()
        if not self.terms:
            return [Reward(None) for _ in rollouts]
        columns = {term.name: self._finite(self._ask(term, rollouts)) if rollouts else [] for term in self.terms}
        rewards = []
        for row in range(len(rollouts)):
            parts = {name: column[row] for name, column in columns.items()}
            known = [term.weight * part for term in self.terms if (part := parts[term.name]) is not None]
            total = sum(known) if len(known) == len(parts) else math.nan
            rewards.append(Reward(total if math.isfinite(total) else None, parts))
        self._metrics = self._measure(rewards)
        return rewards

    @property
    def pair_teachers(self) -> list[str]:
        """Teachers from whose answers rewards learn."""
        return [f.teacher for term in self.terms if isinstance(f := term.function, LearnsFromPairs)]

    def metrics(self) -> dict[str, Mean]:
        """Of the last scored batch; the counts are rows lost per batch. No entries without terms."""
        return dict(self._metrics)

    def close(self) -> None:
        """Stop the worker, and close what functions opened. The stage may be used again and then starts another."""
        self._worker.stop()
        while self._connected:
            self._connected.pop().close()

    def _measure(self, rewards: Sequence[Reward]) -> dict[str, Mean]:
        values = [reward.value for reward in rewards]
        columns = {f"reward/{term.name}": [reward.parts[term.name] for reward in rewards] for term in self.terms}
        means = {}
        for name, column in {"reward/mean": values, **columns}.items():
            known = [value for value in column if value is not None]
            means[name] = Mean(sum(known), len(known))
        for term in self.terms:
            if isinstance(term.function, Measured):
                means |= {f"reward/{term.name}/{name}": mean for name, mean in term.function.metrics().items()}
        counts = {f"reward/{kind}": Mean(self._lost[kind], 1) for kind in ("invalid", "errors", "timeouts")}
        return {**means, "reward/missing": Mean(values.count(None), len(values)), **counts}

    def _finite(self, values: Sequence[float | None]) -> list[float | None]:
        self._lost["invalid"] += sum(value is not None and not math.isfinite(value) for value in values)
        return [value if value is not None and math.isfinite(value) else None for value in values]

    def _ask(self, term: RewardTerm, rollouts: Sequence[Rollout]) -> list[float | None]:
        """The term's values under the policy."""
        if isinstance(term.function, RowLimited):
            return self._ask_rows(term, rollouts, term.function.row_limit, row_may_time_out=True)
        answer = self._call(term, rollouts, self.time_limit)
        if isinstance(answer, list):
            return answer
        self._refuse_unless_skipping(term, answer)
        log.warning("%s failed on a batch (%r); asking its %d rows one by one", term.label, answer, len(rollouts))
        return self._ask_rows(term, rollouts, self.time_limit / ROW_SHARE, row_may_time_out=False)

    def _ask_rows(
        self, term: RewardTerm, rollouts: Sequence[Rollout], row_limit: float, row_may_time_out: bool
    ) -> list[float | None]:
        """Each row asked alone, all of them within one budget; process starts are not counted."""
        values: list[float | None] = []
        stop_at = self._worker.run_seconds + self.time_limit + len(rollouts) * row_limit / ROW_SHARE
        for rollout in rollouts:
            left = stop_at - self._worker.run_seconds
            answer = self._call(term, [rollout], min(row_limit, left)) if left > 0 else TimedOut()
            if isinstance(answer, list):
                values += answer
                continue
            if not (row_may_time_out and isinstance(answer, TimedOut) and left > 0):
                self._refuse_unless_skipping(term, answer)
            self._lost["timeouts" if isinstance(answer, TimedOut) else "errors"] += 1
            values.append(None)
        return values

    def _call(self, term: RewardTerm, rollouts: Sequence[Rollout], limit: float) -> Answer:
        if _runs_in_process(term):
            answer = run_function(term.function, rollouts)
        else:
            answer = self._worker.call(term.function, rollouts, limit)
        if isinstance(answer, RemoteError):
            raise answer
        if isinstance(answer, TemplateFault):
            raise TemplateFault(f"reward.{term.name}.{answer}") from None
        if isinstance(answer, ContractError):
            raise RewardError(f"{term.label} {answer}") from answer.__cause__
        return answer

    def _refuse_unless_skipping(self, term: RewardTerm, answer: Exception) -> None:
        if self.on_error == "skip":
            return
        way_out = "reward_policy.on_error=skip leaves such rows without a reward"
        if isinstance(answer, TimedOut):
            limit = f"ran past reward_policy.time_limit = {self.time_limit:g} s"
            raise RewardTimeout(f"{term.label} {limit} and was stopped; raise the limit, or {way_out}")
        raise RewardError(f"{term.label} failed with {type(answer).__name__}: {answer}; {way_out}") from answer


def _runs_in_process(term: RewardTerm) -> bool:
    return isinstance(term.function, InProcess) and term.function.in_process
