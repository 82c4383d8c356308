"""What is refused of loss terms before weights load, and what is not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from tests.composing import GRPO, prepare, refusal, tiny_opd
from tests.runs import opd as command
from tests.tiny import tokenizer

SAMPLED = "+loss@loss.x=sampled_reverse_kl"
RATIO_TWICE = ["{_target_: opd.losses.TIS, cap: 2}", "{_target_: opd.losses.MIS, low: 0.5, high: 2}"]
MASKS = ["{_target_: opd.losses.TokenMask, low: 0.5, high: 2}", "{_target_: opd.losses.SequenceMask}"]


@pytest.fixture(scope="module")
def opd(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides of a tiny distillation."""
    return tiny_opd(tmp_path_factory.mktemp("opd"))


@dataclass
class Gives:
    """A teacher with the student's vocabulary that gives what it is told."""

    provides: frozenset[str]

    def tokenizer(self) -> Any:
        return tokenizer()

    def start(self) -> None: ...
    def score(self, rollouts: Any) -> list[None]:
        return [None for _ in rollouts]

    def close(self) -> None: ...


class GivesSampled(Gives):
    """The sampled token's score."""

    def __init__(self) -> None:
        super().__init__(frozenset({"sampled"}))


GIVES_SAMPLED = "+teacher.less={_target_: tests.test_term_checks.GivesSampled}"


# ------------------------------------------------------------------------------------------------ teacher and reference


def test_a_full_vocabulary_teacher_meets_a_sampled_need(opd: list[str]) -> None:
    assert prepare(*opd, SAMPLED)


def test_a_sampled_teacher_meets_a_sampled_need_and_no_other(opd: list[str]) -> None:
    less = [GIVES_SAMPLED, SAMPLED, "loss.x.teacher=less"]
    assert prepare(*opd, *less)
    more = refusal(*opd, *less, "loss.x.baseline=negative_kl")
    assert more.startswith("loss.x (SampledReverseKL) needs full_vocab scores; teacher.less (GivesSampled) provides")
    full = refusal(*opd, *less, "loss.distill.teacher=less")
    assert full.startswith("loss.distill (ReverseKL) needs full_vocab scores")


def test_a_sampled_loss_without_a_teacher(opd: list[str]) -> None:
    message = refusal(*opd, SAMPLED, "loss.x.teacher=null")
    assert message == "loss.x.teacher: missing; SampledReverseKL needs sampled scores: name one of your teachers"


@pytest.mark.parametrize(
    ("added", "message"),
    [
        (
            ["+loss@loss.x=extrapolated", "loss.x.reference=null"],
            "loss.x.reference: missing; Toward needs full_vocab scores: name one of your teachers",
        ),
        (
            [SAMPLED, "loss.x.extrapolate=1.25"],
            "loss.x.reference: missing; SampledReverseKL needs sampled scores: name one of your teachers",
        ),
    ],
)
def test_an_extrapolation_without_a_reference(added: list[str], message: str, opd: list[str]) -> None:
    assert refusal(*opd, *added) == message


def test_a_reference_must_give_as_much_as_the_teacher(opd: list[str]) -> None:
    message = refusal(*opd, GIVES_SAMPLED, "+loss@loss.x=extrapolated", "loss.x.reference=less")
    assert message.startswith("loss.x (Toward) needs full_vocab scores; teacher.less (GivesSampled) provides sampled")
    assert prepare(*opd, GIVES_SAMPLED, SAMPLED, "loss.x.extrapolate=1.25", "loss.x.reference=less")


# ---------------------------------------------------------------------------------------------------------- corrections


@pytest.mark.parametrize("correction", RATIO_TWICE)
@pytest.mark.parametrize("option", ["grpo", "gspo", "cispo", "sapo", "bpo", "grpo_modulated", "sampled_reverse_kl"])
def test_a_ratio_counts_once(option: str, correction: str, opd: list[str]) -> None:
    groups = ["credit=grpo", "data.streams.main.samples=4"]
    message = refusal(*opd, *groups, f"+loss@loss.x={option}", f"loss.x.correction={correction}")
    assert message.startswith("loss.x.correction: ")
    assert "multiplies by the ratio of student to sampler" in message
    assert "would count twice: use a TokenMask or a SequenceMask, or a loss without the ratio" in message


@pytest.mark.parametrize("correction", MASKS)
def test_a_mask_goes_with_a_ratio(correction: str, opd: list[str]) -> None:
    assert prepare(*opd, *GRPO, f"loss.grpo.correction={correction}")


@pytest.mark.parametrize("correction", RATIO_TWICE)
@pytest.mark.parametrize(
    "loss", [["reverse_kl"], ["cross_entropy"], ["sampled_kl"], ["sampled_reverse_kl", "loss.x.ratio=false"]], ids=str
)
def test_a_correction_goes_with_a_loss_without_a_ratio(loss: list[str], correction: str, opd: list[str]) -> None:
    option, *settings = loss
    assert prepare(*opd, f"+loss@loss.x={option}", *settings, f"loss.x.correction={correction}")


def test_the_ratio_of_rho_k3_counts_once(opd: list[str]) -> None:
    added = ["+loss@loss.x=sampled_kl", "loss.x.estimator=rho_k3", f"loss.x.correction={RATIO_TWICE[0]}"]
    assert refusal(*opd, *added).startswith("loss.x.correction: TIS multiplies by the ratio")


# ---------------------------------------------------------------------------------------------- estimators, supports


@pytest.mark.parametrize(
    ("estimator", "reason"),
    [("k1", "zero expected gradient and no teacher in it"), ("k3", "the gradient of the forward KL")],
)
def test_k1_and_k3_end_the_command_with_the_reason(estimator: str, reason: str, opd: list[str]) -> None:
    ended = command("check", *opd, "+loss@loss.x=sampled_kl", f"loss.x.estimator={estimator}")
    assert ended.code == 2
    assert f"loss.x: estimator={estimator}: " in ended.err and reason in ended.err and "use " in ended.err


def test_a_raw_truncated_sum_needs_the_explicit_word(opd: list[str]) -> None:
    raw = ["+loss@loss.x=truncated_reverse_kl", "loss.x.rest=raw"]
    ended = command("check", *opd, *raw)
    assert ended.code == 2
    assert "loss.x: rest=raw: " in ended.err and "even where student and teacher agree" in ended.err
    assert "i_know_the_fixed_point_is_not_the_teacher=true" in ended.err
    assert prepare(*opd, *raw, "loss.x.i_know_the_fixed_point_is_not_the_teacher=true")


# ------------------------------------------------------------------------------------------------------------- sampling


@pytest.mark.parametrize("option", ["sampled_reverse_kl", "sampled_kl"])
def test_sampled_estimates_at_another_temperature(option: str, opd: list[str]) -> None:
    """The student's log-probability is taken at the sampler's temperature, the teacher's at 1."""
    message = refusal(*opd, f"+loss@loss.x={option}", "sampler.params.temperature=0.6")
    assert message.startswith("sampler.params.temperature=0.6: loss.x (Sampled")
    assert message.endswith("set temperature=1, or use a full_vocab loss")


def test_divergences_and_ratios_at_another_temperature(opd: list[str]) -> None:
    assert prepare(*opd, *GRPO, "sampler.params.temperature=0.6")


@pytest.mark.parametrize(
    ("added", "what"),
    [
        (["+loss@loss.x=sampled_kl"], "estimate in loss.x (SampledKL)"),
        ([SAMPLED, "loss.x.ratio=false"], "estimate in loss.x (SampledReverseKL)"),
        ([SAMPLED], "ratio in loss.x (SampledReverseKL)"),
        (["+loss@loss.x=forward_kl", f"loss.x.correction={RATIO_TWICE[0]}"], "ratio in loss.x (ForwardKL)"),
    ],
)
def test_estimates_and_corrections_under_truncated_sampling(added: list[str], what: str, opd: list[str]) -> None:
    message = refusal(*opd, *added, "sampler.params.top_p=0.9")
    assert message.startswith("sampler.params: top_p, top_k or min_p cut the distribution") and what in message


# ------------------------------------------------------------------------------------------------------------- weighers


@pytest.mark.parametrize(
    "weigher",
    [
        "TopShare, score: divergence", "TopShare, score: soft_or", "EarlyDisagreement", "TeacherConfidence",
        "ByPerplexity, of: teacher",
    ],
)  # fmt: skip
def test_a_weigher_that_reads_a_teacher_which_the_term_has_not(weigher: str, opd: list[str]) -> None:
    name = weigher.partition(",")[0]
    weigh = f"loss.distill.weigh.w={{_target_: opd.weighting.{weigher}"
    assert refusal(*opd, f"+{weigh}, teacher: other}}") == (
        f"loss.distill.weigh.w ({name}) reads the scores of teacher.other, and the term has main: set "
        "loss.distill.weigh.w.teacher or loss.distill.teacher"
    )
    assert prepare(*opd, f"+{weigh}}}")


def test_a_term_without_a_teacher_under_a_teacher_s_weigher(opd: list[str]) -> None:
    weigh = "+loss.grpo.weigh.w={_target_: opd.weighting.EarlyDisagreement}"
    assert "and the term has no teacher: set" in refusal(*opd, *GRPO, weigh)
    assert prepare(*opd, *GRPO, weigh, "loss.grpo.teacher=main")


@pytest.mark.parametrize("weigher", ["TopShare, score: divergence", "TeacherConfidence"])
def test_a_weigher_that_reads_more_than_its_teacher_gives(weigher: str, opd: list[str]) -> None:
    less = [GIVES_SAMPLED, SAMPLED, "loss.x.teacher=less"]
    message = refusal(*opd, *less, f"+loss.x.weigh.w={{_target_: opd.weighting.{weigher}, teacher: less}}")
    assert "reads full_vocab scores; teacher.less (GivesSampled) provides sampled" in message
    assert prepare(*opd, *less, "+loss.x.weigh.w={_target_: opd.weighting.EarlyDisagreement, teacher: less}")


def test_early_disagreement_at_another_temperature(opd: list[str]) -> None:
    weigh = "+loss.distill.weigh.w={_target_: opd.weighting.EarlyDisagreement}"
    warm = "sampler.params.temperature=0.7"
    assert refusal(*opd, weigh, warm).startswith(f"{warm}: loss.distill.weigh.w (EarlyDisagreement)")


@pytest.mark.parametrize("weigher", ["TopShare, teacher: other", "ByPerplexity, teacher: other", "FirstTokens"])
def test_weighers_that_read_no_teacher(weigher: str, opd: list[str]) -> None:
    assert prepare(*opd, f"+loss.distill.weigh.w={{_target_: opd.weighting.{weigher}}}")


@pytest.mark.parametrize("weigher", ["ByCorrectness", "ByPassRate", "ByPerplexity, side: wrong"])
def test_a_weigher_that_reads_verdicts_without_a_reward(weigher: str, opd: list[str]) -> None:
    weigh = f"+loss.distill.weigh.w={{_target_: opd.weighting.{weigher}}}"
    message = refusal(*opd, weigh, "~reward.correct")
    assert message.startswith("loss.distill.weigh.w (By") and "needs rewards, and there is none" in message
    assert prepare(*opd, weigh)


# --------------------------------------------------------------------------------------------------------------- credit


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("+credit.weights.corect=2", "credit.weights.corect: no reward 'corect'; did you mean correct?"),
        ("+credit.conditions.correct=frm", "credit.conditions.correct: no reward 'frm'"),
        ("+credit.conditions.frm=correct", "credit.conditions.frm: no reward 'frm'"),
    ],
)
def test_gdpo_names_only_rewards_that_exist(setting: str, says: str, opd: list[str]) -> None:
    gdpo = ["+loss@loss.grpo=grpo", "credit=gdpo", "data.streams.main.samples=4"]
    assert refusal(*opd, *gdpo, setting).startswith(says)
    assert prepare(*opd, *gdpo, "+credit.weights.correct=2")


# ------------------------------------------------------------------------------------------ rows and the sampler's head


class WantsRows:
    """A loss that declares row values and has no `of_row`."""

    needs = frozenset({"row_value"})

    def __call__(self, chunk: Any) -> Any:
        return chunk.row_value * chunk.token_logp


def test_row_values_need_a_method_that_makes_them(opd: list[str]) -> None:
    message = refusal(*opd, "+loss.x={_target_: tests.test_term_checks.WantsRows}")
    assert message.startswith("loss.x (WantsRows): its `needs` names row_value, and it has no method of_row")
    assert prepare(*opd, SAMPLED, "loss.x.gamma=1.0")


def test_score_centering_needs_the_sampler_s_likeliest_tokens(opd: list[str]) -> None:
    centred = [*opd, *GRPO, "loss@loss.grpo=score_centering"]
    assert refusal(*centred).startswith("sampler.params.top_logprobs=0: loss.grpo (ScoreCentering) needs")
    assert prepare(*centred, "sampler.params.top_logprobs=16")
    warm = refusal(*centred, "sampler.params.top_logprobs=16", "sampler.params.temperature=0.7")
    assert warm.startswith("sampler.params.temperature=0.7: loss.grpo (ScoreCentering)")
