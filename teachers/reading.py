"""The student's answers as a teacher with another tokenizer reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import nan

from transformers import PreTrainedTokenizerBase

from opd.prompts import Encoder
from opd.records import Example, Rollout, TeacherScores
from opd.teachers.alignment import Alignment, Vocabulary, align
from opd.teachers.protocol import LimitsLength, Teacher


@dataclass(frozen=True)
class Reading:
    """A rollout in the teacher's tokens, and how those lie over the student's."""

    rollout: Rollout
    alignment: Alignment


class Reader:
    """Renders prompts with the teacher's tokenizer and aligns answers with it.

    Args:
        tokenizer: the teacher's.
        student: the student's tokenizer.
        stop_ids: of the student.
        special_tokens: further special tokens, the student's -> the teacher's.
        stop_tokens: of the teacher; null for its end token. The first is what it reads at an answer's end.

    Raises:
        ValueError: a token that does not exist; a tokenizer whose tokens are no bytes.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        student: PreTrainedTokenizerBase,
        stop_ids: Sequence[int],
        special_tokens: Mapping[str, str],
        stop_tokens: Sequence[str] | None,
    ) -> None:
        self.tokenizer = tokenizer
        self.student, self.teacher = Vocabulary(student, "student.model"), Vocabulary(tokenizer, "inner")
        stops = stop_tokens if stop_tokens is not None else [str(tokenizer.eos_token)] if tokenizer.eos_token else []
        if not stops:
            raise ValueError("stop_tokens: the teacher's tokenizer has no end token; name what ends its answers")
        theirs = [_id(token, tokenizer, "stop_tokens", "the teacher") for token in stops]
        pairs = {
            _id(own, student, "special_tokens", "the student"): _id(other, tokenizer, "special_tokens", "the teacher")
            for own, other in special_tokens.items()
        }
        ends = [index for index in stop_ids if index == student.eos_token_id] or list(stop_ids)
        self.read_as = {**pairs, **dict.fromkeys(stop_ids, theirs[0])}  # the student's id -> the teacher's
        self.heard = {other: own for own, other in pairs.items()}  # the teacher's -> the student's
        if ends:
            self.heard |= dict.fromkeys(theirs, ends[0])
        for ids, vocabulary in ((self.read_as, self.student), (self.heard, self.teacher)):
            for index in ids:  # whether or not the tokenizer calls them special
                vocabulary.pieces[index] = None
        self._encoder = Encoder(tokenizer, 2**31, "error")

    def check(self, examples: Sequence[Example]) -> None:
        """Refuses chats where the teacher has no chat template."""
        if self.tokenizer.chat_template is None and any(not isinstance(e.prompt, str) for e in examples):
            raise ValueError("inner: chat messages, but its tokenizer has no chat template; use another teacher")

    def read(self, rollout: Rollout) -> Reading:
        """The rollout in the teacher's tokens, whose response is empty where it can read none of it."""
        alignment = align(rollout.token_ids, self.student, self.teacher, self.read_as)
        prompt = replace(rollout.prompt, token_ids=self._encoder.ids(rollout.prompt.example, "inner"))
        ids = alignment.teacher_ids
        theirs = replace(rollout, prompt=prompt, token_ids=ids, logp=[nan] * len(ids), trainable=[], sampler_top=None)
        return Reading(theirs, alignment)

    def ask(self, inner: Teacher, readings: Sequence[Reading]) -> list[TeacherScores | None]:
        """The inner teacher's scores of its own tokens; None where an answer is unreadable or too long for it."""
        longest = inner.max_len if isinstance(inner, LimitsLength) else None
        asked = [
            number
            for number, reading in enumerate(readings)
            if reading.alignment.groups
            and (longest is None or len(reading.rollout.prompt.token_ids) + len(reading.rollout.token_ids) <= longest)
        ]
        given = dict(zip(asked, inner.score([readings[number].rollout for number in asked]), strict=True))
        return [given.get(number) for number in range(len(readings))]


def _id(token: str, tokenizer: PreTrainedTokenizerBase, key: str, whose: str) -> int:
    index = tokenizer.get_vocab().get(token)
    if index is None:
        raise ValueError(f"{key}: {whose} has no token {token!r}")
    return index
