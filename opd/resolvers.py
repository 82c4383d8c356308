"""Values that YAML may ask for by name."""

from __future__ import annotations

from pathlib import Path

from omegaconf import OmegaConf


def demo_model(name: str) -> str:
    """Folder of a model that ships with the package: `${demo_model:teacher}`."""
    return str(Path(__file__).parent / "demo" / "models" / name)


def register() -> None:
    """Makes the resolvers known; safe to call again."""
    OmegaConf.register_new_resolver("demo_model", demo_model, replace=True)
