"""Every file in conf/ composes, builds and passes the checks; so do the changes that users make to a run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from types import NoneType
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from opd.config import load_config
from opd.losses import JSD, Formula, ForwardKL, PPOClip, ReverseKL
from opd.rewards import RewardTerm
from opd.schedules import Constant, Linear
from opd.students import HFSampler, VLLMSampler
from opd.terms import Term, terms_on
from tests.composing import GRPO, composed, prepare, refusal, tiny_opd, tiny_parts
from tests.source_tree import ROOT
from tests.tiny import save_model

CONF = ROOT / "conf"
OPTIONS = sorted(str(path.relative_to(CONF).with_suffix("")) for path in CONF.glob("*/*.yaml"))
EXPERIMENTS = [option for option in OPTIONS if option.startswith("experiment/") and option != "experiment/none"]
FRAGMENTS = {"data/addition_sources"}  # what other options have in common, no whole of its own
COMPONENTS = [o for o in OPTIONS if not o.startswith(("experiment/", "debug/")) and o not in FRAGMENTS]
NAMED = ("loss", "teacher", "reward", "column")  # groups whose options are added under a name
AROUND = ("teacher/cross_tokenizer", "teacher/spans")  # they hold another teacher
PLACES = {"column": "data.columns"}  # where they are put, if not under the group's own name
GROUPS = ["credit=grpo", "data.streams.main.samples=4"]
REFERENCE = ["+teacher@teacher.reference=local", "teacher.reference.model=${teacher.main.model}"]
MORE = {  # what an option cannot do without
    **{f"loss/{name}": GROUPS for name in ("grpo", "gspo", "cispo", "sapo", "bpo", "grpo_modulated")},
    "loss/score_centering": [*GROUPS, "sampler.params.top_logprobs=8"],
    "loss/extrapolated": REFERENCE,
    "teacher/api": ["loss.distill.teacher=main", "data.streams.main.answers=teacher", "data.streams.main.teacher=x"],
    "teacher/scorer": ["loss@loss.distill=topk_reverse_kl", "loss.distill.teacher=x"],
    "teacher/spans": ["loss.distill.teacher=main", "+loss@loss.s=sampled_reverse_kl", "loss.s.teacher=x"],
    "reward/judge": ["reward.x.model=judge"],
    "reward/discriminator": ["reward.x.teacher=main"],
    "column/api": ["data.columns.x.model=m"],
    "data/addition_two_streams": ["+loss@loss.grpo=grpo", "credit=grpo"],
}


@pytest.fixture(scope="module")
def opd(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides of a tiny distillation."""
    return tiny_opd(tmp_path_factory.mktemp("opd"))


def with_option(option: str, opd: list[str]) -> list[str]:
    """The tiny distillation with one option of one group."""
    group, _, name = option.partition("/")
    base = [o for o in opd if not (group == "data" and name != "jsonl" and o.startswith("data."))]
    if group == "data" and name != "jsonl":
        base = [*base, "data.train.size=32", "data.heldout.size=4"]
    if group not in NAMED or name == "none":
        return [f"{group}={name}", *[o for o in base if not o.startswith(f"{group}=")], *MORE.get(option, [])]
    model = next(o.partition("=")[2] for o in opd if o.startswith("teacher.main.model"))
    weights = ["loss.distill.teacher=x"] if group == "teacher" else []
    inner = "inner." if option in AROUND else ""
    weights += [f"teacher.x.{inner}model={model}"] if group == "teacher" and name != "self" else []  # self: the student
    place = PLACES.get(group, group)
    return [*base, f"+{group}@{place}.x={name}", *weights, *MORE.get(option, [])]


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_of_every_group_composes_builds_and_passes_the_checks(option: str, opd: list[str]) -> None:
    run = prepare(*(experiment if option in EXPERIMENTS else with_option)(option, opd))
    assert run.prompts.draw(0)


def experiment(option: str, opd: list[str]) -> list[str]:
    """An experiment with little data, its `???` filled with tiny parts."""
    chosen = f"experiment={option.partition('/')[2]}"
    cfg = composed(chosen)
    known = dict(override.split("=", 1) for override in opd if "=" in override)
    fill = {"model": known["student.model"], "path": known["data.train.path"]}
    filled = [f"{key}={fill[key.rpartition('.')[2]]}" for key in sorted(OmegaConf.missing_keys(cfg))]
    sized = [f"data.{part}.size=16" for part in ("train", "heldout") if OmegaConf.select(cfg, f"data.{part}.size")]
    return [chosen, *filled, *sized]


# ------------------------------------------------------------------------------------------ YAML and classes agree

SUMS_HELD_OUT = {"data.heldout.split", "data.heldout.size", "data.max_prompt_tokens"}
TEACHERLESS = {"cispo", "sapo", "gspo", "bpo", "grpo", "score_centering", "cross_entropy", "none"}
OF_LOSSES = {path.stem for path in (CONF / "loss").glob("*.yaml")} - TEACHERLESS  # their teacher is `main`
DELIBERATE = {  # YAML defaults that differ from the class's on purpose: option -> keys
    **{f"loss/{name}": {"loss.x.teacher"} for name in OF_LOSSES},
    "loss/bpo": {"loss.x.aggregation"},
    "loss/gspo": {"loss.x.aggregation"},
    "loss/extrapolated": {"loss.x.teacher", "loss.x.reference"},
    "loss/topk_renormalised": {"loss.x.teacher", "loss.x.rest"},
    "credit/dr_grpo": {"credit.deviation"},
    "credit/reinforce_pp_baseline": {"credit.group_baseline"},
    "data/addition": SUMS_HELD_OUT,
    "data/addition_groups": SUMS_HELD_OUT | {"data.streams.main.samples"},
    "data/addition_two_streams": SUMS_HELD_OUT
    | {"data.streams.distill.terms", "data.streams.reward.terms", "data.streams.reward.samples"},
    "eval/none": {"eval.every", "eval.problems", "eval.teacher"},
    "loss/reverse_kl_floored": {"loss.x.teacher", "loss.x.floor"},
    "reward/judge": {"reward.x.api.temperature"},
}
SET_BY_THE_TEST = {"loss.distill.teacher", "sampler.params.top_logprobs", "data.train.size", "data.heldout.size"}
SCALARS = (NoneType, bool, int, float, str)


def settings_of(value: Any) -> dict[str, tuple[Any, Field[Any]]]:
    """Key -> (object that holds it, field) of what a component can be set to."""
    if isinstance(value, Term | RewardTerm):
        inner = value.loss if isinstance(value, Term) else value.function
        own = {f.name: (value, f) for f in fields(value) if f.name not in ("name", "loss", "function")}
        return own | (settings_of(inner) if is_dataclass(inner) else {})
    # min_group says what a credit assigner needs; it is no setting
    return {f.name: (value, f) for f in fields(value) if f.init and f.name != "min_group"}


def components(node: Any, value: Any, path: str) -> Iterator[tuple[str, dict[str, Any], Any]]:
    """(key path, YAML node, object) of every component of ours in a composed configuration."""
    if isinstance(node, dict) and is_dataclass(value) and type(value).__module__.startswith("opd."):
        yield path, node, value
        for key, (owner, _) in settings_of(value).items():
            yield from components(node.get(key), getattr(owner, key), f"{path}.{key}".strip("."))
    elif isinstance(node, dict) and isinstance(value, dict):
        for key in node:
            yield from components(node[key], value[key], f"{path}.{key}")


@pytest.mark.parametrize("option", COMPONENTS)
def test_yaml_mirrors_the_parameters_of_its_class(option: str, opd: list[str]) -> None:
    """Nothing is missing, so every setting can be changed without `+`; a different default is listed as deliberate."""
    given = with_option(option, opd)
    cfg, group = composed(*given), option.partition("/")[0]
    node, config = OmegaConf.to_container(cfg, resolve=True), load_config(cfg)
    differing, differences = set(), DELIBERATE.get(option, set())
    for path, yaml, value in components(node, config, ""):
        settings = settings_of(value)
        assert set(yaml) - {"_target_", "_partial_"} == set(settings), path
        for key, (owner, f) in settings.items():
            default, actual = f.default, getattr(owner, key)
            actual = actual.value if isinstance(actual, Constant) else actual
            if default is MISSING and key == "weight":
                default = 1.0
            if isinstance(default, SCALARS) and default != actual and not is_dataclass(actual) and not callable(actual):
                differing.add(f"{path}.{key}".strip("."))
    set_here = {o.partition("=")[0].lstrip("+") for o in given} | SET_BY_THE_TEST
    assert {key for key in differing if key.startswith(f"{group}.")} - set_here == differences - set_here


# --------------------------------------------------------------------------------------------------- composing runs


@pytest.mark.parametrize(
    ("option", "loss"),
    [
        ("reverse_kl", ReverseKL()),
        ("reverse_kl_floored", ReverseKL(floor=-6.0)),
        ("forward_kl", ForwardKL()),
        ("jsd", JSD(0.5)),
    ],
)
def test_the_divergence_is_switched_by_one_word(option: str, loss: object, opd: list[str]) -> None:
    swapped = [o.replace("+loss@loss.distill=reverse_kl", f"+loss@loss.distill={option}") for o in opd]
    run = prepare(*swapped)
    assert [(term.name, term.loss) for term in run.terms] == [("distill", loss)]


def test_a_term_is_dropped() -> None:
    little = ["data=addition_groups", "data.train.size=8", "data.heldout.size=4"]
    run = prepare("experiment=quickstart_hybrid", "~loss.distill", *little)
    assert [term.name for term in run.terms] == ["grpo"]
    assert run.teachers.teachers == {}, "a teacher that no term uses is not loaded"


def test_grpo_is_added_to_a_distillation(opd: list[str]) -> None:
    run = prepare(*opd, *GRPO, "loss.grpo.weight=0.25", "loss.grpo.clip_high=0.28")
    distill, grpo = run.terms
    assert (distill.loss, distill.teacher) == (ReverseKL(), "main")
    assert (grpo.loss, grpo.teacher, grpo.weight) == (PPOClip(0.2, 0.28), None, Constant(0.25))
    assert [prompt.samples for prompt in run.prompts.draw(0)] == [4, 4, 4, 4]


def test_the_teacher_is_changed_and_each_term_may_have_its_own(opd: list[str], tmp_path: Path) -> None:
    second = save_model(tmp_path / "second", seed=2, layers=1)
    run = prepare(*opd, "+teacher@teacher.small=local", f"teacher.small.model={second}", "+loss@loss.mimic=forward_kl",
                  "loss.mimic.teacher=small")  # fmt: skip
    assert [(term.name, term.teacher) for term in run.terms] == [("distill", "main"), ("mimic", "small")]
    assert run.config.teacher["small"].model == str(second)
    assert prepare(*opd, f"teacher.main.model={second}").config.teacher["main"].model == str(second)


def test_lora_is_switched_on_and_off(opd: list[str]) -> None:
    on = prepare("student=lora", *opd, "student.lora.r=4").config.student
    assert on.lora is not None and (on.lora.r, on.lora.target_modules) == (4, "all-linear")
    assert prepare("student=lora", *opd, "student.lora=null").config.student.lora is None
    assert prepare(*opd).config.student.lora is None


def test_the_sampler_is_switched(opd: list[str]) -> None:
    assert isinstance(prepare(*opd).sampler, HFSampler)
    assert isinstance(prepare(*[o for o in opd if o != "sampler=hf"]).sampler, VLLMSampler)


def test_two_streams_in_one_update(opd: list[str]) -> None:
    reward = "+data.streams.reward={prompts: 2, samples: 4, terms: [grpo]}"
    run = prepare(*opd, "+loss@loss.grpo=grpo", "credit=grpo", "data.streams.main.terms=[distill]", reward)
    drawn = [(prompt.stream, prompt.samples) for prompt in run.prompts.draw(0)]
    assert drawn == [("main", 1)] * 4 + [("reward", 4)] * 2
    terms = {prompt.stream: terms_on(prompt, run.terms, run.prompts.streams) for prompt in run.prompts.draw(0)}
    teachers = {stream: {name for term in found for name in term.teachers} for stream, found in terms.items()}
    assert teachers == {"main": {"main"}, "reward": set()}, "it scores only the stream that has a term under it"


def test_a_weight_may_be_a_schedule(opd: list[str]) -> None:
    """Linear from 1 to 0 until 0.8: at progress 0.4 half of the way, 0.5; from 0.8 on 0."""
    run = prepare(*opd, "loss.distill.weight={_target_: opd.schedules.Linear, start: 1, end: 0, until: 0.8}")
    weight = run.terms[0].weight
    assert weight == Linear(1.0, 0.0, 0.0, 0.8)
    assert [weight(progress) for progress in (0.0, 0.4, 0.8, 0.99)] == [1.0, 0.5, 0.0, 0.0]


@pytest.mark.parametrize(
    ("scheduler", "rates"),
    [
        # cosine over 2 steps: lr (1 + cos(pi t / 2)) / 2 = 1, 1/2, 0
        ("{_target_: torch.optim.lr_scheduler.CosineAnnealingLR, _partial_: true, T_max: 2}", [1.0, 0.5, 0.0]),
        # DeepSpeed's linear warm-up: (t - 1) / 2 of the way after t steps, then held
        (
            "{_target_: deepspeed.runtime.lr_schedules.WarmupLR, _partial_: true, warmup_min_lr: 0, warmup_max_lr: 1, "
            "warmup_num_steps: 2, warmup_type: linear}",
            None,
        ),
        # a function of transformers takes the optimizer first: linear from 0 to 1 in 2 steps
        ("{_target_: transformers.get_constant_schedule_with_warmup, num_warmup_steps: 2}", [0.0, 0.5, 1.0]),
    ],
)
def test_schedulers_and_optimizers_by_name(scheduler: str, rates: list[float] | None, opd: list[str]) -> None:
    swap = ["~engine.scheduler", f"+engine.scheduler={scheduler}"]
    sgd = ["~engine.optimizer", "+engine.optimizer={_target_: torch.optim.SGD, _partial_: true, lr: 1.0}"]
    engine = load_config(composed(*opd, *swap, *sgd)).engine
    optimizer = engine.optimizer([torch.nn.Parameter(torch.zeros(1))])
    assert type(optimizer) is torch.optim.SGD
    assert engine.scheduler is not None
    built = engine.scheduler(optimizer)
    seen = []
    for _ in range(3):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        built.step()
    if rates is not None:
        assert seen == pytest.approx(rates)
    else:
        assert seen == sorted(seen) and optimizer.param_groups[0]["lr"] == 1.0


def test_the_rate_may_stay_constant(opd: list[str]) -> None:
    assert load_config(composed(*opd, "engine.scheduler=null")).engine.scheduler is None


# ----------------------------------------------------------------------------------------- parts from a user's package

USER_PACKAGE = """
from dataclasses import dataclass, field
from opd.records import Example
from opd.students import SamplingParams

@dataclass(frozen=True)
class Margin:
    margin: float = 0.5
    needs = frozenset({"full_vocab"})
    def __call__(self, chunk):
        return (chunk.teacher_logp - chunk.student_logp - self.margin).amax(-1)

class Bare:
    def __call__(self, chunk):
        return chunk.token_logp

class Wishful:
    needs = frozenset({"full_vocabulary"})
    def __call__(self, chunk):
        return chunk.token_logp

def entropy(chunk):
    return -(chunk.student_logp.exp() * chunk.student_logp).sum(-1)

def shortness(rollouts, max_words):
    return [float(len(r.text.split()) <= max_words) for r in rollouts]

@dataclass(frozen=True)
class Doubles:
    count: int
    def load(self):
        return [Example(f"{n}*2=", str(2 * n)) for n in range(self.count)]

@dataclass
class Scripted:
    answer: str = "1"
    params: SamplingParams = field(default_factory=SamplingParams)
    def start(self, student, tokenizer, stop_ids, max_len): ...
    def sample(self, prompts, params, seed): return []
    def sync(self, weights, version): ...
    def close(self): ...
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package of a user's own, outside the repository, on the import path."""
    (tmp_path / "opd_user_parts").mkdir()
    (tmp_path / "opd_user_parts" / "__init__.py").write_text("")
    (tmp_path / "opd_user_parts" / "parts.py").write_text(USER_PACKAGE)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("mine")
def test_a_users_loss_by_import_path(opd: list[str]) -> None:
    added = "+loss.x={_target_: opd_user_parts.parts.Margin, weight: 0.1, margin: 2, teacher: main}"
    term = prepare(*opd, added).terms[1]
    assert (term.name, term.weight, term.teacher, term.loss.margin) == ("x", Constant(0.1), "main", 2.0)


@pytest.mark.usefixtures("mine")
def test_a_users_function_as_a_loss(opd: list[str]) -> None:
    formula = "_target_: opd.losses.Formula, function: opd_user_parts.parts.entropy, needs: [full_vocab]"
    loss = prepare(*opd, f"+loss.x={{{formula}, teacher: main}}").terms[1].loss
    assert isinstance(loss, Formula)
    assert (loss.function.__name__, loss.needs) == ("entropy", frozenset({"full_vocab"}))


@pytest.mark.usefixtures("mine")
@pytest.mark.parametrize("target", ["Bare", "entropy"])
def test_a_users_loss_must_declare_what_it_needs(target: str, opd: list[str]) -> None:
    message = refusal(*opd, f"+loss.x={{_target_: opd_user_parts.parts.{target}, weight: 0.1}}")
    assert message.startswith("loss.x: expected a Loss")
    assert "lacks needs" in message and "opd.losses.Formula" in message


@pytest.mark.usefixtures("mine")
def test_a_need_that_nothing_provides_is_refused_with_the_nearest(opd: list[str]) -> None:
    message = refusal(*opd, "+loss.x={_target_: opd_user_parts.parts.Wishful}")
    assert message == (
        "loss.x (Wishful): its `needs` names 'full_vocabulary', which nothing provides; did you mean full_vocab?"
    )


@pytest.mark.usefixtures("mine")
def test_a_users_reward_source_and_sampler(opd: list[str]) -> None:
    run = prepare(
        *[o for o in opd if not o.startswith(("sampler", "data.train"))],
        "+reward.short={_target_: opd_user_parts.parts.shortness, weight: 0.5, max_words: 3}",
        "~data.train", "+data.train={_target_: opd_user_parts.parts.Doubles, count: 5}",
        "~sampler", "+sampler={_target_: opd_user_parts.parts.Scripted, answer: '7', params: {max_tokens: 3}}",
    )  # fmt: skip
    assert run.config.reward["short"].weight == 0.5
    assert {prompt.text for step in range(2) for prompt in run.prompts.draw(step)} <= {f"{n}*2=" for n in range(5)}
    assert (run.sampler.answer, run.sampler.params.max_tokens) == ("7", 3)


def test_a_part_that_does_not_keep_its_contract_is_refused_with_what_it_lacks(tmp_path: Path) -> None:
    parts = [o for o in tiny_parts(tmp_path) if not o.startswith("sampler")]
    message = refusal(*parts, "~sampler", "+sampler={_target_: opd.schedules.Linear, start: 1, end: 0}")
    assert message.startswith("sampler: expected a Sampler") and "params" in message and "sync" in message
