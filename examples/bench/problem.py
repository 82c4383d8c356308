"""What every variant of the benchmark is given, and the exact answer in fp64 that it is checked against."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

CHUNK = 256  # tokens that go through the head at once, for every variant that has such a setting
TOP_K = 64
CLIP = 0.2
Goal = Literal["kl", "kl+grpo", "top-k"]


@dataclass(frozen=True)
class Problem:
    """Hidden states of N tokens, the two heads, and what a policy gradient needs."""

    hidden: Tensor  # [N, H]
    head: Tensor  # [V, H]
    teacher_hidden: Tensor  # [N, H]
    teacher_head: Tensor  # [V, H]
    token_ids: Tensor  # [N]
    sampler_logp: Tensor  # [N]
    advantages: Tensor  # [N]

    def first(self, tokens: int) -> Problem:
        """The same problem with fewer tokens."""
        cut = ("hidden", "teacher_hidden", "token_ids", "sampler_logp", "advantages")
        return replace(self, **{name: vars(self)[name][:tokens] for name in cut})

    def leaves(self) -> tuple[Tensor, Tensor]:
        """Hidden states and head as fresh leaves that want a gradient."""
        return self.hidden.detach().requires_grad_(), self.head.detach().requires_grad_()


@dataclass(frozen=True)
class Answer:
    """A loss and its gradients in the hidden states and the head."""

    loss: Tensor  # []
    by_hidden: Tensor  # [N, H]
    by_head: Tensor  # [V, H]


@dataclass(frozen=True)
class Variant:
    """One way to compute the loss; `run` is None where it can't be had here, and `absent` says why."""

    name: str
    goal: Goal | None  # None: computes no loss, so there is nothing to check
    run: Callable[[Problem], Answer] | None
    absent: str = ""


def made(tokens: int, hidden: int, vocabulary: int, dtype: torch.dtype) -> Problem:
    """Random states and heads of a realistic spread of logits; the sampler is the student, a little off.

    No ratio is near a bound of the clip, where rounding alone would decide whether a token has a gradient.
    """
    torch.manual_seed(0)
    states = [torch.randn(tokens, hidden, dtype=dtype) for _ in range(2)]
    heads = [torch.randn(vocabulary, hidden, dtype=dtype) / hidden**0.5 * 2 for _ in range(2)]
    token_ids = torch.randint(0, vocabulary, (tokens,))
    sampler_logp = torch.empty(tokens)
    for start in range(0, tokens, CHUNK):
        rows = slice(start, start + CHUNK)
        logits = (states[0][rows] @ heads[0].T).float()
        sampler_logp[rows] = logits.gather(-1, token_ids[rows, None])[:, 0] - logits.logsumexp(-1)
    sampler_logp += torch.tensor([-0.5, -0.05, 0.05, 0.5])[torch.randint(0, 4, (tokens,))]  # well off the clip's bounds
    return Problem(states[0], heads[0], states[1], heads[1], token_ids, sampler_logp, torch.randn(tokens))


def answered(loss: Tensor, leaves: tuple[Tensor, Tensor]) -> Answer:
    """Goes backward from a loss whose leaves are hidden states and head."""
    loss.backward()
    by_hidden, by_head = (leaf.grad for leaf in leaves)
    assert by_hidden is not None and by_head is not None, "the loss reached both leaves"
    return Answer(loss.detach(), by_hidden, by_head)


def exact(problem: Problem, goal: Goal) -> Answer:
    """Loss (a mean over tokens) and gradients from the definitions, in fp64, by autograd over full logits."""
    hidden, head = (leaf.detach().double().requires_grad_() for leaf in problem.leaves())
    student = torch.log_softmax(hidden @ head.T, -1)
    teacher = torch.log_softmax(problem.teacher_hidden.double() @ problem.teacher_head.double().T, -1)
    p, q = student.exp(), teacher.exp()
    if goal == "top-k":
        ids = teacher.topk(TOP_K, -1).indices
        p_in, q_in = p.gather(-1, ids), q.gather(-1, ids)
        p_rest, q_rest = 1 - p_in.sum(-1), 1 - q_in.sum(-1)
        value = (p_in * (p_in / q_in).log()).sum(-1) + p_rest * (p_rest / q_rest).log()
    else:
        value = (p * (student - teacher)).sum(-1)
    if goal == "kl+grpo":
        ratio = (student.gather(-1, problem.token_ids[:, None])[:, 0] - problem.sampler_logp.double()).exp()
        a = problem.advantages.double()
        value = value - torch.minimum(ratio * a, ratio.clamp(1 - CLIP, 1 + CLIP) * a)
    return answered(value.mean(), (hidden, head))
