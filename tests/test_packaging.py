"""What is in the checkout is in the wheel, and the wheel adds one name to a user's environment."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from tests.source_tree import FOLDERS, PYPROJECT, ROOT, imports, modules

SHIPPED = {".py", ".typed", ".yaml", ".json", ".safetensors", ".jinja", ".txt", ".model"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this tree, built in a copy: a build leaves folders behind that leak into the next wheel."""
    copy, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for folder in FOLDERS.values():
        shutil.copytree(folder, copy / folder.name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(copy)]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder into which the wheel was installed, alone."""
    target = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), str(wheel)]
    subprocess.run(pip, check=True)
    return target


def test_every_package_is_listed() -> None:
    folders = {name for name, path in modules().items() if path.name == "__init__.py"}
    assert sorted(PYPROJECT["tool"]["setuptools"]["packages"]) == sorted(folders)
    loose = {str(path) for path in modules().values() if not (path.parent / "__init__.py").exists()}
    assert not loose, f"modules in a folder without __init__.py: {loose}"


def test_the_wheel_holds_every_file(wheel: Path) -> None:
    expected = {
        f"{package.replace('.', '/')}/{path.relative_to(folder)}"
        for package, folder in FOLDERS.items()
        for path in folder.rglob("*")
        if path.suffix in SHIPPED
    }
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == expected


def test_an_installation_adds_one_name(installed: Path) -> None:
    names = {path.name for path in installed.iterdir() if path.name != "bin"}
    assert {"opd"} == {name for name in names if not name.endswith(".dist-info")}
    assert len(names) == 2


@pytest.mark.parametrize("start", [["-m", "opd"], ["-c", "import sys; from opd.cli import main; sys.exit(main())"]])
def test_the_installed_command_starts_anywhere(installed: Path, tmp_path: Path, start: list[str]) -> None:
    environment = os.environ | {"PYTHONPATH": str(installed)}
    command = [sys.executable, *start, "--help"]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "train" in run.stdout
    assert not list(tmp_path.iterdir()), "asking for help leaves no files"


def test_the_installed_packages_are_the_wheels_own(installed: Path, tmp_path: Path) -> None:
    code = f"from importlib.util import find_spec as f; print(*[f(n).origin for n in {list(FOLDERS)}], sep='\\n')"
    environment = os.environ | {"PYTHONPATH": str(installed)}
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert all(Path(line).is_relative_to(installed) for line in run.stdout.splitlines())


def test_everything_imported_is_a_declared_dependency() -> None:
    extras = PYPROJECT["project"]["optional-dependencies"]
    declared = {_canonical(line) for line in [*PYPROJECT["project"]["dependencies"], *extras["cpu"], *extras["gpu"]]}
    owners = packages_distributions()
    undeclared = {
        f"{module} imports {root}"
        for module, path in modules().items()
        for root in {name.split(".")[0] for name in imports(path, module)} - {"opd", *sys.stdlib_module_names}
        if not declared & {_canonical(owner) for owner in owners.get(root, [root])}
    }
    assert not undeclared, "missing from [project] dependencies:\n" + "\n".join(sorted(undeclared))


def test_the_lock_holds_every_direct_dependency_at_one_version() -> None:
    lines = [line for line in (ROOT / "constraints-cpu.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.+]+( ; .+)?", line) for line in lines), "names and exact versions only"
    locked = {_canonical(line) for line in lines}
    assert len(locked) == len(lines)
    extras = PYPROJECT["project"]["optional-dependencies"]
    direct = [*PYPROJECT["project"]["dependencies"], *extras["cpu"], *extras["dev"]]
    assert {_canonical(line) for line in direct} <= locked
    assert not locked & {"torchvision", "torchaudio", "torchcodec"}, "they break the CPU build of torch"


def _canonical(requirement: str) -> str:
    name = re.match(r"[\w.-]+", requirement)
    assert name, requirement
    return re.sub(r"[-_.]+", "-", name.group()).lower()
