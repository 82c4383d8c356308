"""Every `opd train` and `opd check` that the documentation shows composes and builds, word for word."""

from __future__ import annotations

import re
import shlex

import pytest
from hydra import compose, initialize_config_module
from omegaconf import open_dict

from opd.config import load_config
from opd.resolvers import register
from tests.source_tree import ROOT

PAGES = [ROOT / "README.md", *sorted(ROOT.glob("examples/*/README.md"))]
COMMAND = re.compile(r"^(?: {4}|`|\| .*`)(?:PYTHONPATH=\S+ )?\S*opd (?:train|check) ([^`\n]*)", re.MULTILINE)


def shown() -> list[tuple[str, list[str]]]:
    """(page, arguments) of every command; comments and line continuations removed."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        for match in COMMAND.finditer(text):
            found.append((str(page.relative_to(ROOT)), shlex.split(match.group(1), comments=True)))
    return [(page, arguments) for page, arguments in found if arguments and arguments != ["..."]]


def test_commands_are_found() -> None:
    assert len(shown()) >= 12


def named(value: str | list[str]) -> str:
    """A test's name from its page and command."""
    return value if isinstance(value, str) else " ".join(value)


@pytest.mark.parametrize(("page", "arguments"), shown(), ids=named)
def test_a_shown_command_composes(page: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = (ROOT / page).parent
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "custom_loss"))  # the README's my_pkg is this one
    monkeypatch.chdir(folder)
    register()
    flags = {"-m", "--cfg", "job"}
    overrides = [a for a in arguments if (a not in flags and not a.startswith("--") and "=" in a) or a.startswith("~")]
    if "--config-dir" in arguments:
        overrides.append(f"hydra.searchpath=[file://{ROOT / arguments[arguments.index('--config-dir') + 1]}]")
    sweep = [a.split(",")[0] if "-m" in arguments else a for a in overrides]  # a sweep's first job
    with initialize_config_module("opd.conf", version_base="1.3"):
        cfg = compose("train", overrides=sweep)
    with open_dict(cfg):
        cfg.pop("hydra", None)
    assert load_config(cfg).loss
