"""What the streamed pass notes of every token beside the losses; cheap, because it runs for all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from opd.distributions import likeliest, row_dots
from opd.records import Scores, TokenChunk
from opd.shared_vocabulary import given, of_token

TOP = 16
SAMPLED_ABOVE = 2**13  # larger vocabularies get what needs a top-k on a sample of tokens
EVERY = 16  # of how many tokens one is in the sample
STUDENT_LOGP = "student_token_logp"  # only beside a teacher with which it is compared on common tokens


class TokenStatistics:
    """Statistics of a chunk's c tokens by metric name, each [c]; all in nats or shares, all detached.

    Of the student: `entropy`; `token_logp`, of the sampled token at the sampling temperature; `stop_mass`, the
    probability of all ids that end an answer. Of every teacher: `token_logp`; `delta`, its minus the student's log-prob
    of the sampled token at temperature 1, NaN for a given answer. Of one that gives the full vocabulary: `kl`, of the
    student to it; `entropy`; `entropy_gap`, the student's minus its own; `stop_mass`; and what `top_statistics` says of
    the likeliest tokens, over a large vocabulary for one token in sixteen. Of one that gives its likeliest tokens:
    `top_mass`, their probability. Of one with other tokens `shared_mass` and `student_shared_mass`, the two models'
    probability of the common ones, and all others among these; `student_token_logp`, the student's of the sampled
    token as it is compared with `token_logp`, at temperature 1.
    """

    def __init__(self, first: int, vocabulary: int) -> None:
        """Of a chunk that starts at token number `first`."""
        self.first, self.every = first, 1 if vocabulary <= SAMPLED_ABOVE else EVERY
        self._found: dict[str, list[Tensor]] = {}
        self._likely: dict[str, list[tuple[Tensor, Tensor]]] = {}  # teacher -> log-probs [r, V] of both, of the sample

    def add(self, chunk: TokenChunk, teachers: Mapping[str, Scores], start: int) -> None:
        """Notes the next block, whose first token has the number `start`: what is gone with its distributions."""
        entropy = -row_dots(chunk.student_p, chunk.student_logp)
        found = {"student/entropy": entropy, "student/token_logp": chunk.token_logp}
        stops = [index for index in chunk.stop_ids if index < chunk.student_p.shape[1]]
        if stops:
            found["student/stop_mass"] = chunk.student_p[:, stops].sum(-1)
        sample = slice(-start % self.every, None, self.every)
        own = chunk.student_logp[sample].clone() if teachers else None
        for name, scores in teachers.items():
            student, seen, theirs = chunk.student, own, {"token_logp": scores.token_logp, "student_entropy": entropy}
            if scores.support is not None and scores.mass is not None:
                theirs |= {"shared_mass": scores.mass, "student_shared_mass": (student.p * scores.support).sum(-1)}
                if scores.restricts:
                    student = given(student, scores.support)
                    seen, theirs["student_entropy"] = student.logp[sample], -row_dots(student.p, student.logp)
                    theirs[STUDENT_LOGP] = of_token(student, chunk.token_ids)
            theirs["own_token_logp"] = theirs.get(STUDENT_LOGP, of_token(student, chunk.token_ids))
            if scores.top is not None:
                theirs["top_mass"] = scores.top.logp.exp().sum(-1)
            if (teacher := scores.full) is not None:
                theirs["kl"] = -theirs["student_entropy"] - row_dots(student.p, teacher.logp)
                theirs["entropy"] = -row_dots(teacher.p, teacher.logp)
                if stops:
                    theirs["stop_mass"] = teacher.p[:, stops].sum(-1)
                if seen is not None and len(seen):
                    self._likely.setdefault(name, []).append((seen, teacher.logp[sample].clone()))
            found |= {f"teacher/{name}/{key}": value for key, value in theirs.items()}
        for key, value in found.items():
            self._found.setdefault(key, []).append(value)

    def finished(self, sampler_logp: Tensor, present: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """All of the chunk. `present`: teacher -> [c], false where its score is missing: there it has NaN."""
        found = {key: torch.cat(parts) for key, parts in self._found.items()}
        for name, there in present.items():
            prefix = f"teacher/{name}/"
            theirs = {key.removeprefix(prefix): found.pop(key) for key in list(found) if key.startswith(prefix)}
            entropy, token_logp = theirs.pop("student_entropy"), theirs.pop("own_token_logp")
            theirs["delta"] = (theirs["token_logp"] - token_logp).masked_fill(sampler_logp.isnan(), torch.nan)
            if "entropy" in theirs:
                theirs["entropy_gap"] = entropy - theirs["entropy"]
                theirs |= self._tops(name, entropy)
            found |= {prefix + key: value.masked_fill(~there, torch.nan) for key, value in theirs.items()}
        return found

    def _tops(self, name: str, like: Tensor) -> dict[str, Tensor]:
        """`top_statistics` [c], NaN outside of the sample."""
        pairs = self._likely.get(name)
        if pairs is None:
            return {}
        tops = top_statistics(*(torch.cat(parts) for parts in zip(*pairs, strict=True)))
        spread = {key: torch.full_like(like, torch.nan) for key in tops}
        for key, value in tops.items():
            spread[key][-self.first % self.every :: self.every] = value
        return spread


def student_beside(facts: Mapping[str, Tensor], teachers: Sequence[str]) -> Tensor:
    """The student's log-probabilities [R] of a row's sampled tokens, as its teachers are compared with it: given that
    the token is a common one, where the first of them that has other tokens scored it.
    """
    whole = facts["student/token_logp"]
    found = [facts[key] for name in teachers if (key := f"teacher/{name}/{STUDENT_LOGP}") in facts]
    return torch.where(found[0].isnan(), whole, found[0]) if found else whole


def top_statistics(student_logp: Tensor, teacher_logp: Tensor) -> dict[str, Tensor]:
    """`overlap16`: the share of the student's top 16 that is in the teacher's. `<set>16_<whose>_mass`: probability of
    the student's, the teacher's or their common top 16 under either. Each [r], of log-probabilities [r, V].
    """
    k = min(TOP, student_logp.shape[1])
    of_student, of_teacher = likeliest(student_logp, k), likeliest(teacher_logp, k)
    common = (of_student[:, :, None] == of_teacher[:, None, :]).any(-1)
    p_of_student, q_of_student = (logp.gather(-1, of_student).exp() for logp in (student_logp, teacher_logp))
    return {
        "overlap16": common.to(student_logp.dtype).mean(-1),
        "common16_student_mass": (p_of_student * common).sum(-1),
        "common16_teacher_mass": (q_of_student * common).sum(-1),
        "student16_teacher_mass": q_of_student.sum(-1),
        "teacher16_student_mass": student_logp.gather(-1, of_teacher).exp().sum(-1),
        "teacher16_teacher_mass": teacher_logp.gather(-1, of_teacher).exp().sum(-1),
    }
