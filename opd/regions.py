"""Parts of an answer: what a model thinks, and what it says after that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from opd.rows import Row
from opd.weighting import Facts


@dataclass(frozen=True)
class Region:
    """A weigher that keeps one part of an answer: `thinking`, its marks included, or `content`, all that follows.

    Thinking begins with the start mark, in the answer or at the end of the prompt (a template may have written it), and
    ends with the end mark; without an end it is all the rest. An answer without thinking is content. So a teacher that
    thinks otherwise than the student may be heard on one part alone, or two teachers on one each.

    Args:
        part: which one keeps factor 1.
        start_ids, end_ids: token ids of the two marks, such as those of `<think>` and `</think>`.
    """

    part: Literal["thinking", "content"]
    start_ids: list[int]
    end_ids: list[int]
    needs_facts: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not self.start_ids or not self.end_ids:
            raise ValueError("start_ids, end_ids: empty; give the token ids of the two marks")

    def weigh(self, rows: Sequence[Row], facts: Facts) -> list[list[float]]:
        """1 on the tokens of the part, 0 on the others."""
        factors = []
        for row in rows:
            first, behind = self._thinking(row.rollout.prompt.token_ids, row.rollout.token_ids)
            kept = (first <= place < behind for place in row.trainable)
            factors.append([float(inside == (self.part == "thinking")) for inside in kept])
        return factors

    def _thinking(self, prompt: Sequence[int], answer: Sequence[int]) -> tuple[int, int]:
        """Where thinking begins, and the place behind its end; equal where there is none."""
        in_prompt = list(prompt[len(prompt) - len(self.start_ids) :]) == self.start_ids
        first = 0 if in_prompt else _find(answer, self.start_ids, 0)
        if first is None:
            return 0, 0
        end = _find(answer, self.end_ids, first)
        return first, len(answer) if end is None else end + len(self.end_ids)


def _find(tokens: Sequence[int], mark: Sequence[int], start: int) -> int | None:
    """The first place from `start` on where the mark stands."""
    places = range(start, len(tokens) - len(mark) + 1)
    return next((place for place in places if list(tokens[place : place + len(mark)]) == list(mark)), None)
