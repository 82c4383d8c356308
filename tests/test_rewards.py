"""The reward stage: sums, and what each fault of a function comes to (CASES.md 8)."""

import math
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from opd.records import Example, Mean, Prompt, Reward, Rollout
from opd.rewards import RewardError, RewardFunction, RewardStage, RewardTerm, RewardTimeout
from tests import reward_functions as functions

ROOT = Path(__file__).resolve().parent.parent


def rollout(row: int) -> Rollout:
    """A rollout told apart by its sample index."""
    prompt = Prompt("p", "main", [1, 2], Example("1 + 1 = ", answer="2"))
    return Rollout(prompt, row, [3], [-0.5], text="2", finish="stop", version=0)


FOUR = [rollout(row) for row in range(4)]


@pytest.fixture(scope="module")
def stages() -> Iterator[RewardStage]:
    """One stage, so one worker process, for all tests here that do not kill it."""
    stage = RewardStage([])
    yield stage
    stage.close()


@pytest.fixture
def stage(stages: RewardStage) -> RewardStage:
    """The shared stage with its defaults; a test sets terms and policy."""
    stages.terms, stages.time_limit, stages.on_error = [], 30.0, "raise"
    return stages


def values(rewards: list[Reward]) -> list[float | None]:
    return [reward.value for reward in rewards]


# --- sums and metrics


def test_the_value_is_the_weighted_sum_of_the_parts(stage: RewardStage) -> None:
    """Row r: 2 * r - 0.5 * r^2 = 0, 1.5, 2, 1.5; their mean 5 / 4."""
    stage.terms = [
        RewardTerm("row", functions.number_of_row, weight=2.0),
        RewardTerm("square", functions.InProcessSquare(), weight=-0.5),
    ]
    rewards = stage.score(FOUR)
    assert values(rewards) == [0.0, 1.5, 2.0, 1.5]
    assert rewards[3].parts == {"row": 3.0, "square": 9.0}
    assert stage.metrics() == {
        "reward/mean": Mean(5.0, 4),
        "reward/row": Mean(6.0, 4),
        "reward/square": Mean(14.0, 4),
        "reward/missing": Mean(0, 4),
        "reward/invalid": Mean(0, 1),
        "reward/errors": Mean(0, 1),
        "reward/timeouts": Mean(0, 1),
    }


def test_without_terms_there_is_no_verdict_and_no_metric() -> None:
    stage = RewardStage([])
    stage.start()
    assert stage.score(FOUR) == [Reward(None, {})] * 4
    assert stage.metrics() == {}
    stage.close()


def test_a_rank_without_rollouts_still_has_every_metric(stage: RewardStage) -> None:
    stage.terms = [RewardTerm("row", functions.number_of_row)]
    stage.score(FOUR)
    names = stage.metrics().keys()
    assert stage.score([]) == []
    assert stage.metrics().keys() == names
    assert stage.metrics()["reward/mean"] == Mean(0.0, 0)


def test_metrics_merge_over_ranks(stage: RewardStage) -> None:
    """Ranks with 3 of 4 and 1 of 1 verdicts: missing 1 / 5, mean (0 + 1 + 3 + 8) / 4."""
    stage.terms = [RewardTerm("given", partial(functions.give, values=[0.0, 1.0, None, 3.0]))]
    stage.score(FOUR)
    first = stage.metrics()
    stage.terms = [RewardTerm("given", partial(functions.give, values=[8.0]))]
    stage.score(FOUR[:1])
    merged = {name: mean + stage.metrics()[name] for name, mean in first.items()}
    assert merged["reward/missing"].value == pytest.approx(1 / 5)
    assert merged["reward/mean"].value == 3.0


@pytest.mark.parametrize("answer", [np.array([0.0, 1.0, 2.0, 3.0]), torch.arange(4), (False, 1, np.float32(2), "3")])
def test_numbers_come_in_many_types(stage: RewardStage, answer: object) -> None:
    stage.terms = [RewardTerm("given", partial(functions.give, values=answer))]
    assert values(stage.score(FOUR)) == [0.0, 1.0, 2.0, 3.0]


# --- wrong counts: never a broadcast


@pytest.mark.parametrize("on_error", ["raise", "skip"])
@pytest.mark.parametrize(
    ("answer", "came"),
    [
        ([1.0], "1 value"),
        ([1.0] * 5, "5 values"),
        ([], "0 values"),
        (1.0, "float"),
        ("1111", "str"),
        (None, "NoneType"),
    ],
)
def test_another_number_of_values_is_an_error(stage: RewardStage, on_error: str, answer: object, came: str) -> None:
    stage.terms = [RewardTerm("length", partial(functions.give, values=answer))]
    stage.on_error = on_error
    with pytest.raises(RewardError) as caught:
        stage.score(FOUR)
    message = str(caught.value)
    assert "tests.reward_functions.give" in message
    assert "reward.length" in message
    assert came in message
    assert "expected" in message and "4" in message


# --- values that are no rewards


@pytest.mark.parametrize(
    ("bad", "invalid"),
    [(None, 0), (math.nan, 1), (math.inf, 1), (-math.inf, 1), ("good", 1), ([1.0, 2.0], 1), (1j, 1), (10**400, 1)],
)
def test_a_value_that_is_no_number_leaves_its_row_without_reward(stage: RewardStage, bad: object, invalid: int) -> None:
    stage.terms = [
        RewardTerm("given", partial(functions.give, values=[0.0, 1.0, bad, 3.0])),
        RewardTerm("square", functions.InProcessSquare()),
    ]
    rewards = stage.score(FOUR)
    assert values(rewards) == [0.0, 2.0, None, 12.0]
    assert rewards[2].parts == {"given": None, "square": 4.0}
    assert stage.metrics()["reward/missing"] == Mean(1, 4)
    assert stage.metrics()["reward/invalid"] == Mean(invalid, 1)
    assert stage.metrics()["reward/mean"] == Mean(14.0, 3)
    assert stage.metrics()["reward/given"] == Mean(4.0, 3)


def test_a_sum_that_overflows_is_no_verdict(stage: RewardStage) -> None:
    stage.terms = [RewardTerm("given", partial(functions.give, values=[1e308, 1.0, 1.0, 1.0]), weight=10.0)]
    assert values(stage.score(FOUR)) == [None, 10.0, 10.0, 10.0]
    stage.terms = [RewardTerm(name, partial(functions.give, values=[1.5e308, 1.0, 1.0, 1.0])) for name in "ab"]
    assert values(stage.score(FOUR)) == [None, 2.0, 2.0, 2.0]


# --- exceptions


def test_an_exception_stops_the_run_by_default(stage: RewardStage) -> None:
    stage.terms = [RewardTerm("picky", partial(functions.raise_on, row=2))]
    with pytest.raises(
        RewardError, match=r"tests\.reward_functions\.raise_on \(reward\.picky\).*row 2 is bad"
    ) as caught:
        stage.score(FOUR)
    assert "on_error=skip" in str(caught.value)
    cause = caught.value.__cause__
    assert isinstance(cause, ValueError)
    assert "in raise_on" in cause.__notes__[0]  # the worker's own traceback


def test_skip_loses_only_the_row_that_raises(stage: RewardStage) -> None:
    stage.terms = [RewardTerm("picky", partial(functions.raise_on, row=2))]
    stage.on_error = "skip"
    assert values(stage.score(FOUR)) == [0.0, 1.0, None, 3.0]
    assert stage.metrics()["reward/errors"] == Mean(1, 1)
    assert stage.metrics()["reward/missing"] == Mean(1, 4)


@pytest.mark.parametrize("function", [functions.raise_awkwardly, functions.raise_timeout, functions.leave])
def test_odd_exceptions_are_exceptions_too(stage: RewardStage, function: RewardFunction) -> None:
    """An exception that does not unpickle, a TimeoutError of the function's own, and a SystemExit."""
    stage.terms = [RewardTerm("odd", function)]
    with pytest.raises(RewardError, match=r"reward\.odd") as caught:
        stage.score(FOUR)
    assert not isinstance(caught.value, RewardTimeout)
    stage.on_error = "skip"
    assert values(stage.score(FOUR)) == [None] * 4
    assert stage.metrics()["reward/errors"] == Mean(4, 1)
    assert stage.metrics()["reward/timeouts"] == Mean(0, 1)


@pytest.mark.parametrize("function", [lambda rollouts: [1.0] * len(rollouts), "local"])
def test_a_function_that_cannot_be_sent_is_refused_at_the_start(stage: RewardStage, function: object) -> None:
    def local(rollouts: list[Rollout]) -> list[float]:
        return [1.0] * len(rollouts)

    stage.terms = [RewardTerm("mine", local if function == "local" else function)]
    for ask in (stage.start, lambda: stage.score(FOUR)):
        with pytest.raises(RewardError, match=r"reward\.mine.*top level of a module"):
            ask()


def test_rollouts_that_cannot_be_sent_are_named(stage: RewardStage) -> None:
    stage.terms = [RewardTerm("row", functions.number_of_row)]
    prompt = Prompt("p", "main", [1], Example("", columns={"check": lambda text: True}))
    with pytest.raises(RewardError, match="rollouts that cannot be pickled"):
        stage.score([Rollout(prompt, 0, [3], [-0.5], "2", "stop", 0)])


# --- the worker


def test_functions_share_one_process_that_is_not_the_trainer(stage: RewardStage) -> None:
    handlers = [signal.getsignal(name) for name in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)]
    stage.terms = [RewardTerm("one", functions.tell_process), RewardTerm("two", functions.tell_process)]
    stage.start()
    first, second = stage.score(FOUR), stage.score(FOUR)
    assert {value for reward in first + second for value in reward.parts.values()} == {first[0].parts["one"]}
    assert first[0].parts["one"] != os.getpid()
    assert handlers == [signal.getsignal(name) for name in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)]


def test_a_worker_ended_from_outside_is_replaced(stage: RewardStage) -> None:
    """Ctrl-C reaches the whole process group and is ignored; SIGTERM to the group ends the worker between two calls."""
    stage.terms = [RewardTerm("process", functions.tell_process)]
    process = int(stage.score(FOUR)[0].parts["process"] or 0)
    os.kill(process, signal.SIGINT)
    time.sleep(0.2)
    assert stage.score(FOUR)[0].parts["process"] == process
    os.kill(process, signal.SIGTERM)
    assert stage.score(FOUR)[0].parts["process"] not in (None, process)


def test_in_process_functions_start_no_worker() -> None:
    stage = RewardStage([RewardTerm("square", functions.InProcessSquare())])
    stage.start()
    assert values(stage.score(FOUR)) == [0.0, 1.0, 4.0, 9.0]
    assert stage._worker._pool is None


def test_a_dead_process_is_an_error(stage: RewardStage) -> None:
    stage.terms = [RewardTerm("deadly", partial(functions.die_on, row=1))]
    with pytest.raises(RewardError, match=r"reward\.deadly.*worker died with exit code 3"):
        stage.score(FOUR)


@pytest.mark.slow
def test_skip_loses_only_the_row_that_kills_the_process(stage: RewardStage) -> None:
    stage.terms = [RewardTerm("deadly", partial(functions.die_on, row=1))]
    stage.on_error = "skip"
    assert values(stage.score(FOUR)) == [0.0, None, 2.0, 3.0]
    assert stage.metrics()["reward/errors"] == Mean(1, 1)


@pytest.mark.slow
def test_a_worker_ended_from_outside_in_a_call_is_asked_again(stage: RewardStage) -> None:
    """SIGTERM to the process group: the step still ends, so that the trainer can save and leave."""
    stage.terms = [RewardTerm("process", functions.tell_process)]
    process = int(stage.score(FOUR)[0].parts["process"] or 0)
    stage.terms = [RewardTerm("process", functions.tell_process_slowly)]
    threading.Timer(0.5, os.kill, (process, signal.SIGTERM)).start()
    assert stage.score(FOUR)[0].parts["process"] not in (None, process)


# --- time-outs


def test_a_time_out_stops_the_run_by_default_and_the_stage_stays_usable(stage: RewardStage) -> None:
    stage.terms = [RewardTerm("slow", partial(functions.hang_on, rows=[2]))]
    stage.start()
    stage.time_limit = 0.5
    begin = time.monotonic()
    with pytest.raises(RewardTimeout, match=r"hang_on \(reward\.slow\) ran past reward_policy\.time_limit = 0\.5 s"):
        stage.score(FOUR)
    assert time.monotonic() - begin < 5
    assert values(stage.score(FOUR[:2])) == [0.0, 1.0]


def test_skip_loses_only_the_row_that_hangs(stage: RewardStage) -> None:
    stage.terms = [RewardTerm("slow", partial(functions.hang_on, rows=[2]))]
    stage.time_limit, stage.on_error = 2.0, "skip"
    assert values(stage.score(FOUR)) == [0.0, 1.0, None, 3.0]
    assert stage.metrics()["reward/timeouts"] == Mean(1, 1)
    assert stage.metrics()["reward/errors"] == Mean(0, 1)


def test_code_that_holds_the_interpreter_is_killed(stage: RewardStage) -> None:
    stage.terms = [RewardTerm("regex", functions.hold_the_interpreter)]
    stage.start()
    stage.time_limit = 0.5
    with pytest.raises(RewardTimeout):
        stage.score(FOUR)


@pytest.mark.slow
def test_the_rows_together_have_a_budget(stage: RewardStage) -> None:
    """Limit 0.8, 24 rows that hang: a row gets 0.1, all 0.8 + 24 * 0.1 / 8 = 1.1, so that at most 11 are ever asked."""
    stage.terms = [RewardTerm("slow", partial(functions.hang_on, rows=range(24)))]
    stage.start()
    stage.time_limit, stage.on_error = 0.8, "skip"
    begin = stage._worker.run_seconds
    assert values(stage.score([rollout(row) for row in range(24)])) == [None] * 24
    assert stage.metrics()["reward/timeouts"] == Mean(24, 1)
    assert stage._worker.run_seconds - begin < 0.8 + 1.1 + 1.0


def test_a_row_past_its_own_limit_ends_no_run(stage: RewardStage) -> None:
    stage.terms = [RewardTerm("rows", functions.RowByRow(hanging=(1,)))]
    assert values(stage.score(FOUR)) == [0.0, None, 2.0, 3.0]
    assert stage.metrics()["reward/timeouts"] == Mean(1, 1)


def test_rows_past_their_common_budget_follow_the_policy(stage: RewardStage) -> None:
    """Limit 0.1 and 2 rows of 0.4: 0.1 + 2 * 0.4 / 8 = 0.2 for both, which the first spends."""
    stage.terms = [RewardTerm("rows", functions.RowByRow(hanging=(0,)))]
    stage.start()
    stage.time_limit = 0.1
    with pytest.raises(RewardTimeout):
        stage.score(FOUR[:2])
    stage.on_error = "skip"
    assert values(stage.score(FOUR[:2])) == [None, None]
    assert stage.metrics()["reward/timeouts"] == Mean(2, 1)


@pytest.mark.slow
def test_the_worker_dies_with_its_parent(tmp_path: Path) -> None:
    """The parent is killed (SIGKILL: it can clean nothing up) while a reward function hangs."""
    report = tmp_path / "process"
    script = tmp_path / "parent.py"
    script.write_text(
        textwrap.dedent(f"""
        from functools import partial
        from opd.rewards import RewardStage, RewardTerm
        from tests.reward_functions import report_and_hang
        from tests.test_rewards import FOUR

        if __name__ == "__main__":
            RewardStage([RewardTerm("hang", partial(report_and_hang, path={str(report)!r}))]).score(FOUR)
        """)
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    parent = subprocess.Popen([sys.executable, str(script)], env=environment)
    try:
        wait_until(lambda: report.exists() and report.read_text() != "", 60)
        worker = int(report.read_text())
        assert is_running(worker)
    finally:
        parent.kill()
        parent.wait()
    wait_until(lambda: not is_running(worker), 10)


def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    stop = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < stop
        time.sleep(0.05)


def is_running(process: int) -> bool:
    """Whether it exists and is no zombie, which only its new parent can bury."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# --- construction


def test_functions_and_callables_are_reward_functions() -> None:
    for function in (functions.number_of_row, partial(functions.give, values=[]), functions.InProcessSquare()):
        assert isinstance(function, RewardFunction)


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        ({"terms": [RewardTerm("a", functions.number_of_row)] * 2}, "two terms are named 'a'"),
        ({"terms": [RewardTerm("mean", functions.number_of_row)]}, "reward.mean"),
        ({"terms": [RewardTerm("a", functions.number_of_row, weight=math.nan)]}, "reward.a.weight"),
        ({"terms": [], "time_limit": 0.0}, "time_limit"),
        ({"terms": [], "on_error": "ignore"}, "on_error"),
    ],
)
def test_wrong_settings_are_refused_by_name(arguments: dict, key: str) -> None:
    with pytest.raises(ValueError, match=key):
        RewardStage(**arguments)
