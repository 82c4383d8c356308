"""Every method in conf/experiment/method: runs, and computes what its source says.

The references are the formulas of the papers, written here in fp64 and probability space: nothing of opd.losses is
called. p student, q teacher, mu sampler, A advantage, y the sampled token.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import isfinite, log
from pathlib import Path

import pytest
import torch
from torch import Tensor

from opd.batching import make_batch
from opd.config import TrainConfig, load_config
from opd.heads import Head
from opd.metrics import outcome_metrics
from opd.objective import Objective, Outcome, streamed_loss
from opd.records import Batch, Example, FullVocab, MicroBatch, Prompt, Reward, Rollout, TopK
from opd.rows import Row
from opd.weighting import Facts, split_by_rows
from tests.composing import composed
from tests.runs import opd, training_lines
from tests.source_tree import ROOT

METHODS = sorted(path.stem for path in (ROOT / "conf" / "experiment" / "method").glob("*.yaml"))
README = ROOT / "examples" / "methods" / "README.md"

LITTLE = [
    "sampler=hf", "logger=none", "steps=2", "data.train.size=32", "data.heldout.size=4", "eval.problems=0",
    "parity.prompts=2", "engine.scheduler.num_warmup_steps=1", "checkpoint.best_metric=null",
]  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- it runs


@pytest.mark.parametrize("method", METHODS)
def test_two_steps_of_the_real_command(method: str, tmp_path: Path) -> None:
    """Composed, built, checked, sampled, scored, stepped: the demo's own models, four prompts a step."""
    ended = opd("train", f"experiment=method/{method}", *LITTLE, "data.streams.main.prompts=4", f"run_dir={tmp_path}")
    assert ended.code == 0, ended.err
    steps = training_lines(tmp_path)
    terms = load_config(composed(f"experiment=method/{method}")).loss
    assert [all(isfinite(step[f"loss/{name}"]) for name in terms) for step in steps] == [True, True]
    assert any(step["grad_norm"] > 0 for step in steps)


SOURCE = re.compile(r"\d{4}\.\d{5}|\d{4}-\d\d-\d\d|FlashREINFORCE")
TABLE = re.findall(r"^\|[^|]+\|([^|]+)\| `opd train experiment=method/(\w+)` \|", README.read_text(), re.MULTILINE)


def test_the_table_lists_every_method_once_with_its_command() -> None:
    assert sorted(method for _, method in TABLE) == METHODS


@pytest.mark.parametrize(("source", "method"), TABLE, ids=[method for _, method in TABLE])
def test_file_and_table_name_the_same_source_and_the_run_is_called_as_the_file(source: str, method: str) -> None:
    comment = (ROOT / "conf" / "experiment" / "method" / f"{method}.yaml").read_text().partition("defaults:")[0]
    assert SOURCE.findall(comment)[:1] == SOURCE.findall(source) != []
    assert composed(f"experiment=method/{method}").experiment == method


# ------------------------------------------------------------------------------------------------------ a fixed batch

VOCAB, HIDDEN = 48, 16
TEACHERS = ("main", "weak", "reference")
LENGTHS = (3, 5, 1, 4, 6, 2, 4, 3, 5, 2, 1, 4)
CORRECT = (1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0)  # two groups of six
FORM = (1.0, 1.0, 1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0)
GROUP = (0,) * 6 + (1,) * 6
MISMATCH = (0.6,) * 8 + (1e-3,) * 4  # deviation of sampler minus student log-probability, per row


@dataclass(frozen=True)
class Seen:
    """The batch as formulas see it: N tokens, fp64."""

    p: Tensor  # [N, V], differentiable
    q: Tensor  # [N, V]
    weak: Tensor  # [N, V]
    start: Tensor  # [N, V], the reference
    y: Tensor  # [N]
    mu: Tensor  # [N], sampler probability of y
    row: Tensor  # [N]
    top: TopK  # [N, K], some sampler's likeliest tokens
    progress: float

    def of(self, full: Tensor) -> Tensor:
        """Probability [N] of the sampled token."""
        return full.gather(-1, self.y[:, None])[:, 0]

    @property
    def log_p(self) -> Tensor:
        """[N], differentiable."""
        return self.of(self.p).log()

    @property
    def rho(self) -> Tensor:
        """Student over sampler [N], differentiable."""
        return self.of(self.p) / self.mu

    @property
    def delta(self) -> Tensor:
        """log q(y) - log p(y) [N], constant."""
        return self.of(self.q).log() - self.log_p.detach()


class Fixed:
    """Hidden states and heads of a student and three teachers; rows that the student might have sampled."""

    def __init__(self) -> None:
        random = torch.Generator().manual_seed(11)
        draw = lambda *shape: torch.randn(*shape, generator=random)  # noqa: E731
        count = sum(LENGTHS)
        self.row = torch.tensor([row for row, length in enumerate(LENGTHS) for _ in range(length)])
        self.hidden, self.head = draw(count, HIDDEN), Head(0.5 * draw(VOCAB, HIDDEN), vocab_size=VOCAB)
        sharpness = 0.3 + 2.0 * torch.rand(count, 1, generator=random)  # teacher entropies on both sides of .8 nats
        self.teacher_hidden = {name: sharpness * draw(count, HIDDEN) for name in TEACHERS}
        self.teacher_heads = {name: Head(0.5 * draw(VOCAB, HIDDEN), vocab_size=VOCAB) for name in TEACHERS}
        p = torch.softmax(self.hidden.double() @ self.head.weight.double().T, -1)
        self.y = torch.multinomial(p, 1, generator=random)[:, 0]
        self.y[[0, 2]] = 2  # the demo's stop token, twice in a row
        noise = torch.tensor(MISMATCH)[self.row] * draw(count)
        noise[self.row == 8] -= log(1.24)  # a right row between the upper bounds 1.2 and 1.28
        noise[self.row == 9] -= log(0.95)
        self.sampler_logp = (p.gather(-1, self.y[:, None])[:, 0].log() + noise).float()
        likeliest = warmed(p, 1.5).topk(20)
        self.top = TopK(likeliest.indices, likeliest.values.log().float())

    def rows(self, config: TrainConfig) -> list[Row]:
        """With the credit that the configuration gives."""
        prompts = [Prompt(str(group), "main", [3], Example("x"), 6) for group in (0, 1)]
        rollouts, rewards = [], []
        for row, group in enumerate(GROUP):
            mine = self.row == row
            ids, logp = self.y[mine].tolist(), self.sampler_logp[mine].tolist()
            rollouts.append(Rollout(prompts[group], row, ids, logp, "", "stop", 0, sampler_top=self.top.at(mine)))
            parts = {"correct": CORRECT[row]} | ({"form": FORM[row]} if "form" in config.reward else {})
            rewards.append(Reward(sum(parts.values()), parts))
        credits = config.credit.assign(rollouts, rewards)
        terms = frozenset(config.loss)
        hidden = self.teacher_hidden
        return [
            Row(rollout, reward, credit, {t: FullVocab(hidden[t][self.row == i]) for t in hidden}, terms)
            for i, (rollout, reward, credit) in enumerate(zip(rollouts, rewards, credits, strict=True))
        ]

    def order(self, batch: Batch) -> Tensor:
        """Token numbers in the order of the only micro-batch."""
        return torch.cat([torch.nonzero(self.row == row)[:, 0] for row in batch.order[0]])

    def product(self, config: TrainConfig, progress: float) -> tuple[dict[str, float], Tensor]:
        """`loss/<term>` and the gradient [N, H] of the weighted sum in the hidden states, by the trainer's code."""
        terms, rows = list(config.loss.values()), self.rows(config)
        objective = Objective(
            terms, {term.name: term.weight(progress) for term in terms}, VOCAB, config.sampler.params.temperature,
            chunk_tokens=16, progress=progress,
        )  # fmt: skip
        facts: Facts = ()
        if any(term.needs_facts for term in terms):
            bare = self._batch(rows, replace(objective, terms=[]), ())
            outcome = self._pass(bare, replace(objective, terms=[], weights={}), self.hidden)[1]
            facts = split_by_rows(rows, bare.order, [outcome.statistics])
        batch, hidden = self._batch(rows, objective, facts), self.hidden.clone().requires_grad_()
        loss, outcome, micro_batch = self._pass(batch, objective, hidden)
        loss.backward()
        metrics = outcome_metrics([(micro_batch, outcome)], objective)
        return {term.name: metrics[f"loss/{term.name}"].value for term in terms}, hidden.grad

    def _batch(self, rows: list[Row], objective: Objective, facts: Facts) -> Batch:
        return make_batch(rows, objective.terms, 10_000, 0, facts)

    def _pass(self, batch: Batch, objective: Objective, hidden: Tensor) -> tuple[Tensor, Outcome, MicroBatch]:
        (micro_batch,) = batch.micro_batches
        loss, outcome = streamed_loss(hidden[self.order(batch)], self.head, micro_batch, self.teacher_heads, objective)
        return loss, outcome, micro_batch

    def seen(self, progress: float) -> tuple[Seen, Tensor]:
        """The same in fp64, and the hidden states that it is differentiable in."""
        hidden = self.hidden.double().requires_grad_()
        others = {
            name: torch.softmax(self.teacher_hidden[name].double() @ self.teacher_heads[name].weight.double().T, -1)
            for name in TEACHERS
        }
        p = torch.softmax(hidden @ self.head.weight.double().T, -1)
        mu, teachers = self.sampler_logp.double().exp(), (others["main"], others["weak"], others["reference"])
        return Seen(p, *teachers, self.y, mu, self.row, self.top, progress), hidden


# ---------------------------------------------------------------------------------------------------------- references


def kl(a: Tensor, b: Tensor) -> Tensor:
    """KL(a || b) [N]."""
    return (a * (a / b).log()).sum(-1)


def jsd(a: Tensor, b: Tensor) -> Tensor:
    """At beta 1/2."""
    return 0.5 * kl(a, (a + b) / 2) + 0.5 * kl(b, (a + b) / 2)


def entropy(a: Tensor) -> Tensor:
    """[N]."""
    return -(a * a.log()).sum(-1)


def warmed(a: Tensor, temperature: float) -> Tensor:
    """a^(1/T), normalised."""
    powered = a ** (1 / temperature)
    return powered / powered.sum(-1, keepdim=True)


def row_mean(s: Seen, values: Tensor) -> Tensor:
    """Mean of row means."""
    return torch.stack([values[s.row == row].mean() for row in range(len(LENGTHS))]).mean()


def row_sum(s: Seen, values: Tensor) -> Tensor:
    """Mean over rows of their sums."""
    return values.sum() / len(LENGTHS)


def best(a: Tensor, k: int) -> Tensor:
    """Whether a token is among the row's k likeliest [N, V]."""
    return a >= a.sort(-1, descending=True).values[:, k - 1 : k]


def lumped(a: Tensor, kept: Tensor) -> Tensor:
    """Kept tokens, and one bucket for the others [N, V + 1]."""
    inside = torch.where(kept, a, 1e-300)
    return torch.cat([inside, torch.where(kept, 0.0, a).sum(-1, keepdim=True)], -1)


def chosen(scores: Tensor, share: float) -> Tensor:
    """Numbers of the tokens with the highest scores."""
    return scores.argsort(descending=True)[: round(share * len(scores))]


def per_group(values: list[float], advantage: Callable[[Tensor], Tensor]) -> Tensor:
    """A function of the six rewards of each group [rows]."""
    return torch.cat([advantage(part) for part in torch.tensor(values, dtype=torch.float64).split(6)])


def normalised(r: Tensor) -> Tensor:
    """(r - mean) / population deviation."""
    return (r - r.mean()) / (r.std(correction=0) + 1e-6)


def A(s: Seen, advantage: Callable[[Tensor], Tensor] = normalised) -> Tensor:
    """Advantages of the tokens [N]."""
    return per_group(list(CORRECT), advantage)[s.row]


def clipped(ratio: Tensor, a: Tensor, low: float = 0.2, high: float = 0.2) -> Tensor:
    """-min(rho A, clip(rho) A)."""
    return -torch.minimum(ratio * a, ratio.clamp(1 - low, 1 + high) * a)


def within(ratio: Tensor, low: float, high: float) -> Tensor:
    """1 inside the band."""
    return ((ratio >= low) & (ratio <= high)).double()


def sampled(s: Seen, advantage: Tensor | None = None) -> Tensor:
    """-sg(A) rho, A = log q - log p."""
    return -(s.delta if advantage is None else advantage) * s.rho


def first_stop(s: Seen) -> Tensor:
    """Whether the token is its row's first stop token."""
    return torch.tensor([
        token == 2 and 2 not in s.y[: number][s.row[:number] == s.row[number]]
        for number, token in enumerate(s.y.tolist())
    ])  # fmt: skip


def lsm(s: Seen) -> Tensor:
    kept = best(s.q, 32)
    p, q = (torch.where(kept, a, 0.0) / torch.where(kept, a, 0.0).sum(-1, keepdim=True) for a in (s.p, s.q))
    values = torch.where(kept, p * (p.clamp(min=1e-300) / q.clamp(min=1e-300)).log(), 0.0).sum(-1)
    return values[~first_stop(s)].mean()


def veto(s: Seen) -> Tensor:
    target = s.q * s.p.detach() ** (0.8 * (1 - s.progress))
    return kl(s.p, target / target.sum(-1, keepdim=True)).mean()


def early(s: Seen) -> Tensor:
    """1 + (1 - sum of |A| before t / sum of |A|) / 2."""
    weights = torch.zeros_like(s.delta)
    for row in range(len(LENGTHS)):
        gaps = s.delta[s.row == row].abs()
        before = torch.tensor([gaps[:t].sum() for t in range(len(gaps))])
        weights[s.row == row] = 1 + 0.5 * (1 - before / gaps.sum())
    return weights


def tip(s: Seen) -> Tensor:
    scaled = [(x - x.min()) / (x.max() - x.min()) for x in (entropy(s.p).detach(), kl(s.p, s.q).detach())]
    return kl(s.p, s.q)[chosen(scaled[0] + scaled[1] - scaled[0] * scaled[1], 0.5)].mean()


def scope(s: Seen, right: bool) -> Tensor:
    """sum over rows of a side of w sum_t loss_t / their number, w the group's share of PPL_S or 1 / PPL_T."""
    rows = [row for row in range(len(LENGTHS)) if (CORRECT[row] == 1.0) == right]
    mean_logp = [(s.log_p.detach() if right else s.of(s.q).log())[s.row == row].mean() for row in range(len(LENGTHS))]
    raw = {row: float((-mean_logp[row] if right else mean_logp[row]).exp()) for row in rows}
    values = -s.log_p if right else sampled(s)
    total = 0.0
    for row in rows:
        share = raw[row] / sum(raw[other] for other in rows if GROUP[other] == GROUP[row])
        total = total + share * values[s.row == row].sum()
    return total / len(rows)


def gspo(s: Seen) -> Tensor:
    log_rho = s.log_p.detach() - s.mu.log()
    means = torch.stack([log_rho[s.row == row].mean() for row in range(len(LENGTHS))])[s.row]
    ratio = means.exp() * s.of(s.p) / s.of(s.p).detach()
    return row_mean(s, clipped(ratio, A(s), 3e-4, 4e-4))


def sapo(s: Seen) -> Tensor:
    tau = torch.where(A(s) > 0, 1.0, 1.05).double()
    return (-torch.sigmoid(tau * (s.rho - 1)) * 4 / tau * A(s)).mean()


def bpo(s: Seen) -> Tensor:
    rho, a = s.rho.detach(), A(s)
    kept = ~(((a > 0) & (rho > 1.28)) | ((a < 0) & (rho < 0.8)))
    omega = ((1.1 - s.mu) / (1.1 - s.of(s.p).detach())).clamp(max=3.0)
    return row_mean(s, -a * kept * omega * s.log_p)


def gdpo(s: Seen) -> Tensor:
    parts = [per_group(list(r), lambda g: (g - g.mean()) / (g.std(correction=0) + 1e-4)) for r in (CORRECT, FORM)]
    total = parts[0] + parts[1]
    return clipped(s.rho, ((total - total.mean()) / (total.std(correction=0) + 1e-4))[s.row]).mean()


def flash(s: Seen) -> Tensor:
    a = (torch.tensor(CORRECT, dtype=torch.float64) - sum(CORRECT) / len(CORRECT))[s.row]
    log_rho = s.log_p.detach() - s.mu.log()
    geometric = torch.stack([log_rho[s.row == row].mean().exp() for row in range(len(LENGTHS))])[s.row]
    return row_mean(s, -within(geometric, 0.99, 1.01) * s.rho.detach() * a * s.log_p)


def grpo(s: Seen) -> Tensor:
    return clipped(s.rho, A(s)).mean()


def k2(s: Seen) -> Tensor:
    return (s.log_p - s.of(s.q).log()) ** 2 / 2


def mopd(s: Seen, advantage: Tensor) -> Tensor:
    rho = s.rho.detach()
    return row_mean(s, -rho * within(rho, 0.5, 2.0) * advantage * s.log_p)


def exopd(s: Seen) -> Tensor:
    p, q, r = s.log_p.detach(), s.of(s.q).log(), s.of(s.start).log()
    return (-(1.25 * (q - r) - (p - r)) * s.rho.detach().clamp(max=5.0) * s.log_p).mean()


def future(s: Seen) -> Tensor:
    """-sg(mean of the row's later log-ratios, each within 100 nats) rho; 0 for a last token."""
    advantage = torch.zeros_like(s.delta)
    for row in range(len(LENGTHS)):
        gaps = s.delta[s.row == row].clamp(-100, 100)
        advantage[s.row == row] = torch.stack([
            gaps[t + 1 :].mean() if t + 1 < len(gaps) else gaps.new_zeros(()) for t in range(len(gaps))
        ])  # fmt: skip
    return -advantage * s.rho


def score_centering(s: Seen) -> Tensor:
    """-A (w(p/mu) log p - sum over the head of (mu w(p/mu) - alpha p) log p), w(r) = min(r, 2), constants detached."""
    p, mu = s.p.gather(-1, s.top.ids), s.top.logp.double().exp()
    fixed = p.detach()
    rho = (1 - mu.sum(-1)) / (1 - fixed.sum(-1))
    alpha = (2 * rho).clamp(max=1.0)[:, None]
    centre = ((mu * (fixed / mu).clamp(max=2.0) - alpha * fixed) * p.log()).sum(-1)
    return (-A(s) * (s.rho.detach().clamp(max=2.0) * s.log_p - centre)).mean()


def centred(r: Tensor) -> Tensor:
    return r - r.mean()


WRONG = torch.tensor(CORRECT) == 0.0
REFERENCES: dict[str, dict[str, Callable[[Seen], Tensor]]] = {
    "gkd": {"distill": lambda s: jsd(warmed(s.p, 0.9), warmed(s.q, 0.9)).mean()},
    "thinking_machines_opd": {"distill": lambda s: sampled(s).mean()},
    "minillm": {"distill": lambda s: kl(s.p, s.q).mean(), "future": lambda s: future(s).mean()},
    "score_centering": {"grpo": score_centering},
    "deepseek_v4": {"distill": lambda s: kl(s.p, s.q).mean(), "distill_weak": lambda s: kl(s.p, s.weak).mean()},
    "lsm": {"distill": lsm},
    "opsd": {"distill": lambda s: jsd(s.p, s.q).mean()},
    "sdft": {"distill": lambda s: kl(s.p, s.q).mean()},
    "sdpo": {
        "distill": lambda s: (
            kl(lumped(s.p, best(s.p, 20)), lumped(s.q, best(s.p, 20))) * s.rho.detach().clamp(max=2.0)
        ).mean()
    },
    "mopd_topk": {
        "distill": lambda s: row_mean(s, torch.where(best(s.q, 32), s.p * (s.p / s.q).log() - s.p + s.q, 0.0).sum(-1))
    },
    "mopd": {"distill": lambda s: mopd(s, s.delta), "grpo": lambda s: mopd(s, A(s))},
    "exopd": {"distill": exopd},
    "veto": {"distill": veto},
    "eopd": {
        "distill": lambda s: sampled(s).mean(),
        "explore": lambda s: (
            (entropy(s.q) > 0.8) * kl(lumped(s.q, best(s.q, 32)), lumped(s.p, best(s.q, 32)))
        ).mean(),
    },
    "stable_opd": {
        "distill": lambda s: sampled(s).mean(),
        "anchor": lambda s: kl(s.p, s.start).mean(),
        "gold": lambda s: -s.log_p.mean(),
    },
    "reopold": {
        "distill": lambda s: sampled(s, s.delta.clamp(min=log(0.1 / 0.9)))[chosen(entropy(s.p), 0.2)].mean()
    },
    "iw_opd": {"distill": lambda s: (early(s) * sampled(s)).mean()},
    "tip": {"distill": tip},
    "distillm2": {"distill": lambda s: kl(s.p, 0.9 * s.q + 0.1 * s.p).mean()},
    "scope": {"likelihood": lambda s: scope(s, right=True), "distill": lambda s: scope(s, right=False)},
    "kdrl": {"grpo": grpo, "distill": lambda s: k2(s).mean()},
    "kdrl_anneal": {"grpo": grpo, "distill": lambda s: k2(s).mean()},
    "kdrl_masked": {"grpo": grpo, "distill": lambda s: k2(s)[WRONG[s.row]].mean()},
    "rlsd": {"grpo": lambda s: clipped(s.rho, A(s) * (A(s).sign() * s.delta).exp().clamp(0.8, 1.2)).mean()},
    "opd_then_rl": {"grpo": grpo, "distill": lambda s: kl(s.p, s.q).mean()},
    "grpo": {"grpo": lambda s: row_mean(s, clipped(s.rho, A(s)))},
    "dr_grpo": {"grpo": lambda s: row_sum(s, clipped(s.rho, A(s, centred))) / 7},  # of 7 tokens at most
    "dapo": {"grpo": lambda s: clipped(s.rho, A(s), 0.2, 0.28).mean()},
    "gspo": {"grpo": gspo},
    "cispo": {"grpo": lambda s: (-s.rho.detach().clamp(max=5.0) * A(s) * s.log_p).mean()},
    "sapo": {"grpo": sapo},
    "rloo": {"grpo": lambda s: row_sum(s, -s.rho.detach() * A(s, lambda r: 6 / 5 * centred(r)) * s.log_p)},
    "gdpo": {"grpo": gdpo},
    "bpo": {"grpo": bpo},
    "flash_reinforce": {"grpo": flash},
}
WEIGHTS: dict[str, dict[str, Callable[[float], float]]] = {  # 1 where not said; progress t of 150 steps
    "deepseek_v4": {"distill": lambda t: 0.7, "distill_weak": lambda t: 0.3},
    "stable_opd": {"anchor": lambda t: 0.01, "gold": lambda t: 0.1},
    "kdrl": {"distill": lambda t: 2e-3},
    "kdrl_anneal": {"distill": lambda t: max(5e-3 - 5e-5 * 150 * t, 1e-3)},
    "kdrl_masked": {"distill": lambda t: 2e-3},
    "opd_then_rl": {"distill": lambda t: float(t < 60 / 150), "grpo": lambda t: float(t >= 60 / 150)},
}


@pytest.fixture(scope="module")
def fixed() -> Fixed:
    return Fixed()


@pytest.mark.parametrize("progress", [0.25, 0.75])
@pytest.mark.parametrize("method", METHODS)
def test_losses_and_gradient_equal_the_paper_s_formula(method: str, progress: float, fixed: Fixed) -> None:
    """The file's own settings: losses to 1e-4 of their size, the gradient to 1e-4 of its largest entry."""
    values, grad = fixed.product(load_config(composed(f"experiment=method/{method}")), progress)
    seen, hidden = fixed.seen(progress)
    expected = {name: reference(seen) for name, reference in REFERENCES[method].items()}
    assert values == pytest.approx({name: value.item() for name, value in expected.items()}, rel=1e-4, abs=1e-6)
    weights = {name: WEIGHTS.get(method, {}).get(name, lambda t: 1.0)(progress) for name in expected}
    torch.stack([weights[name] * value for name, value in expected.items()]).sum().backward()
    assert hidden.grad.abs().max() > 1e-4
    assert (grad.double() - hidden.grad).abs().max() < 1e-4 * hidden.grad.abs().max()


def test_the_fixed_batch_reaches_every_branch(fixed: Fixed) -> None:
    """Both sides of every clip, band, gate and group: a reference that never leaves one side proves little."""
    seen, _ = fixed.seen(0.0)
    rho, high = seen.rho.detach(), entropy(seen.q) > 0.8
    for low, top in ((0.8, 1.2), (0.8, 1.28), (0.5, 2.0)):
        assert 0 < within(rho, low, top).sum() < len(rho)
        assert (rho < low).any() and (rho > top).any()
    assert (within(rho, 1.2, 1.28) * (A(seen) > 0)).any()
    assert high.any() and not high.all()
    assert (seen.delta < log(0.1 / 0.9)).any() and (seen.delta > 0).any()
    assert first_stop(seen).sum() < (seen.y == 2).sum()
