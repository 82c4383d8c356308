"""What the streamed pass notes of every token beside the losses; cheap, because it runs for all of them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from opd.records import Distribution, Scores, TokenChunk

TOP = 16
SAMPLED_ABOVE = 2**13  # larger vocabularies get what needs a top-k on a sample of tokens


def token_statistics(
    chunk: TokenChunk, teachers: Mapping[str, Scores], present: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Statistics of a block's n tokens by metric name, each [n]; all in nats or shares, all detached.

    `present`: teacher name -> [n], false where its score is missing; there everything of the teacher is NaN.
    Of the student: `entropy`; `token_logp`, of the sampled token at the sampling temperature; `stop_mass`, the
    probability of all ids that end an answer. Of every teacher: `token_logp`; `delta`, its minus the student's log-prob
    of the sampled token at temperature 1, NaN for a given answer. Of one that gives the full vocabulary: `kl`, of the
    student to it; `entropy`; `entropy_gap`, the student's minus its own; `stop_mass`; and what `_top` says of the
    likeliest tokens. Of one that gives its likeliest tokens: `top_mass`, their probability.
    """
    negative_entropy = torch.linalg.vecdot(chunk.student_p, chunk.student_logp)
    found = {"student/entropy": -negative_entropy, "student/token_logp": chunk.token_logp}
    stops = [index for index in chunk.stop_ids if index < chunk.student_p.shape[1]]
    if stops:
        found["student/stop_mass"] = chunk.student_p[:, stops].sum(-1)
    if not teachers:
        return found
    token, likeliest = chunk.token_ids[:, None], _likeliest(chunk.student)
    student_token_logp = chunk.student_logp.gather(-1, token)[:, 0]
    for name, scores in teachers.items():
        theirs = {
            "token_logp": scores.token_logp,
            "delta": (scores.token_logp - student_token_logp).masked_fill(chunk.sampler_logp.isnan(), torch.nan),
        }
        if scores.top is not None:
            theirs["top_mass"] = scores.top.logp.exp().sum(-1)
        if (teacher := scores.full) is not None:
            entropy = -torch.linalg.vecdot(teacher.p, teacher.logp)
            theirs |= {
                "kl": negative_entropy - torch.linalg.vecdot(chunk.student_p, teacher.logp),
                "entropy": entropy,
                "entropy_gap": -negative_entropy - entropy,
                **({"stop_mass": teacher.p[:, stops].sum(-1)} if stops else {}),
                **_top(chunk.student, teacher, likeliest),
            }
        missing = ~present[name]
        found |= {f"teacher/{name}/{key}": value.masked_fill(missing, torch.nan) for key, value in theirs.items()}
    return found


def _likeliest(distribution: Distribution) -> Tensor:
    """Ids [r, k] of the 16 likeliest tokens. Over a large vocabulary of the block's first row only: a top-k costs more
    than all other statistics together.
    """
    tokens, vocabulary = distribution.logp.shape
    return distribution.logp[: 1 if vocabulary > SAMPLED_ABOVE else tokens].topk(min(TOP, vocabulary), -1).indices


def _top(student: Distribution, teacher: Distribution, of_student: Tensor) -> dict[str, Tensor]:
    """`overlap16`: the share of the student's top 16 that is in the teacher's. `<set>16_<whose>_mass`: probability of
    the student's, the teacher's or their common top 16 under either. NaN in rows that were not looked at.
    """
    rows, of_teacher = len(of_student), _likeliest(teacher)
    common = (of_student[:, :, None] == of_teacher[:, None, :]).any(-1)
    p, q = student.p[:rows], teacher.p[:rows]
    q_of_student = q.gather(-1, of_student)
    looked_at = {
        "overlap16": common.to(p.dtype).mean(-1),
        "common16_student_mass": (p.gather(-1, of_student) * common).sum(-1),
        "common16_teacher_mass": (q_of_student * common).sum(-1),
        "student16_teacher_mass": q_of_student.sum(-1),
        "teacher16_student_mass": p.gather(-1, of_teacher).sum(-1),
        "teacher16_teacher_mass": q.gather(-1, of_teacher).sum(-1),
    }
    rest = len(student.logp) - rows
    return {name: torch.nn.functional.pad(value, (0, rest), value=torch.nan) for name, value in looked_at.items()}
