"""Sampling by `transformers` generation: the fall-back where vLLM has no build. Keeps its own copy of the weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from opd.records import Prompt, Rollout, TopK
from opd.students.model import Dtype, HFStudent
from opd.students.sampler import SamplingParams, WeightNames, request_seed, text_of


@dataclass
class HFSampler:
    """Batched `model.generate`. `batch_size`: answers drawn at a time."""

    params: SamplingParams = field(default_factory=SamplingParams)
    batch_size: int = 128
    dtype: Dtype | None = None

    def start(
        self, student: HFStudent, tokenizer: PreTrainedTokenizerBase, stop_ids: Sequence[int], max_len: int
    ) -> None:
        """Loads the model."""
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model = AutoModelForCausalLM.from_pretrained(
            student.model,
            dtype=getattr(torch, self.dtype or student.dtype),
            attn_implementation=student.attention,
            trust_remote_code=student.trust_remote_code,
        )
        nn.Module.to(model, device)
        self.attach(model, tokenizer, stop_ids)

    def attach(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, stop_ids: Sequence[int]) -> None:
        """Samples from a model that is loaded already; its own generation settings (penalties and such) are dropped."""
        self.model: Any = model.eval()
        model.generation_config = GenerationConfig()
        self.tokenizer, self.stop_ids, self.version = tokenizer, list(stop_ids), 0
        self.weights = dict(model.named_parameters(remove_duplicate=False))
        self.names = WeightNames(self.weights)

    def sample(self, prompts: Sequence[Prompt], params: SamplingParams, seed: int) -> list[Rollout]:
        """Rollouts in the order of prompts and samples."""
        requests = [(prompt, index) for prompt in prompts for index in range(prompt.samples)]
        rollouts: list[Rollout] = []
        for start in range(0, len(requests), self.batch_size):
            rollouts += self._generate(requests[start : start + self.batch_size], params, seed)
        return rollouts

    @torch.no_grad()
    def _generate(self, requests: Sequence[tuple[Prompt, int]], params: SamplingParams, seed: int) -> list[Rollout]:
        width = max(len(prompt.token_ids) for prompt, _ in requests)
        pad = self.tokenizer.pad_token_id
        ids = torch.tensor([[pad] * (width - len(p.token_ids)) + p.token_ids for p, _ in requests])
        mask = torch.tensor([[0] * (width - len(p.token_ids)) + [1] * len(p.token_ids) for p, _ in requests])
        device = self.model.device
        seeds = [request_seed(seed, prompt, index) for prompt, index in requests]
        generators = None if params.temperature == 0.0 else [torch.Generator(device).manual_seed(s) for s in seeds]
        draw = _Draw(generators, params.top_logprobs)
        output = self.model.generate(
            input_ids=ids.to(device),
            attention_mask=mask.to(device),
            max_new_tokens=params.max_tokens,
            do_sample=False,  # the last processor draws
            eos_token_id=self.stop_ids or None,
            pad_token_id=pad,
            logits_processor=LogitsProcessorList([*_warpers(params), draw]),
        )
        logp = torch.stack(draw.logp, -1)
        top = draw.top()
        return [
            self._rollout(
                prompt, index, output[row, width:].tolist(), logp[row].tolist(), None if top is None else top[row]
            )
            for row, (prompt, index) in enumerate(requests)
        ]

    def _rollout(
        self, prompt: Prompt, index: int, token_ids: list[int], logp: list[float], top: TopK | None
    ) -> Rollout:
        end = next((i + 1 for i, token in enumerate(token_ids) if token in self.stop_ids), None)
        kept = token_ids if end is None else token_ids[:end]
        return Rollout(
            prompt=prompt,
            sample_index=index,
            token_ids=kept,
            logp=logp[: len(kept)],
            text=text_of(self.tokenizer, kept),
            finish="length" if end is None else "stop",
            version=self.version,
            sampler_top=None if top is None else top.at(slice(len(kept))),
        )

    def sync(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copies every weight in place."""
        seen = []
        for name, tensor in weights:
            seen.append(name)
            if name in self.weights:
                self.weights[name].data.copy_(tensor)
        self.names.check(seen)
        self.version = version

    def close(self) -> None:
        """Drops the model."""
        del self.model, self.weights


def _warpers(params: SamplingParams) -> list[LogitsProcessor]:
    """The sampling distribution; min_p comes before the others, as in vLLM."""
    warpers: list[LogitsProcessor] = []
    if params.temperature not in (0.0, 1.0):
        warpers.append(TemperatureLogitsWarper(params.temperature))
    if params.min_p > 0.0:
        warpers.append(MinPLogitsWarper(params.min_p))
    if params.top_k > 0:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        warpers.append(TopPLogitsWarper(params.top_p))
    return warpers


class _Draw(LogitsProcessor):
    """Draws every row's token with a generator of its own, so that a draw depends on nothing else in the batch.

    The token with the largest log p - log E, E ~ Exp(1), is a draw from p (Gumbel-max). Without generators it is the
    likeliest one. `generate` takes the largest score that it gets back: the token whose log p was noted.
    """

    def __init__(self, generators: Sequence[torch.Generator] | None, top_logprobs: int) -> None:
        self.generators, self.top_logprobs = generators, top_logprobs
        self.logp: list[Tensor] = []  # [B] of each token drawn so far
        self.likeliest: list[tuple[Tensor, Tensor]] = []  # log-probs [B, K] and ids of each

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Scores [B, V] whose largest is the draw."""
        logp = torch.log_softmax(scores.float(), -1)
        noisy = logp
        if self.generators is not None:
            waits = torch.stack([torch.empty_like(logp[0]).exponential_(generator=each) for each in self.generators])
            noisy = logp - waits.log()
        self.logp.append(logp.gather(-1, noisy.argmax(-1, keepdim=True))[:, 0])
        if self.top_logprobs:
            self.likeliest.append(logp.topk(min(self.top_logprobs, logp.shape[1]), -1))
        return noisy

    def top(self) -> list[TopK] | None:
        """The likeliest tokens [T, K] per row; None where they were not asked for."""
        if not self.likeliest:
            return None
        logp, ids = (torch.stack(parts, 1).cpu() for parts in zip(*self.likeliest, strict=True))
        return [TopK(*row) for row in zip(ids, logp, strict=True)]
