"""Verdicts of a language model behind a chat API, as a reward."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, ClassVar, Literal

from jinja2 import StrictUndefined, Template, TemplateSyntaxError, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from opd.chat import ApiConfig, Chat
from opd.records import Mean, Message, Rollout

SEEN = {"prompt", "answer", "reference", "columns"}
ENVIRONMENT = ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)
FENCE = re.compile(r"\s*```(?:json)?\s*(.*?)\s*```\s*", re.DOTALL)


@dataclass
class Judge:
    """Asks a model for a score of every answer: (score - low) / (high - low), so that rewards lie in 0 to 1.

    It runs in the trainer's process: what bounds its time is `api.remote`, not `reward_policy.time_limit`. A verdict
    that is refused, cut, or not read as the template demands gives no reward, and is counted (`reward/<name>/unread`).
    Judges of one run with the same model, template and settings share one request per answer, so several parts of a
    rubric are several rewards that differ in `part` alone; with credit=gdpo each is normalised by itself.

    Args:
        model: the name by which the API knows it.
        template: Jinja text of the user message; sees `prompt` (as text), `answer` (the student's), `reference` (the
            example's answer) and `columns` (its further columns).
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
        self._compiled = compiled(self.template)

    def start(self) -> None:
        """Opens ledger and cache; the first request connects."""
        self._chat = Chat(f"judge ({self.model})", self.model, self.api)

    def __call__(self, rollouts: Sequence[Rollout]) -> list[float | None]:
        """One score in 0 to 1 per rollout, None where there is no verdict.

        Raises:
            RemoteError: the API is gone, or the budget is spent.
        """
        judged = [i for i, rollout in enumerate(rollouts) if self.judges(rollout.prompt.stream)]
        replies = self._chat.ask([self.messages(rollouts[i]) for i in judged])
        scores: list[float | None] = [None] * len(rollouts)
        for place, reply in zip(judged, replies, strict=True):
            if reply.kind == "usable":
                scores[place] = self.read(reply.text, rollouts[place].text)
                self._unread[scores[place] is None] += 1
        return scores

    def judges(self, stream: str) -> bool:
        """Whether answers of this stream are shown to the judge."""
        return self.streams is None or stream in self.streams

    def messages(self, rollout: Rollout) -> list[Message]:
        """What the judge is asked about an answer."""
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
    """The chat that asks about an answer: the rendered template, under a system message if one is given."""
    example = rollout.prompt.example
    text = template.render(
        prompt=rollout.prompt.text, answer=rollout.text, reference=example.answer, columns=example.columns
    )
    above: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    return [*above, {"role": "user", "content": text}]


def names_in(template: str) -> set[str]:
    """What a template reads."""
    return meta.find_undeclared_variables(ENVIRONMENT.parse(template))


def compiled(template: str) -> Template:
    """The template, sandboxed.

    Raises:
        ValueError: it is no valid Jinja, or names something that a judge does not see.
    """
    try:
        unknown = sorted(names_in(template) - SEEN)
        if not unknown:
            return ENVIRONMENT.from_string(template)
    except TemplateSyntaxError as error:
        raise ValueError(f"template: no valid Jinja ({error.message}, line {error.lineno})") from error
    raise ValueError(f"template: there is no {unknown[0]!r}; it may use {', '.join(sorted(SEEN))}")


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
