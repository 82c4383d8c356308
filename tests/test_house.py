"""What no linter checks: sizes, documentation, annotations, and nothing of one person's machine."""

import ast
import re
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from tests.source_tree import ROOT, modules

TREES = {name: ast.parse(path.read_text()) for name, path in modules().items()}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)

# Homes, work folders and scratch folders; a lone "/tmp" as a mount point is no one's in particular.
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:root|work|home/\w+|Users/\w+|tmp/\w+|opt/(?:pypi|wheels))\b/?")


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Every function and method → where it is."""
    for name, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, FUNCTIONS):
                yield f"{name}:{node.lineno} {node.name}", node


def test_modules_have_at_most_300_lines() -> None:
    lengths = {name: len(path.read_text().splitlines()) for name, path in modules().items()}
    assert not {name: length for name, length in lengths.items() if length > 300}


def test_functions_have_at_most_60_lines() -> None:
    lengths = {where: node.end_lineno - node.lineno + 1 for where, node in functions() if node.end_lineno}
    assert not {where: length for where, length in lengths.items() if length > 60}


def test_modules_and_their_public_functions_and_classes_are_documented() -> None:
    bare = [name for name, tree in TREES.items() if ast.get_docstring(tree) is None]
    for name, tree in TREES.items():
        for node in tree.body:
            public = isinstance(node, (*FUNCTIONS, ast.ClassDef)) and not node.name.startswith("_")
            if public and not ast.get_docstring(node):
                bare.append(f"{name}:{node.lineno} {node.name}")
    assert not bare, "without a docstring:\n" + "\n".join(bare)


def test_functions_are_annotated() -> None:
    bare = []
    for where, node in functions():
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg]
        open_ones = [a.arg for a in arguments if a and a.annotation is None and a.arg not in ("self", "cls")]
        if open_ones or node.returns is None:
            bare.append(f"{where}({', '.join(open_ones)})" + ("" if node.returns else " -> ?"))
    assert not bare, "without annotations:\n" + "\n".join(bare)


@pytest.mark.skipif(not (ROOT / ".git").exists() or not shutil.which("git"), reason="not a git checkout")
def test_no_tracked_file_names_a_path_of_one_machine() -> None:
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True).stdout
    found = []
    for name in filter(None, listing.split("\0")):
        text = (ROOT / name).read_bytes().decode("utf-8", errors="replace") if (ROOT / name).is_file() else ""
        found += [f"{name}: {match.group()}" for match in MACHINE_PATH.finditer(text)]
    assert not found, "paths of one machine:\n" + "\n".join(found)
