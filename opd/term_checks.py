"""What can be refused of the loss terms: their teachers, corrections and weighers; see `opd.checks`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, Protocol, get_args, runtime_checkable

from opd.config import TrainConfig, nearest
from opd.losses import Need, RowLoss
from opd.losses.protocol import declared_needs
from opd.teachers import CrossTokenizerTeacher, GivesFullVocab, OwnTokens, Teacher
from opd.terms import Term
from opd.weighting import EarlyDisagreement


@runtime_checkable
class ReadsTeacher(Protocol):
    """Declared by weighers that read a teacher's facts, so that a run without them is refused at the start."""

    @property
    def reads_teacher(self) -> str | None:
        """The teacher's name; None where the settings need none."""
        ...

    @property
    def reads_scores(self) -> Need:
        """`full_vocab` or `sampled`: which scores of that teacher."""
        ...


@runtime_checkable
class GivesTopK(Protocol):
    """Declared by teachers that give their k likeliest tokens."""

    @property
    def k(self) -> int:
        """How many."""
        ...


@runtime_checkable
class TakesTopK(Protocol):
    """Losses over the k likeliest tokens."""

    @property
    def k(self) -> int:
        """How many."""
        ...


@runtime_checkable
class ReadsRewards(Protocol):
    """Declared by weighers that read verdicts."""

    @property
    def reads_rewards(self) -> bool:
        """Whether a reward must be there."""
        ...


def _terms_exist(config: TrainConfig) -> Iterator[str]:
    if not config.loss:
        yield "loss: no term; add one, e.g. +loss@loss.distill=reverse_kl"
    for name, stream in config.data.streams.items():
        for term in stream.terms or []:
            if term not in config.loss:
                yield f"data.streams.{name}.terms: no loss term {term!r}{nearest(term, set(config.loss), 'terms')}"
        if stream.terms == []:
            yield f"data.streams.{name}.terms: empty, so it would train nothing; drop the stream: ~data.streams.{name}"
    for term in config.loss:
        if all(stream.terms is not None and term not in stream.terms for stream in config.data.streams.values()):
            yield f"loss.{term}: no stream trains on it; add it to a stream's terms, or drop it: ~loss.{term}"


def _teachers_exist(config: TrainConfig) -> Iterator[str]:
    for name, term in config.loss.items():
        for key, teacher in (("teacher", term.teacher), ("reference", term.reference)):
            if teacher is not None and teacher not in config.teacher:
                there = nearest(teacher, set(config.teacher), "teachers") if config.teacher else "; there is none"
                yield (
                    f"loss.{name}.{key}: no teacher {teacher!r}{there}; "
                    f"add one with +teacher@teacher.{teacher}=local teacher.{teacher}.model=..."
                )
        lacking = {"teacher": scores(term) and term.teacher is None}
        lacking["reference"] = "reference" in term.loss.needs and term.reference is None
        for key in (key for key, lacks in lacking.items() if lacks):
            asked = " and ".join(scores(term)) or "such"
            yield f"loss.{name}.{key}: missing; {kind(term)} needs {asked} scores: name one of your teachers"


def _needs_are_known(config: TrainConfig) -> Iterator[str]:
    known = set(get_args(Need))
    for name, term in config.loss.items():
        for need in sorted(set(term.loss.needs) - known):
            hint = nearest(need, known, "needs")
            yield f"loss.{name} ({kind(term)}): its `needs` names {need!r}, which nothing provides{hint}"


def _abilities_are_real(config: TrainConfig) -> Iterator[str]:
    for name, teacher in config.teacher.items():
        if "full_vocab" in teacher.provides and not isinstance(teacher, GivesFullVocab):
            yield (
                f"teacher.{name} ({type(teacher).__name__}): provides full_vocab, and has no method head() that turns "
                "its hidden states into logits; add one (opd.teachers.GivesFullVocab)"
            )


def _needs_are_met(config: TrainConfig) -> Iterator[str]:
    for name, term in config.loss.items():
        for teacher_name in term.teachers:
            teacher = config.teacher.get(teacher_name)
            lacking = [] if teacher is None else [need for need in scores(term) if not _provides(teacher, need)]
            if teacher is not None and lacking:
                yield (
                    f"loss.{name} ({kind(term)}) needs {', '.join(lacking)} scores; teacher.{teacher_name} "
                    f"({type(teacher).__name__}) provides {', '.join(sorted(teacher.provides))}: "
                    f"{_way_out(teacher_name, teacher, lacking)}"
                )
            elif teacher is not None and teacher.provides == {"text"}:
                yield (
                    f"loss.{name}.teacher={teacher_name}: teacher.{teacher_name} ({type(teacher).__name__}) provides "
                    f"text, which no term reads; set loss.{name}.teacher=null, and {_of_text(teacher_name)}"
                )
            elif isinstance(teacher, GivesTopK) and isinstance(term.loss, TakesTopK) and term.loss.k > teacher.k:
                yield (
                    f"loss.{name}.k={term.loss.k}: teacher.{teacher_name} ({type(teacher).__name__}) gives "
                    f"{teacher.k} tokens at every position; lower loss.{name}.k, or raise teacher.{teacher_name}.k"
                )


def _way_out(name: str, teacher: Teacher, lacking: Sequence[str]) -> str:
    if teacher.provides == {"text"}:
        return _of_text(name)
    if isinstance(teacher, CrossTokenizerTeacher) and list(lacking) == ["ranked"]:
        return f"set teacher.{name}.strategy=ranked, or use a loss that compares tokens by id"
    if isinstance(teacher, CrossTokenizerTeacher) and teacher.strategy == "ranked":
        return f"set teacher.{name}.strategy=shared (or marginal), or use loss gold or uld"
    return "use another loss or teacher"


def _of_text(teacher: str) -> str:
    """The way out for a teacher that gives text alone."""
    return (
        "let a stream imitate its answers (data.streams.NAME.answers=teacher "
        f"data.streams.NAME.teacher={teacher}, with loss cross_entropy), or take verdicts as a reward (reward=judge)"
    )


def scores(term: Term) -> list[Need]:
    """What the loss asks of its teacher, and of its reference if it has one."""
    return [need for need in declared_needs(term.loss) if need in ("full_vocab", "top_k", "sampled", "ranked")]


def _provides(teacher: Teacher, need: Need) -> bool:
    """Who knows every token's probability knows those of the likeliest tokens, of the sampled one, and their ranks; of
    common tokens alone no ranks, as what is to be ranked is left out.
    """
    implied = ("top_k", "sampled") if isinstance(teacher, OwnTokens) else ("top_k", "sampled", "ranked")
    return need in teacher.provides or (need in implied and "full_vocab" in teacher.provides)


def _corrections_fit(config: TrainConfig) -> Iterator[str]:
    for name, term in config.loss.items():
        if term.correction is not None and term.correction.multiplies and "sampler_logp" in term.loss.needs:
            yield (
                f"loss.{name}.correction: {type(term.correction).__name__} multiplies by the ratio of student to "
                f"sampler, and {kind(term)} holds it already, so that it would count twice: use a TokenMask or a "
                "SequenceMask, or a loss without the ratio"
            )


def _row_values_are_made(config: TrainConfig) -> Iterator[str]:
    for name, term in config.loss.items():
        if "row_value" in term.loss.needs and not isinstance(term.loss, RowLoss):
            yield (
                f"loss.{name} ({kind(term)}): its `needs` names row_value, and it has no method of_row(row) that makes "
                "the values; add one (opd.losses.RowLoss)"
            )


def _rows_have_one_support(config: TrainConfig) -> Iterator[str]:
    for name, term in config.loss.items():
        pair = [config.teacher[key] for key in dict.fromkeys(term.teachers) if key in config.teacher]
        apart = [t for t in pair if isinstance(t, OwnTokens) and "full_vocab" in t.provides]
        if "row_value" in term.loss.needs and len(pair) > 1 and apart:
            yield (
                f"loss.{name} ({kind(term)}) looks at whole rows, where teacher.{term.teacher} "
                f"({type(pair[0]).__name__}) and the reference teacher.{term.reference} ({type(pair[1]).__name__}) are "
                "each known on their own common tokens, not on the same ones: use a loss of single tokens (gamma=0), "
                f"or set loss.{name}.reference=null"
            )


def _sampler_tops_are_kept(config: TrainConfig) -> Iterator[str]:
    params = config.sampler.params
    for name, term in config.loss.items():
        if "sampler_top" in term.loss.needs and not params.top_logprobs:
            yield (
                f"sampler.params.top_logprobs=0: loss.{name} ({kind(term)}) needs the sampler's likeliest tokens at "
                "every position; set sampler.params.top_logprobs=128"
            )
        if "sampler_top" in term.loss.needs and params.temperature != 1.0:
            yield (
                f"sampler.params.temperature={params.temperature:g}: loss.{name} ({kind(term)}) compares the sampler's "
                "likeliest tokens with the student's at temperature 1; set temperature=1"
            )


def _weighers_fit(config: TrainConfig) -> Iterator[str]:
    for name, term in config.loss.items():
        for key, weigher in term.weigh.items():
            where = f"loss.{name}.weigh.{key} ({type(weigher).__name__})"
            teacher = weigher.reads_teacher if isinstance(weigher, ReadsTeacher) else None
            if teacher is not None and teacher not in term.teachers:
                yield (
                    f"{where} reads the scores of teacher.{teacher}, and the term has "
                    f"{' and '.join(term.teachers) or 'no teacher'}: set loss.{name}.weigh.{key}.teacher or "
                    f"loss.{name}.teacher"
                )
            given = config.teacher.get(teacher or "")
            if isinstance(weigher, ReadsTeacher) and given and not _provides(given, weigher.reads_scores):
                yield (
                    f"{where} reads {weigher.reads_scores} scores; teacher.{teacher} ({type(given).__name__}) "
                    f"provides {', '.join(sorted(given.provides))}: use another weigher or teacher"
                )
            if isinstance(weigher, EarlyDisagreement) and config.sampler.params.temperature != 1.0:
                yield (
                    f"sampler.params.temperature={config.sampler.params.temperature:g}: {where} would compare the "
                    "student's log-probability at that temperature with the teacher's at 1; set temperature=1"
                )
            if isinstance(weigher, ReadsRewards) and weigher.reads_rewards and not config.reward:
                yield f"{where} needs rewards, and there is none: add e.g. +reward@reward.correct=exact"


def of_samples(term: Term) -> Literal["ratio", "estimate"] | None:
    """What in the term holds only for tokens that the student drew from its whole distribution."""
    asked = term.loss.needs | (frozenset() if term.correction is None else term.correction.needs)
    return "ratio" if "sampler_logp" in asked else "estimate" if "sampled" in asked else None


def kind(term: Term) -> str:
    """How messages name the loss."""
    return type(term.loss).__name__


TERM_RULES = (
    _terms_exist, _teachers_exist, _needs_are_known, _abilities_are_real, _needs_are_met, _corrections_fit,
    _row_values_are_made, _rows_have_one_support, _sampler_tops_are_kept, _weighers_fit,
)  # fmt: skip
