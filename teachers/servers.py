"""What the servers of a remote teacher hold, asked before anything is scored."""

from __future__ import annotations

from collections.abc import Callable

import httpx
from pydantic import BaseModel
from transformers import PreTrainedTokenizerBase

from opd.remote import Remote, RemoteError


class Card(BaseModel):
    """One model of a vLLM server."""

    id: str
    max_model_len: int


class _Cards(BaseModel):
    data: list[Card]


class _Tokens(BaseModel):
    tokens: list[int]


def only_model(remote: Remote, name: str | None) -> Card:
    """The model `name`, or the only one there, which all servers hold under one name; the shortest of their limits.

    Raises:
        RemoteError: none answers, one has no such model, or several and no name was given.
    """
    found = remote.ask_each("GET", "/v1/models", lambda response: _Cards.model_validate_json(response.content).data)
    chosen = {}
    for url, cards in found.items():
        names = [card.id for card in cards]
        if (name is None and len(cards) != 1) or (name is not None and name not in names):
            raise RemoteError(f"{remote.key}: {url} holds {', '.join(names)}; set served_name to one of them")
        chosen[url] = cards[0 if name is None else names.index(name)]
    if len(different := {card.id for card in chosen.values()}) > 1:
        raise RemoteError(f"{remote.key}: the servers hold {' and '.join(sorted(different))}; set served_name to one")
    return min(chosen.values(), key=lambda card: card.max_model_len)


def check_tokenizer(remote: Remote, name: str, tokenizer: PreTrainedTokenizerBase, model: str) -> None:
    """Every server makes the same ids of a text that has tokens from all over the vocabulary.

    Raises:
        RemoteError: one does not.
    """
    ids = range(0, len(tokenizer), max(1, len(tokenizer) // 64))
    text = str(tokenizer.decode(list(ids), skip_special_tokens=True))
    mine = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    asked = {"model": name, "prompt": text, "add_special_tokens": False}
    made = remote.ask_each(
        "POST", "/tokenize", lambda response: _Tokens.model_validate_json(response.content).tokens, asked
    )
    for url, theirs in made.items():
        if theirs != mine:
            raise RemoteError(
                f"{remote.key}: {url} makes the tokens {theirs[:6]}... of a text, and the tokenizer of {model} "
                f"{mine[:6]}...: they hold different models; correct model or urls"
            )


def check_alike(
    remote: Remote,
    path: str,
    body: object,
    read: Callable[[httpx.Response], list[float]],
    tolerance: float,
    way_out: str,
) -> None:
    """All servers give the same numbers for one request, up to a share of the largest of them.

    Raises:
        RemoteError: one refuses (`way_out` says what it should be), or two of them differ.
    """
    try:
        given = remote.ask_each("POST", path, read, body)
    except RemoteError as error:
        raise RemoteError(f"{error} ({way_out})") from error
    (first, expected), *others = given.items()
    largest = max(map(abs, expected))
    for url, numbers in others:
        gap = max((abs(a - b) for a, b in zip(numbers, expected, strict=True)), default=0.0)
        if gap > tolerance * largest:
            raise RemoteError(
                f"{remote.key}: {first} and {url} score one text differently (by {gap:.3g}): they hold different "
                "weights; correct urls"
            )
