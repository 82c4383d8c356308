"""records ← losses, teachers, students, rewards, credit ← batching, objective ← engine ← loop ← cli, and no circles.

A module between the stages (metrics, checks, …) has no place of its own in that line: imports are followed through it.
"""

import sys

import pytest

from tests.source_tree import ROOT, imports, modules

LINE = [
    ["opd.records"],
    ["opd.losses", "opd.teachers", "opd.students", "opd.rewards", "opd.credit"],
    ["opd.batching", "opd.objective"],
    ["opd.engine"],
    ["opd.loop"],
    ["opd.cli"],
]
HOMES = {"hydra": {"opd.cli", "opd.config", "opd.hints"}, "deepspeed": {"opd.engine"}}

MODULES = modules()
IMPORTS = {name: imports(path, name) for name, path in MODULES.items()}


def within(name: str, package: str) -> bool:
    """Whether a dotted name is a package or lies in it."""
    return name == package or name.startswith(package + ".")


def place(module: str) -> int | None:
    """A module's place in the line, None for one between the stages."""
    return next((i for i, stage in enumerate(LINE) if any(within(module, package) for package in stage)), None)


def module_of(name: str) -> str | None:
    """The module of ours that an imported dotted name comes from; the bare package `opd` holds nothing to import."""
    while name not in MODULES and "." in name:
        name = name.rpartition(".")[0]
    return name if name in MODULES and name != "opd" else None


EDGES = {name: {m for m in map(module_of, used) if m and m != name} for name, used in IMPORTS.items()}


def reached(start: str) -> dict[str, str]:
    """Every module that `start` brings in → the chain of imports that does."""
    chains, queue = {}, [(start, start)]
    while queue:
        module, chain = queue.pop()
        for target in EDGES[module] - chains.keys():
            chains[target] = f"{chain} → {target}"
            queue.append((target, chains[target]))
    return chains


def test_the_line_flows_one_way() -> None:
    against = [
        chain
        for module in MODULES
        if (own := place(module)) is not None
        for target, chain in reached(module).items()
        if (other := place(target)) is not None and other > own
    ]
    assert not against, "imported against the line (DESIGN §3):\n" + "\n".join(against)


def test_no_circles() -> None:
    circles = [reached(module)[module] for module in MODULES if module in reached(module)]
    assert not circles, "modules that import each other, in a circle:\n" + "\n".join(circles)


def test_losses_know_only_torch_and_records() -> None:
    allowed = {"torch", "opd.distributions", "opd.records", "opd.losses", "opd.schedules"}
    foreign = [
        f"{module} imports {name}"
        for module, used in IMPORTS.items()
        if within(module, "opd.losses")
        for name in used
        if name.split(".")[0] not in sys.stdlib_module_names and not any(within(name, package) for package in allowed)
    ]
    assert not foreign, "a loss is a formula:\n" + "\n".join(foreign)


@pytest.mark.parametrize("library", HOMES)
def test_a_library_stays_in_its_modules(library: str) -> None:
    users = {module for module, used in IMPORTS.items() if any(within(name, library) for name in used)}
    assert users <= HOMES[library], f"{library} is imported by {sorted(users - HOMES[library])}"


def test_few_files_import_vllm() -> None:
    users = {module for module, used in IMPORTS.items() if any(within(name, "vllm") for name in used)}
    homes = {"opd.students.vllm_engine", "opd.students.vllm_sampler"}
    assert users <= homes, f"vllm is imported by {sorted(users - homes)}; its version-bound calls belong in one place"


def test_no_file_imports_a_top_level_folder() -> None:
    files = [*MODULES.values(), *ROOT.glob("tests/**/*.py"), *ROOT.glob("examples/**/*.py")]
    twins = [
        f"{path.relative_to(ROOT)}: import opd.{name}"
        for path in files
        for name in imports(path)
        if name.split(".")[0] in {"teachers", "students", "losses", "conf"}
    ]
    assert not twins, "these make a second copy of every class:\n" + "\n".join(twins)
