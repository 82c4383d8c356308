"""The teachers of a run as one stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from opd.heads import Head
from opd.prompts import Stream
from opd.records import FullVocab, Rollout
from opd.teachers import Teacher
from opd.terms import Term


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

    def start(self) -> None:
        """Loads or connects every teacher that a term uses."""
        for teacher in self.teachers.values():
            teacher.start()

    def score(self, rollouts: Sequence[Rollout]) -> dict[str, list[FullVocab | None]]:
        """Teacher name -> one entry per rollout, None where no term asks for it or the teacher has none."""
        return {name: self._score_with(name, rollouts) for name in self.teachers}

    def _score_with(self, name: str, rollouts: Sequence[Rollout]) -> list[FullVocab | None]:
        asked = [i for i, r in enumerate(rollouts) if r.prompt.stream in self.streams_of[name] and r.token_ids]
        return self._spread(self.teachers[name].score([rollouts[i] for i in asked]), asked, len(rollouts))

    def score_all(self, rollouts: Sequence[Rollout]) -> dict[str, list[FullVocab | None]]:
        """As `score`, for rollouts outside any stream (evaluation)."""
        asked = [index for index, rollout in enumerate(rollouts) if rollout.token_ids]
        return {
            name: self._spread(teacher.score([rollouts[i] for i in asked]), asked, len(rollouts))
            for name, teacher in self.teachers.items()
        }

    @staticmethod
    def _spread(scores: Sequence[FullVocab | None], places: Sequence[int], length: int) -> list[FullVocab | None]:
        spread: list[FullVocab | None] = [None] * length
        for place, score in zip(places, scores, strict=True):
            spread[place] = score
        return spread

    def heads(self, vocab_size: int) -> dict[str, Head]:
        """Teacher name -> its head over the shared vocabulary."""
        return {name: teacher.head().narrowed(vocab_size) for name, teacher in self.teachers.items()}

    def widths(self) -> dict[str, int]:
        """Teacher name -> hidden size."""
        return {name: teacher.head().weight.shape[1] for name, teacher in self.teachers.items()}

    def close(self) -> None:
        """Releases every teacher."""
        for teacher in self.teachers.values():
            teacher.close()
