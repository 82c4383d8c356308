"""Servers of teachers in trouble, over real sockets: what is missing is asked again, and never becomes a number."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from opd.records import FullVocab, Rollout, SomeTokens, TeacherScores
from opd.remote import RemoteConfig, RemoteError
from opd.scoring import TeacherStage
from opd.teachers import LocalTeacher, ScorerTeacher, ServedTeacher
from opd.teachers.served import ROWS_PER_REQUEST
from tests.faults.teacher_stub import (
    Answer,
    Fault,
    TeacherStub,
    cut,
    drip,
    edited,
    garbled,
    hang,
    raw,
    status,
    without_row,
)
from tests.rows import rollout
from tests.runs import (
    OF_PROCESS_GROUP,
    Ended,
    Pair,
    assert_same_run,
    checkpoint_steps,
    lines,
    opd,
    save_pair,
    training_lines,
)
from tests.source_tree import ROOT
from tests.tiny import CHARACTERS, save_model

LENGTHS = [(2, 5), (9, 3), (1, 1), (4, 7), (3, 12), (6, 2), (5, 4), (1, 9)]  # prompt and answer tokens of eight rows
Teacher = ServedTeacher | ScorerTeacher


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("teacher"), seed=1)


@pytest.fixture(scope="module")
def rollouts() -> list[Rollout]:
    """Random ids of ragged lengths."""
    generator = torch.Generator().manual_seed(4)
    draw = lambda count: torch.randint(3, 48, (count,), generator=generator).tolist()  # noqa: E731
    return [rollout(draw(prompt), draw(answer)) for prompt, answer in LENGTHS]


@pytest.fixture(scope="module")
def truth(folder: Path, rollouts: list[Rollout]) -> list[Tensor]:
    """The teacher's log-probabilities [R, V] of every answer position, from its own weights."""
    local = LocalTeacher(str(folder))
    local.start()
    scores = [score for score in local.score(rollouts) if isinstance(score, FullVocab)]
    return [torch.log_softmax(local.head().logits(score.hidden), -1) for score in scores]


@pytest.fixture
def stubs(folder: Path) -> Iterator[Callable[..., TeacherStub]]:
    """Makes running servers; all are stopped at the end."""
    with ExitStack() as stack:
        yield lambda *script, **settings: stack.enter_context(
            TeacherStub(settings.pop("folder", folder), script, **settings).running()
        )


@pytest.fixture(params=["served", "scorer"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def reach(*urls: str, timeout: float = 20.0, give_up_after: float = 10.0, concurrency: int = 4) -> RemoteConfig:
    """Addresses, and much more patience than the test needs unless it says so."""
    return RemoteConfig(list(urls), timeout=timeout, give_up_after=give_up_after, concurrency=concurrency)


def connected(
    kind: str, folder: Path, remote: RemoteConfig, faults: Sequence[tuple[TeacherStub, Fault]] = (), **settings: Any
) -> Teacher:
    """A teacher that has started; `faults` are put before its next requests."""
    make = {"served": ServedTeacher, "scorer": ScorerTeacher}[kind]
    few = {"k": 4} if kind == "scorer" else {}
    teacher = make(str(folder), remote, **{**few, **settings})
    teacher.start()
    for stub, fault in faults:
        stub.script.append(fault)
        stub.asked.clear()
    return teacher


def assert_true(
    scores: Sequence[TeacherScores | None], teacher: Teacher, rollouts: Sequence[Rollout], truth: Sequence[Tensor]
) -> None:
    """Every score is there, and is the local teacher's."""
    assert len(scores) == len(rollouts)
    for score, sample, logp in zip(scores, rollouts, truth, strict=True):
        sampled = logp.gather(-1, torch.tensor(sample.token_ids)[:, None])[:, 0]
        if isinstance(score, FullVocab):
            assert isinstance(teacher, ServedTeacher) and score.present is None
            torch.testing.assert_close(
                torch.log_softmax(teacher.head().logits(score.hidden), -1), logp, atol=1e-4, rtol=0
            )
            continue
        assert isinstance(score, SomeTokens) and score.present is not None and bool(score.present.all())
        torch.testing.assert_close(score.token_logp, sampled, atol=1e-4, rtol=0)
        assert score.top is not None
        torch.testing.assert_close(score.top.logp, logp.topk(4).values, atol=1e-4, rtol=0)
        torch.testing.assert_close(logp.gather(-1, score.top.ids), score.top.logp, atol=1e-4, rtol=0)


# ------------------------------------------------------------------------------------------------------------ in health


def test_scores_are_the_local_teachers(
    kind: str, folder: Path, stubs: Any, rollouts: list[Rollout], truth: list[Tensor]
) -> None:
    teacher = connected(kind, folder, reach(stubs().url))
    assert_true(teacher.score(rollouts), teacher, rollouts, truth)
    assert teacher.score([]) == []
    teacher.close()


@pytest.mark.parametrize("budget", [24, 1])
def test_requests_hold_a_budget_of_tokens(
    kind: str, budget: int, folder: Path, stubs: Any, rollouts: list[Rollout], truth: list[Tensor]
) -> None:
    """Padded tokens of a request, rows times the longest, stay within the budget; a row that is longer goes alone."""
    stub = stubs()
    teacher = connected(kind, folder, reach(stub.url), batch_tokens=budget)
    stub.asked.clear()
    assert_true(teacher.score(rollouts), teacher, rollouts, truth)
    for request in stub.scored:
        assert len(request.rows) * max(map(len, request.rows)) <= budget or len(request.rows) == 1
    assert len(stub.scored) > 2
    teacher.close()


def test_an_answer_describes_at_most_so_many_rows(folder: Path, stubs: Any) -> None:
    """300 rows within one budget of tokens are two requests, of 256 rows and 44: the first has a header of 30 kB."""
    stub = stubs()
    teacher = connected("served", folder, reach(stub.url))
    stub.asked.clear()
    many = [rollout([3 + number % 40], [4 + number % 7]) for number in range(300)]
    scores = teacher.score(many)
    assert sorted(len(request.rows) for request in stub.scored) == [300 - ROWS_PER_REQUEST, ROWS_PER_REQUEST]
    for sample, score in zip(many, scores, strict=True):
        assert isinstance(score, FullVocab)
        torch.testing.assert_close(score.hidden[0], stub.hidden(sample.prompt.token_ids)[0], atol=1e-5, rtol=0)
    teacher.close()


# --------------------------------------------------------------------------------------- CASES 15: a service in trouble


def test_a_server_that_never_answers_ends_in_an_error(
    kind: str, folder: Path, stubs: Any, rollouts: list[Rollout]
) -> None:
    stub = stubs()
    teacher = connected(kind, folder, reach(stub.url, timeout=0.3, give_up_after=0.3), [(stub, hang)] * 9)
    with pytest.raises(
        RemoteError, match=r"no usable answer from http://127\.0\.0\.1:\d+ within 0\.3 seconds .*ReadTimeout"
    ):
        teacher.score(rollouts)
    teacher.close()


def test_a_body_that_trickles_is_too_slow_as_a_whole(
    kind: str, folder: Path, stubs: Any, rollouts: list[Rollout]
) -> None:
    """Every byte comes within the limit, and the whole would take minutes."""
    stub = stubs()
    teacher = connected(kind, folder, reach(stub.url, timeout=0.5, give_up_after=0.5), [(stub, drip(0.1))] * 9)
    with pytest.raises(RemoteError, match=r"the answer took more than 0\.5 seconds"):
        teacher.score(rollouts)
    teacher.close()


def test_a_wait_that_the_server_asks_for_is_kept(
    kind: str, folder: Path, stubs: Any, rollouts: list[Rollout], truth: list[Tensor]
) -> None:
    stub = stubs()
    teacher = connected(kind, folder, reach(stub.url), [(stub, status(429, Retry_After="1"))])
    assert_true(teacher.score(rollouts), teacher, rollouts, truth)
    first, second = stub.scored
    assert second.at - first.at >= 1.0
    teacher.close()


@pytest.mark.parametrize("after", ["1.5", "Wed, 21 Oct 2015 07:28:00 GMT", "soon", "²", "-3", "inf", ""])
def test_any_retry_after_header_is_survived(
    after: str, folder: Path, stubs: Any, rollouts: list[Rollout], truth: list[Tensor]
) -> None:
    stub = stubs()
    teacher = connected("served", folder, reach(stub.url), [(stub, status(503, Retry_After=after))])
    assert_true(teacher.score(rollouts), teacher, rollouts, truth)
    teacher.close()


def test_a_wait_beyond_all_patience_ends_at_once(folder: Path, stubs: Any, rollouts: list[Rollout]) -> None:
    """An hour is more than give_up_after: nothing is gained by sleeping through it first."""
    stub = stubs()
    teacher = connected("served", folder, reach(stub.url, give_up_after=5.0), [(stub, status(429, Retry_After="3600"))])
    with pytest.raises(RemoteError, match="status 429"):
        teacher.score(rollouts)
    assert len(stub.scored) == 1
    teacher.close()


@pytest.mark.parametrize("faults", [[status(500), garbled], [status(502), cut], [status(503), status(408)]])
def test_passing_errors_change_nothing(
    kind: str, faults: list[Fault], folder: Path, stubs: Any, rollouts: list[Rollout], truth: list[Tensor]
) -> None:
    stub = stubs()
    teacher = connected(kind, folder, reach(stub.url), [(stub, fault) for fault in faults])
    assert_true(teacher.score(rollouts), teacher, rollouts, truth)
    assert len(stub.scored) == 3
    teacher.close()


def test_after_a_broken_body_only_that_request_is_repeated(
    kind: str, folder: Path, stubs: Any, rollouts: list[Rollout], truth: list[Tensor]
) -> None:
    """Rows in requests of their own, one at a time; the third answer breaks off: nine requests for eight rows."""
    stub = stubs()
    teacher = connected(kind, folder, reach(stub.url, concurrency=1), batch_tokens=1)
    stub.script[:] = [None, None, cut]
    stub.asked.clear()
    assert_true(teacher.score(rollouts), teacher, rollouts, truth)
    asked = [request.rows for request in stub.scored]
    assert len(asked) == len(rollouts) + 1
    assert asked[2] == asked[3]
    teacher.close()


@pytest.mark.parametrize("lost", [0, 3, 7])
def test_only_the_missing_row_is_asked_for_again(
    kind: str, lost: int, folder: Path, stubs: Any, rollouts: list[Rollout], truth: list[Tensor]
) -> None:
    """Seven of eight rows: the second request has the eighth alone."""
    stub = stubs()
    teacher = connected(kind, folder, reach(stub.url), [(stub, without_row(lost))])
    assert_true(teacher.score(rollouts), teacher, rollouts, truth)
    first, second = stub.scored
    assert second.rows == [first.rows[lost]]
    teacher.close()


def test_a_row_that_never_comes_is_named(kind: str, folder: Path, stubs: Any, rollouts: list[Rollout]) -> None:
    stub = stubs()
    teacher = connected(
        kind, folder, reach(stub.url, give_up_after=0.5), [(stub, without_row(5))] + [(stub, without_row(0))] * 20
    )
    with pytest.raises(RemoteError, match="row 0 of 1 is missing in the answer"):
        teacher.score(rollouts)
    teacher.close()


def test_more_tokens_than_the_server_gives_are_refused_at_the_start(folder: Path, stubs: Any) -> None:
    stub = stubs(max_logprobs=20)
    with pytest.raises(RemoteError, match=r"greater than max allowed: 20.*max_logprobs=64, or lower k"):
        connected("scorer", folder, reach(stub.url), k=64)
    assert len(stub.scored) == 1


def test_a_server_that_is_gone_is_named_with_the_way_on(
    kind: str, folder: Path, stubs: Any, rollouts: list[Rollout]
) -> None:
    stub = stubs()
    teacher = connected(kind, folder, reach(stub.url, give_up_after=0.5))
    stub.stop()
    with pytest.raises(RemoteError, match=r"ConnectError.*Start the server, or correct remote\.urls"):
        teacher.score(rollouts)
    teacher.close()


def test_when_one_request_is_refused_for_good_the_others_stop_asking(
    kind: str, folder: Path, stubs: Any, rollouts: list[Rollout], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seven of eight requests meet a server error, which they would ask again about for ten seconds."""
    stub = stubs()
    teacher = connected(kind, folder, reach(stub.url, concurrency=8), batch_tokens=1)
    worst = (rollouts[0].prompt.token_ids + rollouts[0].token_ids)[:3]
    refused, broken = Answer(b'{"error": "too long"}', status=400), Answer(b"{}", status=503)
    monkeypatch.setattr(stub, "answer", lambda request: refused if request.rows[0][:3] == worst else broken)
    with pytest.raises(RemoteError, match=r"status 400: .*too long"):
        teacher.score(rollouts)
    time.sleep(0.3)  # what was under way is answered
    asked = len(stub.scored)
    time.sleep(1.0)  # pauses between attempts are at most 0.1, 0.2, 0.4, ... seconds and a tenth
    assert len(stub.scored) == asked
    teacher.close()


@pytest.mark.parametrize("path", ["/v1/models", "/tokenize"])
@pytest.mark.parametrize("body", [b"", b"null", b"[]", b'{"data": 5}', b'{"data": [{}], "tokens": [null]}', b"<html>"])
def test_an_answer_of_another_kind_of_server_is_an_error_of_the_server(
    kind: str, path: str, body: bytes, folder: Path, stubs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not an error of this program, which two ranks would not leave together."""
    stub = stubs()
    healthy = stub.answer
    monkeypatch.setattr(stub, "answer", lambda request: Answer(body) if request.path == path else healthy(request))
    with pytest.raises(RemoteError):
        connected(kind, folder, reach(stub.url, give_up_after=0.2))


def test_a_server_that_only_scores_otherwise_is_refused_with_the_way_out(
    kind: str, folder: Path, stubs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Started for the other kind of teacher: 404, as vLLM answers."""
    stub = stubs()
    healthy = stub.answer
    gone = Answer(b'{"detail": "Not Found"}', status=404)
    paths = ("/pooling", "/v1/completions")
    monkeypatch.setattr(stub, "answer", lambda request: gone if request.path in paths else healthy(request))
    gives = {"served": "hidden", "scorer": "logprobs"}[kind]
    with pytest.raises(RemoteError, match=f"status 404.*gives={gives}"):
        connected(kind, folder, reach(stub.url))


# --------------------------------------------------------------------------------------- CASES 14: reading the answers


def position(row: int, place: int, change: Callable[[dict[str, Any], str], Any], rollouts: Sequence[Rollout]) -> Fault:
    """Changes the entries of one answer token; `change` gets them and the sampled token's key."""

    def edit(answer: Any) -> Any:
        ids = rollouts[row].prompt.token_ids + rollouts[row].token_ids
        index = next(i for i, length in enumerate(order(rollouts)) if length == row)
        entries = answer["choices"][index]["prompt_logprobs"]
        at = len(rollouts[row].prompt.token_ids) + place
        entries[at] = change(entries[at], str(ids[at]))
        return answer

    return edited(edit)


def order(rollouts: Sequence[Rollout]) -> list[int]:
    """Rows as a single request holds them: the longest first."""
    lengths = [len(r.prompt.token_ids) + len(r.token_ids) for r in rollouts]
    return sorted(range(len(rollouts)), key=lambda i: (-lengths[i], i))


def of_sampled(value: Any) -> Callable[[dict[str, Any], str], dict[str, Any]]:
    """The sampled token's number becomes another value."""
    return lambda entries, key: {**entries, key: {**entries[key], "logprob": value}}


UNKNOWN = {
    "null": of_sampled(None),
    "minus 9999": of_sampled(-9999.0),
    "minus infinity as text": of_sampled("-Infinity"),
    "NaN": of_sampled(math.nan),
    "infinity": of_sampled(-math.inf),
    "a number as text": of_sampled("-1.5"),
    "true": of_sampled(True),
    "no number": lambda entries, key: {**entries, key: {"rank": 3}},
    "no entry": lambda entries, key: {k: v for k, v in entries.items() if k != key},
    "no entries": lambda entries, key: {},
    "null position": lambda entries, key: None,
}


@pytest.mark.parametrize("change", UNKNOWN.values(), ids=UNKNOWN)
def test_what_is_not_known_is_missing_and_the_rest_is_as_it_was(
    change: Any, folder: Path, stubs: Any, rollouts: list[Rollout], truth: list[Tensor]
) -> None:
    """Row 3, answer token 2. The others keep their scores; the odd one has none, so that no term can weigh it."""
    stub = stubs()
    teacher = connected("scorer", folder, reach(stub.url), [(stub, position(3, 2, change, rollouts))])
    scores = teacher.score(rollouts)
    odd = scores[3]
    assert isinstance(odd, SomeTokens) and odd.present is not None and odd.top is not None
    assert odd.present.tolist() == [True, True, False, True, True, True, True]
    sampled = truth[3].gather(-1, torch.tensor(rollouts[3].token_ids)[:, None])[:, 0]
    torch.testing.assert_close(odd.token_logp[odd.present], sampled[odd.present], atol=1e-4, rtol=0)
    assert bool((odd.top.logp[2] == -torch.inf).all())
    others = [i for i in range(len(rollouts)) if i != 3]
    assert_true([scores[i] for i in others], teacher, [rollouts[i] for i in others], [truth[i] for i in others])
    teacher.close()


HARMLESS = {
    "the first token has an entry": lambda row: [{"7": {"logprob": -0.5}}, *row[1:]],
    "entries in another order": lambda row: [entry and dict(reversed(entry.items())) for entry in row],
    "the least likely first": lambda row: [
        entry and dict(sorted(entry.items(), key=lambda pair: pair[1]["logprob"])) for entry in row
    ],
    "texts instead of ranks": lambda row: [
        entry and {key: {**value, "decoded_token": None, "rank": "?"} for key, value in entry.items()} for entry in row
    ],
}  # fmt: skip


@pytest.mark.parametrize("change", HARMLESS.values(), ids=HARMLESS)
def test_scores_are_picked_by_token_id(
    change: Any, folder: Path, stubs: Any, rollouts: list[Rollout], truth: list[Tensor]
) -> None:
    """The stub itself gives k + 1 entries wherever the sampled token is not among the k likeliest, and empty texts."""
    assert any(
        int((logp > logp[0, ids[0]]).sum(-1)[0]) >= 4
        for logp, ids in zip(truth, [r.token_ids for r in rollouts], strict=True)
    )

    def all_rows(answer: Any) -> Any:
        for choice in answer["choices"]:
            choice["prompt_logprobs"] = change(choice["prompt_logprobs"])
        return answer

    stub = stubs()
    teacher = connected("scorer", folder, reach(stub.url), [(stub, edited(all_rows))])
    assert_true(teacher.score(rollouts), teacher, rollouts, truth)
    teacher.close()


def test_ties_take_no_more_than_k_places(folder: Path, stubs: Any, rollouts: list[Rollout]) -> None:
    """Five entries at log 0.2, the sampled token among them: four of the five fill the four places."""

    def tie(entries: dict[str, Any], key: str) -> dict[str, Any]:
        keys = dict.fromkeys([key, "3", "4", "5", "6", "7"])
        return {name: {"logprob": math.log(0.2)} for name in list(keys)[:5]}

    stub = stubs()
    teacher = connected("scorer", folder, reach(stub.url), [(stub, position(1, 0, tie, rollouts))])
    score = teacher.score(rollouts)[1]
    assert isinstance(score, SomeTokens) and score.top is not None
    assert score.top.logp[0].tolist() == pytest.approx([math.log(0.2)] * 4)
    assert len(set(score.top.ids[0].tolist())) == 4
    assert score.token_logp[0].item() == pytest.approx(math.log(0.2))
    teacher.close()


def test_fewer_entries_than_k_leave_empty_places(folder: Path, stubs: Any, rollouts: list[Rollout]) -> None:
    """Of the sampled token and one more at -1.25: two places have a token, two have none."""
    few = lambda entries, key: {key: {"logprob": -1.0}, str((int(key) + 1) % 48): {"logprob": -1.25}}  # noqa: E731
    stub = stubs()
    teacher = connected("scorer", folder, reach(stub.url), [(stub, position(1, 0, few, rollouts))])
    score = teacher.score(rollouts)[1]
    assert isinstance(score, SomeTokens) and score.top is not None
    assert score.top.logp[0].tolist() == [-1.0, -1.25, -math.inf, -math.inf]
    teacher.close()


SHIFTED = {"one too many": lambda row: [*row, row[-1]], "one too few": lambda row: row[:-1], "none": lambda row: None}


@pytest.mark.parametrize("change", SHIFTED.values(), ids=SHIFTED)
def test_scores_of_another_length_are_an_error_that_names_the_row(
    change: Any, folder: Path, stubs: Any, rollouts: list[Rollout]
) -> None:
    """First in the third of eight rows, then, asked again, in the only one."""

    def shifted(index: int) -> Fault:
        def edit(answer: Any) -> Any:
            answer["choices"][index]["prompt_logprobs"] = change(answer["choices"][index]["prompt_logprobs"])
            return answer

        return edited(edit)

    stub = stubs()
    teacher = connected(
        "scorer", folder, reach(stub.url, give_up_after=0.5), [(stub, shifted(2))] + [(stub, shifted(0))] * 20
    )
    with pytest.raises(RemoteError, match=r"row 0(: scores of \d+ positions for \d+ tokens| has no scores)"):
        teacher.score(rollouts)
    assert [len(request.rows) for request in stub.scored[:2]] == [8, 1]
    teacher.close()


def swapped(answer: Any) -> Any:
    """Two rows change places; each keeps the index that says whose it is."""
    key = "data" if "data" in answer else "choices"
    rows = list(answer[key])
    rows[1], rows[4] = rows[4], rows[1]
    return {**answer, key: rows}


def test_rows_are_told_apart_by_their_index(
    kind: str, folder: Path, stubs: Any, rollouts: list[Rollout], truth: list[Tensor]
) -> None:
    stub = stubs()
    teacher = connected(kind, folder, reach(stub.url), [(stub, edited(swapped))])
    assert_true(teacher.score(rollouts), teacher, rollouts, truth)
    teacher.close()


def test_two_rows_of_one_index_are_both_asked_for_again(
    kind: str, folder: Path, stubs: Any, rollouts: list[Rollout], truth: list[Tensor]
) -> None:
    def twice(answer: Any) -> Any:
        key = "data" if "data" in answer else "choices"
        return {**answer, key: [{**row, "index": 1 if row["index"] == 2 else row["index"]} for row in answer[key]]}

    stub = stubs()
    teacher = connected(kind, folder, reach(stub.url), [(stub, edited(twice))])
    assert_true(teacher.score(rollouts), teacher, rollouts, truth)
    assert len(stub.scored) == 2
    teacher.close()


@pytest.mark.parametrize("value", [0.5, 3.0])
def test_numbers_that_are_no_log_probabilities_are_refused_at_once(
    value: float, folder: Path, stubs: Any, rollouts: list[Rollout]
) -> None:
    """Logits, say: above 0, a probability above 1."""
    stub = stubs()
    teacher = connected("scorer", folder, reach(stub.url), [(stub, position(0, 0, of_sampled(value), rollouts))])
    with pytest.raises(RemoteError, match="--logprobs-mode raw_logprobs"):
        teacher.score(rollouts)
    assert len(stub.scored) == 1
    teacher.close()


def test_probabilities_that_sum_to_more_than_one_are_refused(folder: Path, stubs: Any, rollouts: list[Rollout]) -> None:
    """Three tokens at -0.5: 3 x 0.61 = 1.82."""
    three = lambda entries, key: {name: {"logprob": -0.5} for name in {key, "3", "4", "5"}}  # noqa: E731
    stub = stubs()
    teacher = connected("scorer", folder, reach(stub.url), [(stub, position(0, 0, three, rollouts))])
    with pytest.raises(RemoteError, match="no probabilities"):
        teacher.score(rollouts)
    teacher.close()


GARBAGE = [b"", b"null", b"[]", b'{"choices": 5}', b'{"choices": [{"index": 0, "prompt_logprobs": [5]}]}', b"{"]


@pytest.mark.parametrize("body", GARBAGE)
def test_a_body_that_is_no_answer_is_asked_for_again(
    kind: str, body: bytes, folder: Path, stubs: Any, rollouts: list[Rollout], truth: list[Tensor]
) -> None:
    stub = stubs()
    teacher = connected(kind, folder, reach(stub.url), [(stub, raw(body))])
    assert_true(teacher.score(rollouts), teacher, rollouts, truth)
    assert len(stub.scored) == 2
    teacher.close()


def of_row(index: int, **changes: Any) -> Fault:
    """Changes what the header says of one row."""
    return edited(
        lambda answer: {
            **answer,
            "data": [{**row, **(changes if row["index"] == index else {})} for row in answer["data"]],
        }
    )


def number(value: float, at: int) -> Fault:
    """One number of the body becomes another."""

    def change(answer: Answer) -> Answer:
        states = torch.frombuffer(bytearray(answer.body), dtype=torch.float32).clone()
        states[at] = value
        return replace(answer, body=states.numpy().tobytes())

    return change


ODD_STATES = {
    "no description": lambda answer: replace(answer, metadata=None),
    "not a number": number(math.nan, 40),
    "infinite": number(math.inf, 40),
    "a row of another length": of_row(2, shape=[3, 32]),
    "a row of negative length": of_row(2, shape=[-1, 32]),
    "bytes that are not there": of_row(2, start=10_000_000, end=10_000_100),
    "bytes from the end": of_row(2, start=-100, end=-4),
    "half of the numbers": of_row(2, embed_dtype="bfloat16"),
    "an unknown type": of_row(2, embed_dtype="fp8"),
    "another byte order": of_row(2, endianness="big"),
    "no shape": of_row(2, shape=None),
    "a shorter body": lambda answer: replace(answer, body=answer.body[:-4]),
}


@pytest.mark.parametrize("fault", ODD_STATES.values(), ids=ODD_STATES)
def test_states_that_are_not_as_described_are_asked_for_again(
    fault: Fault, folder: Path, stubs: Any, rollouts: list[Rollout], truth: list[Tensor]
) -> None:
    stub = stubs()
    teacher = connected("served", folder, reach(stub.url), [(stub, fault)])
    assert_true(teacher.score(rollouts), teacher, rollouts, truth)
    assert len(stub.scored) == 2
    teacher.close()


def test_states_that_stay_infinite_end_in_an_error(folder: Path, stubs: Any, rollouts: list[Rollout]) -> None:
    stub = stubs()
    teacher = connected("served", folder, reach(stub.url, give_up_after=0.5), [(stub, number(math.inf, 0))] * 20)
    with pytest.raises(RemoteError, match="row 0 holds numbers that are not finite"):
        teacher.score(rollouts)
    teacher.close()


# ------------------------------------------------------------------------------------------------- what a server holds


def test_hidden_states_of_another_size_are_refused_at_once(folder: Path, stubs: Any, tmp_path: Path) -> None:
    other = save_model(tmp_path, seed=1, hidden=48)
    with pytest.raises(RemoteError, match=r"hidden states of size 48.*takes 32"):
        connected("served", folder, reach(stubs(folder=other).url))


def test_hidden_states_that_change_their_size_later_are_refused_at_once(
    folder: Path, stubs: Any, rollouts: list[Rollout]
) -> None:
    """Another model was started at the address."""
    stub = stubs()
    teacher = connected("served", folder, reach(stub.url), [(stub, of_row(0, shape=[1, 48]))])
    with pytest.raises(RemoteError, match="size 48"):
        teacher.score(rollouts)
    teacher.close()


def test_another_tokenizer_is_refused(kind: str, folder: Path, stubs: Any, tmp_path: Path) -> None:
    """The same size, permuted ids."""
    other = save_model(tmp_path, seed=1, order=CHARACTERS[::-1])
    with pytest.raises(RemoteError, match="they hold different models"):
        connected(kind, folder, reach(stubs(folder=other).url))


def test_sequences_beyond_the_servers_context_are_refused_before_the_first_step(
    kind: str, folder: Path, stubs: Any
) -> None:
    """The scorer has one token less: vLLM insists on generating one."""
    stub = stubs(max_len=40)
    teacher = connected(kind, folder, reach(stub.url))
    fits = {"served": 40, "scorer": 39}[kind]
    assert teacher.max_len == fits
    stage = TeacherStage({"main": teacher}, [], {})
    stage.teachers["main"] = teacher
    stage.start(fits, torch.nn.Linear(1, 1))
    with pytest.raises(ValueError, match=rf"teacher\.main: takes at most {fits} tokens; .* is {fits + 1}"):
        stage.start(fits + 1, torch.nn.Linear(1, 1))


@pytest.mark.parametrize(
    ("names", "served_name", "said"),
    [(2, None, "set served_name"), (2, "third", "set served_name"), (1, "x", "set served_name")],
)
def test_the_models_name_must_be_clear(
    kind: str, names: int, served_name: str | None, said: str, folder: Path, stubs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub = stubs()
    healthy = stub.answer

    def answer(request: Any) -> Answer | None:
        given = healthy(request)
        assert given is not None
        if request.path != "/v1/models":
            return given
        card = given.json["data"][0]
        cards = [card, {**card, "id": "second"}][:names]
        return edited(lambda body: {**body, "data": cards})(given)

    monkeypatch.setattr(stub, "answer", answer)
    with pytest.raises(RemoteError, match=said):
        connected(kind, folder, reach(stub.url), served_name=served_name)
    if names == 2:
        connected(kind, folder, reach(stub.url), served_name=stub.name).close()


# ------------------------------------------------------------------------------------------------- the key, the wire


def test_without_the_key_a_server_refuses_and_with_it_answers(
    kind: str, folder: Path, stubs: Any, rollouts: list[Rollout], truth: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    stub = stubs(key="open sesame")
    for wrong in ("", "closed"):
        monkeypatch.setenv("OPD_API_KEY", wrong)
        with pytest.raises(RemoteError, match=r"refused the request: status 401: .*missing or wrong key") as refused:
            connected(kind, folder, reach(stub.url))
        assert "closed" not in str(refused.value)
    monkeypatch.setenv("OPD_API_KEY", "open sesame\n")
    teacher = connected(kind, folder, reach(stub.url))
    assert_true(teacher.score(rollouts), teacher, rollouts, truth)
    teacher.close()


def test_a_proxy_of_the_environment_does_not_stand_before_this_machine(
    kind: str, folder: Path, stubs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    connected(kind, folder, reach(stubs().url, give_up_after=0.5)).close()


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("127.0.0.1:8000", "must start with http"),
        ("http://", "names no host"),
        ("http://[::1", "is no address"),
        ("http://user:hunter2@127.0.0.1:8000", "a key stands before 127.0.0.1"),
    ],
)
def test_an_address_is_checked_when_it_is_read(url: str, said: str) -> None:
    with pytest.raises(ValueError, match=said) as refused:
        RemoteConfig([url])
    assert "hunter2" not in str(refused.value)


def test_a_half_precision_wire_carries_half_precision(
    folder: Path, stubs: Any, rollouts: list[Rollout], truth: list[Tensor]
) -> None:
    """bfloat16 keeps 8 bits, so each number is off by at most 2^-9 of itself."""
    stub = stubs()
    teacher = connected("served", folder, reach(stub.url), wire_dtype="bfloat16")
    for score, sample in zip(teacher.score(rollouts), rollouts, strict=True):
        assert isinstance(score, FullVocab) and score.hidden.dtype == torch.bfloat16
        exact = stub.hidden((sample.prompt.token_ids + sample.token_ids)[:-1])[len(sample.prompt.token_ids) - 1 :]
        assert bool(((score.hidden.float() - exact).abs() <= exact.abs() * 2**-8).all())
    teacher.close()


# ---------------------------------------------------------------------------------------------------- several addresses


def shares(*stubs: TeacherStub) -> list[int]:
    """Scoring requests per server."""
    return [len(stub.scored) for stub in stubs]


def test_requests_are_spread_over_the_addresses(
    kind: str, folder: Path, stubs: Any, rollouts: list[Rollout], truth: list[Tensor]
) -> None:
    first, second = stubs(), stubs(name=str(folder))
    teacher = connected(kind, folder, reach(first.url, second.url), batch_tokens=1)
    first.asked.clear()
    second.asked.clear()
    for _ in range(3):
        assert_true(teacher.score(rollouts), teacher, rollouts, truth)
    assert sum(shares(first, second)) == 24
    assert min(shares(first, second)) >= 5
    teacher.close()


def test_a_slow_address_gets_less(
    kind: str, folder: Path, stubs: Any, rollouts: list[Rollout], truth: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds its first request until the other one has answered the rest: seven of eight rows."""
    slow, quick = stubs(), stubs()
    teacher = connected(kind, folder, reach(slow.url, quick.url, concurrency=2), batch_tokens=1)
    slow.asked.clear()
    quick.asked.clear()
    healthy = slow.answer

    def held(request: Any) -> Answer | None:
        while len(quick.scored) < 7 and not slow.over.wait(0.01):
            pass
        return healthy(request)

    monkeypatch.setattr(slow, "answer", held)
    assert_true(teacher.score(rollouts), teacher, rollouts, truth)
    assert shares(slow, quick) == [1, 7]
    teacher.close()


def test_a_dead_address_is_left_out_and_taken_again_when_it_is_back(
    kind: str, folder: Path, stubs: Any, rollouts: list[Rollout], truth: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("opd.addresses.REST", 0.4)
    dead, alive = stubs(), stubs()
    dead.stop()
    teacher = connected(kind, folder, reach(dead.url, alive.url), batch_tokens=1)
    for _ in range(2):
        assert_true(teacher.score(rollouts), teacher, rollouts, truth)
    assert shares(dead) == [0]
    dead.start()
    for _ in range(200):
        assert_true(teacher.score(rollouts), teacher, rollouts, truth)
        if shares(dead)[0] > 1:
            break
        dead.over.wait(0.05)
    assert shares(dead)[0] > 1
    teacher.close()


def test_an_address_that_hangs_does_not_end_the_run_while_another_lives(
    kind: str, folder: Path, stubs: Any, rollouts: list[Rollout], truth: list[Tensor]
) -> None:
    """One attempt there takes longer than all of give_up_after."""
    hanging, alive = stubs(), stubs()
    teacher = connected(
        kind,
        folder,
        reach(hanging.url, alive.url, timeout=0.6, give_up_after=0.3),
        [(hanging, hang)] * 9,
        batch_tokens=1,
    )
    assert_true(teacher.score(rollouts), teacher, rollouts, truth)
    teacher.close()


def test_a_busy_address_makes_room_for_another(
    kind: str, folder: Path, stubs: Any, rollouts: list[Rollout], truth: list[Tensor]
) -> None:
    """It asks to be left alone for an hour; the other one takes everything, at once."""
    busy, alive = stubs(), stubs()
    teacher = connected(
        kind,
        folder,
        reach(busy.url, alive.url, concurrency=1),
        [(busy, status(429, Retry_After="3600"))],
        batch_tokens=1,
    )
    alive.asked.clear()
    assert_true(teacher.score(rollouts), teacher, rollouts, truth)
    assert shares(busy, alive) == [1, 8]
    teacher.close()


def test_addresses_of_different_weights_are_refused(kind: str, folder: Path, stubs: Any, tmp_path: Path) -> None:
    """The same tokenizer and sizes, under the same name."""
    other = save_model(tmp_path, seed=2)
    first, second = stubs(), stubs(folder=other, name=str(folder))
    with pytest.raises(RemoteError, match="they hold different weights"):
        connected(kind, folder, reach(first.url, second.url))


def test_addresses_of_different_models_are_refused(kind: str, folder: Path, stubs: Any) -> None:
    first, second = stubs(), stubs(name="another")
    with pytest.raises(RemoteError, match=r"the servers hold .* and .*; set served_name"):
        connected(kind, folder, reach(first.url, second.url))


# ----------------------------------------------------------------------------------------------------------- whole runs


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return save_pair(tmp_path_factory.mktemp("models"))


def under(kind: str, pair: Pair, url: str, run_dir: Path, *changes: str) -> list[str]:
    """The run of `Pair.train` with its teacher behind an address, and impatient."""
    loss = {"served": "reverse_kl", "scorer": "topk_reverse_kl"}[kind]
    local = ("+teacher@teacher.main", "+loss@loss.distill")
    settings = [setting for setting in pair.train(run_dir) if not setting.startswith(local)]
    few = ["teacher.main.k=4", "loss.distill.k=4"] if kind == "scorer" else []
    remote = [f"teacher.main.remote.urls=[{url}]", "teacher.main.remote.give_up_after=1"]
    return [*settings, f"+teacher@teacher.main={kind}", f"+loss@loss.distill={loss}", *remote, *few, *changes]


@pytest.mark.parametrize(
    ("kind", "dies_at", "step", "when"),
    [("served", 4, 2, "a step"), ("scorer", 4, 2, "a step"), ("served", 5, 3, "an evaluation")],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_teacher_that_dies_leaves_a_checkpoint_and_the_same_command_goes_on(
    kind: str, dies_at: int, step: int, when: str, pair: Pair, tmp_path: Path
) -> None:
    """Scoring requests: 0 the probe, 1 the first evaluation, 2 and 3 steps 1 and 2, 4 step 3, 5 the evaluation at 3."""
    stub = TeacherStub(pair.teacher, dies_at=dies_at)
    with stub.running():
        command = under(kind, pair, stub.url, tmp_path / "run", "checkpoint.every=100")
        ended = opd(*command)
        assert ended.code == 1
        last = ended.err.strip().splitlines()[-1]
        assert (
            f"opd: failed on rank 0: RemoteError: teacher ({kind.capitalize()}Teacher, {pair.teacher}): no usable"
            in last
        )
        assert "repeat the same command: a run that had begun continues" in last
        assert checkpoint_steps(tmp_path / "run") == [step]

        still_away = opd(*command)
        assert (still_away.code, checkpoint_steps(tmp_path / "run")) == (1, [step])

        stub.dies_at = None
        stub.start()
        again = opd(*command)
        assert again.code == 0, again.err
        straight = opd(*under(kind, pair, stub.url, tmp_path / "straight", "checkpoint.every=100"))
        assert straight.code == 0, straight.err
    assert_same_run(tmp_path / "straight", tmp_path / "run", 6)


@pytest.mark.parametrize("kind", ["served", "scorer"])
def test_faults_that_pass_leave_no_trace_in_a_run(kind: str, pair: Pair, tmp_path: Path) -> None:
    """Every second answer of the server is spoilt; the run ends bit for bit as one without faults."""
    spoilt = [None, status(500), None, cut, None, without_row(2), None, raw(b"{"), None, status(429), *[None] * 20]
    with TeacherStub(pair.teacher, spoilt).running() as stub:
        assert opd(*under(kind, pair, stub.url, tmp_path / "run", "teacher.main.remote.give_up_after=20")).code == 0
        assert len(stub.script) < 20
        assert (
            opd(*under(kind, pair, stub.url, tmp_path / "straight", "teacher.main.remote.give_up_after=20")).code == 0
        )
    assert_same_run(tmp_path / "straight", tmp_path / "run", 6)


def test_missing_scores_leave_the_mean_and_are_no_zeros(pair: Pair, tmp_path: Path) -> None:
    """The last token of every row has no score: the loss is the mean over the others, far from what zeros give."""

    def without_last(answer: Any) -> Any:
        for choice in answer["choices"]:
            row = choice["prompt_logprobs"]
            choice["prompt_logprobs"] = [*row[:-1], {key: {"logprob": None} for key in row[-1]}]
        return answer

    settings = ["steps=1", "eval.problems=0", "engine.optimizer.lr=0"]
    with TeacherStub(pair.teacher).running() as stub:
        assert opd(*under("scorer", pair, stub.url, tmp_path / "whole", *settings)).code == 0
        rows = stub.scored[-1]
        stub.script += [None, edited(without_last)]
        assert opd(*under("scorer", pair, stub.url, tmp_path / "part", *settings)).code == 0
    assert len(rows.rows) == 6
    (whole,), (part,) = training_lines(tmp_path / "whole"), training_lines(tmp_path / "part")
    assert part["loss/distill"] != whole["loss/distill"]
    assert part["loss/distill"] > 0.3 * whole["loss/distill"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["served", "scorer"])
def test_with_two_ranks_all_save_and_leave_together(kind: str, pair: Pair, tmp_path: Path) -> None:
    """Only one of the ranks meets the dead server, in step 3; within a minute both are gone, the default patience kept.

    Requests: 0 and 1 the ranks' probes, 2 and 3 the first evaluation, two per step; the ninth is in the third step.
    """
    stub = TeacherStub(pair.teacher, dies_at=9)
    with stub.running():
        command = under(
            kind, pair, stub.url, tmp_path / "run", "checkpoint.every=100", "teacher.main.remote.give_up_after=45"
        )
        began = time.monotonic()
        ended = launched(*command)
        assert ended.code != 0
        assert "RemoteError: teacher" in ended.err
        asked = next(request.at for request in reversed(stub.scored))
        assert time.monotonic() - asked < 60.0 and asked > began
        (kept,) = checkpoint_steps(tmp_path / "run")
        assert kept == 2

        stub.dies_at = None
        stub.start()
        again = launched(*command)
        assert again.code == 0, again.err[-3000:]
        assert (
            launched(
                *under(
                    kind,
                    pair,
                    stub.url,
                    tmp_path / "straight",
                    "checkpoint.every=100",
                    "teacher.main.remote.give_up_after=45",
                )
            ).code
            == 0
        )
    assert lines(tmp_path / "run") == lines(tmp_path / "straight")


def launched(*arguments: str) -> Ended:
    """`torchrun --nproc-per-node 2 -m opd ARGUMENTS`; a hang ends with its processes and an error."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "opd"]
    env = {name: value for name, value in os.environ.items() if name not in OF_PROCESS_GROUP}
    process = subprocess.Popen(
        [*command, *arguments], cwd=ROOT, env=env, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=300)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return Ended(process.returncode, out, err)
