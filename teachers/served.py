"""A teacher on a stock vLLM server in pooling mode: hidden states come over the wire, the head is read from disk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import httpx
import torch
from pydantic import BaseModel, NonNegativeInt
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
from opd.teachers.servers import check_alike, check_tokenizer, only_model

ROWS_PER_REQUEST = 256  # the answer describes its rows in one HTTP header of some 120 bytes a row; clients bound it
ALIKE = 0.05  # share of the largest number by which servers of one model may differ: bfloat16 on other hardware


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
        """Asks every server what it holds, and scores a few tokens to see that all hold the same and the head fits.

        Raises:
            RemoteError: no server answers, or one does not answer as a pooling server with this model would.
            ValueError: the checkpoint has no head that can be read.
        """
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        head = self.head()
        self._pool = Remote(f"teacher (ServedTeacher, {self.model})", self.remote)
        card = only_model(self._pool, self.served_name)
        self._name, self.max_len, self._size = card.id, card.max_model_len, head.weight.shape[1]
        check_tokenizer(self._pool, self._name, self.tokenizer(), self.model)
        probe = [0, 1, 2, 3]

        def numbers(response: httpx.Response) -> list[float]:
            ((_, states),) = read_states(response, [len(probe)], self._size)
            return states.flatten().tolist()

        way_out = "start it by opd serve-teacher model=... gives=hidden"
        check_alike(self._pool, "/pooling", self._body([probe]), numbers, ALIKE, way_out)

    def head(self) -> Head:
        """The checkpoint's head, read anew."""
        head = read_head(self.model, getattr(torch, self.dtype), self.trust_remote_code)
        return head.to(self._device)

    def score(self, rollouts: Sequence[Rollout]) -> list[TeacherScores | None]:
        """The hidden states [R, H] that predict each response token; no row is ever missing."""
        # The last token's own state predicts nothing that was sampled.
        sequences = [(rollout.prompt.token_ids + rollout.token_ids)[:-1] for rollout in rollouts]
        groups = [
            group[start : start + ROWS_PER_REQUEST]
            for group in split_by_tokens([len(sequence) for sequence in sequences], self.batch_tokens)
            for start in range(0, len(group), ROWS_PER_REQUEST)
        ]

        def read(rows: list[int], response: httpx.Response) -> Iterator[tuple[int, Tensor]]:
            for place, states in read_states(response, [len(sequences[row]) for row in rows], self._size):
                yield rows[place], states

        found = self._pool.ask_rows("/pooling", groups, lambda rows: self._body([sequences[row] for row in rows]), read)
        return [
            FullVocab(found[row][len(rollout.prompt.token_ids) - 1 :].to(self._device))
            for row, rollout in enumerate(rollouts)
        ]

    def _body(self, sequences: Sequence[list[int]]) -> dict[str, Any]:
        return {
            "model": self._name,
            "input": sequences,
            "task": "token_embed",
            "encoding_format": "bytes",
            "embed_dtype": self.wire_dtype,
            "endianness": "little",
            "use_activation": False,
        }

    def close(self) -> None:
        """Ends the connections."""
        self._pool.close()


class _Row(BaseModel):
    """Where the states of a row lie in the body."""

    index: int
    embed_dtype: Literal["float32", "bfloat16", "float16"]
    endianness: Literal["little"]
    start: NonNegativeInt
    end: NonNegativeInt
    shape: tuple[int, int]  # tokens, hidden size


class _Description(BaseModel):
    data: list[_Row]


def read_states(response: httpx.Response, lengths: Sequence[int], size: int) -> Iterator[tuple[int, Tensor]]:
    """(index that the server gave, hidden states [T, `size`]) of the rows that are as they should be.

    Raises:
        RemoteError: the states are of another size.
        ValueError: at the end, when a row is missing, has another length than was sent, or a number that is not finite.
    """
    if "metadata" not in response.headers:
        raise ValueError("the answer has no description of its rows: is this a server in pooling mode?")
    described = _Description.model_validate_json(response.headers["metadata"]).data
    rows = {row.index: row for row in described}
    if len(rows) < len(described):
        raise ValueError("the answer has several rows of one index")
    problems = []
    for index, length in enumerate(lengths):
        try:
            if index not in rows:
                raise ValueError(f"row {index} of {len(lengths)} is missing in the answer")
            states = _states(rows[index], length, size, response.content)
        except ValueError as error:
            problems.append(str(error))
        else:
            yield index, states
    if problems:
        raise ValueError(problems[0])


def _states(row: _Row, length: int, size: int, content: bytes) -> Tensor:
    tokens, width = row.shape
    if width != size:
        raise RemoteError(
            f"a server sends hidden states of size {width}, and the head of the teacher's checkpoint takes {size}: "
            "they are of different models; correct model or urls"
        )
    if tokens != length:
        raise ValueError(f"row {row.index}: {tokens} hidden states for {length} tokens")
    dtype, data = getattr(torch, row.embed_dtype), content[row.start : row.end]
    if len(data) != length * size * dtype.itemsize:
        raise ValueError(f"row {row.index}: {len(data)} bytes for {length} x {size} numbers of {row.embed_dtype}")
    states = torch.frombuffer(bytearray(data), dtype=dtype).view(row.shape)
    if not bool(states.isfinite().all()):
        raise ValueError(f"row {row.index} holds numbers that are not finite")
    return states
