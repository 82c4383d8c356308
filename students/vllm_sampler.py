"""Sampling by vLLM in the trainer's own process."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedTokenizerBase

from opd.records import Finish, Prompt, Rollout, TopK
from opd.students.model import Dtype, HFStudent
from opd.students.sampler import SamplingParams, WeightNames, request_seed, text_of
from opd.students.vllm_engine import shut_down, start_engine

if TYPE_CHECKING:
    from vllm.logprobs import Logprob
    from vllm.outputs import CompletionOutput

FINISH: dict[str, Finish] = {"stop": "stop", "length": "length"}


@dataclass
class VLLMSampler:
    """An in-process vLLM engine per rank.

    Args:
        params: how training rollouts are drawn.
        dtype: of the engine's weights; null follows the student.
        kv_cache_gib: memory for keys and values on a CPU.
        gpu_memory_utilization: share of a GPU's memory that the engine may take beside the trainer.
        max_num_seqs: answers in flight at once.
        engine_args: any further argument of `vllm.LLM`.
    """

    params: SamplingParams = field(default_factory=SamplingParams)
    dtype: Dtype | None = None
    kv_cache_gib: float = 0.25
    gpu_memory_utilization: float = 0.35
    max_num_seqs: int = 256
    enforce_eager: bool = False
    engine_args: dict[str, Any] = field(default_factory=dict)

    def start(
        self, student: HFStudent, tokenizer: PreTrainedTokenizerBase, stop_ids: Sequence[int], max_len: int
    ) -> None:
        """Starts the engine; the process group of the trainer must exist already."""
        self.engine = start_engine(
            student.model,
            max_len=max_len,
            enforce_eager=self.enforce_eager,
            kv_cache_gib=self.kv_cache_gib,
            gpu_memory_utilization=self.gpu_memory_utilization,
            tokenizer=student.model,
            dtype=self.dtype or student.dtype,
            max_num_seqs=self.max_num_seqs,
            logprobs_mode="processed_logprobs",
            trust_remote_code=student.trust_remote_code,
            max_logprobs=max(20, self.params.top_logprobs),
            **self.engine_args,
        )
        self.tokenizer, self.stop_ids, self.version = tokenizer, list(stop_ids), 0
        self.names = WeightNames(_expected_names(student))

    def sample(self, prompts: Sequence[Prompt], params: SamplingParams, seed: int) -> list[Rollout]:
        """Rollouts in the order of prompts and samples."""
        from vllm import SamplingParams as Request

        requests = [(prompt, index) for prompt in prompts for index in range(prompt.samples)]
        outputs = self.engine.generate(
            [{"prompt_token_ids": prompt.token_ids} for prompt, _ in requests],
            [
                Request(
                    max_tokens=params.max_tokens,
                    temperature=params.temperature,
                    top_p=params.top_p,
                    top_k=params.top_k,
                    min_p=params.min_p,
                    stop_token_ids=self.stop_ids,
                    ignore_eos=True,  # the ids above are all that end an answer
                    logprobs=params.top_logprobs,
                    detokenize=False,
                    seed=request_seed(seed, prompt, index),
                )
                for prompt, index in requests
            ],
            use_tqdm=False,
        )
        return [
            self._rollout(prompt, index, output.outputs[0], params.top_logprobs)
            for (prompt, index), output in zip(requests, outputs, strict=True)
        ]

    def _rollout(self, prompt: Prompt, index: int, output: CompletionOutput, top: int) -> Rollout:
        token_ids, entries = list(output.token_ids), list(output.logprobs or [])
        return Rollout(
            prompt=prompt,
            sample_index=index,
            token_ids=token_ids,
            logp=[(entry or {})[token].logprob for token, entry in zip(token_ids, entries, strict=True)],
            text=text_of(self.tokenizer, token_ids),
            finish=FINISH.get(output.finish_reason or "", "aborted"),
            version=self.version,
            sampler_top=_top(entries, top) if top else None,
        )

    def sync(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Reloads every weight in place and clears the prefix cache."""
        seen: list[str] = []

        def noted() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in weights:
                seen.append(name)
                if name in self.names.expected:  # a stranger would leave the engine half loaded
                    yield name, tensor

        self.engine.collective_rpc("reload_weights", kwargs={"weights_iterator": noted()})
        self.names.check(seen)
        if not self.engine.reset_prefix_cache():
            raise RuntimeError("vLLM refused to clear its prefix cache: answers would mix old and new weights")
        self.version = version

    def close(self) -> None:
        """Shuts the engine down and frees its memory."""
        shut_down(self.engine)
        del self.engine
        gc.collect()


def _top(entries: Sequence[Mapping[int, Logprob] | None], k: int) -> TopK:
    """The k likeliest of every position; the sampled token comes on top of them where it is not one."""
    positions = [sorted((entry or {}).items(), key=lambda item: -item[1].logprob)[:k] for entry in entries]
    ids = torch.zeros(len(positions), k, dtype=torch.long)
    logp = torch.full((len(positions), k), -torch.inf)
    for row, found in enumerate(positions):
        ids[row, : len(found)] = torch.tensor([token for token, _ in found])
        logp[row, : len(found)] = torch.tensor([score.logprob for _, score in found])
    return TopK(ids, logp)


def _expected_names(student: HFStudent) -> list[str]:
    """The Hugging Face names of all weights, from a model without storage."""
    from transformers import AutoModelForCausalLM

    config = AutoConfig.from_pretrained(student.model, trust_remote_code=student.trust_remote_code)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=student.trust_remote_code)
    return [name for name, _ in model.named_parameters(remove_duplicate=False)]
