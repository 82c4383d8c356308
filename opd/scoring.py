"""The teachers of a run as one stage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from opd.heads import Head
from opd.prompts import Stream
from opd.records import Rollout, TeacherScores
from opd.remote import on_all_ranks
from opd.teachers import GivesFullVocab, LimitsLength, Teacher
from opd.terms import Term


class Heads(Mapping[str, Head]):
    """Teachers' heads over the shared vocabulary, fetched when one is asked for.

    At most `resident` are kept (null: all), those asked for last: a batch whose rows are sorted by teacher needs each
    head once. What keeps none itself, a served teacher, reads its head from the checkpoint every time.
    """

    def __init__(self, teachers: Mapping[str, GivesFullVocab], vocab_size: int, resident: int | None = None) -> None:
        self.teachers, self.vocab_size, self.resident = teachers, vocab_size, resident
        self.kept: dict[str, Head] = {}

    def __getitem__(self, name: str) -> Head:
        head = self.kept.pop(name, None)
        if head is None:
            while self.resident is not None and len(self.kept) >= self.resident:
                del self.kept[next(iter(self.kept))]  # before the next one is loaded, not after
            head = self.teachers[name].head().narrowed(self.vocab_size)
        self.kept[name] = head
        return head

    def __iter__(self) -> Iterator[str]:
        return iter(self.teachers)

    def __len__(self) -> int:
        return len(self.teachers)


class TeacherStage:
    """Every teacher scores the rows of those streams that have a term under it."""

    def __init__(self, teachers: Mapping[str, Teacher], terms: Sequence[Term], streams: Mapping[str, Stream]) -> None:
        asked = dict.fromkeys(name for term in terms for name in term.teachers)
        self.teachers = {name: teachers[name] for name in asked if name in teachers}
        self.streams_of = {
            teacher: {
                stream
                for stream, spec in streams.items()
                for term in terms
                if teacher in term.teachers and (spec.terms is None or term.name in spec.terms)
            }
            for teacher in self.teachers
        }

    def start(self, max_len: int) -> None:
        """Loads or connects every teacher that a term uses.

        Raises:
            RemoteError: a server does not answer.
            ValueError: a teacher cannot take sequences of `max_len` tokens.
        """
        for name, teacher in self.teachers.items():
            on_all_ranks(teacher.start)
            if isinstance(teacher, LimitsLength) and teacher.max_len < max_len:
                raise ValueError(
                    f"teacher.{name}: takes at most {teacher.max_len} tokens; data.max_prompt_tokens plus "
                    f"sampler.params.max_tokens is {max_len}: lower one of them, or serve it with a larger max_len"
                )

    def score(self, rollouts: Sequence[Rollout]) -> dict[str, list[TeacherScores | None]]:
        """Teacher name -> one entry per rollout, None where no term asks for it or the teacher has none.

        Raises:
            RemoteError: on all ranks, when a teacher is gone for one of them.
        """
        return on_all_ranks(lambda: {name: self._score_with(name, rollouts) for name in self.teachers})

    def _score_with(self, name: str, rollouts: Sequence[Rollout]) -> list[TeacherScores | None]:
        asked = [i for i, r in enumerate(rollouts) if r.prompt.stream in self.streams_of[name] and r.token_ids]
        return _spread(self.teachers[name].score([rollouts[i] for i in asked]), asked, len(rollouts))

    def score_all(self, rollouts: Sequence[Rollout]) -> dict[str, list[TeacherScores | None]]:
        """As `score`, for rollouts outside any stream (evaluation)."""
        asked = [index for index, rollout in enumerate(rollouts) if rollout.token_ids]
        return {
            name: _spread(teacher.score([rollouts[i] for i in asked]), asked, len(rollouts))
            for name, teacher in self.teachers.items()
        }

    def heads(self, vocab_size: int, resident: int | None = None) -> Heads:
        """Name -> head of every teacher that gives the full vocabulary, `resident` of them in memory at a time."""
        return Heads(self.whole, vocab_size, resident)

    @property
    def whole(self) -> dict[str, GivesFullVocab]:
        """The teachers that give the full vocabulary."""
        return {name: teacher for name, teacher in self.teachers.items() if isinstance(teacher, GivesFullVocab)}

    def close(self) -> None:
        """Releases every teacher."""
        for teacher in self.teachers.values():
            teacher.close()


def _spread(scores: Sequence[TeacherScores | None], places: Sequence[int], length: int) -> list[TeacherScores | None]:
    spread: list[TeacherScores | None] = [None] * length
    for place, score in zip(places, scores, strict=True):
        spread[place] = score
    return spread
