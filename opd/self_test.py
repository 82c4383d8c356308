"""Does a teacher answer as it must, through its real wire? Known scores, and teacher = student => no divergence."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from opd.batching import make_batch
from opd.heads import split_model
from opd.objective import Objective, streamed_loss
from opd.records import Credit, FullVocab, Reward, Rollout, TeacherScores, moved
from opd.remote import RemoteError
from opd.rows import Row
from opd.run import Run
from opd.students import HFStudent
from opd.teachers import FollowsStudent, LocalTeacher, PoolingTeacher, ScorerTeacher, ServedTeacher, Teacher

State = Literal["ok", "note", "FAIL"]
SEQUENCES = 4
REPEATED = 1e-4  # of the largest number: by how much fp32 scores may move with the company of other rows
KL, LOGP = 1e-6, 1e-4  # nats; a teacher and its checkpoint here, both fp32: mean KL, largest gap of a log-probability
HALF_REPEATED, HALF_KL, HALF_LOGP = 0.05, 1e-2, 0.5  # the same where one of them computes in half precision


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    subject: str
    state: State
    text: str


def examined(run: Run, as_student: bool) -> Iterator[Finding]:
    """Findings on every teacher that a term uses; `as_student`: loads the checkpoint of each here, in fp32, too."""
    for name, teacher in run.teachers.teachers.items():
        if isinstance(teacher, FollowsStudent):
            yield Finding(f"teacher.{name}", "note", "made of the student: there is nothing to reach")
            continue
        began = time.monotonic()
        try:
            teacher.start()
            yield Finding(
                f"teacher.{name}", "ok", f"{type(teacher).__name__} started in {time.monotonic() - began:.1f} s"
            )
            yield from _examined(f"teacher.{name}", teacher, known_rollouts(run), as_student)
            teacher.close()
        except (RemoteError, ValueError, OSError) as error:
            yield Finding(f"teacher.{name}", "FAIL", str(error))


def known_rollouts(run: Run) -> list[Rollout]:
    """Training prompts, each with the next one's tokens as its answer: the same every time."""
    prompts = run.prompts.draw(0)[:SEQUENCES]
    longest = run.config.sampler.params.max_tokens
    return [
        Rollout(prompt, 0, answer.token_ids[:longest], [0.0] * len(answer.token_ids[:longest]), "", "given", 0)
        for prompt, answer in zip(prompts, [*prompts[1:], prompts[0]], strict=True)
    ]


def _examined(key: str, teacher: Teacher, rollouts: Sequence[Rollout], as_student: bool) -> Iterator[Finding]:
    yield _repeats(key, teacher, rollouts)
    if isinstance(teacher, LocalTeacher | PoolingTeacher | ServedTeacher | ScorerTeacher):
        if as_student:
            yield _against_itself(key, teacher, rollouts)
        else:
            yield Finding(key, "note", "its divergence from its own checkpoint was not asked for")


def _repeats(key: str, teacher: Teacher, rollouts: Sequence[Rollout]) -> Finding:
    """One sequence alone, again, and among others: finite and the same."""
    alone, again, among = teacher.score(rollouts[:1])[0], teacher.score(rollouts[:1])[0], teacher.score(rollouts)[0]
    if alone is None or again is None or among is None:
        return Finding(key, "FAIL", "gave no scores for a known sequence")
    first, *others = (_numbers(scores) for scores in (alone, again, among))
    if not all(bool(numbers.isfinite().all()) for numbers in (first, *others)):
        return Finding(key, "FAIL", "scores of a known sequence are missing or not finite")
    if any(numbers.shape != first.shape for numbers in others):
        return Finding(key, "FAIL", "scores of one sequence have another shape among other rows")
    gap = max((numbers - first).abs().max().item() for numbers in others) / max(first.abs().max().item(), 1e-9)
    text = f"a known sequence twice, alone and among {len(rollouts)}: {len(first)} tokens differ by {gap:.1e} at most"
    return Finding(key, _verdict(gap, REPEATED, HALF_REPEATED), text)


def _numbers(scores: TeacherScores) -> torch.Tensor:
    """The scores as numbers [R, ...], NaN where one is missing."""
    numbers = scores.hidden.float() if isinstance(scores, FullVocab) else scores.token_logp[:, None]
    return numbers if scores.present is None else numbers.masked_fill(~scores.present[:, None], torch.nan)


def _against_itself(
    key: str, teacher: LocalTeacher | PoolingTeacher | ServedTeacher | ScorerTeacher, rollouts: Sequence[Rollout]
) -> Finding:
    """The teacher's own checkpoint as student, under the objective that training uses."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = HFStudent(teacher.model, trust_remote_code=teacher.trust_remote_code).load().eval().to(device)
    scores = teacher.score(rollouts)
    rows = [Row(r, Reward(None), Credit(None), {"it": s}, frozenset()) for r, s in zip(rollouts, scores, strict=True)]
    body, head = split_model(model)
    micro = moved(make_batch(rows, [], micro_batch_tokens=2**40, pad_id=0).micro_batches[0], device)
    heads = {} if isinstance(teacher, ScorerTeacher) else {"it": teacher.head()}
    vocab_size = min(len(each.weight) for each in (head, *heads.values()))
    heads = {name: theirs.narrowed(vocab_size) for name, theirs in heads.items()}
    with torch.no_grad():
        hidden = body(input_ids=micro.input_ids, attention_mask=micro.attention_mask, use_cache=False).last_hidden_state
        predictors = hidden.flatten(0, 1)[micro.tokens.predictor]
        objective = Objective([], {}, vocab_size)
        _, outcome = streamed_loss(predictors, head.narrowed(vocab_size), micro, heads, objective)
    delta = (outcome.statistics["teacher/it/token_logp"] - outcome.statistics["student/token_logp"]).abs()
    worst = delta[~delta.isnan()].max().item()
    if "teacher/it/kl" not in outcome.statistics:
        text = f"its own checkpoint as student: log-probabilities of {len(delta)} tokens differ by {worst:.1e} at most"
        return Finding(key, _verdict(worst, LOGP, HALF_LOGP), text + _precision(worst, LOGP))
    kl = outcome.statistics["teacher/it/kl"].mean().item()
    text = f"its own checkpoint as student: KL {kl:.1e} nats over {len(delta)} tokens"
    return Finding(key, _verdict(abs(kl), KL, HALF_KL), text + _precision(abs(kl), KL))


def _verdict(gap: float, exact: float, half: float) -> State:
    return "ok" if gap <= exact else "note" if gap <= half else "FAIL"


def _precision(gap: float, exact: float) -> str:
    if gap <= exact:
        return ""
    return f"; at most {exact:.0e} where server, wire and head are float32, so one is not, or they hold other weights"
