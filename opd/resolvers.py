"""Values that YAML may ask for by name."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from omegaconf import OmegaConf


def demo_model(name: str) -> str:
    """Folder of a model that ships with the package: `${demo_model:teacher}`."""
    return str(Path(__file__).parent / "demo" / "models" / name)


def folder_name(overrides: str, limit: int = 100) -> str:
    """A folder name, without any sign that needs quoting, for a job of a sweep.

    `loss.distill.weight=0.5,seed=1` becomes `loss.distill.weight-0.5,seed-1`. Where signs or length are lost, a short
    hash keeps jobs apart. In YAML: `${folder_name:${hydra.job.override_dirname}}`.
    """
    safe = re.sub(r"[^\w.,+-]", "_", overrides.replace("=", "-"))
    if safe.replace("-", "=") == overrides.replace("-", "=") and 0 < len(safe) <= limit:
        return safe
    return f"{safe[:limit]}-{hashlib.blake2b(overrides.encode(), digest_size=3).hexdigest()}"


def register() -> None:
    """Makes the resolvers known; safe to call again."""
    OmegaConf.register_new_resolver("demo_model", demo_model, replace=True)
    OmegaConf.register_new_resolver("folder_name", folder_name, replace=True)
