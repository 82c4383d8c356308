"""Hints and critiques by a chat API, as a column that privileged teachers and judges may read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from opd.chat import ApiConfig, Chat
from opd.judges import SEEN, askable, asked_by
from opd.records import Mean, Message, Rollout
from opd.templates import compiled, names_in


@dataclass
class ApiColumn:
    """What an API says of an example (`columns.NAME` of other templates): `data.columns.NAME`.

    A template that does not read `answer` asks once per example, and the text is a hint; one that does asks about every
    answer of the student, and the text is a critique. What is refused, cut or empty is no text, and neither is there
    one for a row that lacks what the template uses: a privileged teacher then has no view of that row, and no score.

    Args:
        model: the name by which the API knows it.
        template: Jinja text of the user message; sees `prompt`, `answer`, `reference` and `columns`, as a judge's.
        api: how to ask it, and what that may cost.
        system: a system message; null for none.
        streams: names of the streams whose examples get the column; null for all.
    """

    model: str
    template: str
    api: ApiConfig
    system: str | None = None
    streams: list[str] | None = None

    def __post_init__(self) -> None:
        self._compiled = compiled(self.template, SEEN)
        self.reads_answers = "answer" in names_in(self.template)

    def start(self) -> None:
        """Opens ledger and cache; the first request connects."""
        self._chat = Chat(f"column ({self.model})", self.model, self.api)

    def fill(self, rollouts: Sequence[Rollout]) -> list[str | None]:
        """The API's texts, None where there is no usable one.

        Raises:
            RemoteError: the API is gone, or the budget is spent.
            TemplateFault: the template fails.
        """
        asked = [i for i, r in enumerate(rollouts) if self.streams is None or r.prompt.stream in self.streams]
        chats = askable(self.messages, rollouts, asked)
        replies = self._chat.ask(list(chats.values()))
        texts: list[str | None] = [None] * len(rollouts)
        for place, reply in zip(chats, replies, strict=True):
            texts[place] = reply.text if reply.kind == "usable" else None
        return texts

    def messages(self, rollout: Rollout) -> list[Message]:
        """What the API is asked about an answer; fails as a judge's does."""
        return asked_by(self._compiled, rollout, self.system)

    def metrics(self) -> dict[str, Mean]:
        """Shares of the texts since the last call, by kind, and of those that had to be asked for."""
        return self._chat.metrics()

    def close(self) -> None:
        """Ends the connections."""
        self._chat.close()
