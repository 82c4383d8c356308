"""What API teachers and judges of a run will be asked, what that may cost, and what of it can be refused beforehand."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from jinja2 import UndefinedError

from opd.api_columns import ApiColumn
from opd.chat import ApiConfig, chat_of
from opd.config import TrainConfig, nearest
from opd.judges import Judge, askable
from opd.ledger import Ledger, input_bound
from opd.metrics import of_all_ranks
from opd.prompts import Column, Prompts
from opd.records import Example, Mean, Prompt, Rollout
from opd.rewards import LearnsFromPairs
from opd.serve import LOOPBACK
from opd.teachers import AnsweringTeacher, ApiTeacher
from opd.templates import Lacks, TemplateFault

ANSWER_BYTES = 4  # of a student's token, for the estimate alone
SHOWN = 64  # examples of a stream that the estimate looks at, and that templates are tried on
STAND_IN = "..."  # of an answer, and of a column that is made during the run


@dataclass(frozen=True)
class Expected:
    """The requests of one part of a run, if nothing is cached and every answer is as long as it may be."""

    key: str
    api: ApiConfig
    requests: int
    input_tokens: int
    output_tokens: int

    @property
    def money(self) -> float:
        """At the part's own prices."""
        return self.api.account.price(self.input_tokens, self.output_tokens)

    def __str__(self) -> str:
        account = self.api.account
        limits = {"money": account.money, "requests": account.requests}
        budget = ", ".join(f"{name} {limit:g}" for name, limit in limits.items() if limit is not None)
        return (
            f"at most {self.requests:,} requests, {self.input_tokens:,} tokens in and {self.output_tokens:,} out, "
            f"{self.money:,.2f} money; budget: {budget or 'none'}"
        )


def expected(config: TrainConfig, prompts: Prompts) -> list[Expected]:
    """Of every part of the run that asks an API; parts that share their requests count once."""
    found = []
    for name, teacher in config.teacher.items():
        if isinstance(teacher, ApiTeacher):
            drawn = _answered(config, prompts, name)
            shown = [prompt for _, some in drawn for prompt in some]
            bodies = [teacher.api.body(teacher.model, chat_of(prompt.example, teacher.system)) for prompt in shown]
            chats = [input_bound(body) for body in bodies]
            found.append(_expected(f"teacher.{name}", teacher.api, sum(count for count, _ in drawn), chats))
    shared = set()
    for name, term in config.reward.items():
        judge = term.function
        if (
            isinstance(judge, Judge)
            and (same := repr((judge.model, judge.template, judge.system, judge.api))) not in shared
        ):
            shared.add(same)
            drawn = _judged(config, prompts, judge)
            found.append(_of_answers(f"reward.{name}", judge, drawn, config))
    for name, column in config.data.columns.items():
        if isinstance(column, ApiColumn):
            found.append(_of_answers(f"data.columns.{name}", column, _columned(config, prompts, column), config))
    return found


def _expected(key: str, api: ApiConfig, requests: int, inputs: Sequence[int]) -> Expected:
    each = sum(inputs) / max(1, len(inputs))
    return Expected(key, api, requests, round(requests * each), requests * api.max_tokens)


def _of_answers(
    key: str, part: Judge | ApiColumn, drawn: Sequence[tuple[int, list[Prompt]]], config: TrainConfig
) -> Expected:
    text = "x" * (ANSWER_BYTES * config.sampler.params.max_tokens)
    shown = [Rollout(prompt, 0, [], [], text, "stop", 0) for _, some in drawn for prompt in some]
    chats = askable(part.messages, shown, range(len(shown))).values()
    inputs = [input_bound(part.api.body(part.model, chat)) for chat in chats]
    return _expected(key, part.api, sum(count for count, _ in drawn), inputs)


def _answered(config: TrainConfig, prompts: Prompts, teacher: str) -> list[tuple[int, list[Prompt]]]:
    """(requests, some of the prompts) per stream that the teacher answers; a prompt is asked about once in a run."""
    learned = [
        f for t in config.reward.values() if isinstance(f := t.function, LearnsFromPairs) and f.teacher == teacher
    ]
    streams = {
        name: stream.samples if stream.teacher == teacher else 1
        for name, stream in config.data.streams.items()
        if stream.teacher == teacher or (learned and stream.answers == "student")
    }
    return [
        (
            samples * min(config.steps * config.data.streams[name].prompts, len(prompts.examples[name])),
            _some(prompts, name),
        )
        for name, samples in streams.items()
    ]


def _judged(config: TrainConfig, prompts: Prompts, judge: Judge) -> list[tuple[int, list[Prompt]]]:
    """(requests, some of the prompts) per stream that the judge sees, evaluation included."""
    drawn = [
        (config.steps * stream.prompts * stream.samples * (1 + stream.refill_rounds), _some(prompts, name))
        for name, stream in config.data.streams.items()
        if stream.answers == "student" and judge.judges(name)
    ]
    if judge.judges("heldout") and prompts.heldout:
        problems = prompts.evaluation(config.eval.problems, config.eval.samples)
        times = 1 + sum(step % config.eval.every == 0 or step == config.steps for step in range(1, config.steps + 1))
        answering = config.eval.teacher and any(isinstance(each, AnsweringTeacher) for each in config.teacher.values())
        drawn.append(((times + answering) * len(problems) * config.eval.samples, problems[:SHOWN]))
    return drawn


def _columned(config: TrainConfig, prompts: Prompts, column: ApiColumn) -> list[tuple[int, list[Prompt]]]:
    """(requests, some of the prompts) per stream that gets the column: per answer, or once per example."""
    drawn = []
    for name, stream in config.data.streams.items():
        if stream.answers == "student" and _asks_about(column, name):
            answers = config.steps * stream.prompts * stream.samples * (1 + stream.refill_rounds)
            count = answers if column.reads_answers else min(answers, len(prompts.examples[name]))
            drawn.append((count, _some(prompts, name)))
    return drawn


def _some(prompts: Prompts, stream: str) -> list[Prompt]:
    shown = prompts.examples[stream][:SHOWN]
    return [Prompt("", stream, ids, _with_columns(example, stream, prompts.columns)) for ids, example in shown]


def spending(config: TrainConfig) -> dict[str, Mean]:
    """`cost/...`: what the ledgers of the run hold by now, all parts and earlier starts together."""
    functions = [term.function for term in config.reward.values()]
    parts = [*config.teacher.values(), *functions, *config.data.columns.values()]
    asking = [part.api.account for part in parts if isinstance(part, ApiTeacher | Judge | ApiColumn)]
    accounts = {account.folder: account for account in asking}
    totals = [Ledger("cost", account).totals() for account in accounts.values()]
    if not totals:
        return {}
    names = ("requests", "input_tokens", "output_tokens", "money")
    return {f"cost/{name}": of_all_ranks(float(sum(vars(total)[name] for total in totals))) for name in names}


def _answers_are_there(config: TrainConfig) -> Iterator[str]:
    asked = {f"data.streams.{name}.teacher": stream.teacher for name, stream in config.data.streams.items()}
    asked |= {
        f"reward.{name}.teacher": term.function.teacher
        for name, term in config.reward.items()
        if isinstance(term.function, LearnsFromPairs)
    }
    for key, name in asked.items():
        if name is None:
            continue
        teacher = config.teacher.get(name)
        if teacher is None:
            there = nearest(name, set(config.teacher), "teachers") if config.teacher else "; there is none"
            yield f"{key}: no teacher {name!r}{there}; add one: +teacher@teacher.{name}=api teacher.{name}.model=..."
        elif not isinstance(teacher, AnsweringTeacher):
            yield (
                f"{key}={name}: teacher.{name} ({type(teacher).__name__}) provides "
                f"{', '.join(sorted(teacher.provides))}, and does not answer prompts; use teacher=api or local"
            )


def _judged_streams_exist(config: TrainConfig) -> Iterator[str]:
    known = {*config.data.streams, "heldout"}
    for name, term in config.reward.items():
        judge = term.function
        for stream in (judge.streams or []) if isinstance(judge, Judge) else []:
            if stream not in known:
                yield f"reward.{name}.streams: no stream {stream!r}{nearest(stream, known, 'streams')}"


def keyless(config: TrainConfig) -> list[str]:
    """Parts that ask an API on another machine without a key."""
    parts = {f"teacher.{name}": teacher for name, teacher in config.teacher.items()}
    parts |= {f"reward.{name}": term.function for name, term in config.reward.items()}
    parts |= {f"data.columns.{name}": column for name, column in config.data.columns.items()}
    asking = {key: part.api.remote for key, part in parts.items() if isinstance(part, ApiTeacher | Judge | ApiColumn)}
    return [
        f"{key}: the environment variable {remote.api_key_env} holds no key for {', '.join(remote.urls)}"
        for key, remote in asking.items()
        if not os.environ.get(remote.api_key_env) and not all(urlsplit(url).hostname in LOOPBACK for url in remote.urls)
    ]


def try_templates(config: TrainConfig, prompts: Prompts) -> None:
    """Renders every template of a judge or column for the first examples of every stream that it is asked about.

    Raises:
        ValueError: one fails, or uses what no example of a stream has; names every such template.
    """
    faults = []
    for name, term in config.reward.items():
        if isinstance(judge := term.function, Judge):
            faults += _of_part(
                f"reward.{name}",
                judge,
                {**_training(config, prompts, judge), **_heldout(config, prompts, judge)},
                config.data.columns,
            )
    made: dict[str, Column] = {}
    for name, column in config.data.columns.items():
        if isinstance(column, ApiColumn):
            faults += _of_part(f"data.columns.{name}", column, _training(config, prompts, column), made)
        made[name] = column
    if faults:
        raise ValueError("\n".join(faults))


def _with_columns(example: Example, stream: str, columns: Mapping[str, Column]) -> Example:
    """The example with a stand-in for every column that the stream gets during the run."""
    made = {
        name: STAND_IN
        for name, column in columns.items()
        if stream != "heldout" and (not isinstance(column, ApiColumn) or _asks_about(column, stream))
    }
    return replace(example, columns={**example.columns, **made})


def _asks_about(part: Judge | ApiColumn, stream: str) -> bool:
    """Whether answers of the stream are shown to the part."""
    return part.streams is None or stream in part.streams


def _training(config: TrainConfig, prompts: Prompts, part: Judge | ApiColumn) -> dict[str, Iterable[Example]]:
    return {
        name: (example for _, example in prompts.examples[name])
        for name, stream in config.data.streams.items()
        if stream.answers == "student" and _asks_about(part, name)
    }


def _heldout(config: TrainConfig, prompts: Prompts, judge: Judge) -> dict[str, Iterable[Example]]:
    problems = prompts.evaluation(config.eval.problems, config.eval.samples)
    return {"heldout": [problem.example for problem in problems]} if problems and judge.judges("heldout") else {}


def _of_part(
    key: str, part: Judge | ApiColumn, streams: Mapping[str, Iterable[Example]], columns: Mapping[str, Column]
) -> Iterator[str]:
    """What is wrong with the template of one part: the first fault found, if there is one."""
    for stream, examples in streams.items():
        told = (_with_columns(example, stream, columns) for example in examples)
        try:
            lacking = _lacking(part, stream, told)
        except TemplateFault as fault:
            yield f"{key}.{fault}"
            return
        if lacking is not None:
            yield (
                f"{key}.template: no example of stream {stream} has all that it uses ({lacking}): correct it, make "
                "what may be missing optional by {% if columns.NAME is defined %} or {% if reference is defined %}, or "
                f"leave the stream out of {key}.streams"
            )
            return


def _lacking(part: Judge | ApiColumn, stream: str, examples: Iterable[Example]) -> str | None:
    """What is missing, where every single example lacks something; an answer's text may lack what it likes.

    Raises:
        TemplateFault: the template fails for another reason.
    """
    lacking, fits = None, False
    for number, example in enumerate(examples):
        if fits and number >= SHOWN:
            break
        try:
            part.messages(Rollout(Prompt("", stream, [], example), 0, [], [], STAND_IN, "stop", 0))
        except Lacks as error:
            lacking = str(error)
            continue
        except UndefinedError:
            pass
        fits = True
    return None if fits else lacking


API_RULES = (_answers_are_there, _judged_streams_exist)
