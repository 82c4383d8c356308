"""A teacher whose weights stand in the training process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from opd.head_file import read_head
from opd.heads import Head, check_split, split_model
from opd.losses import Need
from opd.losses.protocol import needs
from opd.padding import pad, predictor_index, split_by_tokens
from opd.records import FullVocab, Prompt, Rollout, TeacherScores
from opd.students import HFSampler, HFStudent, SamplingParams
from opd.students.model import Dtype


@dataclass
class LocalTeacher:
    """A frozen causal language model that gives the full vocabulary: last hidden states and its head.

    Args:
        model: folder or hub name.
        dtype: of its weights.
        micro_batch_tokens: padded tokens per forward pass.
        keep: where the weights are between scorings: `device`; `host`, from which they move to a GPU and back; `disk`,
            from which they are read at every step, for several teachers where memory holds one.
    """

    model: str
    dtype: Dtype = "float32"
    micro_batch_tokens: int = 16384
    attention: str = "sdpa"
    trust_remote_code: bool = False
    keep: Literal["device", "host", "disk"] = "device"
    provides: ClassVar[frozenset[Need]] = needs("full_vocab")

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Read from the model's folder."""
        return AutoTokenizer.from_pretrained(self.model, trust_remote_code=self.trust_remote_code)

    def start(self) -> None:
        """Loads the weights, frozen."""
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.network: Any = None
        with self._loaded():
            check_split(self.network, *split_model(self.network), "teacher.model")

    @contextmanager
    def _loaded(self) -> Iterator[None]:
        """Inside, the weights are on the device; then they go back to where they are kept."""
        if self.network is None:
            self.network = AutoModelForCausalLM.from_pretrained(
                self.model,
                dtype=getattr(torch, self.dtype),
                attn_implementation=self.attention,
                trust_remote_code=self.trust_remote_code,
            )
            self.network.eval().requires_grad_(False)
        nn.Module.to(self.network, self.device)
        try:
            yield
        finally:
            if self.keep == "host":
                nn.Module.to(self.network, "cpu")
            elif self.keep == "disk":
                self.network = None

    def head(self) -> Head:
        """The model's own head; with `keep` of disk read anew."""
        if self.network is None:
            return read_head(self.model, getattr(torch, self.dtype), self.trust_remote_code).to(self.device)
        return split_model(self.network)[1].to(self.device)

    def score(self, rollouts: Sequence[Rollout]) -> list[TeacherScores | None]:
        """The hidden states [R, H] that predict each response token; no row is ever missing."""
        if not rollouts:
            return []
        with self._loaded():
            states = response_states(split_model(self.network)[0], rollouts, self.micro_batch_tokens)
        return [FullVocab(state) for state in states]

    def sample(self, prompts: Sequence[Prompt], params: SamplingParams, seed: int) -> list[Rollout]:
        """The teacher's own answers, to be compared with the student's."""
        student = HFStudent(self.model, self.dtype, trust_remote_code=self.trust_remote_code)
        tokenizer = student.tokenizer()
        sampler = HFSampler()
        with self._loaded():
            sampler.attach(self.network, tokenizer, student.stop_ids(tokenizer))
            rollouts = sampler.sample(prompts, params, seed)
            sampler.close()
        return rollouts

    def close(self) -> None:
        """Drops the weights."""
        self.network = None


@torch.no_grad()
def response_states(body: nn.Module, rollouts: Sequence[Rollout], micro_batch_tokens: int) -> list[Tensor]:
    """The body's hidden states [R, H] that predict each rollout's response tokens, on the body's device."""
    sequences = [rollout.prompt.token_ids + rollout.token_ids for rollout in rollouts]
    device = next(body.parameters()).device
    found: dict[int, Tensor] = {}
    for group in split_by_tokens([len(sequence) for sequence in sequences], micro_batch_tokens):
        ids, mask = pad([sequences[index] for index in group], pad_id=0)
        hidden = body(input_ids=ids.to(device), attention_mask=mask.to(device), use_cache=False).last_hidden_state
        flat = hidden.flatten(0, 1)
        for row, index in enumerate(group):
            prompt, tokens = len(rollouts[index].prompt.token_ids), len(rollouts[index].token_ids)
            found[index] = flat[[predictor_index(row, ids.shape[1], prompt, position) for position in range(tokens)]]
    return [found[index] for index in range(len(rollouts))]
