"""The dashboard's numbers from the definition: per-token statistics, what is made of them, and the diagnostics."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from math import exp, log, nan
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from opd.diagnostics import DiagnosticsConfig, diagnose
from opd.heads import split_model
from opd.losses import BPO, CISPO, GSPO, PPOClip
from opd.metrics import mismatch_metrics, places, stop_metrics, teacher_metrics, values
from opd.objective import Objective, Outcome
from opd.records import Distribution, MicroBatch, Scores, TokenChunk, TopK
from opd.terms import Term
from opd.token_statistics import SAMPLED_ABOVE, TokenStatistics
from tests.chunks import chunk_of, micro_batch
from tests.rows import TERMS, WEIGHTS, Setting, engine, weights_of
from tests.runs import opd, save_pair, training_lines, without_times
from tests.test_ranks import launch
from tests.tiny import save_model
from tests.two_ranks_dashboard import scenario

P = [0.5, 0.3, 0.15, 0.05]
Q = [0.1, 0.6, 0.2, 0.1]


def token_statistics(
    chunk: TokenChunk, teachers: Mapping[str, Scores], present: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Statistics of a chunk of one block."""
    noted = TokenStatistics(0, chunk.student_logp.shape[1])
    noted.add(chunk, teachers, 0)
    return noted.finished(chunk.sampler_logp, present)


# --------------------------------------------------------------------------------------------- statistics of each token


def statistics(p: Tensor, q: Tensor, tokens: list[int], stop_ids: tuple[int, ...] = ()) -> dict[str, Tensor]:
    """Of n tokens under student p and teacher q [n, V]."""
    student, ids = Distribution(p.log()), torch.tensor(tokens)
    logp = student.logp.gather(-1, ids[:, None])[:, 0]
    chunk = TokenChunk(student, logp, ids, logp, torch.zeros(len(ids)), stop_ids=stop_ids)
    return token_statistics(chunk, {"main": scores(q, ids)}, {"main": torch.ones(len(ids), dtype=torch.bool)})


def scores(q: Tensor, ids: Tensor) -> Scores:
    """A teacher that gives the full vocabulary."""
    return Scores(q.log().gather(-1, ids[:, None])[:, 0], Distribution(q.log()))


def test_statistics_of_one_token() -> None:
    """p = (.5, .3, .15, .05), q = (.1, .6, .2, .1), token 1, which with token 3 ends an answer (id 9 is no token):
    KL(p || q) = .518965 (METHODS 1.3), entropies 1.142152 and 1.088900, delta = log(.6 / .3), stop mass .35 and .7.
    """
    found = {
        name: value.item() for name, value in statistics(*torch.tensor([[P], [Q]]).double(), [1], (1, 3, 9)).items()
    }
    h_p, h_q = (-sum(x * log(x) for x in d) for d in (P, Q))
    assert found["student/entropy"] == pytest.approx(h_p)
    assert found["student/token_logp"] == pytest.approx(log(0.3))
    assert found["student/stop_mass"] == pytest.approx(0.35)
    assert found["teacher/main/kl"] == pytest.approx(0.518965, abs=1e-6)
    assert found["teacher/main/entropy"] == pytest.approx(h_q)
    assert found["teacher/main/entropy_gap"] == pytest.approx(h_p - h_q)
    assert found["teacher/main/token_logp"] == pytest.approx(log(0.6))
    assert found["teacher/main/delta"] == pytest.approx(log(2.0))
    assert found["teacher/main/stop_mass"] == pytest.approx(0.7)
    assert found["teacher/main/overlap16"] == 1.0


def test_without_stop_ids_there_is_no_stop_mass() -> None:
    assert not [name for name in statistics(*torch.tensor([[P], [Q]]).double(), [1]) if "stop" in name]


def shifted() -> tuple[Tensor, Tensor]:
    """V = 20. The student has .05 on ids 0-15 and .05 on the rest together, the teacher .055 on ids 4-19, .03 on 0-3.

    The student's top 16 are 0-15, the teacher's 4-19; common are 4-15.
    """
    p, q = torch.full((20,), 0.05 + 0.05 / 20), torch.full((20,), 0.055)
    p[16:], q[:4] = 0.04, 0.03
    p[:16] = (1 - 0.16) / 16
    q[4:] = (1 - 0.12) / 16
    return p.double()[None], q.double()[None]


def test_masses_of_the_likeliest_tokens() -> None:
    """p is .0525 on ids 0-15 and .04 on 16-19; q .03 on 0-3 and .055 on 4-19: the sets share 12 of 16."""
    found = {name.removeprefix("teacher/main/"): value.item() for name, value in statistics(*shifted(), [0]).items()}
    assert found["overlap16"] == pytest.approx(12 / 16)
    assert found["common16_student_mass"] == pytest.approx(12 * 0.0525)
    assert found["common16_teacher_mass"] == pytest.approx(12 * 0.055)
    assert found["student16_teacher_mass"] == pytest.approx(12 * 0.055 + 4 * 0.03)
    assert found["teacher16_student_mass"] == pytest.approx(12 * 0.0525 + 4 * 0.04)
    assert found["teacher16_teacher_mass"] == pytest.approx(16 * 0.055)


def test_over_a_large_vocabulary_only_a_blocks_first_token_is_ranked() -> None:
    p = torch.softmax(torch.randn(3, SAMPLED_ABOVE + 1, generator=torch.Generator().manual_seed(0)), -1)
    found = statistics(p, p, [0, 1, 2])
    assert found["teacher/main/overlap16"].isnan().tolist() == [False, True, True]
    assert not found["teacher/main/entropy"].isnan().any()


def test_a_teacher_that_gives_some_tokens_is_asked_no_more() -> None:
    """Its two likeliest tokens have .6 and .2 together .8, the sampled one .1 where the student has .5."""
    ids, top = torch.tensor([0]), TopK(torch.tensor([[1, 2]]), torch.tensor([[0.6, 0.2]]).log())
    chunk = TokenChunk(Distribution(torch.tensor([P]).log()), torch.zeros(1), ids, torch.zeros(1), torch.zeros(1))
    given = Scores(torch.tensor([0.1]).log(), top=top)
    found = token_statistics(chunk, {"main": given}, {"main": torch.tensor([True])})
    theirs = {name.removeprefix("teacher/main/"): v.item() for name, v in found.items() if name.startswith("teacher/")}
    assert theirs == pytest.approx({"token_logp": log(0.1), "delta": log(0.1 / 0.5), "top_mass": 0.8}, abs=1e-6)


def test_nothing_is_said_of_missing_scores_and_given_answers() -> None:
    """The first token has no score, the second no sampler: its delta alone is unknown."""
    p, q = torch.tensor([[P, P], [Q, Q]])
    chunk = TokenChunk(Distribution(p.log()), p[:, 0].log(), torch.tensor([0, 0]), torch.tensor([-1.0, nan]), p[:, 0])
    found = token_statistics(chunk, {"main": scores(q, chunk.token_ids)}, {"main": torch.tensor([False, True])})
    for name, value in found.items():
        unknown = [True, name.endswith("delta")] if name.startswith("teacher/") else [False, False]
        assert value.isnan().tolist() == unknown, name


# ------------------------------------------------------------------------------------------- metrics of the whole batch


def outcome(
    deltas: list[list[float]], advantages: list[float], rewards: list[float], first: int = 0
) -> tuple[MicroBatch, Outcome]:
    """Rows of given deltas per token, whose first trainable tokens stand at column `first` of 3000."""
    width = 3000
    flat = torch.tensor([value for row in deltas for value in row])
    batch = micro_batch(torch.zeros(len(flat), dtype=torch.long), {})
    fields = replace(
        batch.tokens,
        predictor=torch.tensor([n * width + first + t for n, row in enumerate(deltas) for t in range(len(row))]),
        advantages=torch.tensor([a for a, row in zip(advantages, deltas, strict=True) for _ in row]),
    )
    batch = replace(batch, input_ids=torch.zeros(len(deltas), width), tokens=fields, rewards=rewards)
    return batch, Outcome({}, {"teacher/main/delta": flat})


def test_the_teachers_opinion_of_the_sampled_tokens() -> None:
    """Deltas 1, -3 (advantage 2, correct), -2 (advantage -1, incorrect) and 4 (no credit), one of them NaN.

    mean |.| = 10/4, std: mean 0, squares 1 + 9 + 4 + 16 over 4; p95 of (1, 2, 3, 4) at rank 2.85: 3.85, p99 at 2.97:
    3.97; half are positive. corr over tokens with credit: deltas (1, -3, -2), advantages (2, 2, -1): means -4/3 and 1,
    products (7/3)(1) + (-5/3)(1) + (-2/3)(-2) = 2, variances (49 + 25 + 4)/9 = 26/3 and 6: 2 / sqrt(52).
    Row means: correct -1, incorrect -2; the pair is in order, so the area is 1.
    """
    parts = [outcome([[1.0, -3.0, nan], [-2.0]], [2.0, -1.0], [1.0, 0.0]), outcome([[4.0]], [0.0], [nan])]
    found = {name.removeprefix("teacher/main/delta_"): v for name, v in values(teacher_metrics(parts)).items()}
    assert found == pytest.approx({
        "abs": 2.5, "std": 7.5**0.5, "p95": 3.85, "p99": 3.97, "positive": 0.5, "abs_0_100": 2.5,
        "advantage_corr": 2 / 52**0.5, "correct": -1.0, "incorrect": -2.0, "auroc": 1.0,
    })  # fmt: skip


def test_sizes_by_position_count_from_the_rows_first_token() -> None:
    """One row of 2,001 tokens behind a prompt of 700: sizes 1, 2, 3 in the first three parts, 4 on the last token."""
    row = [1.0] * 100 + [-2.0] * 400 + [3.0] * 1500 + [-4.0]
    found = values(teacher_metrics([outcome([row], [0.0], [], first=700)]))
    sizes = {name.removeprefix("teacher/main/delta_abs_"): v for name, v in found.items() if "_abs_" in name}
    assert sizes == {"0_100": 1.0, "100_500": 2.0, "500_2000": 3.0, "2000_inf": 4.0}


def test_the_area_counts_pairs_in_order_and_half_of_ties() -> None:
    """Correct rows 2, 0, incorrect 1, 0: in order 2 > 1, 2 > 0, a tie 0 = 0, and 0 < 1: 2.5 of 4."""
    found = values(teacher_metrics([outcome([[2.0], [0.0], [1.0], [0.0]], [0.0] * 4, [1.0, 0.5, 0.0, 0.4])]))
    assert found["teacher/main/delta_auroc"] == 0.625
    assert "teacher/main/delta_advantage_corr" not in found, "no row has credit"


def test_no_token_and_no_verdict_leave_metrics_out() -> None:
    assert teacher_metrics([outcome([[nan]], [1.0], [1.0])]) == {}
    found = values(teacher_metrics([outcome([[1.0], [2.0]], [0.0, 0.0], [])]))
    assert not [name for name in found if "correct" in name or "auroc" in name]


def test_ratios_of_sampler_and_trainer() -> None:
    """rho = 2 and 1/2: gaps +-log 2, k1 = 0, k3 = (2 + .5)/2 - 1 = .25, chi2 = (1 + .25)/2, ess = 2.5^2/(2 * 4.25)."""
    batch = micro_batch(torch.zeros(3, dtype=torch.long), {}, sampler_logp=torch.tensor([-2.0, -2.0, nan]))
    logp = torch.tensor([-2.0 + log(2), -2.0 - log(2), -1.0])
    found = values(mismatch_metrics([(batch, Outcome({}, {"student/token_logp": logp}))]))
    assert {name.removeprefix("mismatch/"): value for name, value in found.items()} == pytest.approx(
        {"logp_diff_mean": log(2), "logp_diff_p95": log(2), "logp_diff_std": log(2), "k1": 0.0, "k3": 0.25,
         "chi2": 0.625, "ess": 6.25 / 8.5},
        abs=1e-6,
    )  # fmt: skip


def test_a_ratio_beyond_bounds_does_not_overflow() -> None:
    batch = micro_batch(torch.zeros(1, dtype=torch.long), {}, sampler_logp=torch.tensor([-200.0]))
    found = values(mismatch_metrics([(batch, Outcome({}, {"student/token_logp": torch.tensor([0.0])}))]))
    assert found["mismatch/k3"] == pytest.approx(exp(20.0) - 1.0 - 200.0)
    assert found["mismatch/ess"] == 1.0


def test_stop_mass_at_the_end_of_stopped_answers() -> None:
    """Rows (7 1), (1 7), (1): id 1 stops. The first row's last token counts, the second's does not stop, and the third
    row was given by the data: the student's mass is .9, the teacher has not scored it.
    """
    batch = micro_batch(torch.tensor([7, 1, 1, 7, 1]), {}, sampler_logp=torch.tensor([-1.0, -1.0, -1.0, -1.0, nan]))
    batch = replace(
        batch, input_ids=torch.zeros(3, 4), tokens=replace(batch.tokens, predictor=torch.tensor([1, 2, 5, 6, 9]))
    )
    mass = {
        "student/stop_mass": torch.tensor([0.1, 0.9, 0.2, 0.3, 0.4]),
        "teacher/main/stop_mass": torch.full((5,), nan),
    }
    assert [place.tolist() for place in places(batch)] == [
        [0, 0, 1, 1, 2], [0, 1, 0, 1, 0], [False, True, False, True, True],
    ]  # fmt: skip
    assert values(stop_metrics([(batch, Outcome({}, mass))], (1,))) == pytest.approx({"student/stop_mass_end": 0.9})


@pytest.mark.parametrize(
    ("loss", "ratio", "advantage", "clipped"),
    [
        (PPOClip(), 1.3, 1.0, True),
        (PPOClip(), 1.3, -1.0, False),
        (PPOClip(), 0.7, -1.0, True),
        (PPOClip(), 0.7, 1.0, False),
        (PPOClip(), 1.1, 1.0, False),
        (PPOClip(dual_clip=3.0), 3.5, -1.0, True),
        (GSPO(), 1.001, 1.0, True),
        (GSPO(), 1.001, -1.0, False),
        (CISPO(cap=2.0), 2.5, -1.0, True),
        (CISPO(cap=None), 9.0, 1.0, False),
        (BPO(), 1.3, 1.0, True),
        (BPO(), 1.2, 1.0, False),
    ],
)
def test_a_clipped_token_is_known(
    loss: PPOClip | GSPO | CISPO | BPO, ratio: float, advantage: float, clipped: bool
) -> None:
    """And, capped weights apart, it is the one whose value does not change with its log-probability."""
    logp = torch.tensor([log(ratio) - 1.0], dtype=torch.float64, requires_grad=True)
    chunk = replace(
        chunk_of([0.5, 0.5], advantage=advantage), token_logp=logp, sampler_logp=torch.tensor([-1.0]).double(),
        row_log_ratio=torch.tensor([log(ratio)]).double(),
    )  # fmt: skip
    assert loss.clipped(chunk).tolist() == [clipped]
    if not isinstance(loss, CISPO):
        (grad,) = torch.autograd.grad(loss(chunk).sum(), logp)
        assert (grad.item() == 0.0) == clipped


# ---------------------------------------------------------------------------------------------------------- diagnostics


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    """A vocabulary of 48, so that a top 16 leaves something out."""
    folder = tmp_path_factory.mktemp("dashboard")
    save_model(folder / "student", 0, hidden=16, layers=1)
    save_model(folder / "teacher", 1, hidden=24, layers=1)
    return Setting.of(folder / "student", folder / "teacher")


def naive_gradients(setting: Setting) -> dict[str, list[Tensor]]:
    """Per row the gradients [R, H] of weighted terms and, under weight 1, of full, sampled and top-16 reverse KL."""
    body, head = split_model(AutoModelForCausalLM.from_pretrained(setting.student).double())
    weight = head.weight.detach()
    tokens = {name: sum(len(r.trainable) for r in rows) for name, rows in trained(setting).items()}
    found: dict[str, list[Tensor]] = {name: [] for name in ("kl", "pg", "full", "sampled", "top16")}
    for row in setting.rows:
        ids = torch.tensor([row.token_ids])
        prompt, drawn = len(row.rollout.prompt.token_ids), torch.tensor(row.rollout.token_ids)[:, None]
        h = body(input_ids=ids).last_hidden_state[0, prompt - 1 : -1].detach().requires_grad_()
        p = torch.softmax(h @ weight.T, -1)
        values: dict[str, Tensor] = {}
        if row.scores["main"] is not None:
            teacher = setting.teacher.network
            with torch.no_grad():
                q = torch.softmax(teacher(input_ids=ids).logits[0, prompt - 1 : -1].double(), -1)
            values["full"] = (p * (p / q).log()).sum(-1)
            values["kl"] = WEIGHTS["kl"] / tokens["kl"] * values["full"]
            ratio = p.gather(-1, drawn)[:, 0]
            values["sampled"] = (
                (-(q.gather(-1, drawn)[:, 0] / ratio).log()).detach()
                * ratio
                / torch.tensor(row.rollout.logp).double().exp()
            )
            top = q.topk(16).indices
            inside = torch.stack([p.gather(-1, top).sum(-1), q.gather(-1, top).sum(-1)])
            tail = (1 - inside[0]) * ((1 - inside[0]) / (1 - inside[1])).log()
            values["top16"] = (p.gather(-1, top) * (p.gather(-1, top) / q.gather(-1, top)).log()).sum(-1) + tail
        if "pg" in row.terms and (a := row.credit.advantage) is not None:
            rho = p.gather(-1, drawn)[:, 0] / torch.tensor(row.rollout.logp).double().exp()
            values["pg"] = -torch.minimum(rho * a, rho.clamp(0.8, 1.2) * a) * WEIGHTS["pg"] / tokens["pg"]
        for name, parts in found.items():
            value = values.get(name)
            zero = torch.zeros_like(h)
            parts.append(zero if value is None else torch.autograd.grad(value.sum(), h, retain_graph=True)[0])
    return found


def trained(setting: Setting) -> dict[str, list]:
    """The rows that each of the two terms trains on."""
    scored = [row for row in setting.rows if row.scores["main"] is not None]
    return {"kl": scored, "pg": [r for r in setting.rows if r.credit.advantage is not None and "pg" in r.terms]}


def two_terms(setting: Setting) -> tuple[list[Term], Objective]:
    terms = [TERMS["kl"], TERMS["pg"]]
    return terms, setting.objective(terms)


@pytest.mark.parametrize("stage", [0, 3])
def test_diagnostics_equal_the_definition(setting: Setting, stage: int) -> None:
    """Against gradients of every row alone in fp64, without batch, blocks or weights that are shared."""
    terms, goal = two_terms(setting)
    found = values(
        diagnose(engine(setting.student, stage), setting.batch(terms=terms, budget=12), goal, setting.heads(), 10**6)
    )
    g = {name: torch.cat(parts) for name, parts in naive_gradients(setting).items()}
    expected = {
        "diagnostics/kl/grad_norm": g["kl"].norm(),
        "diagnostics/pg/grad_norm": g["pg"].norm(),
        "diagnostics/cosine/kl/pg": (g["kl"] * g["pg"]).sum() / g["kl"].norm() / g["pg"].norm(),
    }
    for name in ("sampled", "top16"):
        error = g[name] - g["full"]
        expected[f"diagnostics/main/{name}_noise"] = error.norm() / g["full"].norm()
        expected[f"diagnostics/main/{name}_bias"] = (error * g["full"]).sum() / g["full"].square().sum()
    assert found == pytest.approx({name: value.item() for name, value in expected.items()}, rel=1e-4, abs=1e-6)
    assert abs(found["diagnostics/cosine/kl/pg"]) > 1e-3
    assert found["diagnostics/main/top16_noise"] > 1e-3


def test_diagnostics_look_at_no_more_than_asked(setting: Setting) -> None:
    """At budget 12 the longest row stands in the first micro-batch alone; one token asked for: that micro-batch."""
    terms, goal = two_terms(setting)
    batch = setting.batch(terms=terms, budget=12)
    first = replace(batch, micro_batches=batch.micro_batches[:1])
    trainee = engine(setting.student)
    few, those, many = (
        diagnose(trainee, b, goal, setting.heads(), n) for b, n in ((batch, 1), (first, 99), (batch, 99))
    )
    assert values(few) == values(those)
    assert values(few) != values(many)


@pytest.mark.parametrize("stage", [0, 3])
def test_diagnostics_leave_the_update_as_it_is(setting: Setting, stage: int) -> None:
    """Bit for bit: metrics and weights of two updates with and without a look before each."""
    terms, goal = two_terms(setting)
    results = []
    for looks in (False, True):
        trainee, metrics = engine(setting.student, stage, optimizer=torch.optim.AdamW), []
        torch.manual_seed(0)
        for _ in range(2):
            batch = setting.batch(terms=terms, budget=12)
            if looks:
                assert diagnose(trainee, batch, goal, setting.heads(), 10)
            metrics.append(trainee.update(batch, goal, setting.heads()))
        results.append((metrics, weights_of(trainee), torch.rand(1).item()))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(tensor, results[1][1][name]) for name, tensor in results[0][1].items())
    assert results[0][2] == results[1][2], "random numbers were drawn"


def test_terms_that_share_no_token_have_no_cosine(setting: Setting) -> None:
    rows = [replace(row, terms=frozenset({"kl" if n % 2 else "pg"})) for n, row in enumerate(setting.rows)]
    terms, goal = two_terms(setting)
    found = values(diagnose(engine(setting.student), setting.batch(rows, terms), goal, setting.heads(), 99))
    assert found["diagnostics/kl/grad_norm"] > 0
    assert found["diagnostics/pg/grad_norm"] > 0
    assert not [name for name in found if "cosine" in name]


def test_without_scores_there_is_nothing_to_compare(setting: Setting) -> None:
    rows = [replace(row, scores={"main": None}) for row in setting.rows]
    terms, goal = two_terms(setting)
    found = values(diagnose(engine(setting.student), setting.batch(rows, terms), goal, setting.heads(), 99))
    assert found.keys() == {"diagnostics/kl/grad_norm", "diagnostics/pg/grad_norm"}
    assert found["diagnostics/kl/grad_norm"] == 0.0


@pytest.mark.parametrize(("every", "tokens"), [(-1, 8), (1, 0)])
def test_senseless_settings_are_refused(every: int, tokens: int) -> None:
    with pytest.raises(ValueError, match="need every >= 0 and tokens >= 1"):
        DiagnosticsConfig(every, tokens)


# --------------------------------------------------------------------------------------------------------- a whole run


def test_a_run_with_diagnostics_trains_like_one_without(tmp_path: Path) -> None:
    """Every second of four steps is diagnosed; all other metrics, and so the weights behind them, are bitwise the same.

    The alarm thresholds of the command line hold: every |delta| p99 is over 0.
    """
    pair, runs = save_pair(tmp_path), []
    mix = ["+loss@loss.grpo=grpo", "credit=grpo", "data.streams.main.samples=2", "steps=4", "alarms.delta=0.0"]
    for every in (0, 2):
        ended = opd(*pair.train(tmp_path / str(every), *mix, f"diagnostics.every={every}"))
        assert ended.code == 0, ended.err
        assert ended.out.count("alarm delta/main: ") == 1
        runs.append(training_lines(tmp_path / str(every)))
    found = [{name for name in line if name.startswith("diagnostics/")} for line in runs[1]]
    assert found[0] == found[2] == set()
    assert {"diagnostics/distill/grad_norm", "diagnostics/main/sampled_noise"} <= found[1] == found[3]
    plain = [without_times({name: v for name, v in line.items() if name not in found[1]}) for line in runs[1]]
    assert plain == [without_times(line) for line in runs[0]]
    assert "mismatch/clip_fraction/grpo" in plain[0]
    summary = json.loads((tmp_path / "2" / "summary.json").read_text())
    assert [alarm["key"] for alarm in summary["alarms"] if alarm["threshold"] == 0.0] == ["delta/main"]
    assert summary["wall_seconds"]["diagnose"] > 0.0


def test_two_ranks_see_what_one_process_sees(setting: Setting, tmp_path: Path) -> None:
    """Rows dealt 4 + 1 and 5 + 0, so that ranks differ in micro-batches, teachers and verdicts; whole and sharded."""
    launch(setting.student, setting.teacher.model, tmp_path / "two.pt", module="tests.two_ranks_dashboard")
    two, one = torch.load(tmp_path / "two.pt", weights_only=True), scenario(setting)
    assert two.keys() == one.keys()
    for deal, mine in two.items():
        assert mine.keys() == one[deal].keys()
        assert mine == pytest.approx(one[deal], rel=1e-5, abs=1e-6), deal
        assert {
            "teacher/main/delta_p99", "teacher/main/delta_auroc", "teacher/main/delta_advantage_corr", "mismatch/ess",
            "diagnostics/cosine/kl/pg", "diagnostics/main/sampled_noise", "student/stop_mass_end",
        } <= mine.keys()  # fmt: skip
