"""Reward functions that come with opd; each judges `Rollout.text` (special tokens removed) against `Example.answer`.

A rollout whose example has no answer has no verdict (None). Your own function is used in the same way, by import path:

    # conf/reward/mine.yaml          (keys beside `_target_` and `weight` reach the function as keyword arguments)
    _target_: my_package.my_reward
    weight: 0.5
    max_words: 100

    def my_reward(rollouts: Sequence[Rollout], max_words: int) -> list[float | None]:
        return [float(len(rollout.text.split()) <= max_words) for rollout in rollouts]
"""

from __future__ import annotations

import logging
import re
import signal
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from math_verify import parse, verify
from sympy import Basic, Expr, Mul, N, Rational, UnevaluatedExpr

from opd.records import Rollout

ALARM_REPEAT = 0.05  # seconds; an alarm raised inside a finalizer is lost, so it comes again
ALARM_GRACE = 2.0  # seconds past `pair_limit` in which the alarm must have been heard
PERCENT = UnevaluatedExpr(Rational(1, 100))  # the factor by which math-verify marks a percentage
POINTS = [Rational(*pair) for pair in [(7, 5), (-13, 7), (23, 9), (3, 11), (-29, 8), (31, 6)]]
BOX = re.compile(r"\\boxed\s*\{")
LATEX_NAME = re.compile(r"\\[A-Za-z]+(\s*\{[A-Za-z ]*\})?")  # \frac, \text{cm}, \begin{pmatrix}
PLAIN_FUNCTION = re.compile(r"(?<![A-Za-z])(sin|cos|tan|log|ln|exp|sqrt|pi)(?![A-Za-z])")
PLAIN_WORD = re.compile(r"(?<![\dA-Za-z])[A-Za-z]{3,}|^\s*[A-Za-z]{2}\s*$")


@dataclass(frozen=True)
class ExactMatch:
    """1.0 if the text is the answer, else 0.0. `strip`: ignore white space around both."""

    strip: bool = True
    in_process: ClassVar[bool] = True

    def __call__(self, rollouts: Sequence[Rollout]) -> list[float | None]:
        return [self._judge(rollout) for rollout in rollouts]

    def _judge(self, rollout: Rollout) -> float | None:
        answer = rollout.prompt.example.answer
        if answer is None:
            return None
        return float(rollout.text.strip() == answer.strip() if self.strip else rollout.text == answer)


@dataclass(frozen=True)
class RegexMatch:
    """1.0 if `pattern` is found in the text, else 0.0; a check of format unless `group` is given.

    `group`: name or number of a group of the pattern whose text, white space around it ignored, must equal the answer;
    of several matches the last one counts. `full`: the pattern must match the whole text.
    """

    pattern: str
    group: int | str | None = None
    full: bool = False

    def __post_init__(self) -> None:
        try:
            compiled = re.compile(self.pattern)
        except re.error as error:
            raise ValueError(f"pattern: {self.pattern!r} is not a regular expression: {error}") from error
        known = [*range(compiled.groups + 1), *compiled.groupindex]
        if self.group is not None and self.group not in known:
            raise ValueError(f"group: {self.group!r} is not a group of pattern {self.pattern!r}; it has {known}")

    def __call__(self, rollouts: Sequence[Rollout]) -> list[float | None]:
        return [self._judge(rollout) for rollout in rollouts]

    def _judge(self, rollout: Rollout) -> float | None:
        answer = rollout.prompt.example.answer
        if self.group is not None and answer is None:
            return None
        compiled = re.compile(self.pattern)
        found = [compiled.fullmatch(rollout.text)] if self.full else list(compiled.finditer(rollout.text))[-1:]
        if not found or found[0] is None:
            return 0.0
        if self.group is None or answer is None:
            return 1.0
        return float((found[0][self.group] or "").strip() == answer.strip())


@dataclass(frozen=True)
class MathEquivalence:
    r"""1.0 if the text's final answer equals the example's answer as mathematics (math-verify, sympy), else 0.0.

    Final answer: what the last `\boxed{...}` holds; without a box the last formula or number that math-verify finds, or
    nothing under `require_box`. The example's answer is the gold, always math-verify's first argument: LaTeX, a formula
    or a number, also inside `$...$` or a box. Plain words are no gold unless written as LaTeX, such as `\text{yes}`.

    `pair_limit`: seconds to judge one pair. Past it there is no verdict: by an alarm at first and, where C code does
    not hear it, by the end of the process (`row_limit`). The alarm needs a main thread, which the worker of a
    `RewardStage` offers whatever thread calls the stage. `float_rounding`: decimal places that count where one side is
    a rounded decimal.

    | gold                   | answer                     | verdict | why                                     |
    |------------------------|----------------------------|---------|-----------------------------------------|
    | None, empty, `no idea` | anything                   | None    | unreadable gold: counted, never 0       |
    | any                    | too heavy for `pair_limit` | None    | `9^{9^{9^9}}`, `(10^8)!`, ...           |
    | any                    | no formula, no number      | 0.0     | nothing was answered                    |
    | `5` or `7`             | `\boxed{5} ... \boxed{7`   | 0.0     | the last box is not closed              |
    | `1/2^{60}`             | `1/2^{61}` or `0`          | 0.0     | exact numbers are compared exactly      |
    | `1/3`                  | `0.333333`                 | 1.0     | equal to `float_rounding` decimals ...  |
    | `0.0000012`            | `0.0000014`                | 0.0     | ... and to five significant digits      |
    | `0.5`                  | `50%` or `50\%`            | 1.0     | a percentage has a value ...            |
    | `50` or `50%`          | `50%` or `50`              | 1.0     | ... or only names the unit              |
    | `\sqrt{1/n}`           | `1/\sqrt{n}`               | 1.0     | equal wherever both are real numbers    |
    | `x`                    | `\sqrt{x^2}`               | 0.0     | both are real at x = -1, and not equal  |
    | `1<x<2`                | `(1,2)`                    | 1.0     | the set that the gold describes         |
    | `(1,2)`                | `1<x<2`                    | 0.0     | an interval was asked for               |
    | `5` or `x=5`           | `x=5` or `5`               | 1.0     | an assignment has a value               |
    """

    pair_limit: float = 2.0
    require_box: bool = False
    float_rounding: int = 6

    def __post_init__(self) -> None:
        if not self.pair_limit > 0:
            raise ValueError(f"pair_limit must be a positive number of seconds, got {self.pair_limit}")

    @property
    def row_limit(self) -> float:
        """Seconds after which a row that did not listen to the alarm is killed."""
        return self.pair_limit + ALARM_GRACE

    def __call__(self, rollouts: Sequence[Rollout]) -> list[float | None]:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("MathEquivalence limits its time by an alarm, in a main thread only; call a RewardStage")
        logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limits are off
        _parse("$1$")  # builds the grammar, outside the limit of the first pair
        return [self._judge(rollout) for rollout in rollouts]

    def _judge(self, rollout: Rollout) -> float | None:
        gold_text = rollout.prompt.example.answer
        if gold_text is None:
            return None
        armed = True

        def expire(signum: int, frame: object) -> None:
            if armed:
                raise _PairTimeout

        previous = signal.signal(signal.SIGALRM, expire)
        signal.setitimer(signal.ITIMER_REAL, self.pair_limit, ALARM_REPEAT)
        try:
            return self._compare(gold_text, rollout.text)
        except _PairTimeout:
            return None
        finally:
            armed = False
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, previous)

    def _compare(self, gold_text: str, text: str) -> float | None:
        gold = _read_gold(gold_text)
        if gold is None:
            return None
        box = last_box(text)
        if box is None and self.require_box:
            return 0.0
        answer = _read_text(text) if box is None else _read_formula(box)
        return float(answer is not None and self._equal_up_to_percent(gold, answer))

    def _equal_up_to_percent(self, gold: Any, answer: Any) -> bool:
        (gold, gold_is_percent), (answer, answer_is_percent) = _split_percent(gold), _split_percent(answer)
        if self._equal(gold, answer):
            return True
        if gold_is_percent and not answer_is_percent:
            return self._equal(gold / 100, answer)
        return answer_is_percent and not gold_is_percent and self._equal(gold, answer / 100)

    def _equal(self, gold: Any, answer: Any) -> bool:
        try:
            verdict = verify([gold], [answer], float_rounding=self.float_rounding, timeout_seconds=0)
            if not (isinstance(gold, Expr) and isinstance(answer, Expr)):
                return verdict
            if gold.free_symbols or answer.free_symbols:
                return verdict or _agree_where_real(gold, answer)
            return verdict and _same_number(gold, answer)
        except Exception:  # sympy raises anything at all on what a student may write
            return False


def last_box(text: str) -> str | None:
    r"""What the last `\boxed{...}` holds: None if there is no box, "" if it is empty or never closed."""
    starts = [match.end() for match in BOX.finditer(text)]
    if not starts:
        return None
    depth = 1
    for brace in re.finditer(r"\\.|[{}]", text[starts[-1] :], re.DOTALL):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return text[starts[-1] : starts[-1] + brace.start()]
    return ""


def _read_gold(text: str) -> Basic | None:
    box = last_box(text)
    if box is not None:
        return _read_formula(box)
    if any(mark in text.replace(r"\$", "") for mark in ("$", r"\(", r"\[")):
        return _read_text(text)
    outside_latex = LATEX_NAME.sub(" ", text)
    if PLAIN_FUNCTION.search(outside_latex):
        return None
    return _read_text(text) if PLAIN_WORD.search(outside_latex) else _read_formula(text)


def _read_formula(latex: str) -> Basic | None:
    """Text that is one formula as a whole."""
    number = latex.strip().removesuffix("%").removesuffix("\\").strip()
    if latex.strip().endswith("%"):
        return _parse(f"${number.replace('$', '')}$%")
    return _parse(rf"\boxed{{{latex}}}")


def _read_text(text: str) -> Basic | None:
    """The last formula or number in running text; `$50\\%$` is read as `$50$%`, which math-verify understands."""
    return _parse(text.replace("\\%", "%").replace("%$", "$%"))


def _parse(text: str) -> Any:
    found = parse(text, fallback_mode="no_fallback", parsing_timeout=0)
    return found[0] if found else None


def _split_percent(value: Any) -> tuple[Any, bool]:
    if isinstance(value, Mul) and len(value.args) == 2 and value.args[1] == PERCENT:
        return value.args[0], True
    return value, False


def _same_number(gold: Expr, answer: Expr) -> bool:
    """Exact for rational numbers, else to five significant digits, since math-verify compares absolutely."""
    gold, answer = gold.doit(), answer.doit()
    if gold == answer:
        return True
    if gold.is_Rational and answer.is_Rational:
        return False
    return bool(abs(N(gold - answer)) <= 1e-5 * abs(N(gold)))


def _agree_where_real(gold: Expr, answer: Expr) -> bool:
    """Equal at all sample points at which both are real; at least two such points."""
    symbols = sorted(gold.free_symbols, key=str)
    if answer.free_symbols != gold.free_symbols:
        return False
    agreeing = 0
    for start in range(len(POINTS)):
        point = [(symbol, POINTS[(start + i) % len(POINTS)]) for i, symbol in enumerate(symbols)]
        left, right = N(gold.subs(point)), N(answer.subs(point))
        if left.is_real and right.is_real:
            if abs(left - right) > 1e-9 * abs(left):
                return False
            agreeing += 1
    return agreeing >= 2


class _PairTimeout(BaseException):
    """Not an Exception, so that neither sympy nor math-verify can take it for a failed comparison."""


@dataclass(frozen=True)
class Overlong:
    """Soft punishment of long answers (DAPO, 2503.14476): 0 up to limit - margin tokens, then down to -1 at the limit.

    A part of the reward like the others; give it a name of its own after the reward that measures accuracy.
    """

    limit: int
    margin: int
    in_process: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 < self.margin < self.limit:
            raise ValueError(f"limit={self.limit}, margin={self.margin}: need 0 < margin < limit (tokens)")

    def __call__(self, rollouts: Sequence[Rollout]) -> list[float | None]:
        free = self.limit - self.margin
        return [max(-1.0, min(0.0, (free - len(rollout.token_ids)) / self.margin)) for rollout in rollouts]
