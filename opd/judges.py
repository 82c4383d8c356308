"""Verdicts of a language model behind a chat API, as a reward."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, ClassVar, Literal

from jinja2 import Template, UndefinedError

from opd.chat import ApiConfig, Chat
from opd.records import Mean, Message, Rollout
from opd.templates import compiled, rendered

SEEN = {"prompt", "answer", "reference", "columns"}
FENCE = re.compile(r"\s*```(?:json)?\s*(.*?)\s*```\s*", re.DOTALL)


@dataclass
class Judge:
    """Asks a model for a score of every answer: (score - low) / (high - low), so that rewards lie in 0 to 1.

    It runs in the trainer's process: what bounds its time is `api.remote`, not `reward_policy.time_limit`. A verdict
    that is refused, cut, or not read as the template demands gives no reward, and is counted (`reward/<name>/unread`).
    A row that lacks what the template uses is not asked about and has no reward.
    Judges of one run with the same model, template and settings share one request per answer, so several parts of a
    rubric are several rewards that differ in `part` alone; with credit=gdpo each is normalised by itself.

    Args:
        model: the name by which the API knows it.
        template: Jinja text of the user message; sees `prompt` (as text), `answer` (the student's), `reference` (the
            example's answer) and `columns` (its further columns). What does not exist, or is null, is undefined: ask
            first, by `{% if reference is defined %}`.
        api: how to ask it, and what that may cost.
        part: name of the tag, or key, that holds the score.
        form: `tag`: exactly one <part>number</part> anywhere in the text; `json`: the text is one JSON object, perhaps
            in a code fence, with the number under the key; `same`: the model is given the task alone and its text is
            its own answer, which scores `high` for a student who says the same and `low` for others.
        low, high: the scale; a number outside it is not read.
        system: a system message; null for none.
        streams: names of the streams to judge, `heldout` for evaluation; null for all.
    """

    model: str
    template: str
    api: ApiConfig
    part: str = "score"
    form: Literal["tag", "json", "same"] = "tag"
    low: float = 0.0
    high: float = 10.0
    system: str | None = None
    streams: list[str] | None = None
    in_process: ClassVar[bool] = True
    _unread: Counter[bool] = field(default_factory=Counter, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not (isfinite(self.low) and isfinite(self.high) and self.low < self.high):
            raise ValueError(f"low={self.low}, high={self.high}: low must be below high")
        if not re.fullmatch(r"\w+", self.part):
            raise ValueError(f"part={self.part!r}: must be one word of letters, digits and _")
        self._compiled = compiled(self.template, SEEN)

    def start(self) -> None:
        """Opens ledger and cache; the first request connects."""
        self._chat = Chat(f"judge ({self.model})", self.model, self.api)

    def __call__(self, rollouts: Sequence[Rollout]) -> list[float | None]:
        """One score in 0 to 1 per rollout, None where there is no verdict.

        Raises:
            RemoteError: the API is gone, or the budget is spent.
            TemplateFault: the template fails.
        """
        judged = [i for i, rollout in enumerate(rollouts) if self.judges(rollout.prompt.stream)]
        chats = askable(self.messages, rollouts, judged)
        replies = self._chat.ask(list(chats.values()))
        scores: list[float | None] = [None] * len(rollouts)
        for place, reply in zip(chats, replies, strict=True):
            if reply.kind == "usable":
                scores[place] = self.read(reply.text, rollouts[place].text)
                self._unread[scores[place] is None] += 1
        return scores

    def judges(self, stream: str) -> bool:
        """Whether answers of this stream are shown to the judge."""
        return self.streams is None or stream in self.streams

    def messages(self, rollout: Rollout) -> list[Message]:
        """What the judge is asked about an answer.

        Raises:
            UndefinedError: the row lacks something that the template uses.
            TemplateFault: the template fails for another reason.
        """
        return asked_by(self._compiled, rollout, self.system)

    def read(self, text: str, answer: str = "") -> float | None:
        """The score in the judge's text, scaled to 0 to 1; None unless it stands there exactly as agreed."""
        if self.form == "same":
            return float(text.strip() == answer.strip())
        number = _tagged(text, self.part) if self.form == "tag" else _in_json(text, self.part)
        if number is None or not self.low <= number <= self.high:
            return None
        return (number - self.low) / (self.high - self.low)

    def metrics(self) -> dict[str, Mean]:
        """Shares of the verdicts since the last call: unusable ones by kind, and usable ones that could not be read."""
        unread = Mean(float(self._unread[True]), float(self._unread.total()))
        self._unread.clear()
        return {**self._chat.metrics(), "unread": unread}

    def close(self) -> None:
        """Ends the connections."""
        self._chat.close()


def asked_by(template: Template, rollout: Rollout, system: str | None) -> list[Message]:
    """The chat that asks about an answer: the rendered template, under a system message if one is given.

    Raises:
        UndefinedError, TemplateFault: as `opd.templates.rendered`.
    """
    example = rollout.prompt.example
    seen = {"prompt": rollout.prompt.text, "answer": rollout.text, "reference": example.answer}
    text = rendered(template, {**seen, "columns": example.columns})
    above: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    return [*above, {"role": "user", "content": text}]


def askable(
    messages: Callable[[Rollout], list[Message]], rollouts: Sequence[Rollout], places: Iterable[int]
) -> dict[int, list[Message]]:
    """Place -> chat of the answers that can be asked about; the others lack something that the template uses."""
    chats = {}
    for place in places:
        try:
            chats[place] = messages(rollouts[place])
        except UndefinedError:
            continue
    return chats


def _tagged(text: str, part: str) -> float | None:
    found = re.findall(rf"<{part}>(.*?)</{part}>", text, re.DOTALL)
    return _number(found[0].strip()) if len(found) == 1 else None


def _in_json(text: str, part: str) -> float | None:
    fenced = FENCE.fullmatch(text)
    try:
        found: Any = json.loads(fenced[1] if fenced else text)
    except json.JSONDecodeError:
        return None
    value = found.get(part) if isinstance(found, Mapping) else None
    return None if isinstance(value, bool) or not isinstance(value, int | float) else _number(str(value))


def _number(text: str) -> float | None:
    """A finite decimal number; no words, no fraction, no percent sign."""
    return float(text) if re.fullmatch(r"[-+]?\d{1,15}(\.\d{1,15})?", text, re.ASCII) else None
