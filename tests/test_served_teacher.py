"""Teachers behind real vLLM servers, started by `opd serve-teacher` and asked over the loopback interface."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import torch
from torch import Tensor

from opd.ranks import free_port
from opd.records import FullVocab, Rollout, SomeTokens
from opd.remote import RemoteConfig, RemoteError
from opd.teachers import LocalTeacher, ScorerTeacher, ServedTeacher
from tests.rows import rollout
from tests.runs import OF_PROCESS_GROUP, Pair, opd, save_pair, training_lines
from tests.source_tree import ROOT
from tests.tiny import CHARACTERS, save_model

pytestmark = pytest.mark.vllm

KEY, START_LIMIT = "open sesame", 400.0  # seconds; a busy machine takes 100
PATHS = ["/v1/models", "/pooling", "/v1/completions", "/tokenize", "/metrics", "/docs", "/version", "/"]


@dataclass(frozen=True)
class Served:
    """A running server and what it holds."""

    url: str
    pair: Pair

    @property
    def remote(self) -> RemoteConfig:
        """How to reach it."""
        return RemoteConfig([self.url], give_up_after=5.0)


@contextmanager
def server(model: Path, log: Path, *settings: str) -> Iterator[str]:
    """The address of `opd serve-teacher` on a free port; its whole process group ends with the block."""
    port = free_port()
    env = {name: value for name, value in os.environ.items() if name not in OF_PROCESS_GROUP}
    command = [
        sys.executable,
        "-m",
        "opd",
        "serve-teacher",
        f"model={model}",
        f"port={port}",
        "dtype=float32",
        *settings,
    ]
    with log.open("w") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, env={**env, "OPD_API_KEY": KEY}, stdout=file, stderr=file, start_new_session=True
        )
    try:
        wait_for(f"http://127.0.0.1:{port}/health", process, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Returns when the server answers there."""
    ends = time.monotonic() + START_LIMIT
    while time.monotonic() < ends and process.poll() is None:
        try:
            if httpx.get(url, timeout=5.0).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.5)
    raise AssertionError(f"the server did not start: {log.read_text()[-3000:]}")


@pytest.fixture(scope="module")
def pooling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Hidden states of the pair's teacher."""
    folder = tmp_path_factory.mktemp("pooling")
    pair = save_pair(folder)
    with server(pair.teacher, folder / "log") as url:
        yield Served(url, pair)


@pytest.fixture(scope="module")
def logprobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Log-probabilities of the pair's teacher, 16 at a position."""
    folder = tmp_path_factory.mktemp("logprobs")
    pair = save_pair(folder)
    with server(pair.teacher, folder / "log", "gives=logprobs", "max_logprobs=16") as url:
        yield Served(url, pair)


@pytest.fixture(autouse=True)
def with_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPD_API_KEY", KEY)


def rollouts() -> list[Rollout]:
    """Ragged rows; two that share more tokens than a block of the server's cache holds; and the shortest there is."""
    generator = torch.Generator().manual_seed(7)
    draw = lambda count: torch.randint(3, 48, (count,), generator=generator).tolist()  # noqa: E731
    long = draw(300)
    rows = [rollout(draw(prompt), draw(answer)) for prompt, answer in [(2, 5), (9, 3), (4, 40), (3, 120)]]
    shared = [rollout(long[:200], [*long[200:], *draw(5)]), rollout(long[:200], [*long[200:], *draw(9)])]
    return [*rows, *shared, rollout([5], [6])]


def truth(folder: Path, given: Sequence[Rollout]) -> list[Tensor]:
    """The local teacher's log-probabilities [R, V]."""
    local = LocalTeacher(str(folder))
    local.start()
    return [
        torch.log_softmax(local.head().logits(s.hidden), -1) for s in local.score(given) if isinstance(s, FullVocab)
    ]


def logp(teacher: ServedTeacher, given: Sequence[Rollout]) -> list[Tensor]:
    """Log-probabilities [R, V] from what came over the wire."""
    head = teacher.head()
    return [torch.log_softmax(head.logits(s.hidden), -1) for s in teacher.score(given) if isinstance(s, FullVocab)]


def started(
    make: Callable[..., ServedTeacher | ScorerTeacher], served: Served, **settings: object
) -> ServedTeacher | ScorerTeacher:
    teacher = make(str(served.pair.teacher), served.remote, **settings)
    teacher.start()
    return teacher


# -------------------------------------------------------------------------------------------------------- hidden states


def test_served_probabilities_are_the_local_ones(pooling: Served) -> None:
    """In one request and in many, once and again (then from the server's cache, if it has one): to 1e-5 in fp32."""
    given = rollouts()
    expected = truth(pooling.pair.teacher, given)
    for budget in (16384, 64):
        teacher = started(ServedTeacher, pooling, batch_tokens=budget)
        assert isinstance(teacher, ServedTeacher)
        for _ in range(2):
            for mine, right in zip(logp(teacher, given), expected, strict=True):
                assert (mine.exp() - right.exp()).abs().max() < 1e-5
        teacher.close()


def test_bfloat16_on_the_wire_costs_little(pooling: Served) -> None:
    """Hidden states rounded to 8 bits. Measured: probabilities off by at most 3e-3, KL(exact || rounded) 3e-6 nats."""
    given = rollouts()
    teacher = started(ServedTeacher, pooling, wire_dtype="bfloat16")
    assert isinstance(teacher, ServedTeacher)
    pairs = list(zip(truth(pooling.pair.teacher, given), logp(teacher, given), strict=True))
    gaps = torch.cat([(right.exp() - mine.exp()).abs().flatten() for right, mine in pairs])
    kl = torch.cat([(right.exp() * (right - mine)).sum(-1) for right, mine in pairs])
    assert 1e-6 < gaps.max() < 1e-2
    assert kl.mean() < 3e-5
    teacher.close()


def test_a_request_of_many_rows_has_a_header_that_fits(pooling: Served) -> None:
    """300 rows: 256 of them, 29 kB of header, in the first request."""
    many = [rollout([3 + number % 40], [4 + number % 7]) for number in range(300)]
    teacher = started(ServedTeacher, pooling)
    assert isinstance(teacher, ServedTeacher)
    expected = torch.cat(truth(pooling.pair.teacher, many))
    torch.testing.assert_close(torch.cat(logp(teacher, many)).exp(), expected.exp(), atol=1e-5, rtol=0)
    teacher.close()


def test_the_key_is_needed_everywhere_but_for_health(pooling: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    assert httpx.get(f"{pooling.url}/health").status_code == 200
    for headers in ({}, {"Authorization": "Bearer closed"}):
        for path in PATHS:
            assert httpx.get(pooling.url + path, headers=headers).status_code == 401
            assert httpx.post(pooling.url + path, json={}, headers=headers).status_code == 401
    monkeypatch.setenv("OPD_API_KEY", "closed")
    with pytest.raises(RemoteError, match="status 401"):
        started(ServedTeacher, pooling)


def test_what_does_not_fit_a_pooling_server_is_refused(pooling: Served, tmp_path: Path) -> None:
    """Another tokenizer; the other kind of teacher; a name that it does not have; a sequence beyond its context."""
    permuted = save_model(tmp_path, seed=1, order=CHARACTERS[::-1])
    with pytest.raises(RemoteError, match="they hold different models"):
        ServedTeacher(str(permuted), pooling.remote).start()
    with pytest.raises(RemoteError, match=r"status 404.*gives=logprobs"):
        started(ScorerTeacher, pooling)
    with pytest.raises(RemoteError, match="set served_name"):
        started(ServedTeacher, pooling, served_name="another")
    teacher = started(ServedTeacher, pooling)
    assert teacher.max_len == 512
    with pytest.raises(RemoteError, match="maximum context length is 512"):
        teacher.score([rollout([3] * 500, [4] * 100)])
    teacher.close()


def over_the_wire(served: Served, kind: str, loss: str, run_dir: Path, *changes: str) -> list[str]:
    """Three steps with the teacher behind the server, or local."""
    settings = [s for s in served.pair.train(run_dir) if not s.startswith(("+teacher@", "+loss@"))]
    url = [] if kind == "local" else [f"teacher.main.remote.urls=[{served.url}]"]
    return [*settings, f"+teacher@teacher.main={kind}", f"+loss@loss.distill={loss}", "steps=3", *url, *changes]


def losses(run_dir: Path) -> list[float]:
    """Of every step."""
    return [line["loss/distill"] for line in training_lines(run_dir)]


def test_a_distillation_over_the_wire_is_the_local_one(pooling: Served, tmp_path: Path) -> None:
    for kind in ("served", "local"):
        ended = opd(*over_the_wire(pooling, kind, "reverse_kl", tmp_path / kind))
        assert ended.code == 0, ended.err
    assert len(losses(tmp_path / "local")) == 3
    assert losses(tmp_path / "served") == pytest.approx(losses(tmp_path / "local"), abs=1e-5)


def test_the_doctor_finds_the_teacher_well(pooling: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through server, wire and head: a KL of at most 1e-6 to the same checkpoint loaded here."""
    monkeypatch.setenv("COLUMNS", "300")
    ended = opd("doctor", *over_the_wire(pooling, "served", "reverse_kl", tmp_path / "run")[1:])
    assert ended.code == 0, ended.out
    found = [line for line in ended.out.splitlines() if "teacher.main" in line]
    assert len(found) == 3 and all("│ ok" in line for line in found), found


# ---------------------------------------------------------------------------------------------------- log-probabilities


@pytest.mark.slow
def test_the_doctor_finds_the_scorer_well(logprobs: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probabilities within 1e-4 of the same checkpoint's."""
    monkeypatch.setenv("COLUMNS", "300")
    settings = over_the_wire(
        logprobs, "scorer", "topk_reverse_kl", tmp_path / "run", "teacher.main.k=8", "loss.distill.k=8"
    )
    ended = opd("doctor", *settings[1:])
    assert ended.code == 0, ended.out
    found = [line for line in ended.out.splitlines() if "teacher.main" in line]
    assert len(found) == 3 and all("│ ok" in line for line in found), found


@pytest.mark.slow
@pytest.mark.parametrize("k", [16, 1, 0])
def test_scores_are_the_local_log_probabilities(logprobs: Served, k: int) -> None:
    given = rollouts()
    teacher = started(ScorerTeacher, logprobs, k=k)
    for score, sample, right in zip(teacher.score(given), given, truth(logprobs.pair.teacher, given), strict=True):
        assert isinstance(score, SomeTokens) and score.present is not None and bool(score.present.all())
        sampled = right.gather(-1, torch.tensor(sample.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(score.token_logp, sampled, atol=1e-4, rtol=0)
        if k:
            assert score.top is not None
            torch.testing.assert_close(score.top.logp, right.topk(k).values, atol=1e-4, rtol=0)
            torch.testing.assert_close(right.gather(-1, score.top.ids), score.top.logp, atol=1e-4, rtol=0)
    teacher.close()


@pytest.mark.slow
def test_what_does_not_fit_a_server_of_log_probabilities_is_refused(logprobs: Served, tmp_path: Path) -> None:
    """More tokens than max_logprobs; another tokenizer; the other kind of teacher; a sequence beyond its context."""
    with pytest.raises(RemoteError, match=r"greater than max allowed: 16.*max_logprobs=17, or lower k"):
        started(ScorerTeacher, logprobs, k=17)
    permuted = save_model(tmp_path, seed=1, order=CHARACTERS[::-1])
    with pytest.raises(RemoteError, match="they hold different models"):
        ScorerTeacher(str(permuted), logprobs.remote, k=4).start()
    with pytest.raises(RemoteError, match=r"status 404.*gives=hidden"):
        started(ServedTeacher, logprobs)
    teacher = started(ScorerTeacher, logprobs, k=4)
    assert teacher.max_len == 511
    assert len(teacher.score([rollout([3] * 400, [4] * 111)])) == 1
    with pytest.raises(RemoteError, match="status 400"):
        teacher.score([rollout([3] * 400, [4] * 112)])
    teacher.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "k"),
    [("topk_reverse_kl", ["teacher.main.k=8", "loss.distill.k=8"]), ("sampled_reverse_kl", ["teacher.main.k=0"])],
)
def test_scores_over_the_wire_train_as_local_ones(logprobs: Served, loss: str, k: list[str], tmp_path: Path) -> None:
    local = [setting for setting in k if not setting.startswith("teacher")]
    for kind, settings in (("scorer", k), ("local", local)):
        ended = opd(*over_the_wire(logprobs, kind, loss, tmp_path / kind, *settings))
        assert ended.code == 0, ended.err
    assert losses(tmp_path / "scorer") == pytest.approx(losses(tmp_path / "local"), abs=1e-5)
