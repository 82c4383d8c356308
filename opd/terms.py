"""A loss term: a formula with its name, weight, teacher and way of averaging."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from opd.losses import Correction, Loss
from opd.prompts import Prompts, Stream
from opd.records import Example, Prompt
from opd.schedules import Constant, Schedule
from opd.weighting import Weigher

Aggregation = Literal["token_mean", "sequence_mean", "constant"]


@dataclass(frozen=True)
class Term:
    """weight(progress) * sum_t w_t c_t loss_t / N, with N counted over all ranks and micro-batches of the update.

    w_t is the product of the weighers' factors (`weigh`, named; a token of factor 0 is not counted), c_t the
    `correction` for the mismatch between sampler and student.

    `sources` routes: the term trains on answers to prompts of these sources only, and its teachers score no others.

    `aggregation`: `token_mean` (w = 1, N = tokens), `sequence_mean` (w = 1 / tokens of the row, N = rows; the mean of
    row means), `constant` (w = 1, N = rows * `constant_tokens`; Dr. GRPO, 2503.20783).
    """

    name: str
    loss: Loss
    weight: Schedule = field(default_factory=lambda: Constant(1.0))
    teacher: str | None = None
    reference: str | None = None
    sources: list[str] | None = None
    correction: Correction | None = None
    weigh: dict[str, Weigher] = field(default_factory=dict)
    aggregation: Aggregation = "token_mean"
    constant_tokens: int = 1

    def takes(self, prompt: Prompt) -> bool:
        """Whether the prompt's source is one of the term's."""
        return self.sources is None or prompt.example.source in self.sources

    @property
    def teachers(self) -> list[str]:
        """Names of the teachers whose scores a row must have: `teacher`, and `reference`, a second one."""
        return [name for name in (self.teacher, self.reference) if name is not None]

    @property
    def needs_facts(self) -> bool:
        """Whether a forward pass without gradients must precede the update."""
        asked = self.loss.needs | (frozenset() if self.correction is None else self.correction.needs)
        return bool({"row_ratio", "row_value"} & asked) or any(weigher.needs_facts for weigher in self.weigh.values())

    @property
    def needs_advantage(self) -> bool:
        """Whether rows without a reward must stay out of this term."""
        return "advantage" in self.loss.needs


def terms_on(prompt: Prompt, terms: Sequence[Term], streams: Mapping[str, Stream]) -> list[Term]:
    """The terms that train on the prompt's answers: those of its stream that take its source."""
    listed = streams[prompt.stream].terms
    return [term for term in terms if (listed is None or term.name in listed) and term.takes(prompt)]


def check_sources(terms: Sequence[Term], prompts: Prompts) -> None:
    """Refuses prompts that no term trains on, and sources that no prompt has.

    Raises:
        ValueError: naming the stream or the term, and the way out.
    """
    present: dict[str, set[str]] = {}
    for stream, examples in prompts.examples.items():
        for source in sorted({example.source for _, example in examples}):
            example = Prompt("", stream, [], Example("", source=source))
            found = terms_on(example, terms, prompts.streams)
            for term in found:
                present.setdefault(term.name, set()).add(source)
            if not found:
                raise ValueError(
                    f"data.streams.{stream}: examples of source {source!r} match no loss term; add the source to a "
                    "term's `sources`, or leave these examples out"
                )
    for term in terms:
        unknown = sorted(set(term.sources or ()) - present.get(term.name, set()))
        if unknown:
            raise ValueError(
                f"loss.{term.name}.sources: no example of its streams has the source {unknown[0]!r} (there are: "
                f"{', '.join(sorted({e.source for examples in prompts.examples.values() for _, e in examples}))})"
            )
