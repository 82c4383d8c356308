"""`opd doctor`: what it says of the machine, and of teachers that answer as they must, nearly so, or not."""

from __future__ import annotations

import math
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from opd import doctor
from opd.exits import DONE, REFUSED
from tests.faults.teacher_stub import Answer, Fault, TeacherStub, edited
from tests.runs import Ended, Pair, opd, save_pair
from tests.tiny import save_model


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return save_pair(tmp_path_factory.mktemp("models"))


@pytest.fixture(autouse=True)
def wide_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that no line of the table is wrapped."""
    monkeypatch.setenv("COLUMNS", "400")


def rows(ended: Ended) -> list[tuple[str, str, str]]:
    """Subject, state and text of every line of the table."""
    found = [[cell.strip() for cell in line.split("│")[1:4]] for line in ended.out.splitlines() if "│" in line]
    return [(subject, state, text) for subject, state, text in found]


def of_teacher(ended: Ended) -> list[tuple[str, str]]:
    """State and text of what is said of teacher.main."""
    return [(state, text) for subject, state, text in rows(ended) if subject == "teacher.main"]


def settings(pair: Pair, run_dir: Path, kind: str, *more: str) -> list[str]:
    """The configuration of a run under one kind of teacher."""
    loss = "topk_reverse_kl" if kind == "scorer" else "reverse_kl"
    common = [s for s in pair.settings(run_dir) if not s.startswith(("+teacher@", "+loss@"))]
    few = ["teacher.main.k=4", "loss.distill.k=4"] if kind == "scorer" else []
    return [*common, f"+teacher@teacher.main={kind}", f"+loss@loss.distill={loss}", *few, *more]


def served(stub: TeacherStub, pair: Pair, run_dir: Path, kind: str, *more: str) -> Ended:
    """`opd doctor` on a run whose teacher is the stub."""
    remote = [f"teacher.main.remote.urls=[{stub.url}]", "teacher.main.remote.give_up_after=0.3"]
    return opd("doctor", *settings(pair, run_dir, kind, *remote, *more))


def test_the_machine() -> None:
    ended = opd("doctor")
    assert ended.code in (DONE, doctor.FAILED)
    said = {subject: text for subject, _, text in rows(ended)}
    assert f"torch {torch.__version__}" in said["versions"]
    assert said["devices"] == "CPU only" or "GiB" in said["devices"]
    assert re.fullmatch(r"\d+ of torch on \d+ cores.*", said["threads"])
    assert "GiB free" in said["run_dir"]


def test_more_threads_than_cores_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.os, "sched_getaffinity", lambda _: {0, 3})
    monkeypatch.setattr(doctor.torch, "get_num_threads", lambda: 8)
    (said,) = [each for each in doctor.machine() if each.subject == "threads"]
    assert said.state == "note" and said.text.endswith("set OMP_NUM_THREADS=2")


def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (said,) = doctor.folder(tmp_path / "file" / "run")
    assert said.state == "FAIL" and "cannot be written to" in said.text


def test_packages_that_do_not_load_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        failed = "vllm" in command[-1]
        said = "Traceback\n  ...\nImportError: libnuma.so.1: cannot open" if failed else ""
        return subprocess.CompletedProcess(command, int(failed), "", said)

    monkeypatch.setattr(doctor.subprocess, "run", run)
    vllm, deepspeed = doctor.imported()
    assert (vllm.state, vllm.text) == ("FAIL", "ImportError: libnuma.so.1: cannot open")
    assert deepspeed.state == "ok" and re.fullmatch(r"loads in \d+\.\d s", deepspeed.text)


def test_a_configuration_that_is_refused(pair: Pair, tmp_path: Path) -> None:
    ended = opd("doctor", *settings(pair, tmp_path, "local"), "teacher.main.modle=x")
    assert ended.code == REFUSED and "did you mean teacher.main.model" in ended.err


@pytest.mark.parametrize("kind", ["local", "served", "scorer"])
def test_a_teacher_that_is_well(kind: str, pair: Pair, tmp_path: Path) -> None:
    """Its own checkpoint as student: KL <= 1e-6, or log-probabilities within 1e-4. Nothing is written."""
    with TeacherStub(pair.teacher).running() as stub:
        changes = [] if kind == "local" else [f"teacher.main.remote.urls=[{stub.url}]"]
        ended = opd("doctor", *settings(pair, tmp_path / "run", kind, *changes))
    assert ended.code == DONE, ended.out
    found = of_teacher(ended)
    assert [state for state, _ in found] == ["ok", "ok", "ok"]
    number = re.search(r"(?:KL|differ by) (-?\d\.\de[+-]\d\d)", found[2][1])
    assert number and abs(float(number[1])) <= (1e-4 if kind == "scorer" else 1e-6)
    assert not (tmp_path / "run").exists()


def test_the_teacher_need_not_be_loaded_here(pair: Pair, tmp_path: Path) -> None:
    with TeacherStub(pair.teacher).running() as stub:
        ended = served(stub, pair, tmp_path, "served", "--no-student")
    assert ended.code == DONE
    assert [state for state, _ in of_teacher(ended)] == ["ok", "ok", "note"]


def test_half_precision_on_the_wire_is_noted(pair: Pair, tmp_path: Path) -> None:
    """Hidden states of 8 bits: a KL of about 1e-5, above 1e-6 and far below that of other weights."""
    with TeacherStub(pair.teacher).running() as stub:
        ended = served(stub, pair, tmp_path, "served", "teacher.main.wire_dtype=bfloat16")
    assert ended.code == DONE
    assert [state for state, _ in of_teacher(ended)] == ["ok", "ok", "note"]
    assert "at most 1e-06 where server, wire and head are float32" in of_teacher(ended)[2][1]


@pytest.mark.parametrize("kind", ["served", "scorer"])
def test_other_weights_behind_the_address_fail(kind: str, pair: Pair, tmp_path: Path) -> None:
    """The same tokenizer, the same sizes: only the divergence from the named checkpoint can tell."""
    other = save_model(tmp_path / "other", seed=5)
    with TeacherStub(other).running() as stub:
        ended = served(stub, pair, tmp_path / "run", kind)
    assert ended.code == doctor.FAILED
    assert [state for state, _ in of_teacher(ended)] == ["ok", "ok", "FAIL"]
    assert "they hold other weights" in of_teacher(ended)[2][1]


def not_a_number(answer: Answer) -> Answer:
    """The last number of the body."""
    states = torch.frombuffer(bytearray(answer.body), dtype=torch.float32).clone()
    states[-1] = math.nan
    return replace(answer, body=states.numpy().tobytes())


def unknown(answer: Any) -> Any:
    """The last position of every row has no numbers."""
    for choice in answer["choices"]:
        choice["prompt_logprobs"][-1] = {}
    return answer


@pytest.mark.parametrize(("kind", "fault"), [("served", not_a_number), ("scorer", edited(unknown))])
def test_scores_that_are_not_there_fail(kind: str, fault: Fault, pair: Pair, tmp_path: Path) -> None:
    with TeacherStub(pair.teacher, [None, *[fault] * 50]).running() as stub:
        ended = served(stub, pair, tmp_path, kind)
    assert ended.code == doctor.FAILED
    (_, first), (state, text) = of_teacher(ended)[:2]
    assert "started in" in first and state == "FAIL" and "not finite" in text


def test_scores_that_depend_on_the_company_fail(pair: Pair, tmp_path: Path) -> None:
    """Right for a row alone; among others its states are another row's, as after a mistake in the order."""

    def mixed(answer: Answer) -> Answer:
        assert answer.metadata is not None
        spans = [(row["start"], row["end"]) for row in answer.metadata["data"]]
        parts = [answer.body[start:end] for start, end in spans]
        return replace(answer, body=b"".join(parts[-1:] + parts[:-1])) if len(parts) > 1 else answer

    with TeacherStub(pair.teacher, [None, *[mixed] * 50]).running() as stub:
        ended = served(stub, pair, tmp_path, "served")
    assert ended.code == doctor.FAILED
    assert of_teacher(ended)[1][0] == "FAIL"


def test_a_server_that_is_gone_fails_and_the_rest_is_told(pair: Pair, tmp_path: Path) -> None:
    ended = served(TeacherStub(pair.teacher), pair, tmp_path, "served")
    assert ended.code == doctor.FAILED
    ((state, text),) = of_teacher(ended)
    assert state == "FAIL" and "Start the server" in text
    assert {subject for subject, _, _ in rows(ended)} >= {"versions", "devices", "threads", "run_dir"}
