"""A teacher on a stock vLLM server in pooling mode: hidden states come over the wire, the head is read from disk."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import httpx
import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from opd.head_file import read_head
from opd.heads import Head
from opd.losses import Need
from opd.losses.protocol import needs
from opd.padding import split_by_tokens
from opd.records import FullVocab, Rollout, TeacherScores
from opd.remote import Remote, RemoteConfig, RemoteError
from opd.students.model import Dtype

ROWS_PER_REQUEST = 256  # the answer describes its rows in one HTTP header, whose size clients bound


@dataclass
class ServedTeacher:
    """Full-vocabulary scores from `opd serve-teacher` (or any vLLM server with the same flags).

    The server gets token ids and sends the last hidden states of every position: H numbers per token, not V. The head
    stays here and is read from the same checkpoint.

    Args:
        model: folder or hub name that the servers hold; tokenizer, configuration and head are read from it.
        remote: where they are and how to ask them.
        dtype: of the head.
        wire_dtype: of the hidden states on the wire; bfloat16 halves the bytes at a relative error of 2^-9 per number.
        batch_tokens: tokens per request.
        served_name: the model's name on the servers; null for the only one there.
    """

    model: str
    remote: RemoteConfig
    dtype: Dtype = "float32"
    wire_dtype: Dtype = "float32"
    batch_tokens: int = 16384
    served_name: str | None = None
    trust_remote_code: bool = False
    provides: ClassVar[frozenset[Need]] = needs("full_vocab")

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Read from the model's folder."""
        return AutoTokenizer.from_pretrained(self.model, trust_remote_code=self.trust_remote_code)

    def start(self) -> None:
        """Asks the servers what they hold, and scores one token to see that the head fits.

        Raises:
            RemoteError: no server answers, or one does not answer as a pooling server with this model would.
        """
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._pool = Remote(f"teacher (ServedTeacher, {self.model})", self.remote)
        card = only_model(self._pool, self.served_name)
        self._name, self.max_len = str(card["id"]), int(card["max_model_len"])
        (states,) = self._ask([[0]])
        head = self.head()
        if states.shape[1] != head.weight.shape[1]:
            raise RemoteError(
                f"{self._pool.key}: the servers send hidden states of size {states.shape[1]}, and the head of "
                f"{self.model} takes {head.weight.shape[1]}: they hold another model; correct model or urls"
            )

    def head(self) -> Head:
        """The checkpoint's head, read anew."""
        head = read_head(self.model, getattr(torch, self.dtype), self.trust_remote_code)
        return head.to(self._device)

    def score(self, rollouts: Sequence[Rollout]) -> list[TeacherScores | None]:
        """The hidden states [R, H] that predict each response token; no row is ever missing."""
        # The last token's own state predicts nothing that was sampled.
        states = self._ask([(rollout.prompt.token_ids + rollout.token_ids)[:-1] for rollout in rollouts])
        return [
            FullVocab(state[len(rollout.prompt.token_ids) - 1 :])
            for rollout, state in zip(rollouts, states, strict=True)
        ]

    def _ask(self, sequences: Sequence[list[int]]) -> list[Tensor]:
        """Last hidden states [T, H] of every sequence."""
        groups = [
            group[start : start + ROWS_PER_REQUEST]
            for group in split_by_tokens([len(sequence) for sequence in sequences], self.batch_tokens)
            for start in range(0, len(group), ROWS_PER_REQUEST)
        ]
        bodies = [
            {
                "model": self._name,
                "input": [sequences[index] for index in group],
                "task": "token_embed",
                "encoding_format": "bytes",
                "embed_dtype": self.wire_dtype,
                "endianness": "little",
                "use_activation": False,
            }
            for group in groups
        ]
        answers = self._pool.post_all(
            "/pooling",
            bodies,
            lambda number, response: read_states(response, [len(sequences[index]) for index in groups[number]]),
        )
        found: dict[int, Tensor] = {}
        for group, states in zip(groups, answers, strict=True):
            found |= dict(zip(group, states, strict=True))
        return [found[index].to(self._device) for index in range(len(sequences))]

    def close(self) -> None:
        """Ends the connections."""
        self._pool.close()


def only_model(remote: Remote, name: str | None) -> dict[str, object]:
    """What a vLLM server says of the model `name`, or of its only one.

    Raises:
        RemoteError: it has no such model, or several and no name was given.
    """
    cards = {str(card["id"]): card for card in remote.get("/v1/models")["data"]}
    if name is None and len(cards) == 1:
        return next(iter(cards.values()))
    if name is None or name not in cards:
        raise RemoteError(f"{remote.key}: the server holds {', '.join(cards)}; set served_name to one of them")
    return cards[name]


def read_states(response: httpx.Response, lengths: Sequence[int]) -> list[Tensor]:
    """Hidden states [T, H] per row, by the index that the server gave each.

    Raises:
        ValueError: a row is missing, has another length than was sent, or holds a number that is not finite.
    """
    try:
        rows = {row["index"]: row for row in json.loads(response.headers["metadata"])["data"]}
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError("the answer has no description of its rows: is this a server in pooling mode?") from error
    states = []
    for index, length in enumerate(lengths):
        if index not in rows:
            raise ValueError(f"row {index} of {len(lengths)} is missing in the answer")
        row = rows[index]
        if row["shape"][0] != length:
            raise ValueError(f"row {index}: {row['shape'][0]} hidden states for {length} tokens")
        dtype = getattr(torch, row["embed_dtype"])
        data = response.content[row["start"] : row["end"]]
        if len(data) != row["shape"][0] * row["shape"][1] * dtype.itemsize:
            raise ValueError(f"row {index}: {len(data)} bytes for shape {row['shape']} of {row['embed_dtype']}")
        state = torch.frombuffer(bytearray(data), dtype=dtype).view(row["shape"])
        if not bool(state.isfinite().all()):
            raise ValueError(f"row {index} holds numbers that are not finite")
        states.append(state)
    return states
