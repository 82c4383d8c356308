"""Settings that must stand before torch, DeepSpeed, vLLM or transformers is imported."""

import os
import sys

if "torch" in sys.modules:
    raise RuntimeError("torch was imported before tests/conftest.py could set its threads: by which plug-in?")

os.environ.update(
    OMP_NUM_THREADS="1",  # bitwise tests, and two shared cores: more threads are slower and add in another order
    TOKENIZERS_PARALLELISM="false",
    HF_HUB_OFFLINE="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",  # the engine lives in the test's own process
    VLLM_NO_USAGE_STATS="1",
    VLLM_LOGGING_LEVEL="WARNING",
    MPLBACKEND="Agg",
)
os.environ.setdefault("DS_ACCELERATOR", "cpu")  # `DS_ACCELERATOR=cuda pytest -m gpu` on a machine that has one

from hypothesis import settings

# The same examples in every run, so that a failure can be repeated; `--hypothesis-profile=search` draws new ones.
settings.register_profile("repeatable", derandomize=True)
settings.register_profile("search", max_examples=300)
settings.load_profile("repeatable")
