"""A reward that is trained in the loop to tell a teacher's answers from the student's (GAD, 2511.10643)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from opd.heads import split_model
from opd.padding import pad, split_by_tokens
from opd.records import Mean, Rollout
from opd.students import HFStudent


@dataclass
class Discriminator:
    """D(x, y): a linear head on the last hidden state of a copy of the student, which learns along with it.

    Every step it takes one AdamW step on the mean of -log sigmoid(D(x, y_teacher) - D(x, y_student)) over pairs of
    answers to one prompt, after it has judged the student's answers; D itself is the reward. The head starts at zero,
    so at first no answer is better than another. Both answers are encoded from their texts, an end token after whole
    ones, so that the way in which the student happened to cut a text into tokens tells nothing.

    Args:
        teacher: name of the teacher whose answers are the better ones.
        lr: learning rate.
        max_grad_norm: clipping, 0 for none.
        length_ratio: pairs whose lengths differ by more than this factor are not learned from, as length alone would
            tell the answers apart; null learns from all.
        streams: names of the streams to judge and to learn from, `heldout` for evaluation; null for all.
        micro_batch_tokens: padded tokens that go through the model at once.
    """

    teacher: str
    lr: float = 1.0e-6
    max_grad_norm: float = 0.2
    length_ratio: float | None = 1.5
    streams: list[str] | None = None
    micro_batch_tokens: int = 8192
    in_process: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.lr <= 0 or self.max_grad_norm < 0 or self.micro_batch_tokens < 1:
            raise ValueError(
                f"lr={self.lr}, max_grad_norm={self.max_grad_norm}, micro_batch_tokens={self.micro_batch_tokens}: "
                "the first and the last must be positive, the second at least 0"
            )
        if self.length_ratio is not None and self.length_ratio < 1:
            raise ValueError(f"length_ratio={self.length_ratio}: must be at least 1, or null")

    def begin(self, student: HFStudent, tokenizer: PreTrainedTokenizerBase) -> None:
        """Loads the copy."""
        self._tokenizer = tokenizer
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        network = student.load()
        self._body, head = split_model(network)
        self._head = nn.Linear(head.weight.shape[1], 1, bias=False)  # a bias would cancel in every pair
        nn.init.zeros_(self._head.weight)
        self._model = nn.ModuleDict({"body": self._body, "head": self._head}).to(self._device)
        self._trained = {name: p for name, p in self._model.named_parameters() if p.requires_grad}
        self._optimizer = torch.optim.AdamW(self._trained.values(), lr=self.lr, betas=(0.9, 0.95), weight_decay=0.0)

    def judges(self, stream: str) -> bool:
        """Whether answers of this stream are judged, and learned from."""
        return self.streams is None or stream in self.streams

    @torch.no_grad()
    def __call__(self, rollouts: Sequence[Rollout]) -> list[float | None]:
        """D of every rollout; None for an empty one and for those of other streams."""
        judged = [i for i, rollout in enumerate(rollouts) if self.judges(rollout.prompt.stream) and rollout.text]
        scores: list[float | None] = [None] * len(rollouts)
        sequences = [self._sequence(rollouts[i]) for i in judged]
        for group in split_by_tokens([len(sequence) for sequence in sequences], self.micro_batch_tokens):
            for place, score in zip(group, self._score([sequences[i] for i in group]).tolist(), strict=True):
                scores[judged[place]] = score
        return scores

    def learn(self, pairs: Sequence[tuple[Rollout, Rollout]]) -> dict[str, Mean]:
        """One step on the (teacher's, student's) pairs that differ and whose lengths match; none of them, no step.

        Returns:
            `accuracy`, the share of pairs in the right order (a tie counts half); `margin`, their mean D difference;
            `pairs`, the share learned from; `length_corr`, Pearson's between D and length of the student's answers.
        """
        encoded = [(self._sequence(a), self._sequence(b), len(a.prompt.token_ids)) for a, b in pairs]
        matched = [pair for pair in encoded if pair[0] != pair[1] and self._lengths_match(*pair)]
        gaps, lengths, scores = [], [], []
        for group in split_by_tokens(
            [2 * max(len(better), len(worse)) for better, worse, _ in matched], self.micro_batch_tokens
        ):
            better, worse = self._score([matched[i][0] for i in group] + [matched[i][1] for i in group]).chunk(2)
            (-nn.functional.logsigmoid(better - worse).sum() / len(matched)).backward()
            gaps += (better - worse).tolist()
            lengths += [len(matched[i][1]) - matched[i][2] for i in group]
            scores += worse.tolist()
        if gaps:
            if self.max_grad_norm:
                torch.nn.utils.clip_grad_norm_(self._trained.values(), self.max_grad_norm)
            self._optimizer.step()
            self._optimizer.zero_grad()
        return _measures(gaps, lengths, scores, len(pairs))

    def state(self) -> dict[str, Tensor]:
        """Weights and optimizer, as tensors under one name each."""
        moments = {
            f"optimizer.{name}.{key}": value
            for name, parameter in self._trained.items()
            for key, value in self._optimizer.state.get(parameter, {}).items()
        }
        return {**{f"model.{name}": p.detach() for name, p in self._trained.items()}, **moments}

    @torch.no_grad()
    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Goes on from what `state` gave."""
        for name, parameter in self._trained.items():
            parameter.copy_(state[f"model.{name}"])
            start = f"optimizer.{name}."
            moments = {key.removeprefix(start): value for key, value in state.items() if key.startswith(start)}
            if moments:  # a part that no gradient has reached has none
                step = moments.pop("step").cpu()
                placed = {key: value.to(parameter) for key, value in moments.items()}
                self._optimizer.state[parameter] = {"step": step, **placed}

    def _sequence(self, rollout: Rollout) -> list[int]:
        end = [self._tokenizer.eos_token_id] if rollout.finish == "stop" else []
        ids = self._tokenizer(rollout.text, add_special_tokens=False)["input_ids"]
        return [*rollout.prompt.token_ids, *ids, *(token for token in end if isinstance(token, int))]

    def _lengths_match(self, better: Sequence[int], worse: Sequence[int], prompt: int) -> bool:
        short, long = sorted((len(better) - prompt, len(worse) - prompt))
        return short > 0 and (self.length_ratio is None or long <= self.length_ratio * short)

    def _score(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """D [B], of the state at the last token."""
        ids, mask = pad(sequences, pad_id=0)
        states = self._body(
            input_ids=ids.to(self._device), attention_mask=mask.to(self._device), use_cache=False
        ).last_hidden_state
        last = states[torch.arange(len(ids), device=self._device), mask.sum(1).to(self._device) - 1]
        return self._head(last.float()).squeeze(-1)


def _measures(gaps: Sequence[float], lengths: Sequence[int], scores: Sequence[float], pairs: int) -> dict[str, Mean]:
    count = float(len(gaps))
    right = sum(1.0 if gap > 0 else 0.5 if gap == 0 else 0.0 for gap in gaps)
    sides = torch.tensor([lengths, scores], dtype=torch.float64)
    varies = len(gaps) > 1 and bool((sides.std(1) > 0).all())
    return {
        "accuracy": Mean(right, count),
        "margin": Mean(sum(gaps), count),
        "pairs": Mean(count, float(pairs)),
        "length_corr": Mean(sides.corrcoef()[0, 1].item(), 1.0) if varies else Mean(0.0, 0.0),
    }
