"""On-policy distillation and reinforcement learning for language models, composed term by term."""

from importlib.metadata import version

__version__ = version("opd")
