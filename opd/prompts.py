"""Prompts in a fixed, restart-safe order: which prompt stands where depends on the seed and the step alone."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from transformers import PreTrainedTokenizerBase

from opd import ranks
from opd.records import Example, Prompt, Rollout

HALF_PAIR = re.compile("[\ud800-\udfff]")  # a surrogate; a whole pair is one character by now


@runtime_checkable
class Source(Protocol):
    """A finite set of examples. Construction reads nothing."""

    def load(self) -> Sequence[Example]:
        """All examples, always in the same order."""
        ...


@dataclass(frozen=True)
class JsonlSource:
    """A JSON-lines file: `prompt` (text) or `messages` (chat), and optionally `answer`, `source` and further columns.

    `limit`: read only so many lines; null for all.
    """

    path: str
    limit: int | None = None

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit={self.limit}: must be at least 1, or null for all lines")

    def load(self) -> Sequence[Example]:
        """The file's rows.

        Raises:
            ValueError: no such file, one that cannot be read as UTF-8, a line without a usable prompt (named).
        """
        file = Path(self.path)
        if not file.is_file():
            raise ValueError(f"path: no file {self.path!r}")
        try:
            text = file.read_text(encoding="utf-8-sig")  # some editors write a mark in front
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"path: {self.path} cannot be read as UTF-8 text ({error})") from error
        lines = text.split("\n")[: self.limit]  # splitlines() would split inside strings
        return [self._example(number, line) for number, line in enumerate(lines, 1) if line.strip()]

    def _example(self, number: int, line: str) -> Example:
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"path: {self.path}:{number} is not JSON ({error})") from error
        if not isinstance(row, dict) or not (row.get("messages") or row.get("prompt")):
            empty = [key for key in ("prompt", "messages") if isinstance(row, dict) and row.get(key) in ("", [])]
            what = f"an empty `{empty[0]}`" if empty else "neither `prompt` nor `messages`"
            raise ValueError(f"path: {self.path}:{number} has {what}")
        prompt: Any = row.pop("messages", None) or row.pop("prompt")
        if not isinstance(prompt, str) and not _is_chat(prompt):
            raise ValueError(
                f"path: {self.path}:{number} has a prompt that is neither text nor a list of messages with `role` "
                "and `content`"
            )
        if not isinstance(prompt, str) and not all(isinstance(message["content"], str) for message in prompt):
            raise ValueError(
                f"path: {self.path}:{number} has a message whose `content` is not text: write one string, not null and "
                "not a list of parts"
            )
        answer, source = row.pop("answer", None), row.pop("source", None)
        known = None if answer is None else str(answer)
        return Example(prompt, known, "default" if source is None else str(source), row)


def _is_chat(prompt: Any) -> bool:
    return isinstance(prompt, list) and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in prompt)


@dataclass(frozen=True)
class Stream:
    """A share of every update: where prompts come from, how many samples each gets, and which terms train on them.

    Args:
        prompts: prompts per step, over all ranks.
        samples: answers per prompt; answers to one prompt form a group.
        terms: names of loss terms that apply; null for all.
        source: examples of its own; null for `data.train`.
        answers: `student` samples; `given` takes each example's `answer` (gold, or a teacher's), `teacher` lets the
            teacher named by `teacher` answer; the last two are imitated.
        refill_rounds: how often groups whose rewards do not differ are replaced by fresh prompts (DAPO's dynamic
            sampling); 0 never.
    """

    prompts: int
    samples: int = 1
    terms: list[str] | None = None
    source: Source | None = None
    answers: Literal["student", "given", "teacher"] = "student"
    teacher: str | None = None
    refill_rounds: int = 0

    def __post_init__(self) -> None:
        if self.prompts < 1 or self.samples < 1 or self.refill_rounds < 0:
            raise ValueError(
                f"prompts={self.prompts}, samples={self.samples}, refill_rounds={self.refill_rounds}: "
                "the first two must be at least 1, the last at least 0"
            )
        if self.answers == "given" and (self.samples > 1 or self.refill_rounds):
            raise ValueError("answers=given: there is one answer to a prompt; set samples=1 and refill_rounds=0")
        if (self.answers == "teacher") != (self.teacher is not None):
            raise ValueError(
                f"answers={self.answers}, teacher={self.teacher}: set answers=teacher and a teacher's name, or neither"
            )
        if self.answers == "teacher" and self.refill_rounds:
            raise ValueError("answers=teacher: these answers get no reward to refill by; set refill_rounds=0")


@runtime_checkable
class Column(Protocol):
    """Tells more of an example once the student has answered it, such as a hint; rewards and teachers may read it."""

    def start(self) -> None:
        """Opens what it needs; called once before the first step."""
        ...

    def fill(self, rollouts: Sequence[Rollout]) -> list[str | None]:
        """One text per sampled answer, in order; None where there is none."""
        ...

    def close(self) -> None:
        """Releases what `start` took."""
        ...


@dataclass(frozen=True)
class DataConfig:
    """Examples to train on and to evaluate on, the streams of an update, and columns that are made during the run."""

    train: Source
    heldout: Source | None = None
    streams: dict[str, Stream] = field(default_factory=lambda: {"main": Stream(prompts=64)})
    columns: dict[str, Column] = field(default_factory=dict)
    max_prompt_tokens: int = 1024
    too_long: Literal["error", "drop", "keep_end"] = "error"

    def __post_init__(self) -> None:
        if self.max_prompt_tokens < 1:
            raise ValueError(f"max_prompt_tokens={self.max_prompt_tokens}: must be at least 1")
        if not self.streams:
            raise ValueError("streams: empty; an update needs at least one stream")


class Prompts:
    """Tokenized examples of every stream."""

    def __init__(self, data: DataConfig, tokenizer: PreTrainedTokenizerBase, seed: int) -> None:
        encoder = Encoder(tokenizer, data.max_prompt_tokens, data.too_long)
        self.streams, self.columns, self.seed = data.streams, data.columns, seed
        self._orders: dict[str, tuple[int, list[int]]] = {}  # stream -> the epoch that it is in, and its order
        shares = any(stream.source is None for stream in data.streams.values())
        shared = encoder.encode(data.train, "data.train") if shares else []
        self.examples = {
            name: shared if stream.source is None else encoder.encode(stream.source, f"data.streams.{name}.source")
            for name, stream in data.streams.items()
        }
        for name, stream in data.streams.items():
            if stream.answers == "given" and any(example.answer is None for _, example in self.examples[name]):
                raise ValueError(f"data.streams.{name}.answers=given: some examples have no `answer`")
        self.heldout = [] if data.heldout is None else encoder.encode(data.heldout, "data.heldout")

    @property
    def told(self) -> dict[str, list[tuple[list[int], Example]]]:
        """The examples with a stand-in for every column that is made during the run."""
        later = dict.fromkeys(self.columns, "...")
        return {
            name: [(ids, replace(example, columns={**example.columns, **later})) for ids, example in rows]
            for name, rows in self.examples.items()
        }

    def draw(self, step: int) -> list[Prompt]:
        """The prompts of a step, of all streams and ranks. Every epoch is a fresh permutation; none is cut short."""
        drawn = []
        for name, stream in self.streams.items():
            examples = self.examples[name]
            for position in range(step * stream.prompts, (step + 1) * stream.prompts):
                epoch, place = divmod(position, len(examples))
                token_ids, example = examples[self._order(name, epoch)[place]]
                drawn.append(Prompt(str(position), name, token_ids, example, stream.samples))
        return drawn

    def extra(self, stream: str, step: int, turn: int, count: int) -> list[Prompt]:
        """`count` prompts beside those of the step, this rank's own; they follow from seed, step and turn."""
        examples = self.examples[stream]
        chooser = random.Random(f"{self.seed}/{stream}/{step}/{turn}/{ranks.rank()}")
        return [
            Prompt(f"{step}.{turn}.{ranks.rank()}.{n}", stream, *chooser.choice(examples), self.streams[stream].samples)
            for n in range(count)
        ]

    def evaluation(self, limit: int, samples: int) -> list[Prompt]:
        """The first `limit` held-out prompts."""
        return [
            Prompt(str(index), "heldout", token_ids, example, samples)
            for index, (token_ids, example) in enumerate(self.heldout[:limit])
        ]

    def _order(self, stream: str, epoch: int) -> list[int]:
        known_epoch, order = self._orders.get(stream, (-1, []))
        if known_epoch != epoch:
            order = list(range(len(self.examples[stream])))
            random.Random(f"{self.seed}/{stream}/{epoch}").shuffle(order)
            self._orders[stream] = epoch, order
        return order


def _texts(example: Example) -> list[str]:
    """What of an example becomes tokens."""
    prompt = example.prompt
    texts = [prompt] if isinstance(prompt, str) else [str(message["content"]) for message in prompt]
    return texts if example.answer is None else [*texts, example.answer]


class Encoder:
    """Turns examples into token ids, once, before any weights load."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, limit: int, too_long: str) -> None:
        self.tokenizer, self.limit, self.too_long = tokenizer, limit, too_long

    def encode(self, source: Source, key: str) -> list[tuple[list[int], Example]]:
        """(token ids, example) of every usable example.

        Raises:
            ValueError: no examples, a prompt over the limit, one that is no valid text, a chat prompt without a chat
                template; names `key`.
        """
        try:
            examples = source.load()
        except ValueError as error:
            raise ValueError(f"{key}.{error}") from error
        encoded = []
        for number, example in enumerate(examples):
            if any(HALF_PAIR.search(text) for text in _texts(example)):
                raise ValueError(
                    f"{key}: example {number} holds half of a surrogate pair (such as \\ud83d alone), which is no "
                    "character: write the whole pair, or leave it out"
                )
            token_ids = self.ids(example, key)
            if not token_ids:
                raise ValueError(f"{key}: example {number} has an empty prompt")
            if len(token_ids) > self.limit:
                if self.too_long == "error":
                    raise ValueError(
                        f"{key}: example {number} has {len(token_ids)} prompt tokens, over data.max_prompt_tokens="
                        f"{self.limit}; raise the limit, or set data.too_long to drop or keep_end"
                    )
                if self.too_long == "drop":
                    continue
                token_ids = self._end_of(token_ids)
            encoded.append((token_ids, example))
        if not encoded:
            raise ValueError(f"{key}: no examples" + (" left after dropping long prompts" if examples else ""))
        return encoded

    def _end_of(self, token_ids: list[int]) -> list[int]:
        """The last `limit` tokens, the start token kept in front where there was one."""
        start = token_ids[:1] if token_ids[0] == self.tokenizer.bos_token_id else []
        return start + token_ids[len(token_ids) - self.limit + len(start) :]

    def ids(self, example: Example, key: str) -> list[int]:
        """The example's prompt as the model gets it, not cut; ValueError for a chat without a chat template."""
        if isinstance(example.prompt, str):
            ids: list[int] = self.tokenizer(example.prompt)["input_ids"]  # pyright: ignore[reportAssignmentType]
            if (
                len(ids) > 1
                and ids[-1] == self.tokenizer.eos_token_id
                and not example.prompt.endswith(str(self.tokenizer.eos_token))
            ):
                ids = ids[:-1]  # an end token that the tokenizer adds would close the prompt before the answer
        elif self.tokenizer.chat_template is None:
            raise ValueError(
                f"{key}: chat messages, but the student's tokenizer has no chat template; set student.chat_template "
                "to a template file, or give plain text as `prompt`"
            )
        else:
            chat = [dict(message) for message in example.prompt]
            rendered: Any = self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
            ids = list(rendered)
        bos = self.tokenizer.bos_token_id
        return ids[1:] if len(ids) > 1 and bos is not None and ids[0] == ids[1] == bos else ids
