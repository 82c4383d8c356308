"""A teacher in a vLLM engine of the trainer's own process: hidden states from there, the head read from disk."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from opd.head_file import read_head
from opd.heads import Head
from opd.losses import Need
from opd.losses.protocol import needs
from opd.records import FullVocab, Rollout, TeacherScores
from opd.students.model import Dtype
from opd.students.vllm_engine import shut_down, start_pooling_engine


@dataclass
class PoolingTeacher:
    """Full-vocabulary scores from vLLM without a server: for one machine, and models that vLLM runs faster.

    Args:
        model: folder or hub name.
        dtype: of the engine's weights and of the head.
        max_tokens: of a sequence; null for the model's own limit, which sizes the engine's buffers.
        kv_cache_gib: memory for keys and values on a CPU.
        gpu_memory_utilization: share of a GPU's memory that the engine may take beside trainer and sampler.
        max_num_seqs: sequences in flight at once.
        engine_args: any further argument of `vllm.LLM`.
    """

    model: str
    dtype: Dtype = "float32"
    max_tokens: int | None = None
    kv_cache_gib: float = 0.25
    gpu_memory_utilization: float = 0.35
    max_num_seqs: int = 256
    enforce_eager: bool = False
    trust_remote_code: bool = False
    engine_args: dict[str, Any] = field(default_factory=dict)
    provides: ClassVar[frozenset[Need]] = needs("full_vocab")

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Read from the model's folder."""
        return AutoTokenizer.from_pretrained(self.model, trust_remote_code=self.trust_remote_code)

    def start(self) -> None:
        """Starts the engine; the process group of the trainer must exist already."""
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._engine = start_pooling_engine(
            self.model,
            max_len=self.max_tokens,
            enforce_eager=self.enforce_eager,
            kv_cache_gib=self.kv_cache_gib,
            gpu_memory_utilization=self.gpu_memory_utilization,
            dtype=self.dtype,
            max_num_seqs=self.max_num_seqs,
            trust_remote_code=self.trust_remote_code,
            **self.engine_args,
        )
        self.max_len = int(self._engine.llm_engine.model_config.max_model_len)

    def head(self) -> Head:
        """The checkpoint's head, read anew."""
        return read_head(self.model, getattr(torch, self.dtype), self.trust_remote_code).to(self._device)

    def score(self, rollouts: Sequence[Rollout]) -> list[TeacherScores | None]:
        """The hidden states [R, H] that predict each response token; no row is ever missing."""
        if not rollouts:
            return []
        # The last token's own state predicts nothing that was sampled.
        sequences = [(rollout.prompt.token_ids + rollout.token_ids)[:-1] for rollout in rollouts]
        outputs = self._engine.encode(
            [{"prompt_token_ids": sequence} for sequence in sequences], pooling_task="token_embed", use_tqdm=False
        )
        return [
            FullVocab(output.outputs.data[len(rollout.prompt.token_ids) - 1 :].to(self._device))
            for output, rollout in zip(outputs, rollouts, strict=True)
        ]

    def close(self) -> None:
        """Shuts the engine down and frees its memory."""
        shut_down(self._engine)
        del self._engine
        gc.collect()
