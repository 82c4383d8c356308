"""What a teacher of another vocabulary says, in the student's ids, and the comparison on what both can say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from opd.distributions import Distribution, LogitMap
from opd.records import Scores, TokenChunk

LOGP_MIN = -1e4  # nats; stands for -inf, so that products with zero stay zero
REST_MIN = -20.0  # nats; the least probability of ending a token here, for a teacher that has no token for it
PLACE_BITS = 10  # of a place: bytes of the token that are already there


@dataclass(frozen=True)
class InStudentIds:
    """A teacher's logits for c tokens, in the student's ids.

    Attributes:
        logits: [c, V], -inf where the teacher has no say.
        support: [1, V] or [c, V], the ids that the two have in common; None: all.
        mass: [c], the teacher's probability of them.
        restricts: whether losses compare the two models on the support alone, each renormalised.
        rest: [c, V], ids of the support that the teacher gives one probability for all together; None: none.
        rest_logp: [c], its logarithm, on the scale of `logits`.
        onward: what is still to be done to the logits, which are raw ones in the head's dtype; None: nothing.
    """

    logits: Tensor
    support: Tensor | None = None
    mass: Tensor | None = None
    restricts: bool = True
    rest: Tensor | None = None
    rest_logp: Tensor | None = None
    onward: LogitMap | None = None

    def at(self, rows: slice) -> InStudentIds:
        """The same of some tokens."""
        support = self.support if self.support is None or len(self.support) == 1 else self.support[rows]
        mass, rest, rest_logp = (
            None if each is None else each[rows] for each in (self.mass, self.rest, self.rest_logp)
        )
        return InStudentIds(self.logits[rows], support, mass, self.restricts, rest, rest_logp, self.onward)

    def beside(self, student: Distribution) -> Tensor:
        """The logits [c, V], the rest's probability shared out as the student's own is.

        Then p / q is the same for all of the rest, so that every divergence is that with the rest as one token, and so
        is its gradient.
        """
        if self.rest is None or self.rest_logp is None:
            return self.logits
        own = student.logp.masked_fill(~self.rest, -torch.inf)
        total = own.logsumexp(-1).clamp(min=LOGP_MIN)  # of a row without a rest
        return torch.where(self.rest, own + (self.rest_logp - total)[:, None], self.logits)


class Translation(Protocol):
    """From logits over the teacher's ids to the student's."""

    def __call__(self, logits: Tensor, places: Tensor | None) -> InStudentIds:
        """Of logits [c, V'] at `places` [c], see `place`."""
        ...

    def narrowed(self, vocab_size: int) -> Translation:
        """The same into the first `vocab_size` ids of the student."""
        ...


# Of a place: the teacher's tokens [m] that it may have begun there, and the student's id that comes next in each; -1
# for one that ends there, after which anything may come.
Continuations = Callable[[int], tuple[Tensor, Tensor]]


def place(token: int, num_bytes: int) -> int:
    """Where a teacher stands that has begun a token: its first `num_bytes` bytes are there. 0: between two tokens."""
    return token << PLACE_BITS | num_bytes if num_bytes else 0


def begun(place: int) -> tuple[int, int]:
    """The token and its bytes of a place other than 0."""
    return place >> PLACE_BITS, place & ((1 << PLACE_BITS) - 1)


@dataclass(frozen=True)
class Fold:
    """Each token of the teacher gives its probability to one of the student's, or is left out.

    Attributes:
        ids: [V'], the student's id for each of the teacher's; -1: left out.
        vocab_size: ids of the student.
        continuations: the same for a teacher that has begun a token; None where that is not asked for.
    """

    ids: Tensor
    vocab_size: int
    continuations: Continuations | None = None

    def __call__(self, logits: Tensor, places: Tensor | None) -> InStudentIds:
        """Logits [c, V]: log of the summed exponentials of the tokens that give to one id."""
        ids = self.ids[: logits.shape[1]].to(logits.device)
        normaliser = logits.logsumexp(-1)
        known = _below(ids, self.vocab_size).nonzero()[:, 0]
        folded = _gathered(logits, known, ids[known], self.vocab_size)
        support = torch.zeros(1, self.vocab_size, dtype=torch.bool, device=logits.device)
        support[0, ids[known]] = True
        rest: Tensor | None = None
        rest_logp: Tensor | None = None
        inside = torch.zeros(0) if places is None or self.continuations is None else places[places > 0].unique()
        if len(inside):
            assert places is not None and self.continuations is not None, "places inside a token were asked for"
            support = support.repeat(len(logits), 1)
            rest = torch.zeros_like(support)
            rest_logp = torch.zeros_like(normaliser)
            for here in inside.tolist():
                rows = (places == here).nonzero()[:, 0]
                tokens, targets = (each.to(logits.device) for each in self.continuations(here))
                normaliser[rows] = logits[rows][:, tokens].logsumexp(-1)
                known = _below(targets, self.vocab_size)
                folded[rows] = _gathered(logits[rows], tokens[known], targets[known], self.vocab_size)
                rest[rows] = support[rows]
                rest[rows[:, None], targets[known][None, :]] = False
                support[rows[:, None], targets[known][None, :]] = True
                ended = logits[rows][:, tokens[targets < 0]].logsumexp(-1)
                rest_logp[rows] = torch.maximum(ended, normaliser[rows] + REST_MIN)
        mass = (folded.logsumexp(-1) - normaliser).exp()
        return InStudentIds(folded, support, mass, rest=rest, rest_logp=rest_logp)

    def narrowed(self, vocab_size: int) -> Fold:
        """The same into the first `vocab_size` ids."""
        return replace(self, vocab_size=vocab_size)


@dataclass(frozen=True)
class Ranked:
    """Matched tokens by id; the probabilities of the others in falling order, on the student's unmatched ids.

    What is beyond the number of those is left out, the smallest first.
    """

    ids: Tensor  # [V'], as in `Fold`
    vocab_size: int

    def __call__(self, logits: Tensor, places: Tensor | None) -> InStudentIds:
        """Logits [c, V], normalised over the teacher's whole vocabulary; `support`: the matched ids."""
        ids = self.ids[: logits.shape[1]].to(logits.device)
        logits = torch.log_softmax(logits, -1)
        matched = _below(ids, self.vocab_size)
        known = matched.nonzero()[:, 0]
        placed = _gathered(logits, known, ids[known], self.vocab_size)
        support = torch.zeros(1, self.vocab_size, dtype=torch.bool, device=logits.device)
        support[0, ids[known]] = True
        rest = logits[:, ~matched].sort(-1, descending=True).values
        free = (~support[0]).nonzero()[:, 0][: rest.shape[1]]
        placed[:, free] = rest[:, : len(free)]
        return InStudentIds(placed, support, logits[:, known].exp().sum(-1), restricts=False)

    def narrowed(self, vocab_size: int) -> Ranked:
        """The same into the first `vocab_size` ids."""
        return replace(self, vocab_size=vocab_size)


def _below(ids: Tensor, vocab_size: int) -> Tensor:
    return (ids >= 0) & (ids < vocab_size)


def _gathered(logits: Tensor, tokens: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
    """[c, V]: of every target the log of its tokens' summed exponentials, -inf where it has none."""
    values = logits[:, tokens]
    gathered = logits.new_full((len(logits), vocab_size), -torch.inf)
    if len(targets.unique()) == len(targets):
        gathered[:, targets] = values
        return gathered
    peaks = gathered.scatter_reduce(1, targets.expand_as(values), values, "amax")
    peaks.masked_fill_(peaks == -torch.inf, 0.0)
    sums = torch.zeros_like(gathered).index_add_(1, targets, (values - peaks[:, targets]).exp())
    return peaks.add_(sums.log())


def restricted(chunk: TokenChunk, sampling: Distribution, support: Tensor) -> tuple[TokenChunk, Distribution]:
    """The chunk, and the distribution of sampling, given that the token is one of `support` ([1 or n, V]).

    Every distribution is renormalised over it; the sampler's probability of the token too, by the student's mass there:
    so a ratio of the two stays what it was. Outside, log-probabilities are `LOGP_MIN`, constant, and probabilities 0.
    """
    student = given(chunk.student, support)
    drawn = student if sampling is chunk.student else given(sampling, support)
    teacher = chunk.teacher if chunk.teacher is None or support is chunk.support else given(chunk.teacher, support)
    reference = None if chunk.reference is None else given(chunk.reference, support)
    token_logp = of_token(drawn, chunk.token_ids)
    changed = replace(
        chunk,
        student=student,
        token_logp=token_logp,
        sampler_logp=chunk.sampler_logp + (token_logp - chunk.token_logp),
        teacher=teacher,
        teacher_token_logp=chunk.teacher_token_logp if teacher is None else of_token(teacher, chunk.token_ids),
        reference=reference,
        reference_token_logp=chunk.reference_token_logp if reference is None else of_token(reference, chunk.token_ids),
    )
    return changed, drawn


def of_token(distribution: Distribution, token_ids: Tensor) -> Tensor:
    """The log-probabilities [n] of one token each."""
    return distribution.logp.gather(-1, token_ids[:, None])[:, 0]


def common_support(teachers: Mapping[str, Scores], names: list[str]) -> Tensor | None:
    """The ids [1 or n, V] on which the teachers of a term are compared with the student; None: all."""
    supports = [s for name in names if teachers[name].restricts and (s := teachers[name].support) is not None]
    common = supports[0] if supports else None
    for support in supports[1:]:
        common = support if common is None else common & support
    return common


def given(distribution: Distribution, support: Tensor) -> Distribution:
    """The distribution of a token that is one of the support's ([1 or n, V])."""
    return Distribution.of_logits(distribution.logp.masked_fill(~support, -torch.inf), floor=LOGP_MIN)
