"""The teachers of a run as one stage."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from opd import ranks
from opd.checkpoint import save_tensors
from opd.heads import Head
from opd.prompts import Stream
from opd.records import Example, Mean, Prompt, Reward, Rollout, TeacherScores
from opd.remote import on_all_ranks
from opd.rewards import Measured
from opd.teachers import (
    AnsweringTeacher,
    FollowsStudent,
    GivesFullVocab,
    LimitsLength,
    OwnTokens,
    ReadsVerdicts,
    Teacher,
    TriesExamples,
)
from opd.terms import Term, terms_on


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
    """Every teacher scores the rows of those streams that have a term under it; `answering` ones give texts."""

    def __init__(
        self,
        teachers: Mapping[str, Teacher],
        terms: Sequence[Term],
        streams: Mapping[str, Stream],
        answering: Sequence[str] = (),
    ) -> None:
        asked = dict.fromkeys(name for term in terms for name in term.teachers)
        self.teachers = {name: teachers[name] for name in asked if name in teachers}
        named = dict.fromkeys([*(stream.teacher for stream in streams.values()), *answering])
        found = {name: teachers.get(name) for name in named if name is not None}
        self.answering = {name: each for name, each in found.items() if isinstance(each, AnsweringTeacher)}
        self.terms, self.streams = terms, streams
        self.metrics: dict[str, Mean] = {}  # of the last `score`
        self._missing: dict[str, Mean] = {}  # share of the tokens asked about that got no score

    @property
    def all(self) -> dict[str, Teacher]:
        """Those that answer and those that score."""
        return {**self.answering, **self.teachers}

    def meet(self, tokenizer: PreTrainedTokenizerBase, stop_ids: Sequence[int]) -> None:
        """Tells teachers with tokens of their own of the student's.

        Raises:
            ValueError: a teacher cannot deal with them.
        """
        for name, teacher in self.teachers.items():
            if isinstance(teacher, OwnTokens):
                try:
                    teacher.meet(tokenizer, stop_ids)
                except ValueError as error:
                    raise ValueError(f"teacher.{name}.{error}") from error

    @property
    def same_tokens(self) -> dict[str, Teacher]:
        """Those whose ids are the student's."""
        return {name: teacher for name, teacher in self.teachers.items() if not isinstance(teacher, OwnTokens)}

    def check_examples(self, examples: Mapping[str, Sequence[tuple[list[int], Example]]]) -> None:
        """Has teachers try the data of the streams that they score, before anything is loaded.

        Raises:
            ValueError: a teacher does not fit it.
        """
        for name, teacher in self.teachers.items():
            if isinstance(teacher, TriesExamples):
                theirs = [
                    example
                    for stream, rows in examples.items()
                    for ids, example in rows
                    if any(
                        name in term.teachers
                        for term in terms_on(Prompt("", stream, ids, example), self.terms, self.streams)
                    )
                ]
                try:
                    teacher.check_examples(theirs)
                except ValueError as error:
                    raise ValueError(f"teacher.{name}.{error}") from error

    def start(self, max_len: int, student: nn.Module) -> None:
        """Loads or connects every teacher that scores or answers; `student` is the module in training.

        Raises:
            RemoteError: a server does not answer.
            ValueError: a teacher cannot take sequences of `max_len` tokens.
        """
        for name, teacher in self.all.items():
            if isinstance(teacher, FollowsStudent):
                teacher.attach(student)
            on_all_ranks(teacher.start)
            if isinstance(teacher, LimitsLength) and teacher.max_len < max_len:
                raise ValueError(
                    f"teacher.{name}: takes at most {teacher.max_len} tokens; data.max_prompt_tokens plus "
                    f"sampler.params.max_tokens is {max_len}: lower one of them, or serve it with a larger max_len"
                )

    def score(self, rollouts: Sequence[Rollout], rewards: Sequence[Reward]) -> dict[str, list[TeacherScores | None]]:
        """Teacher name -> one entry per rollout, None where no term asks for it or the teacher has none.

        Raises:
            RemoteError: on all ranks, when a teacher is gone for one of them.
        """
        scores = self._score(rollouts, rewards, lambda prompt: terms_on(prompt, self.terms, self.streams))
        self.metrics = self._missing | self._measured()
        return scores

    def score_all(
        self, rollouts: Sequence[Rollout], rewards: Sequence[Reward]
    ) -> dict[str, list[TeacherScores | None]]:
        """As `score`, for rollouts outside any stream (evaluation); not measured."""
        scores = self._score(rollouts, rewards, lambda prompt: [term for term in self.terms if term.takes(prompt)])
        self._measured()
        return scores

    def _measured(self) -> dict[str, Mean]:
        return {
            f"teacher/{name}/{key}": mean
            for name, teacher in self.teachers.items()
            if isinstance(teacher, Measured)
            for key, mean in teacher.metrics().items()
        }

    def _score(
        self, rollouts: Sequence[Rollout], rewards: Sequence[Reward], terms_of: Callable[[Prompt], Sequence[Term]]
    ) -> dict[str, list[TeacherScores | None]]:
        asked = [{name for term in terms_of(r.prompt) for name in term.teachers} for r in rollouts]
        places = {
            name: [i for i, rollout in enumerate(rollouts) if name in asked[i] and rollout.token_ids]
            for name in self.teachers
        }
        return on_all_ranks(
            lambda: {name: self._spread(name, rollouts, rewards, places[name]) for name in self.teachers}
        )

    def _spread(
        self, name: str, rollouts: Sequence[Rollout], rewards: Sequence[Reward], places: Sequence[int]
    ) -> list[TeacherScores | None]:
        """The teacher's scores of the rollouts at these places, None elsewhere."""
        teacher, asked = self.teachers[name], [rollouts[place] for place in places]
        if isinstance(teacher, ReadsVerdicts):
            scores = teacher.score_judged(asked, [rewards[place] for place in places])
        else:
            scores = teacher.score(asked)
        spread: list[TeacherScores | None] = [None] * len(rollouts)
        missing = total = 0
        for place, score in zip(places, scores, strict=True):
            spread[place], tokens = score, len(rollouts[place].token_ids)
            known = tokens if score is not None and score.present is None else 0
            known += 0 if score is None or score.present is None else int(score.present.sum())
            missing, total = missing + tokens - known, total + tokens
        self._missing[f"teacher/{name}/missing"] = Mean(float(missing), float(total))
        return spread

    def follow(self, weights: Callable[[], Iterable[tuple[str, Tensor]]], step: int) -> None:
        """Lets teachers that are made of the student take its weights after the update to `step`; all ranks call."""
        for teacher in self._following.values():
            teacher.follow(weights, step)

    @property
    def _following(self) -> dict[str, FollowsStudent]:
        return {name: teacher for name, teacher in self.all.items() if isinstance(teacher, FollowsStudent)}

    def save(self, folder: Path) -> None:
        """Writes into a checkpoint what teachers became of the student; all ranks call, rank 0 writes.

        Raises:
            OSError: it could not be written.
        """
        for name, teacher in self._following.items():
            if (state := teacher.state()) and ranks.rank() == 0:
                save_tensors(state, folder / "teachers" / f"{name}.safetensors")

    def load(self, folder: Path) -> None:
        """Restores what `save` wrote.

        Raises:
            ValueError: the checkpoint is of a run without such a teacher.
        """
        for name, teacher in self._following.items():
            if teacher.state():
                file = folder / "teachers" / f"{name}.safetensors"
                if not file.is_file():
                    raise ValueError(
                        f"teacher.{name}: its weights follow the student's, and the checkpoint {folder} holds none for "
                        "it; take the configuration that made it, or start anew by resume=never"
                    )
                teacher.restore(load_file(file))

    def heads(self, vocab_size: int, resident: int | None = None) -> Heads:
        """Name -> head of every teacher that gives the full vocabulary, `resident` of them in memory at a time."""
        return Heads(self.whole, vocab_size, resident)

    @property
    def whole(self) -> dict[str, GivesFullVocab]:
        """The teachers that give the full vocabulary."""
        return {name: teacher for name, teacher in self.teachers.items() if isinstance(teacher, GivesFullVocab)}

    def close(self) -> None:
        """Releases every teacher."""
        for teacher in (self.answering | self.teachers).values():
            teacher.close()
