"""A chat API in trouble, over a real socket: nothing hangs, nothing is paid twice, no fault becomes a text."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from opd.chat import Chat
from opd.ledger import Totals, input_bound
from opd.ranks import free_port
from opd.remote import Remote, RemoteConfig, RemoteError
from tests.chat_server import Fault, api, chat_server, completion
from tests.runs import Ended, Pair, assert_same_run, checkpoint_steps, opd, save_pair, training_lines
from tests.source_tree import ROOT
from tests.test_api_chat import ask, echo


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return save_pair(tmp_path_factory.mktemp("models"))


def test_a_server_that_never_answers_ends_within_the_limit(tmp_path: Path) -> None:
    """Attempts of 0.3 s until 1 s has passed, then the error; each may have been billed, and counts at its most."""
    with chat_server(lambda body, number: Fault(silent=True)) as server:
        chat = Chat("main", "m", api(server.url, tmp_path, remote={"timeout": 0.3, "give_up_after": 1.0}))
        with pytest.raises(RemoteError, match=r"main: no usable answer .*ReadTimeout"):
            chat.ask(ask("a"))
        server.released.set()
        totals = chat.ledger.totals()
        chat.close()
    tries = len(server.bodies)
    assert tries >= 2
    most = input_bound(chat.config.body("m", [{"role": "user", "content": "a"}]))
    assert totals == Totals(tries, tries * most, tries * 20, 0.0)


def test_the_wait_that_the_server_asks_for_is_kept(tmp_path: Path) -> None:
    arrivals = []

    def busy_once(body: dict[str, Any], number: int) -> dict[str, Any] | Fault:
        arrivals.append(time.monotonic())
        return Fault(429, {"retry-after": "0.7"}) if number == 0 else echo(body, number)

    with chat_server(busy_once) as server:
        chat = Chat("main", "m", api(server.url, tmp_path))
        assert chat.ask(ask("a"))[0].text == "re a"
        assert chat.ledger.totals().requests == 1, "what was refused is not paid"
        chat.close()
    assert arrivals[1] - arrivals[0] >= 0.7


def test_a_wait_beyond_the_limit_is_not_begun(tmp_path: Path) -> None:
    """An hour is asked for where 5 seconds may pass: the error comes after one attempt."""
    with chat_server(lambda body, number: Fault(429, {"retry-after": "3600"})) as server:
        chat = Chat("main", "m", api(server.url, tmp_path))
        with pytest.raises(RemoteError, match="status 429"):
            chat.ask(ask("a"))
        chat.close()
    assert len(server.bodies) == 1


@pytest.mark.parametrize(
    "fault",
    [Fault(500), Fault(503), Fault(breaks_off=True), Fault(text="no JSON"), Fault(text='{"choices": []}')],
    ids=["500", "503", "broken off", "no JSON", "no choice"],
)
def test_only_what_is_missing_is_asked_again(fault: Fault, tmp_path: Path) -> None:
    """Of eight questions one fails twice: ten requests, and the same eight answers."""
    failed: Counter[str] = Counter()

    def script(body: dict[str, Any], number: int) -> dict[str, Any] | Fault:
        text = body["messages"][-1]["content"]
        if text == "d" and failed[text] < 2:
            failed[text] += 1
            return fault
        return echo(body, number)

    with chat_server(script) as server:
        chat = Chat("main", "m", api(server.url, tmp_path))
        assert [reply.text for reply in chat.ask(ask(*"abcdefgh"))] == [f"re {c}" for c in "abcdefgh"]
        chat.close()
    assert Counter(server.texts) == {**dict.fromkeys("abcefgh", 1), "d": 3}


def test_a_wrong_key_ends_at_once_and_is_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPD_TEST_KEY", "sk-wrong")
    refuse = Fault(401, text="Incorrect API key provided: sk-wrong")
    with chat_server(lambda body, number: refuse) as server:
        chat = Chat("main", "m", api(server.url, tmp_path))
        with pytest.raises(RemoteError, match=r"status 401: Incorrect API key provided: \*\*\*") as caught:
            chat.ask(ask("a"))
        chat.close()
    assert "sk-wrong" not in str(caught.value) and len(server.bodies) == 1


def test_a_key_that_no_header_can_hold_is_refused_without_showing_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPD_TEST_KEY", "sk-\nsplit")
    with pytest.raises(RemoteError, match="OPD_TEST_KEY holds characters") as caught:
        Remote("main", RemoteConfig(["http://127.0.0.1:1"], "OPD_TEST_KEY"))
    assert "split" not in str(caught.value)


# ------------------------------------------------------------------------------------------------------- in whole runs


def imitation(pair: Pair, run_dir: Path, url: str, *changes: str) -> list[str]:
    """`opd train` of three steps of six prompts that imitates an API teacher."""
    return [
        *pair.train(run_dir, "steps=3", "checkpoint.every=1", "eval=none", "~loss.distill", "~reward.correct"),
        "+loss@loss.imitate=cross_entropy", "+teacher@teacher.api=api", "teacher.api.model=m",
        f"teacher.api.api.remote.urls=[{url}]", "teacher.api.api.remote.give_up_after=3",
        "data.streams.main.answers=teacher", "data.streams.main.teacher=api", "~teacher.main", *changes,
    ]  # fmt: skip


def imitating(pair: Pair, run_dir: Path, url: str, *changes: str) -> Ended:
    """The same, in this process."""
    return opd(*imitation(pair, run_dir, url, *changes))


def sums(body: dict[str, Any], number: int) -> dict[str, Any]:
    """Six digits, whatever was asked."""
    return completion("123456")


def test_answers_are_imitated_and_a_repeated_run_pays_nothing(pair: Pair, tmp_path: Path) -> None:
    """3 steps of 6 different prompts: 18 requests; the same run anew, on the same cache: none, and bitwise the same."""
    with chat_server(sums) as server:
        shared = f"teacher.api.api.account.cache={tmp_path}/shared"
        first = imitating(pair, tmp_path / "first", server.url, shared)
        assert first.code == 0, first.err
        assert len(server.bodies) == 18
        again = imitating(pair, tmp_path / "again", server.url, shared)
        assert again.code == 0, again.err
        assert len(server.bodies) == 18
    loss = [line["loss/imitate"] for line in training_lines(tmp_path / "first")]
    assert loss[-1] < loss[0]
    assert [line["cost/requests"] for line in training_lines(tmp_path / "first")] == [6, 12, 18]
    assert [line["answers/api/asked"] for line in training_lines(tmp_path / "again")] == [0, 0, 0]


def test_a_run_that_resumes_pays_nothing_twice(pair: Pair, tmp_path: Path) -> None:
    """Killed after a step whose answers were paid: 18 requests in all, and it ends as the unbroken run does."""
    with chat_server(sums) as server:
        whole = imitating(pair, tmp_path / "whole", server.url)
        assert whole.code == 0, whole.err
        stopped = imitating(pair, tmp_path / "run", server.url, "stop_after=2")
        assert stopped.code == 0, stopped.err
        (tmp_path / "run" / "checkpoints" / "step_00000002").rename(tmp_path / "lost")
        ended = imitating(pair, tmp_path / "run", server.url)
        assert ended.code == 0, ended.err
        assert len(server.bodies) == 36
    for name in ("metrics.jsonl", "summary.json"):
        for run in ("whole", "run"):
            _without_costs(tmp_path / run / name)
    assert_same_run(tmp_path / "whole", tmp_path / "run", 3)


def _without_costs(file: Path) -> None:
    """Costs, as times, are what no two runs share."""
    if file.suffix == ".json":
        summary = json.loads(file.read_text())
        summary["final_metrics"] = {k: v for k, v in summary["final_metrics"].items() if not _is_cost(k)}
        file.write_text(json.dumps(summary))
    else:
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        kept = [{k: v for k, v in line.items() if not _is_cost(k)} for line in lines]
        file.write_text("".join(json.dumps(line) + "\n" for line in kept))


def _is_cost(name: str) -> bool:
    return name.startswith("cost/") or name.endswith("/asked")


def test_the_budget_ends_the_run_with_its_checkpoint_and_a_higher_one_goes_on(pair: Pair, tmp_path: Path) -> None:
    """Eight requests pay for one step of six: exit 1, a checkpoint of step 1; with 18 it ends, on 18 requests."""
    with chat_server(sums) as server:
        ended = imitating(pair, tmp_path, server.url, "teacher.api.api.account.requests=8")
        assert ended.code == 1
        assert "budget reached before a request" in ended.err.splitlines()[-1]
        assert checkpoint_steps(tmp_path) == [1]
        assert len(server.bodies) == 8
        resumed = imitating(pair, tmp_path, server.url, "teacher.api.api.account.requests=18")
        assert resumed.code == 0, resumed.err
        assert len(server.bodies) == 18


def test_a_teacher_that_dies_for_good_ends_the_run_with_its_checkpoint(pair: Pair, tmp_path: Path) -> None:
    with chat_server(lambda body, number: sums(body, number) if number < 9 else Fault(503)) as server:
        ended = imitating(pair, tmp_path, server.url)
    assert ended.code == 1
    assert "no usable answer from" in ended.err.splitlines()[-1]
    assert checkpoint_steps(tmp_path) == [1]


def test_refusals_and_empty_texts_are_counted_and_never_trained_on(pair: Pair, tmp_path: Path) -> None:
    """Of six answers a step two are refused, one is empty, one is cut and two are used."""
    bad = [completion("I'm sorry, I can't."), completion("", refusal="no"), completion(""), completion("12", "length")]

    def script(body: dict[str, Any], number: int) -> dict[str, Any]:
        return bad[number % 6] if number % 6 < 4 else sums(body, number)

    with chat_server(script) as server:
        ended = imitating(pair, tmp_path, server.url)
        assert ended.code == 0, ended.err
    for line in training_lines(tmp_path):
        shares = {kind: line[f"answers/api/{kind}"] for kind in ("used", "refused", "empty", "cut")}
        assert shares == pytest.approx({"used": 2 / 6, "refused": 2 / 6, "empty": 1 / 6, "cut": 1 / 6})


def test_a_step_without_any_usable_answer_changes_nothing(pair: Pair, tmp_path: Path) -> None:
    with chat_server(lambda body, number: completion("I cannot answer.")) as server:
        ended = imitating(pair, tmp_path, server.url)
        assert ended.code == 0, ended.err
    assert [line["update/skipped"] for line in training_lines(tmp_path)] == [1, 1, 1]


@pytest.mark.slow
def test_two_ranks_share_a_budget_and_leave_together(pair: Pair, tmp_path: Path) -> None:
    """Eight requests pay for one step of two ranks: both end with the reason, the checkpoint is that of step 1."""
    with chat_server(sums) as server:
        command = imitation(pair, tmp_path, server.url, "teacher.api.api.account.requests=8")
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={free_port()}"]
        ended = subprocess.run(
            [*launcher, "-m", "opd", *command], cwd=ROOT, capture_output=True, text=True, timeout=300
        )
        asked = len(server.bodies)
    assert ended.returncode != 0
    for rank in (0, 1):
        assert f"opd: failed on rank {rank}: RemoteError: teacher (ApiTeacher, m): budget reached" in ended.stderr
    assert asked == 8
    assert checkpoint_steps(tmp_path) == [1]
