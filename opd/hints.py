"""Turns Hydra's composition errors into messages with the nearest valid key."""

from __future__ import annotations

import argparse
import os
import re
from difflib import get_close_matches

from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

BAD_KEY = re.compile(r"Could not (?:override|delete from config\.) '([^']+)'")
BAD_OPTION = re.compile(r"Could not find '([^']+)'")
BAD_GROUP = re.compile(r"config group '([^']+)' does not exist")


def explain_override(error: Exception, argv: list[str]) -> str:
    """The error's text; for keys, options and groups that do not exist, one line each with the closest ones that do."""
    bad_option, bad_group = BAD_OPTION.search(str(error)), BAD_GROUP.search(str(error))
    available = re.findall(r"^\t(\S+)$", str(error), re.MULTILINE)
    if bad_option and available:
        option = bad_option.group(1)
        return f"{option}: no such option{closest(option.rpartition('/')[2], available)}"
    if bad_group:
        return f"{bad_group.group(1)}: no such group{closest(bad_group.group(1), _groups())}"
    if BAD_KEY.search(str(error)):
        return _explain_keys(error, argv)
    text, cause = str(error).strip(), str(error.__cause__ or "").strip()
    return f"{text}\n{cause}" if cause and cause not in text else text


def search_path(argv: list[str]) -> list[str]:
    """The overrides that make Hydra find the same user folders as the command line `argv` did."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--config-dir", "-cd", action="append", default=[])
    folders = parser.parse_known_args(argv)[0].config_dir
    given = [argument for argument in argv if argument.lstrip("+").startswith("hydra.searchpath=")]
    listed = [entry for argument in given for entry in argument.partition("=")[2].strip("[]").split(",") if entry]
    paths = [*listed, *(f"file://{os.path.abspath(folder)}" for folder in folders)]
    return [f"hydra.searchpath=[{','.join(paths)}]"] if paths else []


def closest(key: str, known: list[str]) -> str:
    """A hint that names the nearest of the known names."""
    close = get_close_matches(key, known, n=3, cutoff=0.5)
    if close:
        return f"; did you mean {' or '.join(close)}?"
    return f"; valid: {', '.join(known[:40])}" if known else ""


def _explain_keys(error: Exception, argv: list[str]) -> str:
    """Every override whose key does not exist, found by composing again without those found before."""
    overrides = [a for a in argv if "=" in a and not a.startswith(("-", "hydra.", "+hydra."))]
    bad: dict[str, str] = {}  # key -> what Hydra says
    while True:
        found = BAD_KEY.search(str(error))
        if found is None or found.group(1) in bad:
            known: list[str] = []
            break
        key = found.group(1)
        bad[key] = str(error.__cause__ or error).splitlines()[0]
        overrides = [a for a in overrides if a.split("=", 1)[0].lstrip("+~") != key]
        try:
            known = _flat(_compose([*overrides, *search_path(argv)]), "")
            break
        except HydraException as another:
            error = another
    return "\n".join(
        f"{key}: {why}; to replace all of it, drop it first: '~{key}' '+{key}=...'"
        if key in known
        else f"{key}: no such key{closest(key, known)}"
        for key, why in bad.items()
    )


def _compose(overrides: list[str]) -> DictConfig:
    GlobalHydra.instance().clear()
    with initialize_config_module("opd.conf", version_base="1.3"):
        return compose("train", overrides=overrides)


def _groups() -> list[str]:
    GlobalHydra.instance().clear()
    with initialize_config_module("opd.conf", version_base="1.3"):
        return [g for g in GlobalHydra.instance().config_loader().list_groups("") if not g.startswith(("hydra", "__"))]


def _flat(node: DictConfig, prefix: str) -> list[str]:
    keys: list[str] = []
    for key in map(str, node):
        keys.append(f"{prefix}{key}")
        if not OmegaConf.is_missing(node, key) and not OmegaConf.is_interpolation(node, key):
            child = node[key]
            if isinstance(child, DictConfig):
                keys += _flat(child, f"{prefix}{key}.")
    return keys
