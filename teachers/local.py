"""A teacher whose weights stand in the training process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

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
    """

    model: str
    dtype: Dtype = "float32"
    micro_batch_tokens: int = 16384
    attention: str = "sdpa"
    trust_remote_code: bool = False
    provides: ClassVar[frozenset[Need]] = needs("full_vocab")

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Read from the model's folder."""
        return AutoTokenizer.from_pretrained(self.model, trust_remote_code=self.trust_remote_code)

    def start(self) -> None:
        """Loads the weights, frozen."""
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.network = AutoModelForCausalLM.from_pretrained(
            self.model,
            dtype=getattr(torch, self.dtype),
            attn_implementation=self.attention,
            trust_remote_code=self.trust_remote_code,
        )
        nn.Module.to(self.network, self.device)
        self.network.eval().requires_grad_(False)
        self._body, self._head = split_model(self.network)
        check_split(self.network, self._body, self._head, "teacher.model")

    def head(self) -> Head:
        """The model's own head."""
        return self._head

    @torch.no_grad()
    def score(self, rollouts: Sequence[Rollout]) -> list[TeacherScores | None]:
        """The hidden states [R, H] that predict each response token; no row is ever missing."""
        sequences = [rollout.prompt.token_ids + rollout.token_ids for rollout in rollouts]
        scores: list[TeacherScores | None] = [None] * len(rollouts)
        for group in split_by_tokens([len(sequence) for sequence in sequences], self.micro_batch_tokens):
            ids, mask = pad([sequences[index] for index in group], pad_id=0)
            hidden = self._body(
                input_ids=ids.to(self.device), attention_mask=mask.to(self.device), use_cache=False
            ).last_hidden_state
            flat = hidden.flatten(0, 1)
            for row, index in enumerate(group):
                prompt, tokens = len(rollouts[index].prompt.token_ids), len(rollouts[index].token_ids)
                scores[index] = FullVocab(
                    flat[[predictor_index(row, ids.shape[1], prompt, position) for position in range(tokens)]]
                )
        return scores

    def sample(self, prompts: Sequence[Prompt], params: SamplingParams, seed: int) -> list[Rollout]:
        """The teacher's own answers, to be compared with the student's."""
        student = HFStudent(self.model, self.dtype, trust_remote_code=self.trust_remote_code)
        tokenizer = student.tokenizer()
        sampler = HFSampler()
        sampler.attach(self.network, tokenizer, student.stop_ids(tokenizer))
        return sampler.sample(prompts, params, seed)

    def close(self) -> None:
        """Drops the weights."""
        del self.network, self._body, self._head
