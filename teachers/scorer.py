"""A teacher behind a stock vLLM server that gives log-probabilities of the sampled tokens and of its likeliest ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import exp, isfinite
from typing import Any

import httpx
import torch
from pydantic import BaseModel, TypeAdapter, ValidationError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from opd.losses import Need
from opd.losses.protocol import needs
from opd.padding import split_by_tokens
from opd.records import Rollout, SomeTokens, TeacherScores, TopK
from opd.remote import Remote, RemoteConfig, RemoteError
from opd.teachers.servers import check_alike, check_tokenizer, only_model

UNKNOWN = -9000.0  # vLLM writes -inf as -9999; at or below this a number stands for "not known"
ROUNDING = 1e-3  # by which a log-probability may exceed 0, or a sum of probabilities 1
ALIKE = 0.05  # share of the largest number by which servers of one model may differ: bfloat16 on other hardware


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
        """Asks every server what it holds, and scores a few tokens to see that all can and hold the same.

        Raises:
            RemoteError: no server answers; k exceeds its max_logprobs; it sends other numbers than log-probabilities;
                its tokenizer is not the model's.
        """
        self._pool = Remote(f"teacher (ScorerTeacher, {self.model})", self.remote)
        card = only_model(self._pool, self.served_name)
        self._name = card.id
        self.max_len = card.max_model_len - 1  # the server insists on generating one token
        check_tokenizer(self._pool, self._name, self.tokenizer(), self.model)
        probe = [0, 1, 2, 3]

        def numbers(response: httpx.Response) -> list[float]:
            ((_, entries),) = read_positions(response, [probe])
            return read_scores(entries[1:], probe[1:], self.k).token_logp.tolist()

        way_out = f"start it by opd serve-teacher model=... gives=logprobs max_logprobs={max(self.k, 1)}, or lower k"
        check_alike(self._pool, "/v1/completions", self._body([probe]), numbers, ALIKE, way_out)

    def score(self, rollouts: Sequence[Rollout]) -> list[TeacherScores | None]:
        """Log-probabilities of each response token and of the likeliest tokens in its place."""
        sequences = [rollout.prompt.token_ids + rollout.token_ids for rollout in rollouts]

        def read(rows: list[int], response: httpx.Response) -> Iterator[tuple[int, SomeTokens]]:
            for place, entries in read_positions(response, [sequences[row] for row in rows]):
                rollout = rollouts[rows[place]]
                yield rows[place], read_scores(entries[len(rollout.prompt.token_ids) :], rollout.token_ids, self.k)

        groups = split_by_tokens([len(sequence) for sequence in sequences], self.batch_tokens)
        found = self._pool.ask_rows(
            "/v1/completions", groups, lambda rows: self._body([sequences[row] for row in rows]), read
        )
        return [found[row] for row in range(len(rollouts))]

    def _body(self, sequences: Sequence[list[int]]) -> dict[str, Any]:
        return {
            "model": self._name,
            "prompt": sequences,
            "prompt_logprobs": self.k,
            "max_tokens": 1,
            "temperature": 1.0,
            "add_special_tokens": False,
        }

    def close(self) -> None:
        """Ends the connections."""
        self._pool.close()


Entries = dict[int, dict[str, Any]] | None  # what is said of one position's tokens, by id


class _Choice(BaseModel):
    index: int
    prompt_logprobs: Any = None


class _Completion(BaseModel):
    choices: list[_Choice]


POSITIONS: TypeAdapter[list[Entries]] = TypeAdapter(list[Entries])


def read_positions(response: httpx.Response, sequences: Sequence[Sequence[int]]) -> Iterator[tuple[int, list[Entries]]]:
    """(index that the server gave, entries of every position) of the rows that are as they should be.

    Raises:
        ValueError: at the end, when a row is missing, or has scores of more or fewer positions than were sent.
    """
    choices = _Completion.model_validate_json(response.content).choices
    by_index = {choice.index: choice for choice in choices}
    if len(by_index) < len(choices):
        raise ValueError("the answer has several rows of one index")
    problems = []
    for index, sequence in enumerate(sequences):
        try:
            if index not in by_index:
                raise ValueError(f"row {index} of {len(sequences)} is missing in the answer")
            entries = _positions(by_index[index], len(sequence))
        except ValueError as error:
            problems.append(str(error))
        else:
            yield index, entries
    if problems:
        raise ValueError(problems[0])


def _positions(choice: _Choice, length: int) -> list[Entries]:
    try:
        entries = POSITIONS.validate_python(choice.prompt_logprobs)
    except ValidationError as error:
        raise ValueError(f"row {choice.index} has no scores that can be read: {error.errors()[0]['msg']}") from error
    if len(entries) != length:
        raise ValueError(f"row {choice.index}: scores of {len(entries)} positions for {length} tokens")
    return entries


def known_logp(value: object) -> float | None:
    """A log-probability, or None for null, text, -inf (which vLLM writes as -9999) and what is not finite."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value) or value <= UNKNOWN:
        return None
    return float(value)


def read_scores(entries: Sequence[Entries], token_ids: Sequence[int], k: int) -> SomeTokens:
    """Entries of R positions, keyed by token id in any order, as scores; what is not known is missing, not a number.

    Raises:
        RemoteError: the numbers are no log-probabilities.
    """
    count = len(token_ids)
    token_logp, present = torch.zeros(count), torch.zeros(count, dtype=torch.bool)
    top = TopK(torch.zeros(count, max(k, 1), dtype=torch.long), torch.full((count, max(k, 1)), -torch.inf))
    for place, (token, entry) in enumerate(zip(token_ids, entries, strict=True)):
        known = {
            key: value for key, item in (entry or {}).items() if (value := known_logp(item.get("logprob"))) is not None
        }
        _check_logprobs(list(known.values()))
        if token not in known:
            continue
        token_logp[place], present[place] = known[token], True
        likeliest = sorted(known.items(), key=lambda pair: -pair[1])[:k]  # the sampled token may stand beside the k
        top.ids[place, : len(likeliest)] = torch.tensor([likely for likely, _ in likeliest], dtype=torch.long)
        top.logp[place, : len(likeliest)] = torch.tensor([value for _, value in likeliest])
    return SomeTokens(token_logp, top if k else None, present)


def _check_logprobs(values: Sequence[float]) -> None:
    if any(value > ROUNDING for value in values) or sum(map(exp, values)) > 1.0 + ROUNDING:
        raise RemoteError(
            f"a server sends {', '.join(f'{value:.4g}' for value in values[:3])} as log-probabilities of one token's "
            "place, which no probabilities have; start it with --logprobs-mode raw_logprobs"
        )
