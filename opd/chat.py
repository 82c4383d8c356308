"""Chat completions over HTTP (OpenAI-compatible): metered, kept on disk, and judged usable or not."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import httpx

from opd.answer_cache import AnswerCache, content_key
from opd.ledger import Account, BudgetSpent, Ledger
from opd.records import Example, Mean, Message
from opd.remote import Remote, RemoteConfig

REFUSAL = r"(?i)\W*((i\W?m|i am) (very |so )?(sorry|unable|not able)|sorry, |i can(no|\W)t |as an ai\b)"
Kind = Literal["usable", "empty", "refused", "cut"]
KINDS: tuple[Kind, ...] = ("usable", "empty", "refused", "cut")


@dataclass(frozen=True)
class ApiConfig:
    """How to ask an OpenAI-compatible API, and what that may cost.

    Args:
        account: prices, budget, and the folder of ledger and answers.
        max_tokens: longest answer; a longer one is cut by the server, and then not used.
        limit_key: what the API calls that limit.
        temperature: null leaves it to the server.
        refusal: regular expression; a text that begins so is a refusal. null: only what the server marks as one.
        extra: further keys of every request, such as reasoning_effort.
    """

    remote: RemoteConfig
    account: Account
    max_tokens: int = 1024
    limit_key: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    temperature: float | None = 1.0
    refusal: str | None = REFUSAL
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens={self.max_tokens}: must be at least 1")
        if self.temperature is not None and self.temperature < 0:
            raise ValueError(f"temperature={self.temperature}: must not be negative")
        owned = {"model", "messages", "max_tokens", "max_completion_tokens", "temperature", "n", "stream"}
        if taken := sorted(owned & self.extra.keys()):
            raise ValueError(f"extra.{taken[0]}: set by the keys beside extra, or not supported; leave it out")
        try:
            re.compile(self.refusal or "")
        except re.error as error:
            raise ValueError(f"refusal: {self.refusal!r} is not a regular expression: {error}") from error

    def body(self, model: str, messages: Sequence[Message]) -> dict[str, Any]:
        """The JSON of one request."""
        temperature = {} if self.temperature is None else {"temperature": self.temperature}
        chat = [dict(message) for message in messages]
        return {"model": model, "messages": chat, self.limit_key: self.max_tokens, **temperature, **self.extra}


@dataclass(frozen=True)
class Reply:
    """One answer and what it is good for.

    `usable`, or else `empty`, `cut` at the limit, `refused`: refused, filtered, or ended in another odd way.
    """

    text: str
    kind: Kind


class Chat:
    """A connection to one model. `key`: how messages name the part of the run that asks."""

    def __init__(self, key: str, model: str, config: ApiConfig) -> None:
        self.key, self.model, self.config = key, model, config
        self.cache = AnswerCache(Path(config.account.cache or config.account.folder))
        self.ledger = Ledger(key, config.account)
        self.remote = Remote(key, config.remote, self.ledger)
        self._seen: Counter[str] = Counter()  # since `metrics` was asked last

    def ask(self, chats: Sequence[Sequence[Message]], draws: Sequence[int] | None = None) -> list[Reply]:
        """One reply per chat, in order; what was answered before, in this run or another, is not asked again.

        `draws` numbers the answers to equal chats that shall be different ones.

        Raises:
            BudgetSpent: the next request might exceed the budget.
            RemoteError: the servers are gone, or refuse.
        """
        bodies = [self.config.body(self.model, messages) for messages in chats]
        keys = [content_key([body, draw]) for body, draw in zip(bodies, draws or [0] * len(bodies), strict=True)]
        known = {key: self.cache.get(key) for key in dict.fromkeys(keys)}
        missing = {key: body for key, body in zip(keys, bodies, strict=True) if known[key] is None}
        known |= self._fetch(missing)
        replies = [self._reply(known[key]) for key in keys]
        self._seen.update(reply.kind for reply in replies)
        self._seen.update(asked=len(missing), answers=len(replies))
        return replies

    def metrics(self) -> dict[str, Mean]:
        """Shares of the answers since the last call: of each kind, and of those that had to be asked for."""
        count = float(self._seen["answers"])
        found = {kind: Mean(float(self._seen[kind]), count) for kind in (*KINDS, "asked")}
        self._seen.clear()
        return found

    def close(self) -> None:
        """Ends the connections."""
        self.remote.close()

    def _fetch(self, missing: Mapping[str, Any]) -> dict[str, Any]:
        names = list(missing)

        def read(number: int, response: httpx.Response) -> Any:
            answer = read_answer(response)
            self.cache.put(names[number], answer)
            return answer

        try:
            return dict(
                zip(names, self.remote.post_all("/v1/chat/completions", list(missing.values()), read), strict=True)
            )
        except BudgetSpent:
            self.remote.close(wait=True)  # what is under way is paid for: let it reach the cache
            raise

    def _reply(self, answer: Mapping[str, Any]) -> Reply:
        text = str(answer["text"])
        if answer["refused"] or (self.config.refusal is not None and re.match(self.config.refusal, text)):
            return Reply(text, "refused")
        if answer["finish"] == "length":
            return Reply(text, "cut")
        return Reply(text, "usable" if text.strip() else "empty")


def read_answer(response: httpx.Response) -> dict[str, Any]:
    """Text, end and refusal of a chat completion.

    Raises:
        ValueError: it is not one.
    """
    try:
        choice = response.json()["choices"][0]
        message, finish = choice["message"], choice["finish_reason"]
        text, refusal = message.get("content") or "", message.get("refusal")
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(f"the answer is no chat completion ({error!r})") from error
    if not isinstance(text, str):
        raise ValueError(f"the answer's content is no text: {text!r}")
    text = text.encode(errors="replace").decode()  # half of a surrogate pair is no character
    return {"text": text, "finish": finish, "refused": bool(refusal) or finish not in ("stop", "length")}


def chat_of(example: Example, system: str | None = None) -> list[Message]:
    """The example's prompt as messages, under a system message if one is given."""
    prompt = example.prompt
    messages: list[Message] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    return messages if system is None else [{"role": "system", "content": system}, *messages]
