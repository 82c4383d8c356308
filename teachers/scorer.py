"""A teacher behind a stock vLLM server that gives log-probabilities of the sampled tokens and of its likeliest ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import httpx
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from opd.losses import Need
from opd.losses.protocol import needs
from opd.padding import split_by_tokens
from opd.records import Rollout, SomeTokens, TeacherScores, TopK
from opd.remote import Remote, RemoteConfig, RemoteError
from opd.teachers.served import only_model

UNKNOWN = -9000.0  # vLLM writes -inf as -9999; at or below this a number stands for "not known"
ROUNDING = 1e-3  # by which a log-probability may exceed 0, or a sum of probabilities 1


@dataclass
class ScorerTeacher:
    """Scores by `prompt_logprobs` on token ids, from `opd serve-teacher gives=logprobs` or any vLLM server.

    The server chooses the tokens: its k likeliest and the sampled one. A support that the student chooses needs the
    whole vocabulary (teacher=served or local).

    Args:
        model: folder or hub name whose tokenizer the servers use.
        remote: where they are and how to ask them.
        k: likeliest tokens per position, at most the servers' max_logprobs; 0 asks for the sampled token alone.
        batch_tokens: tokens per request; an answer has about 80 bytes of JSON per token and place.
        served_name: the model's name on the servers; null for the only one there.
    """

    model: str
    remote: RemoteConfig
    k: int = 64
    batch_tokens: int = 4096
    served_name: str | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        if self.k < 0:
            raise ValueError(f"k={self.k}: must not be negative (0 asks for the sampled token alone)")

    @property
    def provides(self) -> frozenset[Need]:
        """The sampled token's score, and with k the likeliest tokens'."""
        return needs("sampled") | (needs("top_k") if self.k else needs())

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Read from the model's folder."""
        return AutoTokenizer.from_pretrained(self.model, trust_remote_code=self.trust_remote_code)

    def start(self) -> None:
        """Asks the servers what they hold, and scores a few tokens to see that they can.

        Raises:
            RemoteError: no server answers; k exceeds its max_logprobs; it sends other numbers than log-probabilities;
                its tokenizer is not the model's.
        """
        self._pool = Remote(f"teacher (ScorerTeacher, {self.model})", self.remote)
        card = only_model(self._pool, self.served_name)
        self._name = str(card["id"])
        self.max_len = int(str(card["max_model_len"])) - 1  # the server insists on generating one token
        self._check_tokenizer()
        self._ask([[0, 1, 2, 3]])

    def _check_tokenizer(self) -> None:
        """The server makes the same ids of a text that has tokens from all over the vocabulary."""
        tokenizer = self.tokenizer()
        ids = range(0, len(tokenizer), max(1, len(tokenizer) // 64))
        text = str(tokenizer.decode(list(ids), skip_special_tokens=True))
        asked = {"model": self._name, "prompt": text, "add_special_tokens": False}
        (theirs,) = self._pool.post_all("/tokenize", [asked], lambda _, response: response.json()["tokens"])
        mine = tokenizer(text, add_special_tokens=False)["input_ids"]
        if theirs != mine:
            raise RemoteError(
                f"{self._pool.key}: the server makes the tokens {theirs[:6]}... of a text, and the tokenizer of "
                f"{self.model} {mine[:6]}...: they hold different models; correct model or urls"
            )

    def score(self, rollouts: Sequence[Rollout]) -> list[TeacherScores | None]:
        """Log-probabilities of each response token and of the likeliest tokens in its place."""
        sequences = [rollout.prompt.token_ids + rollout.token_ids for rollout in rollouts]
        positions = self._ask(sequences)
        return [
            read_scores(entries[len(rollout.prompt.token_ids) :], rollout.token_ids, self.k)
            for rollout, entries in zip(rollouts, positions, strict=True)
        ]

    def _ask(self, sequences: Sequence[list[int]]) -> list[list[Any]]:
        """What the server says of every position of every sequence."""
        groups = split_by_tokens([len(sequence) for sequence in sequences], self.batch_tokens)
        bodies = [
            {
                "model": self._name,
                "prompt": [sequences[index] for index in group],
                "prompt_logprobs": self.k,
                "max_tokens": 1,
                "temperature": 1.0,
                "add_special_tokens": False,
            }
            for group in groups
        ]
        answers = self._pool.post_all(
            "/v1/completions",
            bodies,
            lambda number, response: read_positions(response, [sequences[index] for index in groups[number]]),
        )
        found: dict[int, list[Any]] = {}
        for group, rows in zip(groups, answers, strict=True):
            found |= dict(zip(group, rows, strict=True))
        return [found[index] for index in range(len(sequences))]

    def close(self) -> None:
        """Ends the connections."""
        self._pool.close()


def read_positions(response: httpx.Response, sequences: Sequence[list[int]]) -> list[list[Any]]:
    """The entries of every position, row by row, by the index that the server gave each.

    Raises:
        ValueError: a row is missing, has another length than was sent, or numbers that are no log-probabilities.
    """
    choices = {choice["index"]: choice for choice in response.json()["choices"]}
    rows = []
    for index, sequence in enumerate(sequences):
        if index not in choices:
            raise ValueError(f"row {index} of {len(sequences)} is missing in the answer")
        entries = choices[index].get("prompt_logprobs") or []
        if len(entries) != len(sequence):
            raise ValueError(f"row {index}: scores of {len(entries)} positions for {len(sequence)} tokens")
        for position, entry in enumerate(entries[1:], 1):  # the first token has no predictor
            _check_logprobs(entry, f"row {index}, position {position}")
        rows.append(entries)
    return rows


def _check_logprobs(entry: Mapping[str, Any] | None, where: str) -> None:
    known = [value for item in (entry or {}).values() if (value := known_logp(item["logprob"])) is not None]
    if any(value > ROUNDING for value in known) or torch.tensor(known).exp().sum().item() > 1.0 + ROUNDING:
        raise ValueError(
            f"{where}: {known[:3]} are no log-probabilities; start the server with --logprobs-mode raw_logprobs"
        )


def known_logp(value: object) -> float | None:
    """A log-probability, or None for null, text, -inf (which vLLM writes as -9999) and what is not finite."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value) or value <= UNKNOWN:
        return None
    return float(value)


def read_scores(entries: Sequence[Mapping[str, Any] | None], token_ids: Sequence[int], k: int) -> SomeTokens:
    """Entries of R positions, keyed by token id in any order, as scores; what is not known is missing, not a number."""
    count = len(token_ids)
    token_logp, present = torch.zeros(count), torch.zeros(count, dtype=torch.bool)
    top = TopK(torch.zeros(count, max(k, 1), dtype=torch.long), torch.full((count, max(k, 1)), -torch.inf))
    for place, (token, entry) in enumerate(zip(token_ids, entries, strict=True)):
        known = {
            int(key): value for key, item in (entry or {}).items() if (value := known_logp(item["logprob"])) is not None
        }
        if token not in known:
            continue
        token_logp[place], present[place] = known[token], True
        likeliest = sorted(known.items(), key=lambda pair: -pair[1])[:k]  # the sampled token may stand beside the k
        for rank, (likely, value) in enumerate(likeliest):
            top.ids[place, rank], top.logp[place, rank] = likely, value
    return SomeTokens(token_logp, top if k else None, present)
