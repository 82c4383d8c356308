"""What a self teacher sees in place of the student's prompt: a template over the example and the row's verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from jinja2 import UndefinedError

from opd.records import Example, Message, Reward, Rollout
from opd.templates import compiled, names_in, rendered

OF_EXAMPLE = {"prompt", "answer", "source", "columns"}
OF_VERDICTS = {"sibling", "reward", "parts"}


class View:
    """A Jinja template of the prompt that the teacher gets.

    It sees `prompt` (plain text, or what the last user message of a chat says), `answer`, `source`, `columns` (the
    further columns of the example), and of the row `sibling` (a correct answer of the same group), `reward` and `parts`
    (its own verdict, whole and by name). What does not exist is undefined: using it means that there is no view, unless
    the template asks first (`{% if sibling is defined %}`).

    Raises:
        ValueError: the template is no valid Jinja, or names something else.
    """

    def __init__(self, template: str) -> None:
        self._template = compiled(template, OF_EXAMPLE | OF_VERDICTS, " (a column of the data by columns.{name})")
        names = names_in(template)
        self.reads_siblings = "sibling" in names
        self.reads_verdicts = bool(names & OF_VERDICTS)

    def of(self, example: Example, reward: Reward, sibling: str | None) -> Example | None:
        """The example with the prompt that the teacher gets; None where something that it needs does not exist.

        Raises:
            TemplateFault: the template fails for another reason.
        """
        messages = example.prompt
        known = {
            "prompt": messages if isinstance(messages, str) else messages[_asking(messages)]["content"],
            "answer": example.answer,
            "source": example.source,
            "columns": example.columns,
            "sibling": sibling,
            "reward": reward.value,
            "parts": reward.parts,
        }
        try:
            text = rendered(self._template, known)
        except UndefinedError:
            return None
        if isinstance(messages, str):
            return replace(example, prompt=text)
        asking = _asking(messages)
        asked = {**messages[asking], "content": text}
        return replace(example, prompt=[*messages[:asking], asked, *messages[asking + 1 :]])


def _asking(messages: Sequence[Message]) -> int:
    """Place of the last user message; of the last message where there is none."""
    users = [place for place, message in enumerate(messages) if message["role"] == "user"]
    return users[-1] if users else len(messages) - 1


def correct_siblings(rollouts: Sequence[Rollout], rewards: Sequence[Reward], correct_from: float) -> list[str | None]:
    """For every rollout the text of the first correct answer among the others of its group; None without one."""
    correct: dict[tuple[str, str], list[int]] = {}
    for index, (rollout, reward) in enumerate(zip(rollouts, rewards, strict=True)):
        if reward.value is not None and reward.value >= correct_from:
            correct.setdefault(rollout.group, []).append(index)
    others = [[i for i in correct.get(rollout.group, []) if i != index] for index, rollout in enumerate(rollouts)]
    return [rollouts[found[0]].text if found else None for found in others]


def quotes(answer: Sequence[int], view: Sequence[int], prompt: Sequence[int], length: int) -> bool:
    """Whether the answer repeats `length` consecutive tokens that the view has and the student's prompt has not."""
    return bool(_runs(answer, length) & (_runs(view, length) - _runs(prompt, length)))


def _runs(token_ids: Sequence[int], length: int) -> set[tuple[int, ...]]:
    return {tuple(token_ids[start : start + length]) for start in range(len(token_ids) - length + 1)}
