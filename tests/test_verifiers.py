"""The reward functions that come with opd, and what their maths checker makes of known pairs (CASES.md 19)."""

import threading
import time
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from opd import verifiers
from opd.records import Example, Mean, Prompt, Rollout
from opd.rewards import RewardFunction, RewardStage, RewardTerm, RewardTimeout
from opd.verifiers import ExactMatch, MathEquivalence, RegexMatch, last_box

CONF = Path(__file__).resolve().parent.parent / "conf" / "reward"


def rollout(text: str, answer: str | None, row: int = 0) -> Rollout:
    """A sampled text and the answer of its example."""
    return Rollout(Prompt("p", "main", [1], Example("?", answer)), row, [2], [-0.5], text, "stop", 0)


def verdict(function: RewardFunction, text: str, answer: str | None) -> float | None:
    """What a function says of one pair, called in this process."""
    (value,) = function([rollout(text, answer)])
    return value


# --- exact match


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        ("7", "7", 1.0),
        (" 7\n", "7", 1.0),
        ("7", "7 ", 1.0),
        ("7.", "7", 0.0),
        ("", "7", 0.0),
        ("", "", 1.0),
        ("7", None, None),
    ],
)
def test_exact_match(text: str, answer: str | None, expected: float | None) -> None:
    assert verdict(ExactMatch(), text, answer) == expected


def test_exact_match_to_the_last_space() -> None:
    assert verdict(ExactMatch(strip=False), " 7", "7") == 0.0
    assert verdict(ExactMatch(strip=False), "7", "7") == 1.0


# --- regular expressions


@pytest.mark.parametrize(
    ("settings", "text", "answer", "expected"),
    [
        ({"pattern": r"answer: \d+"}, "The answer: 42.", None, 1.0),
        ({"pattern": r"answer: \d+"}, "I do not know", None, 0.0),
        ({"pattern": r"\d+", "full": True}, "42", None, 1.0),
        ({"pattern": r"\d+", "full": True}, "42.", None, 0.0),
        ({"pattern": r"answer: (\d+)", "group": 1}, "answer: 41 ... answer: 42", "42", 1.0),
        ({"pattern": r"answer: (\d+)", "group": 1}, "answer: 42 ... answer: 41", "42", 0.0),
        ({"pattern": r"answer:(?P<value>.*)", "group": "value"}, "answer: 42 ", " 42", 1.0),
        ({"pattern": r"(\d+)|(none)", "group": 1}, "none", "42", 0.0),
        ({"pattern": r"answer: (\d+)", "group": 1}, "no number", "42", 0.0),
        ({"pattern": r"answer: (\d+)", "group": 1}, "answer: 42", None, None),
        ({"pattern": r"\d+", "group": 0}, "about 42", "42", 1.0),
    ],
)
def test_regex_match(settings: dict[str, Any], text: str, answer: str | None, expected: float | None) -> None:
    assert verdict(RegexMatch(**settings), text, answer) == expected


@pytest.mark.parametrize(
    ("settings", "key"),
    [({"pattern": "("}, "pattern"), ({"pattern": "a", "group": 1}, "group"), ({"pattern": "a", "group": "b"}, "group")],
)
def test_a_wrong_pattern_is_refused_at_construction(settings: dict[str, Any], key: str) -> None:
    with pytest.raises(ValueError, match=rf"^{key}: "):
        RegexMatch(**settings)


# --- maths


@pytest.mark.parametrize(
    ("text", "box"),
    [
        ("no box", None),
        (r"\boxed{5}", "5"),
        (r"\boxed {5}.", "5"),
        (r"\boxed{\frac{1}{2}} then \boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{5} then \boxed{7", ""),
        (r"\boxed{5} then \boxed{\frac{7}{8}", ""),
        (r"\boxed{}", ""),
    ],
)
def test_last_box(text: str, box: str | None) -> None:
    assert last_box(text) == box


KNOWN_PAIRS = [
    # the table in MathEquivalence's docstring
    (None, "5", None),
    ("", "5", None),
    ("no idea", "5", None),
    ("unknown", r"\boxed{unknown}", None),
    ("5", "I do not know", 0.0),
    ("5", "", 0.0),
    ("5", r"\boxed{5} or rather \boxed{7", 0.0),
    ("7", r"\boxed{5} or rather \boxed{7", 0.0),
    ("1/2^{60}", r"\boxed{1/2^{60}}", 1.0),
    ("1/2^{60}", r"\boxed{1/2^{61}}", 0.0),
    (r"\frac{1}{2^{60}}", r"$\frac{1}{2^{61}}$", 0.0),
    ("1/2^60", "1/2^61", 0.0),
    ("1/2^{60}", r"\boxed{0}", 0.0),
    ("1/2^{60}", "0.0", 0.0),
    ("1+10^{-20}", r"\boxed{1+10^{-21}}", 0.0),
    ("2^{100}", r"\boxed{1267650600228229401496703205376}", 1.0),
    ("2^{100}", r"\boxed{1267650600228229401496703205377}", 0.0),
    ("1/3", "0.333333", 1.0),
    ("1/3", r"\boxed{0.333333}", 1.0),
    ("1/3", r"\boxed{0.3333}", 0.0),
    ("0.0000012", r"\boxed{0.0000014}", 0.0),
    ("0.5", "50%", 1.0),
    ("0.5", r"$50\%$", 1.0),
    ("0.5", r"\boxed{50\%}", 1.0),
    ("50%", r"\boxed{0.5}", 1.0),
    (r"50\%", r"\boxed{\frac{1}{2}}", 1.0),
    ("12.5%", r"\boxed{0.125}", 1.0),
    ("50", r"\boxed{50\%}", 1.0),
    ("50%", "50", 1.0),
    ("12.5", r"\boxed{12.5\%}", 1.0),
    ("0.5", r"\boxed{50}", 0.0),
    ("0.5", r"\boxed{5\%}", 0.0),
    (r"\sqrt{1/n}", r"\boxed{1/\sqrt{n}}", 1.0),
    (r"1/\sqrt{n}", r"\boxed{\sqrt{1/n}}", 1.0),
    (r"\sqrt{1/n}", r"\boxed{1/\sqrt{m}}", 0.0),
    (r"\sqrt{1/n}", r"\boxed{1/n}", 0.0),
    ("x", r"\boxed{\sqrt{x^2}}", 0.0),
    ("|x|", r"\boxed{\sqrt{x^2}}", 1.0),
    # an interval and an inequality, and swapped: the gold says which is asked for
    ("1<x<2", "$(1,2)$", 1.0),
    ("(1,2)", "$1<x<2$", 0.0),
    ("5", "$x=5$", 1.0),
    ("x=5", "5", 1.0),
    # how a gold may be written
    ("$5$", "5", 1.0),
    (r"\boxed{5}", "5", 1.0),
    (r"\$5", "5", 1.0),
    ("$5", "5", 1.0),
    ("1,000", "1000", 1.0),
    ("72 apples", "72", 1.0),
    ("-72", "72", 0.0),
    ("2xyz", "$2xyz$", 1.0),
    ("x^2+1", "$1+x^2$", 1.0),
    ("(x+1)^2", r"\boxed{x^2+2x+1}", 1.0),
    (r"\text{yes}", r"\boxed{yes}", 1.0),
    (r"\text{yes}", r"\boxed{\text{no}}", 0.0),
    ("sqrt(2)", r"\boxed{\sqrt{2}}", None),
    # where the answer is taken from
    ("5", r"first 3, so \boxed{5}, not 7", 1.0),
    ("3", r"first 3, so \boxed{5}, not 7", 0.0),
    ("7", "first 3, then 5, at last 7", 1.0),
]


@pytest.mark.parametrize(("gold", "text", "expected"), KNOWN_PAIRS)
def test_known_pairs(gold: str | None, text: str, expected: float | None) -> None:
    assert verdict(MathEquivalence(), text, gold) == expected


def test_an_answer_outside_a_box_can_be_refused() -> None:
    assert verdict(MathEquivalence(require_box=True), "5", "5") == 0.0
    assert verdict(MathEquivalence(require_box=True), r"\boxed{5}", "5") == 1.0


def test_the_gold_is_the_first_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(verifiers, "verify", lambda gold, answer, **settings: seen.append((gold, answer)) or True)
    verdict(MathEquivalence(), r"\boxed{4}", "3")
    assert seen == [([3], [4])]


def test_called_in_a_thread_without_a_stage_it_says_what_to_do() -> None:
    errors: list[Exception] = []

    def ask() -> None:
        try:
            verdict(MathEquivalence(), "5", "5")
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert "RewardStage" in str(errors[0])


HEAVY = [
    r"9^{9^{9^9}}",
    r"(10^8)!",
    r"\sum_{k=1}^{10000000} \frac{1}{k^2}",
    r"\binom{10^9}{5 \cdot 10^8}",
    r"\int_0^1 \sin(x^x) e^{x^3} dx",
]


@pytest.fixture(scope="module")
def maths() -> Iterator[RewardStage]:
    """A started stage with the maths checker, pairs limited to half a second."""
    stage = RewardStage([RewardTerm("maths", MathEquivalence(pair_limit=0.5))])
    stage.start()
    yield stage
    stage.close()


def test_a_right_answer_is_right_from_any_thread(maths: RewardStage) -> None:
    found: list[float | None] = []
    pairs = [rollout(r"\boxed{\frac{1}{2}}", "0.5")]
    thread = threading.Thread(target=lambda: found.extend(reward.value for reward in maths.score(pairs)))
    thread.start()
    thread.join()
    assert found == [1.0]


def test_heavy_pairs_have_no_verdict_within_their_limits(maths: RewardStage) -> None:
    """Five heavy answers, a heavy gold, two good pairs: 6 * 0.5 s, and what is left for a slow machine."""
    batch = [rollout(rf"\boxed{{{heavy}}}", "1") for heavy in HEAVY]
    batch += [rollout("1", HEAVY[0]), rollout(r"\boxed{5}", "5"), rollout(r"\boxed{6}", "5")]
    before = maths._worker.run_seconds
    assert [reward.value for reward in maths.score(batch)] == [None] * 6 + [1.0, 0.0]
    assert maths._worker.run_seconds - before < 8 * 0.5 + 2
    assert maths.metrics()["reward/missing"] == Mean(6, 8)
    assert maths.metrics()["reward/timeouts"] == Mean(0, 1), "the alarms were heard; no process was killed"
    assert [reward.value for reward in maths.score(batch[6:])] == [1.0, 0.0]


def test_each_heavy_pair_ends_within_its_limit() -> None:
    for heavy in HEAVY:
        begin = time.monotonic()
        assert verdict(MathEquivalence(pair_limit=0.3), rf"\boxed{{{heavy}}}", "1") is None
        assert time.monotonic() - begin < 0.3 + 1.0, heavy


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # an alarm that a finalizer swallowed
@pytest.mark.parametrize(
    "text", ["(" * 3000, r"\boxed{" + "(" * 300 + "1" + ")" * 300 + "}", "$ " * 8000, "1 $a$ " * 2000]
)
def test_no_text_holds_it_up(text: str) -> None:
    begin = time.monotonic()
    assert verdict(MathEquivalence(pair_limit=0.3), text, "1") in (None, 0.0)
    assert time.monotonic() - begin < 1.5


def test_an_unreadable_gold_is_counted(maths: RewardStage) -> None:
    rewards = maths.score([rollout("5", "no idea"), rollout("5", "5"), rollout("5", None)])
    assert [reward.value for reward in rewards] == [None, 1.0, None]
    assert maths.metrics()["reward/missing"] == Mean(2, 3)
    assert maths.metrics()["reward/mean"] == Mean(1.0, 1)


def test_catastrophic_backtracking_is_killed(maths: RewardStage) -> None:
    stage = maths  # for its worker; the last test to use it
    stage.terms, stage.time_limit = [RewardTerm("form", RegexMatch(r"^(a+)+$"))], 0.5
    with pytest.raises(RewardTimeout, match=r"RegexMatch \(reward\.form\)"):
        stage.score([rollout("a" * 64 + "b", None)])


def test_the_pair_limit_is_positive() -> None:
    with pytest.raises(ValueError, match="pair_limit"):
        MathEquivalence(pair_limit=0.0)


# --- configuration


@pytest.mark.parametrize("option", ["exact", "regex", "math"])
def test_the_yaml_mirrors_the_class(option: str) -> None:
    node = yaml.safe_load((CONF / f"{option}.yaml").read_text())
    module, _, name = node.pop("_target_").rpartition(".")
    assert module == "opd.verifiers"
    assert node.pop("weight") == 1.0
    cls = getattr(verifiers, name)
    assert list(node) == [field.name for field in fields(cls)]
    for field in fields(cls):
        assert field.default is MISSING or node[field.name] == field.default
    assert isinstance(cls(**node), RewardFunction)


def test_no_reward_is_an_empty_mapping() -> None:
    assert yaml.safe_load((CONF / "none.yaml").read_text()) == {}
