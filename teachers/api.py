"""A teacher behind a chat API: it answers in text, and can score nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from transformers import PreTrainedTokenizerBase

from opd.chat import ApiConfig, Chat, Kind, chat_of
from opd.losses import Need
from opd.losses.protocol import needs
from opd.records import Finish, Mean, Prompt, Rollout, TeacherScores
from opd.students import SamplingParams

FINISH: Mapping[Kind, Finish] = {"usable": "stop", "cut": "length", "empty": "aborted", "refused": "aborted"}


@dataclass
class ApiTeacher:
    """An OpenAI-compatible chat model whose answers the student imitates (`answers: teacher` of a stream).

    Its answers depend on the prompt alone, so a prompt that comes again is not asked, and not paid, again.

    Args:
        model: the name by which the API knows it.
        api: how to ask it, and what that may cost.
        system: a system message ahead of every prompt; null for none.
    """

    model: str
    api: ApiConfig
    system: str | None = None
    provides: ClassVar[frozenset[Need]] = needs("text")

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Not known: nothing of this teacher is compared token by token."""
        raise ValueError(f"{self.model} is known by its texts alone: it has no tokenizer here")

    def start(self) -> None:
        """Opens ledger and cache; the first request connects."""
        self._chat = Chat(f"teacher (ApiTeacher, {self.model})", self.model, self.api)

    def score(self, rollouts: Sequence[Rollout]) -> list[TeacherScores | None]:
        """No text says how likely other tokens would have been: every score is missing."""
        return [None for _ in rollouts]

    def sample(self, prompts: Sequence[Prompt], params: SamplingParams, seed: int) -> list[Rollout]:
        """Answers as text without token ids, in the order of prompts and samples; drawn as `api` says.

        `finish` is `stop` for a whole answer, `length` for one that was cut, `aborted` for a refusal or an empty one.
        """
        asked = [(prompt, index) for prompt in prompts for index in range(prompt.samples)]
        chats = [chat_of(prompt.example, self.system) for prompt, _ in asked]
        replies = self._chat.ask(chats, [index for _, index in asked])
        return [
            Rollout(prompt, index, [], [], reply.text, FINISH[reply.kind], version=0)
            for (prompt, index), reply in zip(asked, replies, strict=True)
        ]

    def metrics(self) -> dict[str, Mean]:
        """Shares of the answers since the last call, by kind, and of those that had to be asked for."""
        return self._chat.metrics()

    def close(self) -> None:
        """Ends the connections."""
        self._chat.close()
