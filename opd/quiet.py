"""Keeps other libraries' start-up chatter off the screen; every setting gives way to one in the environment."""

from __future__ import annotations

import os
import warnings

SETTINGS = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CONFIGURE_LOGGING": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TQDM_DISABLE": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "DS_LOG_LEVEL": "error",
}


def quiet_libraries() -> None:
    """Call before torch, transformers, DeepSpeed and vLLM are imported."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    warnings.filterwarnings("ignore", category=FutureWarning)  # from vLLM and DeepSpeed, about torch.distributed
