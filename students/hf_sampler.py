"""Sampling by `transformers` generation: the fall-back where vLLM has no build. Keeps its own copy of the weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from opd.records import Prompt, Rollout
from opd.students.model import HFStudent
from opd.students.sampler import SamplingParams, WeightNames, request_seed


@dataclass
class HFSampler:
    """Batched `model.generate`. `batch_size`: answers drawn at a time."""

    params: SamplingParams = field(default_factory=SamplingParams)
    batch_size: int = 128
    dtype: str | None = None

    def start(self, student: HFStudent, tokenizer: PreTrainedTokenizerBase, stop_ids: Sequence[int], max_len: int) -> None:
        """Loads the model."""
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model = AutoModelForCausalLM.from_pretrained(
            student.model,
            dtype=getattr(torch, self.dtype or student.dtype),
            attn_implementation=student.attention,
            trust_remote_code=student.trust_remote_code,
        )
        self.attach(model.to(device), tokenizer, stop_ids)

    def attach(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, stop_ids: Sequence[int]) -> None:
        """Samples from a model that is loaded already."""
        self.model = model.eval()
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
        ids = torch.tensor([[pad] * (width - len(p.token_ids)) + p.token_ids for p, _ in requests], device=self.model.device)
        mask = torch.tensor([[0] * (width - len(p.token_ids)) + [1] * len(p.token_ids) for p, _ in requests])
        recorder = _SampledLogp(width)
        torch.manual_seed(request_seed(seed, *requests[0]))
        output = self.model.generate(
            input_ids=ids,
            attention_mask=mask.to(ids.device),
            max_new_tokens=params.max_tokens,
            do_sample=params.temperature > 0.0,
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            eos_token_id=self.stop_ids,
            pad_token_id=pad,
            logits_processor=LogitsProcessorList([*_warpers(params), recorder]),
        )
        logp = recorder.finish(output)
        return [
            self._rollout(prompt, index, output[row, width:].tolist(), logp[row].tolist())
            for row, (prompt, index) in enumerate(requests)
        ]

    def _rollout(self, prompt: Prompt, index: int, token_ids: list[int], logp: list[float]) -> Rollout:
        end = next((i + 1 for i, token in enumerate(token_ids) if token in self.stop_ids), None)
        kept = token_ids if end is None else token_ids[:end]
        return Rollout(
            prompt=prompt,
            sample_index=index,
            token_ids=kept,
            logp=logp[: len(kept)],
            text=self.tokenizer.decode(kept, skip_special_tokens=True),
            finish="length" if end is None else "stop",
            version=self.version,
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
    """The sampling distribution as processors of ours: `generate` would apply its own after the recorder."""
    warpers: list[LogitsProcessor] = []
    if params.temperature not in (0.0, 1.0):
        warpers.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k > 0:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0.0:
        warpers.append(MinPLogitsWarper(params.min_p))
    return warpers


class _SampledLogp(LogitsProcessor):
    """Notes the log-prob of each sampled token: a processor sees the scores first and the chosen token one call later."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.previous: Tensor | None = None
        self.logp: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores unchanged."""
        self._note(input_ids)
        self.previous = torch.log_softmax(scores.float(), -1)
        return scores

    def _note(self, ids: Tensor) -> None:
        if self.previous is not None:
            chosen = ids[:, self.width + len(self.logp)]
            self.logp.append(self.previous.gather(-1, chosen[:, None])[:, 0])

    def finish(self, ids: Tensor) -> Tensor:
        """Log-probs [B, R] of all sampled tokens."""
        self._note(ids)
        return torch.stack(self.logp, -1)
