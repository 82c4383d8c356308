"""A stock vLLM server as the API: its chat answers are judged by, imitated, counted and kept."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing

import httpx
import pytest

from opd import ranks
from opd.resolvers import demo_model
from tests.runs import opd, training_lines
from tests.source_tree import ROOT

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
START_LIMIT = 300.0  # seconds; 40 to 90 are usual


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The demo teacher behind `opd serve-teacher`."""
    port = ranks.free_port()
    template = ROOT / "examples" / "black_box" / "plain.jinja"
    arguments = f"args=[--chat-template,{template},--served-model-name,teacher,--enforce-eager]"
    command = [sys.executable, "-m", "opd", "serve-teacher", f"model={demo_model('teacher')}", f"port={port}",
               "gives=logprobs", arguments]  # fmt: skip
    log = tmp_path_factory.mktemp("server") / "log"
    with log.open("w") as out:
        server = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out, env={**os.environ, "OPD_API_KEY": ""})
        try:
            give_up = time.monotonic() + START_LIMIT
            while not _answers(port):
                assert server.poll() is None and time.monotonic() < give_up, log.read_text()[-3000:]
                time.sleep(0.5)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()
            server.wait(60)


def _answers(port: int) -> bool:
    with closing(socket.socket()) as probe:
        if probe.connect_ex(("127.0.0.1", port)) != 0:
            return False
    return httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200


SHORT = ["steps=2", "sampler=hf", "logger=none", "data.train.size=64", "data.heldout.size=16", "eval.every=2"]


def test_a_local_teacher_s_divergence_and_an_api_s_verdicts_train_together(
    url: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Eight prompts a step are judged by the API's own answers: 16 requests of 13 tokens in and 7 out, and none when
    the run is repeated on its answers, although nobody listens at the address any more.
    """
    folder = tmp_path_factory.mktemp("judged")
    common = ["train", "experiment=quickstart_judge", *SHORT, f"reward.agrees.api.account.cache={folder}/answers"]
    ended = opd(*common, f"run_dir={folder}/one", f"reward.agrees.api.remote.urls=[{url}]")
    assert ended.code == 0, ended.err
    lines = training_lines(folder / "one")
    assert [line["cost/requests"] for line in lines] == [8, 16]
    assert (lines[1]["cost/input_tokens"], lines[1]["cost/output_tokens"]) == (16 * 13, 16 * 7)
    assert [line["reward/agrees/usable"] for line in lines] == [1, 1]
    assert all(line["loss/distill"] > 0 and "loss/grpo" in line for line in lines)
    again = opd(
        *common, f"run_dir={folder}/two", f"reward.agrees.api.remote.urls=[http://127.0.0.1:{ranks.free_port()}]"
    )
    assert again.code == 0, again.err
    assert [line["reward/agrees"] for line in training_lines(folder / "two")] == [
        line["reward/agrees"] for line in lines
    ]
    assert training_lines(folder / "two")[-1]["cost/requests"] == 0


def test_an_api_s_answers_are_imitated(url: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The served model is right almost always, and its texts are whole: all are used."""
    folder = tmp_path_factory.mktemp("imitated")
    ended = opd(
        "train", "data=addition", *SHORT, f"run_dir={folder}", "student.model=${demo_model:student}",
        "+loss@loss.imitate=cross_entropy", "+teacher@teacher.big=api", "teacher.big.model=teacher",
        f"teacher.big.api.remote.urls=[{url}]", "teacher.big.api.max_tokens=16", "teacher.big.api.temperature=0",
        "data.streams.main.answers=teacher", "data.streams.main.teacher=big", "data.streams.main.prompts=16",
        "sampler.params.max_tokens=7", "engine.optimizer.lr=0.002",
    )  # fmt: skip
    assert ended.code == 0, ended.err
    assert [line["answers/big/used"] for line in training_lines(folder)] == [1, 1]
