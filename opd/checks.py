"""Everything that can be refused before weights load: each message names the key, both sides, and the way out."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from peft import LoraConfig
from transformers import AutoConfig, PreTrainedTokenizerBase

from opd.api_plan import API_RULES, keyless
from opd.config import ConfigError, TrainConfig, nearest
from opd.credit import GDPO
from opd.metric_checks import METRIC_RULES
from opd.rewards import LearnsFromPairs
from opd.self_checks import SELF_RULES
from opd.students import HFStudent
from opd.teachers import CrossTokenizerTeacher, LocalTeacher, OwnTokens, SpanTeacher, Teacher
from opd.term_checks import TERM_RULES, kind, of_samples

HEAD_NAMES = ("lm_head", "embed_out", "output_layer")


def check_models(config: TrainConfig) -> None:
    """Raises ConfigError for every model whose folder or hub name cannot give a tokenizer, a config and weights."""
    owners: dict[str, HFStudent | Teacher] = {"student": config.student}
    for name, teacher in used_teachers(config).items():
        if isinstance(teacher, CrossTokenizerTeacher | SpanTeacher):
            owners[f"teacher.{name}.inner"] = teacher.inner
        elif gives_more(teacher):
            owners[f"teacher.{name}"] = teacher
    problems = [problem for key, owner in owners.items() for problem in _unreadable(key, owner, config)]
    if problems:
        raise ConfigError("\n".join(problems))


def used_teachers(config: TrainConfig) -> dict[str, Teacher]:
    """Those that a term, a stream or a reward names."""
    named = {name for term in config.loss.values() for name in term.teachers}
    named |= {stream.teacher for stream in config.data.streams.values()}
    named |= {t.function.teacher for t in config.reward.values() if isinstance(t.function, LearnsFromPairs)}
    return {name: teacher for name, teacher in config.teacher.items() if name in named}


def gives_more(teacher: Teacher) -> bool:
    """Whether it gives more than text, and so has a tokenizer that must be the student's."""
    return teacher.provides != {"text"}


def notes(config: TrainConfig) -> list[str]:
    """What is odd, but may be meant."""
    idle = [name for name in config.teacher if name not in used_teachers(config)]
    return [
        *(f"teacher.{name}: no loss term uses it, nor a stream, so it is not loaded" for name in idle),
        *keyless(config),
    ]


def _unreadable(key: str, owner: HFStudent | Teacher, config: TrainConfig) -> Iterator[str]:
    named = isinstance(owner, HFStudent | LocalTeacher)
    where = f"{key}.model={owner.model}" if named else key
    way_out = "give a folder with config.json, tokenizer and weights, or the name of a model on the Hugging Face hub"
    if named and owner.model.startswith(("/", ".", "~")) and not Path(owner.model).is_dir():
        yield f"{where}: no such folder; {way_out}"
        return
    try:
        tokenizer = owner.tokenizer()
        if not named:
            return
        model = AutoConfig.from_pretrained(owner.model, trust_remote_code=owner.trust_remote_code)
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        yield reason if reason.startswith(f"{key}.") else f"{where}: cannot be read ({reason}); {way_out}"
        return
    yield from (f"{where}: {lack}; {way_out}" for lack in _lacking(Path(owner.model), tokenizer))
    positions = getattr(model.get_text_config(), "max_position_embeddings", None)
    length = config.data.max_prompt_tokens + config.sampler.params.max_tokens
    if positions is not None and length > positions:
        yield (
            f"{where}: holds at most {positions} tokens; data.max_prompt_tokens + sampler.params.max_tokens = "
            f"{length}: lower one of them"
        )


def _lacking(folder: Path, tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """What a local folder lacks; of a tokenizer without files transformers makes an empty one."""
    if not folder.is_dir():
        return
    if not any((folder / name).is_file() for name in tokenizer.vocab_files_names.values()):
        yield "the folder has no tokenizer"
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        yield "the folder has no weights"


def check(config: TrainConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises ConfigError with every refusal found, one per line."""
    rules: list[Callable[[TrainConfig], Iterator[str]]] = [
        *TERM_RULES, _credit_fits, _refills_fit, _credit_knows_its_rewards, _sampling_fits, *METRIC_RULES, *SELF_RULES,
        *API_RULES, _adapter_fits, _optimizer_fits, _heads_fit, _sizes_fit, _run_dir_fits,
    ]  # fmt: skip
    problems = [problem for rule in rules for problem in rule(config)]
    problems = problems or list(_vocabularies_match(config, tokenizer))
    if problems:
        raise ConfigError("\n".join(problems))


def _credit_fits(config: TrainConfig) -> Iterator[str]:
    for name, term in config.loss.items():
        if not term.needs_advantage:
            continue
        if not config.reward:
            yield f"loss.{name} ({kind(term)}) needs rewards, and there is none: add e.g. +reward@reward.correct=exact"
        if type(config.credit).__name__ == "NoCredit":
            yield f"loss.{name} ({kind(term)}) needs advantages, and credit=none gives none: use e.g. credit=grpo"
        for stream_name, stream in config.data.streams.items():
            applies = stream.terms is None or name in stream.terms
            if applies and stream.samples < config.credit.min_group:
                yield (
                    f"data.streams.{stream_name}.samples={stream.samples}: loss.{name} with "
                    f"{type(config.credit).__name__} compares samples of one prompt and needs at least "
                    f"{config.credit.min_group}; raise samples, or keep the term out of this stream by "
                    f"data.streams.{stream_name}.terms"
                )


def _refills_fit(config: TrainConfig) -> Iterator[str]:
    for name, stream in config.data.streams.items():
        if not stream.refill_rounds:
            continue
        key = f"data.streams.{name}.refill_rounds={stream.refill_rounds}"
        terms = [term for key, term in config.loss.items() if stream.terms is None or key in stream.terms]
        if not config.reward:
            yield f"{key}: replaces groups by their rewards, and there is no reward; add one, or set refill_rounds=0"
        elif not any(term.needs_advantage for term in terms):
            yield (
                f"{key}: replaces groups that give no advantage, and no loss term of this stream needs one; add such a "
                "term, or set refill_rounds=0"
            )


def _credit_knows_its_rewards(config: TrainConfig) -> Iterator[str]:
    if not isinstance(config.credit, GDPO):
        return
    gates = {f"conditions.{name}": gate for name, gate in config.credit.conditions.items()}
    named = {f"{key}.{name}": name for key in ("weights", "conditions") for name in vars(config.credit)[key]}
    for key, name in (*named.items(), *gates.items()):
        if name not in config.reward:
            yield f"credit.{key}: no reward {name!r}{nearest(name, set(config.reward), 'rewards')}"


def _sampling_fits(config: TrainConfig) -> Iterator[str]:
    params = config.sampler.params
    for stream_name, stream in config.data.streams.items():
        for name in config.loss if stream.terms is None else stream.terms:
            term = config.loss.get(name)
            if stream.answers == "student" or term is None or term.needs_advantage:
                continue
            if of_samples(term):
                yield (
                    f"data.streams.{stream_name}.answers={stream.answers}: loss.{name} ({kind(term)}) needs the "
                    f"probability under which a token was sampled, and nobody sampled these; list other terms in "
                    f"data.streams.{stream_name}.terms"
                )
    if params.temperature == 0.0:
        yield "sampler.params.temperature=0: training needs sampled answers; use a temperature above 0"
    if params.truncates:
        for name, term in config.loss.items():
            if (what := of_samples(term)) is not None:
                yield (
                    f"sampler.params: top_p, top_k or min_p cut the distribution, so the {what} in loss.{name} "
                    f"({kind(term)}) would be off by the mass that was cut; set top_p=1, top_k=0, min_p=0"
                )
    if params.temperature not in (0.0, 1.0):
        for name, term in config.loss.items():
            if "sampled" in term.loss.needs:
                yield (
                    f"sampler.params.temperature={params.temperature:g}: loss.{name} ({kind(term)}) would compare the "
                    "student's log-probability at that temperature with the teacher's at 1, and miss the teacher; set "
                    "temperature=1, or use a full_vocab loss"
                )


def _adapter_fits(config: TrainConfig) -> Iterator[str]:
    lora = config.student.lora
    if not isinstance(lora, LoraConfig):
        return
    targets = lora.target_modules or []
    named = [name for name in HEAD_NAMES if name in (lora.modules_to_save or [])]
    if isinstance(targets, str):
        named += [name for name in HEAD_NAMES if re.fullmatch(targets, name)]
    else:
        named += [name for name in HEAD_NAMES if name in targets]
    if named and _tied(config.student):
        yield (
            f"student.lora: {', '.join(named)} is the head, which student.model={config.student.model} ties to its "
            "embedding; an adapter would part the two: leave it out of target_modules and modules_to_save (all-linear "
            "leaves it out)"
        )
    if lora.use_dora:
        yield "student.lora.use_dora: DoRA cannot be merged exactly into the sampler's weights; set use_dora=false"


def _heads_fit(config: TrainConfig) -> Iterator[str]:
    resident = config.engine.resident_heads
    for name, term in config.loss.items():
        if resident is not None and 1 <= resident < len(set(term.teachers)):
            yield (
                f"engine.resident_heads={resident}: loss.{name} compares {len(set(term.teachers))} teachers at every "
                "token, whose heads would be loaded again and again; raise it to that number"
            )


def _tied(student: HFStudent) -> bool:
    model = AutoConfig.from_pretrained(student.model, trust_remote_code=student.trust_remote_code)
    return bool(model.get_text_config().tie_word_embeddings)


def _optimizer_fits(config: TrainConfig) -> Iterator[str]:
    """Torch's own refusals, on one parameter that costs nothing; other packages' optimizers may compile first."""
    make = config.engine.optimizer
    if not isinstance(make, partial) or not make.func.__module__.startswith("torch.optim"):
        return
    try:
        optimizer = make([torch.nn.Parameter(torch.zeros(1))])
        optimizer.step()
    except (ValueError, TypeError, IndexError, RuntimeError) as error:
        yield f"engine.optimizer ({make.func.__name__}): {error}; {make.keywords}"


def _sizes_fit(config: TrainConfig) -> Iterator[str]:
    at_least_one = {
        "engine.micro_batch_tokens": config.engine.micro_batch_tokens,
        "engine.chunk_tokens": config.engine.chunk_tokens,
        "engine.resident_heads": config.engine.resident_heads,
        "eval.max_tokens": config.eval.max_tokens,
        **{f"loss.{name}.constant_tokens": term.constant_tokens for name, term in config.loss.items()},
    }
    yield from (f"{k}={n}: must be at least 1" for k, n in at_least_one.items() if n is not None and n < 1)
    not_negative = {"engine.max_grad_norm": config.engine.max_grad_norm, "eval.temperature": config.eval.temperature}
    yield from (f"{key}={number}: must not be negative" for key, number in not_negative.items() if number < 0)


def _run_dir_fits(config: TrainConfig) -> Iterator[str]:
    """The folder, or the nearest above it that there is, can be written to."""
    path = Path(config.run_dir).absolute()
    there = next(folder for folder in (path, *path.parents) if os.path.lexists(folder))
    if not os.path.isdir(there):
        yield f"run_dir={config.run_dir}: {there} is not a folder; give another run_dir"
    elif not os.access(there, os.W_OK | os.X_OK):
        yield f"run_dir={config.run_dir}: {there} cannot be written to; give another run_dir, or change its permissions"


def _vocabularies_match(config: TrainConfig, tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """Compares id -> token, not sizes: two vocabularies of one size can be permuted."""
    mine = {index: token for token, index in tokenizer.get_vocab().items()}
    for name, teacher in sorted(used_teachers(config).items()):
        if not gives_more(teacher) or isinstance(teacher, OwnTokens):
            continue
        theirs = {index: token for token, index in teacher.tokenizer().get_vocab().items()}
        differing = sorted(index for index in mine.keys() & theirs.keys() if mine[index] != theirs[index])
        if differing or len(mine.keys() & theirs.keys()) < min(len(mine), len(theirs)):
            index = differing[0] if differing else min(mine.keys() ^ theirs.keys())
            yield (
                f"teacher.{name}: its vocabulary is not the student's ({len(differing)} ids differ; id {index} is "
                f"{mine.get(index)!r} for the student and {theirs.get(index)!r} for the teacher): losses and "
                f"weighers compare by id; use a teacher with the student's tokenizer, or teacher@teacher.{name}="
                "cross_tokenizer, which lays one tokenizer over the other (opd.teachers.CrossTokenizerTeacher)"
            )
