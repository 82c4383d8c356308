"""Turns Hydra's composition errors into a message with the nearest valid key."""

from __future__ import annotations

import re
from difflib import get_close_matches

from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf


def explain_override(error: Exception, argv: list[str]) -> str:
    """The error's text, and for a key or option that does not exist the closest ones that do."""
    text = str(error).strip()
    cause = str(error.__cause__ or "").strip()
    bad_key = re.search(r"Could not override '([^']+)'|Could not delete from config\. '([^']+)'", text)
    if bad_key:
        key = bad_key.group(1) or bad_key.group(2)
        return f"{key}: no such key{_closest(key, _known_keys(key, argv))}"
    bad_option = re.search(r"Could not find '([^']+)'", text)
    available = re.findall(r"^\t(\S+)$", text, re.MULTILINE)
    if bad_option and available:
        option = bad_option.group(1)
        return f"{option}: no such option{_closest(option.rpartition('/')[2], available)}"
    return f"{text}\n{cause}" if cause and cause not in text else text


def _closest(key: str, known: list[str]) -> str:
    close = get_close_matches(key, known, n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(close)}?" if close else f"; valid: {', '.join(known[:40])}"


def _known_keys(key: str, argv: list[str]) -> list[str]:
    """All keys of what the other overrides compose to."""
    others = [a for a in argv if "=" in a and not a.startswith("-") and a.split("=", 1)[0].lstrip("+~") != key]
    GlobalHydra.instance().clear()
    try:
        with initialize_config_module("opd.conf", version_base="1.3"):
            return _flat(compose("train", overrides=[a for a in others if not a.startswith("hydra.")]), "")
    except HydraException:
        return []


def _flat(node: DictConfig, prefix: str) -> list[str]:
    keys: list[str] = []
    for key in node:
        keys.append(f"{prefix}{key}")
        if not OmegaConf.is_missing(node, key) and not OmegaConf.is_interpolation(node, key):
            child = node[key]
            if isinstance(child, DictConfig):
                keys += _flat(child, f"{prefix}{key}.")
    return keys
