"""Everything that can be refused before weights load: each message names the key, both sides, and the way out."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from transformers import PreTrainedTokenizerBase

from opd.config import ConfigError, TrainConfig
from opd.losses.protocol import declared_needs
from opd.terms import Term


def check(config: TrainConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises ConfigError with every refusal found, one per line."""
    rules: list[Callable[[TrainConfig], Iterator[str]]] = [
        _terms_exist, _teachers_exist, _needs_are_met, _credit_fits, _sampling_fits, _evaluation_fits,
    ]  # fmt: skip
    problems = [problem for rule in rules for problem in rule(config)]
    problems = problems or list(_vocabularies_match(config, tokenizer))
    if problems:
        raise ConfigError("\n".join(problems))


def _terms_exist(config: TrainConfig) -> Iterator[str]:
    if not config.loss:
        yield "loss: no term; add one, e.g. +loss@loss.distill=reverse_kl"
    for name, stream in config.data.streams.items():
        for term in stream.terms or []:
            if term not in config.loss:
                yield f"data.streams.{name}.terms: no loss term {term!r}; there are {', '.join(config.loss)}"


def _teachers_exist(config: TrainConfig) -> Iterator[str]:
    for name, term in config.loss.items():
        if term.teacher is not None and term.teacher not in config.teacher:
            there = ", ".join(config.teacher) or "none"
            yield (
                f"loss.{name}.teacher: no teacher {term.teacher!r} (there: {there}); "
                f"add one with +teacher@teacher.{term.teacher}=local teacher.{term.teacher}.model=..."
            )
        if term.teacher is None and "full_vocab" in term.loss.needs:
            yield f"loss.{name}.teacher: missing; {_kind(term)} needs full_vocab scores: name one of your teachers"


def _needs_are_met(config: TrainConfig) -> Iterator[str]:
    for name, term in config.loss.items():
        teacher = config.teacher.get(term.teacher or "")
        wanted = {"full_vocab"} & set(declared_needs(term.loss))
        if teacher is not None and not wanted <= teacher.provides:
            yield (
                f"loss.{name} ({_kind(term)}) needs {', '.join(sorted(wanted))} scores; teacher.{term.teacher} "
                f"({type(teacher).__name__}) provides {', '.join(sorted(teacher.provides))}: use another loss or teacher"
            )


def _credit_fits(config: TrainConfig) -> Iterator[str]:
    for name, term in config.loss.items():
        if not term.needs_advantage:
            continue
        if not config.reward:
            yield f"loss.{name} ({_kind(term)}) needs rewards, and there are none: add e.g. +reward@reward.correct=exact"
        if type(config.credit).__name__ == "NoCredit":
            yield f"loss.{name} ({_kind(term)}) needs advantages, and credit=none gives none: use e.g. credit=grpo"
        for stream_name, stream in config.data.streams.items():
            applies = stream.terms is None or name in stream.terms
            if applies and stream.samples < config.credit.min_group:
                yield (
                    f"data.streams.{stream_name}.samples={stream.samples}: loss.{name} with {type(config.credit).__name__} "
                    f"compares samples of one prompt and needs at least {config.credit.min_group}; raise samples, or keep "
                    f"the term out of this stream by data.streams.{stream_name}.terms"
                )


def _sampling_fits(config: TrainConfig) -> Iterator[str]:
    params = config.sampler.params
    if params.temperature == 0.0:
        yield "sampler.params.temperature=0: training needs sampled answers; use a temperature above 0"
    if params.truncates:
        for name, term in config.loss.items():
            if "sampler_logp" in term.loss.needs:
                yield (
                    f"sampler.params: top_p, top_k or min_p cut the distribution, so the ratio in loss.{name} "
                    f"({_kind(term)}) would be off by the mass that was cut; set top_p=1, top_k=0, min_p=0"
                )


def _evaluation_fits(config: TrainConfig) -> Iterator[str]:
    metric = config.checkpoint.best_metric
    known = {"eval/accuracy": bool(config.reward), "eval/kl": bool(config.teacher)}
    if metric in known and not (known[metric] and config.data.heldout is not None):
        yield f"checkpoint.best_metric={metric}: never measured; it needs data.heldout and {'a reward' if metric == 'eval/accuracy' else 'a teacher'}"


def _vocabularies_match(config: TrainConfig, tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """Compares id -> token, not sizes: two vocabularies of one size can be permuted."""
    mine = {index: token for token, index in tokenizer.get_vocab().items()}
    used = {term.teacher for term in config.loss.values() if "full_vocab" in term.loss.needs}
    for name in sorted(name for name in used if name in config.teacher):
        theirs = {index: token for token, index in config.teacher[name].tokenizer().get_vocab().items()}
        differing = sorted(index for index in mine.keys() & theirs.keys() if mine[index] != theirs[index])
        if differing or len(mine.keys() & theirs.keys()) < min(len(mine), len(theirs)):
            index = differing[0] if differing else min(mine.keys() ^ theirs.keys())
            yield (
                f"teacher.{name}: its vocabulary is not the student's ({len(differing)} ids differ; id {index} is "
                f"{mine.get(index)!r} for the student and {theirs.get(index)!r} for the teacher): full_vocab losses need one "
                "vocabulary; use a teacher with the student's tokenizer"
            )


def _kind(term: Term) -> str:
    return type(term.loss).__name__
