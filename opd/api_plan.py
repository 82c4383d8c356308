"""What API teachers and judges of a run will be asked, what that may cost, and what of it can be refused beforehand."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from opd.api_columns import ApiColumn
from opd.chat import ApiConfig, chat_of
from opd.config import TrainConfig, nearest
from opd.judges import Judge
from opd.ledger import Ledger, input_bound
from opd.metrics import of_all_ranks
from opd.prompts import Prompts
from opd.records import Mean, Prompt, Rollout
from opd.rewards import LearnsFromPairs
from opd.serve import LOOPBACK
from opd.teachers import AnsweringTeacher, ApiTeacher

ANSWER_BYTES = 4  # of a student's token, for the estimate alone
SHOWN = 64  # examples that the estimate looks at


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
            chats = [input_bound(chat_of(prompt.example, teacher.system)) for _, some in drawn for prompt in some]
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
    inputs = [input_bound(part.messages(rollout)) for rollout in shown]
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
        if stream.answers == "student" and (column.streams is None or name in column.streams):
            answers = config.steps * stream.prompts * stream.samples * (1 + stream.refill_rounds)
            count = answers if column.reads_answers else min(answers, len(prompts.examples[name]))
            drawn.append((count, _some(prompts, name)))
    return drawn


def _some(prompts: Prompts, stream: str) -> list[Prompt]:
    return [Prompt("", stream, ids, example) for ids, example in prompts.examples[stream][:SHOWN]]


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


API_RULES = (_answers_are_there, _judged_streams_exist)
