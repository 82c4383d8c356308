"""A vLLM engine in this process, beside the trainer and perhaps other engines."""

from __future__ import annotations

import gc
import os
from typing import TYPE_CHECKING, Any

import torch

from opd import ranks

if TYPE_CHECKING:
    from vllm import LLM


def start_engine(
    model: str, *, max_len: int | None, enforce_eager: bool, kv_cache_gib: float, gpu_memory_utilization: float,
    **settings: Any,
) -> LLM:  # fmt: skip
    """The engine of a folder or hub name; the process group of the trainer must exist already.

    Args:
        max_len: tokens of a sequence; None for the model's own limit.
        enforce_eager: run without captured graphs, as it always does on a CPU.
        kv_cache_gib: memory for keys and values on a CPU.
        gpu_memory_utilization: share of a GPU's memory that the engine may take.
        settings: any further argument of `vllm.LLM`.
    """
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # the trainer's threads live in this process too
    from vllm import LLM  # the import takes many seconds: only a run with an engine pays for it
    from vllm.platforms import current_platform
    from vllm.v1.engine import core

    core.cleanup_dist_env_and_memory = _free_memory  # pyright: ignore[reportPrivateImportUsage]: no other way
    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        current_platform.simple_compile_backend = "eager"  # else small helpers are compiled, and that needs a g++
    memory: dict[str, Any] = (
        {"gpu_memory_utilization": gpu_memory_utilization}
        if on_gpu
        else {"kv_cache_memory_bytes": int(kv_cache_gib * 2**30)}
    )
    if ranks.world_size() > 1:
        memory["distributed_executor_backend"] = "external_launcher"
    return LLM(
        model,
        max_model_len=max_len,
        enforce_eager=enforce_eager or not on_gpu,
        seed=0,
        disable_log_stats=True,
        use_tqdm_on_load=False,
        **memory,
        **settings,
    )


def _free_memory(shutdown_ray: bool = False) -> None:
    """In place of the last thing an engine does: it ends all process groups, the trainer's and other engines' too."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def start_pooling_engine(model: str, **settings: Any) -> LLM:
    """An engine that gives the last hidden states of every token, as `opd serve-teacher` does."""
    from vllm.config import PoolerConfig

    pooler = PoolerConfig(task="token_embed", use_activation=False)
    return start_engine(model, runner="pooling", convert="embed", pooler_config=pooler, **settings)


def shut_down(engine: LLM) -> None:
    """Frees what the engine holds."""
    engine.llm_engine.engine_core.shutdown()
