"""A teacher with another tokenizer, heard through the likelihood of what both wrote: one number per span of bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from opd.heads import Head
from opd.losses import Need
from opd.losses.protocol import needs
from opd.records import Example, FullVocab, Mean, Rollout, SomeTokens, TeacherScores
from opd.teachers.cross_tokenizer import check_inner, measured
from opd.teachers.protocol import GivesFullVocab, Teacher
from opd.teachers.reading import Reader, Reading

CHUNK = 256  # tokens whose logits exist at one time
CERTAIN = -1e-6  # nats; a span that the student was surer of than this has no shares


@dataclass
class SpanTeacher:
    """Scores the sampled tokens by spans that cover the same bytes (Breaking the Tokenizer Barrier, 2606.09456).

    With L_T and L_S the log-likelihoods of a span under the teacher and under the sampler, its token i gets the target
    log q_i = (L_T / L_S) log p_i, so that the advantages log q_i - log p_i of `opd.losses.SampledReverseKL` (shape
    `clip`, 10 either way) add up to L_T - L_S. Where the student was certain of the whole span, its tokens get equal
    shares.

    Args:
        inner: any teacher that gives the full vocabulary or the sampled token's score.
        max_tokens: of a span on either side; longer ones have no score.
        special_tokens, stop_tokens: as in `CrossTokenizerTeacher`; so are the metrics.
    """

    inner: Teacher
    max_tokens: int = 6
    special_tokens: dict[str, str] = field(default_factory=dict)
    stop_tokens: list[str] | None = None
    provides: ClassVar[frozenset[Need]] = needs("sampled")

    def __post_init__(self) -> None:
        self._metrics: dict[str, Mean] = {}
        check_inner(self.inner)
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens={self.max_tokens}: must be at least 1")
        if not self.inner.provides & {"full_vocab", "sampled"}:
            raise ValueError(f"inner ({type(self.inner).__name__}): gives no score of the sampled token")

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The teacher's own."""
        return self.inner.tokenizer()

    def meet(self, tokenizer: PreTrainedTokenizerBase, stop_ids: Sequence[int]) -> None:
        """Takes the student's tokenizer and the ids that end its answers."""
        self._reader = Reader(self.tokenizer(), tokenizer, stop_ids, self.special_tokens, self.stop_tokens)

    def check_examples(self, examples: Sequence[Example]) -> None:
        """Tries the teacher's chat template."""
        self._reader.check(examples)

    def start(self) -> None:
        """Starts the inner teacher."""
        self.inner.start()

    def score(self, rollouts: Sequence[Rollout]) -> list[TeacherScores | None]:
        """Targets [R] of the sampled tokens; None for an answer that the teacher cannot read at all."""
        readings = [self._reader.read(rollout) for rollout in rollouts]
        head = self.inner.head() if isinstance(self.inner, GivesFullVocab) else None  # once: it may come from a file
        scores: list[TeacherScores | None] = [
            None if given is None else self._scores(rollout, reading, *_token_logp(reading, given, head))
            for rollout, reading, given in zip(rollouts, readings, self._reader.ask(self.inner, readings), strict=True)
        ]
        self._metrics = measured(readings, scores)
        return scores

    def _scores(self, rollout: Rollout, reading: Reading, logp: Tensor, known: Tensor) -> SomeTokens:
        targets = torch.zeros(len(rollout.token_ids))
        present = torch.zeros(len(rollout.token_ids), dtype=torch.bool)
        for mine, theirs in reading.alignment.groups:
            if max(len(mine), len(theirs)) <= self.max_tokens and bool(known[theirs].all()):
                targets[mine] = torch.tensor(shares([rollout.logp[n] for n in mine], logp[theirs].sum().item()))
                present[mine] = True
        return SomeTokens(targets, present=present)

    def metrics(self) -> Mapping[str, Mean]:
        """Of the last `score`."""
        return self._metrics

    def close(self) -> None:
        """Closes the inner teacher."""
        self.inner.close()


@torch.no_grad()
def _token_logp(reading: Reading, given: TeacherScores, head: Head | None) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the teacher's own tokens, and which of them it knows."""
    ids = torch.tensor(reading.rollout.token_ids)
    if isinstance(given, FullVocab):
        assert head is not None, "who sends hidden states has a head"
        parts = zip(given.hidden.split(CHUNK), ids.to(given.hidden.device).split(CHUNK), strict=True)
        logp = torch.cat([head.logits(h).log_softmax(-1).gather(-1, t[:, None])[:, 0] for h, t in parts]).cpu()
    else:
        logp = given.token_logp.cpu()
    return logp, torch.ones_like(ids, dtype=torch.bool) if given.present is None else given.present.cpu()


def shares(student_logp: Sequence[float], teacher_logp: float) -> list[float]:
    """The teacher's log-likelihood of a span, shared out over the student's tokens as their own are."""
    total = sum(student_logp)
    if isfinite(total) and total < CERTAIN:
        return [teacher_logp / total * each for each in student_logp]
    return [teacher_logp / len(student_logp)] * len(student_logp)
