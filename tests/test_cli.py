"""The command line: exit codes, what is printed where, sweeps, user folders, and one whole run."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from opd.cli import main
from opd.exits import DONE, REFUSED
from tests.composing import GRPO, tiny_opd
from tests.runs import OF_PROCESS_GROUP
from tests.source_tree import ROOT


@pytest.fixture(scope="module")
def opd(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides of a tiny distillation."""
    return tiny_opd(tmp_path_factory.mktemp("opd"))


def opd_process(*argv: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """`python -m opd ...` in a process of its own; its process group is its own, not that of an engine in this one."""
    command = [sys.executable, "-m", "opd", *argv]
    env = {name: value for name, value in os.environ.items() if name not in OF_PROCESS_GROUP} | environment
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=500, env=env, check=False)


def in_process(monkeypatch: pytest.MonkeyPatch, *argv: str) -> int:
    """The exit code of `opd ...` in this process, which has paid for the imports already."""
    monkeypatch.setattr(sys, "argv", ["opd", *argv])
    with pytest.raises(SystemExit) as left:
        main()
    assert isinstance(left.value.code, int)
    return left.value.code


# ------------------------------------------------------------------------------------------------ usage and refusals


@pytest.mark.parametrize(
    ("argv", "code"),
    [(["--help"], DONE), (["-h"], DONE), ([], REFUSED), (["trian"], REFUSED)],
)
def test_usage(argv: list[str], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert in_process(monkeypatch, *argv) == code
    printed = capsys.readouterr()
    shown = printed.err if argv == ["trian"] else printed.out
    assert all(f"opd {command}" in shown for command in ("train", "check", "eval", "export", "report"))


@pytest.mark.parametrize(
    "argv",
    [
        ["export"], ["export", "RUN"], ["export", "RUN", "out="], ["export", "A", "B", "out=X"],
        ["export", "RUN", "out=X", "whihc=best"], ["export", "RUN", "out=X", "which=bset"],
        ["export", "RUN", "out=X", "adapter=yes"], ["report"], ["report", "--all"],
    ],
)  # fmt: skip
def test_export_and_report_usage_errors(
    argv: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert in_process(monkeypatch, *argv) == REFUSED
    assert capsys.readouterr().err.startswith(f"opd: refused\nusage: opd {argv[0]} ")


@pytest.mark.parametrize("unread", ["'~loss.distill' junk", "junk", "+steps=3", "-m", "--cfg job", "''"])
def test_eval_of_a_run_takes_keys_and_nothing_else(
    unread: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "config.yaml").touch()
    assert in_process(monkeypatch, "eval", str(tmp_path), *shlex.split(unread), "eval.problems=2") == REFUSED
    said = capsys.readouterr().err
    assert said == f"opd: refused\nusage: opd eval RUN key=value ...; not understood: {unread}\n"


def test_eval_of_a_run_refuses_a_value_that_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "config.yaml").touch()
    assert in_process(monkeypatch, "eval", str(tmp_path), "eval.problems=[2") == REFUSED
    assert capsys.readouterr().err.startswith("opd: refused\n'eval.problems=[2': ")


@pytest.mark.parametrize("override", ["+loss=[1]", "+loss@loss.x=[1]", "+teacher=5"])
def test_a_group_that_is_given_a_number(
    override: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert in_process(monkeypatch, "check", override) == REFUSED
    said = capsys.readouterr().err
    assert said.startswith("opd: refused\n") and "a group takes the name of an option, such as none" in said


@pytest.mark.parametrize("argv", [["export", "nowhere", "out=X"], ["report", "nowhere"], ["eval", "nowhere"]])
def test_a_folder_that_is_no_run(
    argv: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert in_process(monkeypatch, *argv) == REFUSED
    assert capsys.readouterr().err.startswith("opd: refused\nnowhere: ")


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("stpes=5", "stpes: no such key; did you mean steps"),
        ("steps=abc", "steps: "),
        ("student.model=/no/such", "student.model=/no/such: no such folder"),
        ("loss.distill.teacher=mian", "loss.distill.teacher: no teacher 'mian'"),
        ("student=null", "Config group override must be a string or a list"),
        ("steps", "Error parsing override 'steps'"),
    ],
)
@pytest.mark.parametrize("command", ["check", "train"])
def test_a_refused_configuration_leaves_with_2_and_says_why_once(
    command: str,
    wrong: str,
    says: str,
    opd: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert in_process(monkeypatch, command, *opd, wrong) == REFUSED
    printed = capsys.readouterr()
    assert f"opd: refused\n{says}" in printed.err
    assert "Traceback" not in printed.err
    assert printed.out == ""


def test_eval_of_an_experiment_is_refused_alike(
    opd: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Arguments that start with `~` or `-` name no run folder."""
    assert in_process(monkeypatch, "eval", *opd, "~teacher.main") == REFUSED
    assert "loss.distill.teacher: no teacher 'main'" in capsys.readouterr().err


def test_only_the_first_rank_says_why(
    opd: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    assert in_process(monkeypatch, "check", *opd, "stpes=5") == REFUSED
    assert capsys.readouterr().err == ""


def test_usage_and_composition_errors_do_not_wait_for_torch(tmp_path: Path) -> None:
    script = """
import sys
from opd.cli import main
for argv in (["opd", "--help"], ["opd", "check", "stpes=5"], ["opd", "export"], ["opd", "train", "--cfg", "job"]):
    sys.argv = argv
    try:
        main()
    except SystemExit:
        pass
print([name for name in ("torch", "transformers", "vllm", "deepspeed") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


# ------------------------------------------------------------------------------------------------ plan, --cfg, folders


def test_check_prints_the_plan(
    opd: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """4 prompts x 4 samples x at most 4 tokens = 64 tokens a step; the weight is 1, then 1 - 1/2 on the second of 2."""
    monkeypatch.setenv("COLUMNS", "150")
    schedule = "loss.distill.weight={_target_: opd.schedules.Linear, start: 1, end: 0}"
    folder = f"run_dir={tmp_path}/planned"
    assert in_process(monkeypatch, "check", *opd, *GRPO, schedule, folder) == DONE
    lines = [line for line in capsys.readouterr().out.splitlines() if "│" in line]
    rows = [[cell.strip() for cell in line.split("│")[1:3]] for line in lines]
    plan = {key: text for key, text in rows if key}
    assert plan["loss.distill"] == "ReverseKL x 1 -> 0.5, token_mean, on main, under teacher.main"
    assert plan["loss.grpo"] == "PPOClip x 1 -> 1, token_mean, on main"
    assert plan["teacher.main"] == "LocalTeacher: full_vocab"
    assert plan["stream main"].startswith("4 prompts x 4 = 16 answers, at most 64 sampled tokens a step; 6 examples")
    assert plan["reward.correct"] == "ExactMatch"
    assert plan["credit"] == "GRPO"
    assert plan["held out"].startswith("2 prompts")
    assert not (tmp_path / "planned").exists(), "a check writes nothing"


def test_cfg_job_prints_the_composed_configuration(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["train", "experiment=quickstart", "--cfg", "job", "loss.distill.weight=0.5"]
    assert in_process(monkeypatch, *argv) == DONE
    printed = capsys.readouterr().out
    assert "_target_: opd.losses.ReverseKL" in printed and "weight: 0.5" in printed


@pytest.fixture
def user_conf(tmp_path: Path) -> Path:
    """A config folder of a user's own, with an experiment."""
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    (tmp_path / "conf" / "experiment" / "mine.yaml").write_text(
        "# @package _global_\ndefaults:\n  - /loss@loss.distill: jsd\n  - _self_\n"
        "experiment: mine\nloss:\n  distill:\n    beta: 0.25\n"
    )
    return tmp_path / "conf"


@pytest.mark.parametrize("how", ["--config-dir", "hydra.searchpath"])
def test_a_users_config_folder(
    how: str, user_conf: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--config-dir", str(user_conf)] if how == "--config-dir" else [f"hydra.searchpath=[file://{user_conf}]"]
    assert in_process(monkeypatch, "train", *where, "experiment=mine", "--cfg", "job") == DONE
    assert "beta: 0.25" in capsys.readouterr().out
    assert in_process(monkeypatch, "train", *where, "experiment=mine", "loss.distill.bta=1") == REFUSED
    assert "loss.distill.bta: no such key; did you mean loss.distill.beta" in capsys.readouterr().err
    assert in_process(monkeypatch, "train", *where, "experiment=mien") == REFUSED
    assert "experiment/mien: no such option; did you mean mine?" in capsys.readouterr().err


# --------------------------------------------------------------------------------------------------------- whole runs


def test_a_whole_run_and_what_can_be_done_with_it(opd: list[str], tmp_path: Path) -> None:
    """Two steps of distillation, GRPO and a user's loss from outside the repository; then the same command again."""
    (tmp_path / "plugin").mkdir()
    (tmp_path / "plugin" / "opd_user_loss.py").write_text(
        "class Sharp:\n    needs = frozenset()\n    def __call__(self, chunk):\n"
        "        return -(chunk.student_logp.exp() * chunk.student_logp).sum(-1)\n"
    )
    user = ["+loss.sharp={_target_: opd_user_loss.Sharp, weight: 0.1}"]
    argv = ["train", *opd, *GRPO, *user, "eval.problems=2", f"run_dir={tmp_path}/run"]
    path = os.pathsep.join(filter(None, [str(tmp_path / "plugin"), os.environ.get("PYTHONPATH")]))

    first = opd_process(*argv, cwd=tmp_path, PYTHONPATH=path)
    assert first.returncode == DONE, first.stderr[-3000:]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == 2
    assert {"before", "after", "teacher"} <= summary["eval"].keys()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    trained = [line for line in lines if "loss/distill" in line]
    assert [line["step"] for line in trained] == [1, 2]
    assert all({"loss/grpo", "loss/sharp", "weight/sharp", "reward/mean", "lr"} <= line.keys() for line in trained)

    again = opd_process(*argv, cwd=tmp_path, PYTHONPATH=path)
    assert again.returncode == DONE, again.stderr[-3000:]
    assert "all 2 steps are done" in again.stdout
    assert sorted(p.name for p in tmp_path.iterdir()) == ["plugin", "run"], "nothing is written but run_dir"


@pytest.mark.slow
def test_a_sweep_runs_every_job_in_a_folder_of_its_own(opd: list[str], tmp_path: Path, user_conf: Path) -> None:
    """Two weights, so two jobs; the folders of the sweep's command line reach them."""
    base = [o for o in opd if not o.startswith(("run_dir=", "steps=", "+loss@"))]
    sweep = ["-m", "--config-dir", str(user_conf), "experiment=mine", "loss.distill.weight=0.5,1.5", "steps=1"]
    done = opd_process("train", *base, *sweep, f"run_dir={tmp_path}/sweep", "eval=none", cwd=ROOT)
    assert done.returncode == DONE, done.stderr[-3000:]
    summaries = sorted((tmp_path / "sweep").rglob("summary.json"))
    assert len(summaries) == 2
    weights = [json.loads(s.read_text())["final_metrics"]["weight/distill"] for s in summaries]
    assert sorted(weights) == [0.5, 1.5]
    assert {s.parent.parent for s in summaries} == {tmp_path / "sweep"}


@pytest.mark.slow
def test_a_sweep_with_a_refused_job_runs_the_others_and_leaves_with_2(opd: list[str], tmp_path: Path) -> None:
    base = [o for o in opd if not o.startswith(("run_dir=", "steps="))]
    done = opd_process("train", *base, "-m", "steps=0,1", f"run_dir={tmp_path}/sweep", "eval=none", cwd=ROOT)
    assert done.returncode == REFUSED, done.stderr[-3000:]
    assert "steps=0: must be at least 1" in done.stderr
    assert len(list((tmp_path / "sweep").rglob("summary.json"))) == 1
