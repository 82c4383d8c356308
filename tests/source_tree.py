"""What the tests of the house read: the project's modules by import name, and their imports, without importing them."""

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

FOLDERS = {
    "opd": ROOT / "opd",
    "opd.teachers": ROOT / "teachers",
    "opd.students": ROOT / "students",
    "opd.losses": ROOT / "losses",
    "opd.conf": ROOT / "conf",
}


def modules() -> dict[str, Path]:
    """Every module by its import name, as `opd.losses.divergences` → its file; a package is its `__init__.py`."""
    found = {}
    for package, folder in FOLDERS.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            parts = parts[:-1] if parts[-1] == "__init__" else parts
            found[".".join((package, *parts))] = path
    return found


def imports(path: Path, module: str = "") -> set[str]:
    """The dotted names that a file imports anywhere, but for what only a type checker reads.

    `from a.b import c` gives `a.b.c`: whether c is a module or a name in one is for the caller to see. Relative imports
    are resolved against `module`, the file's own import name.
    """
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    names = set()
    for node in _runtime_nodes(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            names |= {f"{base}.{alias.name}" for alias in node.names}
    return names


def _runtime_nodes(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            for other in child.orelse:
                yield from _runtime_nodes(other)
        else:
            yield from _runtime_nodes(child)
