"""The command `opd`: train, check, eval, export, report, serve-teacher, doctor."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import hydra
import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from opd.exits import DONE, REFUSED, name_failures, refuse
from opd.hints import explain_override, search_path
from opd.quiet import quiet_libraries
from opd.resolvers import register

USAGE = """usage: opd COMMAND ...

  opd train  experiment=NAME key=value ...   run it (resumes what run_dir holds); -m sweeps, --cfg job prints
  opd check  experiment=NAME key=value ...   compose, refuse what cannot work, print the plan; no weights are read
  opd eval   RUN | experiment=NAME ...       accuracy and divergence on the held-out prompts
  opd export RUN out=DIR [which=best] [adapter=true]   the trained student as a Hugging Face folder
  opd report RUN [OTHER ...]                 curves and tables of a run, beside others if named
  opd serve-teacher model=... [port=8100] [gives=hidden|logprobs] ...   a vLLM server with the flags that teachers need
  opd doctor [experiment=NAME key=value ...] [--imports] [--no-student]   this machine, and the run's teachers tested
"""


def main() -> None:
    """Entry point; exits 0 done, 1 failed, 2 refused configuration."""
    commands: dict[str, Callable[[list[str]], int]] = {
        "train": lambda argv: _composed("train", argv),
        "check": lambda argv: _composed("check", argv),
        "eval": _eval,
        "export": _export,
        "report": _report,
        "serve-teacher": _serve_teacher,
        "doctor": _doctor,
    }
    arguments = sys.argv[1:]
    if not arguments or arguments[0] not in commands:
        print(USAGE, file=sys.stderr if arguments and arguments[0] not in ("-h", "--help", "help") else sys.stdout)
        sys.exit(DONE if arguments and arguments[0] in ("-h", "--help", "help") else REFUSED)
    quiet_libraries()
    name_failures()
    sys.exit(commands[arguments[0]](arguments[1:]))


def _composed(command: str, argv: list[str], ours: frozenset[str] = frozenset()) -> int:
    """Lets Hydra compose the configuration, then runs the command on it."""
    register()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises instead of printing and leaving with 1
    overrides = [a for a in argv if ("=" in a and not a.startswith("-")) or a.startswith("~")]
    flags = [argument for argument in argv if argument not in overrides]
    sys.argv = [f"opd {command}", *overrides, *flags]  # Hydra's parser takes no override after `-m`
    result, is_composed = DONE, False

    def task(cfg: DictConfig) -> None:
        nonlocal result, is_composed
        is_composed = True
        multirun = HydraConfig.get().mode == RunMode.MULTIRUN
        result = max(result, _sweep_job(command, argv) if multirun else _on_config(command, cfg, ours))

    try:
        hydra.main(version_base="1.3", config_path="pkg://opd.conf", config_name="train")(task)()
    except (HydraException, OmegaConfBaseException) as error:
        return refuse(explain_override(error, argv))
    except (TypeError, ValueError) as error:  # Hydra's own, where a group is given a number or a list of them
        if is_composed:
            raise
        return refuse(f"{error}; a group takes the name of an option, such as none")
    return result


def _on_config(command: str, cfg: DictConfig, ours: frozenset[str]) -> int:
    from opd.commands import check_config, eval_config, train_config  # torch and transformers load here

    if command == "doctor":
        from opd.doctor import doctor_of_config

        return doctor_of_config(cfg, imports="--imports" in ours, as_student="--no-student" not in ours)
    action = {"train": train_config, "check": check_config, "eval": eval_config}[command]
    return action(cfg)


def _sweep_job(command: str, argv: list[str]) -> int:
    """One job of a sweep, in a process of its own: engines do not share memory, and a crash stays alone."""
    settings = HydraConfig.get()
    task = [override for override in settings.overrides.task if not override.startswith("run_dir=")]
    arguments = [*task, *search_path(argv), f"run_dir='{settings.runtime.output_dir}'"]
    return subprocess.run([sys.executable, "-m", "opd", command, *arguments], check=False).returncode


def _settings(argv: list[str]) -> tuple[list[str], dict[str, str]]:
    """Positional arguments, and key=value ones."""
    pairs = dict(argument.split("=", 1) for argument in argv if "=" in argument)
    return [argument for argument in argv if "=" not in argument], pairs


def _keys(arguments: list[str]) -> DictConfig:
    """What key=value arguments say.

    Raises:
        ValueError: a value is no YAML.
    """
    try:
        return OmegaConf.from_dotlist(arguments)
    except yaml.YAMLError as error:
        raise ValueError(f"{shlex.join(arguments)}: {str(error).splitlines()[0]}") from error


def _eval(argv: list[str]) -> int:
    folders = [argument for argument in argv if "=" not in argument and not argument.startswith(("-", "~"))]
    if not folders:
        return _composed("eval", argv)
    saved = Path(folders[0]) / "config.yaml"
    if not saved.exists():
        return refuse(f"{folders[0]}: not a run folder (no config.yaml)")
    settings = list(argv)
    settings.remove(folders[0])
    unread = [argument for argument in settings if not re.match(r"[^-+~=][^=]*=", argument)]
    if unread:
        return refuse(f"usage: opd eval RUN key=value ...; not understood: {shlex.join(unread)}")
    from opd.commands import eval_config

    try:
        cfg = OmegaConf.merge(OmegaConf.load(saved), _keys(settings))
    except ValueError as error:
        return refuse(str(error))
    assert isinstance(cfg, DictConfig), "a run's configuration is a mapping"
    cfg.run_dir = folders[0]
    return eval_config(cfg)


def _export(argv: list[str]) -> int:
    folders, pairs = _settings(argv)
    choices = {"which": ("latest", "best"), "adapter": ("false", "true")}
    valid = all(key == "out" or value in choices.get(key, ()) for key, value in pairs.items())
    if len(folders) != 1 or not pairs.get("out") or not valid:
        return refuse("usage: opd export RUN out=DIR [which=latest|best] [adapter=true|false]")
    from opd.export import export_run  # torch and transformers load here

    try:
        out = export_run(
            Path(folders[0]), Path(pairs["out"]), pairs.get("which", "latest"), pairs.get("adapter") == "true"
        )
    except ValueError as error:
        return refuse(str(error))
    print(f"exported to {out}")
    return DONE


def _serve_teacher(argv: list[str]) -> int:
    from opd.config import build
    from opd.serve import ServeConfig, serve_teacher

    try:
        serve_teacher(build({str(key): value for key, value in _keys(argv).items()}, ServeConfig))
    except (OmegaConfBaseException, ValueError) as error:
        return refuse(
            f"{error}\nusage: opd serve-teacher model=... [port=8100] [host=127.0.0.1] [gives=hidden|logprobs] "
            "[dtype=auto] [max_len=N] [max_logprobs=128] [args=[--flag,value]]"
        )
    return DONE


def _doctor(argv: list[str]) -> int:
    ours = frozenset(argv) & {"--imports", "--no-student"}
    rest = [argument for argument in argv if argument not in ours]
    if rest:
        return _composed("doctor", rest, ours)
    from opd.doctor import doctor

    return doctor(imports="--imports" in ours)


def _report(argv: list[str]) -> int:
    if not argv or any(argument.startswith("-") for argument in argv):
        return refuse("usage: opd report RUN [OTHER ...]")
    from rich.console import Console

    from opd.report import load_run, summary_table, write_report

    runs = [Path(argument) for argument in argv]
    try:
        written = write_report(runs[0], runs[1:])
        Console().print(summary_table(load_run(runs[0])))
    except ValueError as error:
        return refuse(str(error))
    for path in written:
        print(path)
    return DONE
