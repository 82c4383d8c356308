"""A teacher with another tokenizer: it reads the student's text in its own tokens, and is heard in the student's."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from opd.heads import Head
from opd.losses import Need
from opd.losses.protocol import needs
from opd.records import Example, FullVocab, Mean, Rollout, TeacherScores
from opd.shared_vocabulary import PLACE_BITS, Fold, Ranked, begun, place
from opd.teachers.alignment import Alignment, Vocabulary
from opd.teachers.protocol import FollowsStudent, GivesFullVocab, OwnTokens, Teacher
from opd.teachers.reading import Reader, Reading

Strategy = Literal["shared", "marginal", "ranked"]


@dataclass
class CrossTokenizerTeacher:
    """Full-vocabulary scores of a teacher whose tokens are not the student's.

    The teacher gets the example's prompt under its own chat template and tokenizer, and the student's answer, byte for
    byte, in its own tokens. Where no score is possible it is missing, and counts nowhere.

    Args:
        inner: any teacher that gives the full vocabulary (local, served).
        strategy: `shared`: where one token of the student is one of the teacher's, both distributions restricted to
            the tokens that both have, and renormalised (2610.08448). `marginal`: where the student's token lies within
            one of the teacher's, the teacher's next token gives its probability to the token with which the student's
            tokenizer would begin its bytes; both restricted to such tokens (2607.22334). `ranked`: wherever both
            stand at the same byte, common tokens by id and the other probabilities by rank, for the losses ULD and GOLD
            alone.
        inside: of `marginal`: also where the teacher stands inside a token, given the bytes of it that are there: what
            its tokens go on with, one by one, and as one the probability that it had ended there. Exact for a teacher
            that writes every text in one way.
        special_tokens: further special tokens of the student -> the teacher's; without, an answer is read up to one.
        stop_tokens: of the teacher, they mean that the answer ends; null for its tokenizer's end token. Together they
            meet the student's end token.

    `teacher/<name>/coverage` is the share of tokens with a score; `unaligned`, of those in no group of equal bytes;
    `cut`, of answers that end within a character; `unread`, of answers without any score; `shared_mass` and
    `student_shared_mass`, the probability of what is compared, before it is renormalised (inside a token: of going on).
    """

    inner: GivesFullVocab
    strategy: Strategy = "shared"
    inside: bool = True
    special_tokens: dict[str, str] = field(default_factory=dict)
    stop_tokens: list[str] | None = None

    def __post_init__(self) -> None:
        self._metrics: dict[str, Mean] = {}
        check_inner(self.inner)
        if "full_vocab" not in self.inner.provides:
            raise ValueError(
                f"inner ({type(self.inner).__name__}): gives {', '.join(sorted(self.inner.provides))}, not the full "
                "vocabulary; use a local or served one, or opd.teachers.SpanTeacher"
            )

    @property
    def provides(self) -> frozenset[Need]:
        """Every token's probability; `ranked` only for losses that do not ask whose it is."""
        return needs("ranked") if self.strategy == "ranked" else needs("full_vocab")

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The teacher's own."""
        return self.inner.tokenizer()

    def meet(self, tokenizer: PreTrainedTokenizerBase, stop_ids: Sequence[int]) -> None:
        """Lays the student's vocabulary over the teacher's.

        Raises:
            ValueError: a tokenizer whose tokens are no bytes, or a special token that does not exist.
        """
        self._reader = Reader(self.tokenizer(), tokenizer, stop_ids, self.special_tokens, self.stop_tokens)
        student, teacher = self._reader.student, self._reader.teacher
        ids = _same_bytes(student, teacher) if self.strategy != "marginal" else _first_tokens(student, teacher)
        for index, own in self._reader.heard.items():
            ids[index] = own
        if not any(index >= 0 for index in ids):
            raise ValueError("inner: its vocabulary shares no token with the student's")
        self._ids = torch.tensor(ids)
        self._heard = set(ids) - {-1}
        self._begun = _Begun(student, teacher)

    def check_examples(self, examples: Sequence[Example]) -> None:
        """Tries the teacher's chat template.

        Raises:
            ValueError: it has none, and the prompts are chats.
        """
        self._reader.check(examples)

    def start(self) -> None:
        """Starts the inner teacher."""
        self.inner.start()

    def head(self) -> Head:
        """The inner teacher's, cut to its tokenizer's ids, with the way into the student's."""
        onto = Ranked if self.strategy == "ranked" else Fold
        translation = onto(self._ids, len(self._reader.student.pieces))
        if isinstance(translation, Fold) and self.strategy == "marginal" and self.inside:
            translation = replace(translation, continuations=self._begun)
        return replace(self.inner.head().narrowed(len(self._ids)), onto=translation)

    def score(self, rollouts: Sequence[Rollout]) -> list[TeacherScores | None]:
        """Hidden states [R, H] at the student's tokens; None for an answer that the teacher cannot read at all."""
        readings = [self._reader.read(rollout) for rollout in rollouts]
        states = self._reader.ask(self.inner, readings)
        scores: list[TeacherScores | None] = [
            None if state is None else self._scores(rollout, reading.alignment, state)
            for rollout, reading, state in zip(rollouts, readings, states, strict=True)
        ]
        self._metrics = measured(readings, scores)
        return scores

    def _scores(self, rollout: Rollout, alignment: Alignment, given: TeacherScores) -> FullVocab:
        assert isinstance(given, FullVocab), "the inner teacher of a cross-tokenizer teacher gives hidden states"
        length = len(rollout.token_ids)
        hidden = given.hidden.new_zeros(length, given.hidden.shape[1])
        present = torch.zeros(length, dtype=torch.bool)
        places = torch.zeros(length, dtype=torch.long)
        for token, theirs, where in self._pairs(rollout.token_ids, alignment):
            if given.present is None or bool(given.present[theirs]):
                hidden[token], present[token], places[token] = given.hidden[theirs], True, where
        return FullVocab(hidden, present, places)

    def _pairs(self, ids: Sequence[int], alignment: Alignment) -> list[tuple[int, int, int]]:
        """Of every token that is scored: its number, that of the teacher's token that covers it, and the place."""
        pairs: list[tuple[int, int, int]] = []
        for mine, theirs in alignment.groups:
            if self.strategy == "ranked":
                pairs.append((mine[0], theirs[0], 0))
            elif self.strategy == "shared":
                alone = len(mine) == len(theirs) == 1
                if alone and ids[mine[0]] == int(self._ids[alignment.teacher_ids[theirs[0]]]):
                    pairs.append((mine[0], theirs[0], 0))
            else:
                pairs += self._within(ids, alignment, mine, theirs)
        return pairs

    def _within(
        self, ids: Sequence[int], alignment: Alignment, mine: list[int], theirs: list[int]
    ) -> list[tuple[int, int, int]]:
        """The student's tokens of a group that lie within one token of the teacher's."""
        spans = dict(zip(theirs, _spans(alignment.teacher, theirs), strict=True))
        pairs: list[tuple[int, int, int]] = []
        for token, (start, end) in zip(mine, _spans(alignment.student, mine), strict=True):
            around = next((n for n, (low, high) in spans.items() if low <= start and end <= high and low < high), None)
            if around is None:
                continue
            there = start - spans[around][0]
            if there == 0 and ids[token] in self._heard:
                pairs.append((token, around, 0))
            elif there > 0 and self.inside and there < 1 << PLACE_BITS:
                where = self._begun.place(alignment.teacher_ids[around], there)
                if ids[token] in self._begun(where)[1]:
                    pairs.append((token, around, where))
        return pairs

    def metrics(self) -> Mapping[str, Mean]:
        """Of the last `score`."""
        return self._metrics

    def close(self) -> None:
        """Closes the inner teacher."""
        self.inner.close()


def check_inner(inner: Teacher) -> None:
    """Refuses a teacher that is made of the student: it has the student's tokens.

    Raises:
        ValueError: naming the way out.
    """
    if isinstance(inner, FollowsStudent | OwnTokens):
        raise ValueError(f"inner ({type(inner).__name__}): speaks the student's tokens already; use it alone")


def measured(readings: Sequence[Reading], scores: Sequence[TeacherScores | None]) -> dict[str, Mean]:
    """Coverage, unaligned share and cut answers of what was read and scored."""
    tokens = float(sum(len(reading.alignment.student) for reading in readings))
    aligned = float(sum(len(mine) for reading in readings for mine, _ in reading.alignment.groups))
    scored = float(sum(int(s.present.sum()) for s in scores if s is not None and s.present is not None))
    return {
        "coverage": Mean(scored, tokens),
        "unaligned": Mean(tokens - aligned, tokens),
        "cut": Mean(float(sum(reading.alignment.cut > 0 for reading in readings)), float(len(readings))),
        "unread": Mean(float(sum(score is None for score in scores)), float(len(scores))),
    }


def _spans(pieces: Sequence[bytes | None], numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Start and end of every one of the tokens in the bytes of their group."""
    spans: list[tuple[int, int]] = []
    end = 0
    for number in numbers:
        start, end = end, end + len(pieces[number] or b"")
        spans.append((start, end))
    return spans


def _same_bytes(student: Vocabulary, teacher: Vocabulary) -> list[int]:
    """For each of the teacher's ids the student's with the same bytes, -1 without."""
    return [student.by_bytes.get(piece, -1) if piece else -1 for piece in teacher.pieces]


def _first_tokens(student: Vocabulary, teacher: Vocabulary) -> list[int]:
    """For each of the teacher's ids the one with which the student's tokenizer begins its bytes, -1 without."""
    firsts = iter(student.first_of([piece for piece in teacher.pieces if piece]))
    found = [next(firsts) if piece else None for piece in teacher.pieces]
    return [-1 if index is None else index for index in found]


class _Begun:
    """What may follow inside the teacher's tokens, made when it is first asked for; see `Continuations`."""

    def __init__(self, student: Vocabulary, teacher: Vocabulary) -> None:
        self.student, self.teacher = student, teacher
        self._sorted = sorted((piece, index) for index, piece in enumerate(teacher.pieces) if piece)
        self._known: dict[int, tuple[Tensor, Tensor]] = {}

    def place(self, token: int, num_bytes: int) -> int:
        """One number for all tokens that begin with these bytes."""
        piece = self.teacher.pieces[token]
        assert piece is not None, "a place inside a special token"
        return place(self._sorted[bisect_left(self._sorted, (piece[:num_bytes],))][1], num_bytes)

    def __call__(self, where: int) -> tuple[Tensor, Tensor]:
        """Token ids [m] of the teacher and the student's next ids [m]."""
        if where not in self._known:
            self._known[where] = self._made(where)
        return self._known[where]

    def _made(self, where: int) -> tuple[Tensor, Tensor]:
        token, num_bytes = begun(where)
        there = (self.teacher.pieces[token] or b"")[:num_bytes]
        first = bisect_left(self._sorted, (there,))
        longer: list[tuple[bytes, int]] = []
        for piece, index in self._sorted[first:]:
            if not piece.startswith(there):
                break
            if len(piece) > num_bytes:
                longer.append((piece, index))
        targets = self.student.first_of([piece[num_bytes:] for piece, _ in longer])
        beginnings = [there[:length] for length in range(1, num_bytes + 1)]
        complete = [self.teacher.by_bytes[piece] for piece in beginnings if piece in self.teacher.by_bytes]
        tokens = [index for _, index in longer] + complete
        return torch.tensor(tokens), torch.tensor([-1 if t is None else t for t in targets] + [-1] * len(complete))
