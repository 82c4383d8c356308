"""What a mistake in the configuration is answered with: the key, the reason, the nearest valid key."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra.errors import HydraException
from omegaconf import OmegaConf

from opd.config import ConfigError, load_config
from opd.hints import explain_override, search_path
from opd.resolvers import folder_name
from tests.composing import composed, tiny_opd


@pytest.fixture(scope="module")
def opd(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides of a tiny distillation."""
    return tiny_opd(tmp_path_factory.mktemp("opd"))


def mistake(*overrides: str) -> str:
    """What `load_config` says against a configuration that Hydra composes."""
    with pytest.raises(ConfigError) as caught:
        load_config(composed(*overrides))
    return str(caught.value)


def explained(*overrides: str) -> str:
    """What the user reads where Hydra refuses to compose."""
    with pytest.raises(HydraException) as caught:
        composed(*overrides)
    return explain_override(caught.value, list(overrides))


# ------------------------------------------------------------------------------ keys, options, groups that do not exist


@pytest.mark.parametrize(
    ("override", "start", "nearest"),
    [
        ("stpes=5", "stpes: no such key", "steps"),
        ("student.modle=x", "student.modle: no such key", "student.model"),
        ("loss.distill.wieght=1", "loss.distill.wieght: no such key", "loss.distill.weight"),
        ("engine.optimizer.lrr=1", "engine.optimizer.lrr: no such key", "engine.optimizer.lr"),
        ("data.streams.main.sample=2", "data.streams.main.sample: no such key", "data.streams.main.samples"),
        ("~loss.distil", "loss.distil: no such key", "loss.distill"),
        ("+loss@loss.grpo=grop", "loss/grop: no such option", "grpo"),
        ("student=lroa", "student/lroa: no such option", "lora"),
        ("experiment=quickstrat", "experiment/quickstrat: no such option", "quickstart"),
        ("+losss@loss.x=grpo", "losss: no such group", "loss"),
        ("sampelr=vllm", "sampelr: no such key", "sampler"),
    ],
)
def test_a_misspelt_key_option_or_group_is_answered_with_the_nearest(
    override: str, start: str, nearest: str, opd: list[str]
) -> None:
    message = explained(*opd, override)
    assert message.startswith(f"{start}; did you mean ")
    suggestions = message.removesuffix("?").partition("did you mean ")[2].split(" or ")
    assert nearest in suggestions[:2]


def test_a_misspelt_option_of_a_named_term() -> None:
    message = explained("loss@loss.distill=revrse_kl", "experiment=quickstart")
    assert message.startswith("loss/revrse_kl: no such option; did you mean reverse_kl or ")


def test_misspelt_keys_are_listed_together(opd: list[str]) -> None:
    lines = explained(*opd, "stpes=5", "seeed=1").splitlines()
    assert [line.partition(":")[0] for line in lines] == ["stpes", "seeed"]
    assert "steps" in lines[0] and "seed" in lines[1]


def test_replacing_a_part_key_by_key_is_answered_with_the_way_to_replace_it_whole(opd: list[str]) -> None:
    message = explained(*opd, "engine.scheduler={_target_: torch.optim.lr_scheduler.ConstantLR, _partial_: true}")
    assert message.startswith("engine.scheduler: ")
    assert message.endswith("drop it first: '~engine.scheduler' '+engine.scheduler=...'")


@pytest.mark.parametrize(
    ("override", "start", "nearest"),
    [
        ("+student.modle=x", "student.modle: opd.students.model.HFStudent has no such key", "model"),
        ("+loss.distill.flooor=1", "loss.distill.flooor: opd.losses.divergences.ReverseKL has no such key", "floor"),
        ("+loss.distill.wieght=1", "loss.distill.wieght: opd.losses.divergences.ReverseKL has no such key", "weight"),
        ("+stpes=5", "stpes: opd.config.TrainConfig has no such key", "steps"),
        ("+data.streams.main.sampels=2", "data.streams.main.sampels: opd.prompts.Stream has no such key", "samples"),
        ("+engine.optimizer.lrr=1", "engine.optimizer.lrr: torch.optim.adamw.AdamW has no such key", "lr"),
        ("+reward.correct.stripp=true", "reward.correct.stripp: opd.verifiers.ExactMatch has no such key", "strip"),
    ],
)
def test_a_misspelt_key_is_refused_also_when_it_is_added(
    override: str, start: str, nearest: str, opd: list[str]
) -> None:
    message = mistake(*opd, override)
    assert message.startswith(f"{start}; did you mean {nearest}")


def test_a_key_that_resembles_none_is_answered_with_all(opd: list[str]) -> None:
    message = mistake(*opd, "+credit.zzz=1")
    assert message.startswith("credit.zzz: opd.credit.NoCredit has no such key; valid keys: ")


# ------------------------------------------------------------------------------------------------------- wrong values


@pytest.mark.parametrize(
    ("override", "key", "says"),
    [
        ("steps=abc", "steps", "integer"),
        ("steps=0", "config", "steps=0: must be at least 1"),
        ("steps=-3", "config", "steps=-3"),
        ("seed=1.5", "seed", "integer"),
        ("run_dir=[a]", "run_dir", "string"),
        ("resume=maybe", "resume", "'auto' or 'never'"),
        ("student.dtype=float33", "student.dtype", "'float32' or 'bfloat16'"),
        ("student.lora=5", "student.lora", "PeftConfig"),
        ("sampler.params=5", "sampler.params", "SamplingParams"),
        ("sampler.params.max_tokens=0", "sampler.params", "max_tokens=0: must be at least 1"),
        ("sampler.params.temperature=-1", "sampler.params", "temperature=-1"),
        ("sampler.params.top_p=1.5", "sampler.params", "top_p=1.5"),
        ("loss.distill.weight=[1]", "loss.distill.weight", "Schedule"),
        ("loss.distill.weight=abc", "loss.distill.weight", "or give a number"),
        ("loss.distill.weight=true", "loss.distill.weight", "or give a number"),
        ("loss.distill.aggregation=mean", "loss.distill.aggregation", "'token_mean'"),
        ("loss.distill=reverse_kl", "loss.distill", "Term"),
        ("teacher.main=null", "teacher.main", "Teacher"),
        ("reward.correct.weight=abc", "reward.correct.weight", "number"),
        ("data.streams.main.prompts=0", "data.streams.main", "prompts=0"),
        ("data.streams.main.samples=-1", "data.streams.main", "samples=-1"),
        ("data.streams.main.terms=distill", "data.streams.main.terms", "list"),
        ("data.streams=null", "data.streams", "dict"),
        ("~data.streams.main", "data", "at least one stream"),
        ("data.max_prompt_tokens=0", "data", "max_prompt_tokens=0"),
        ("data.too_long=cut", "data.too_long", "'keep_end'"),
        ("data.train.limit=-1", "data.train", "limit=-1"),
        ("engine.zero_stage=4", "engine.zero_stage", "0, 1, 2 or 3"),
        ("engine.optimizer=AdamW", "engine.optimizer", "cannot import 'AdamW'"),
        ("eval.every=0", "eval", "every=0"),
        ("checkpoint.keep=0", "checkpoint", "keep=0"),
        ("checkpoint.best_mode=highest", "checkpoint.best_mode", "'max' or 'min'"),
        ("parity.limit=-1", "parity", "limit=-1"),
        ("reward_policy.on_error=ignore", "reward_policy.on_error", "'raise' or 'skip'"),
        ("reward_policy.time_limit=0", "reward_policy", "time_limit=0"),
        ("stop_after=0", "config", "stop_after=0"),
        ("run_dir=''", "config", "run_dir"),
    ],
)
def test_a_wrong_value_names_its_key_and_what_is_expected(override: str, key: str, says: str, opd: list[str]) -> None:
    message = mistake(*opd, override)
    assert message.startswith(f"{key}: ")
    assert says in message
    assert "\n" not in message, "one problem, one line"


def test_missing_values_are_named_with_their_keys(opd: list[str]) -> None:
    missing = [o for o in opd if not o.startswith(("student.model", "teacher.main.model"))]
    assert mistake(*missing).splitlines() == [
        "student.model: missing, and it has no default; give student.model=...",
        "teacher.main.model: missing, and it has no default; give teacher.main.model=...",
    ]


def test_an_unknown_interpolation_is_named(opd: list[str]) -> None:
    assert mistake(*opd, "steps=${nope}") == "steps: Interpolation key 'nope' not found"


def test_several_problems_are_listed_together(opd: list[str]) -> None:
    lines = mistake(*opd, "seed=x", "+student.b=2", "loss.distill.weight=abc", "+loss.distill.wieght=1").splitlines()
    assert sorted(line.partition(":")[0] for line in lines) == [
        "loss.distill.wieght",
        "seed",
        "student.b",
    ], "and the term's other settings are judged once its formula can be built"


# ------------------------------------------------------------------------------------------------------- import paths


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("opd.losses.ReversKL", "opd.losses has no ReversKL; did you mean ReverseKL"),
        ("no_such_package.Loss", "no module 'no_such_package'; write package.module.Class, and set PYTHONPATH"),
        ("Loss", "write package.module.Class"),
        ("opd.losses", "is neither a class nor a function"),
        ("opd.schedules.Linear", "start: missing; opd.schedules.Linear needs it"),
        ("opd.students.SamplingParams", "expected a Loss"),
    ],
)
def test_an_import_path_that_leads_nowhere(target: str, says: str, opd: list[str]) -> None:
    message = mistake(*opd, f"+loss.x={{_target_: {target}}}")
    assert message.startswith("loss.x")
    assert says in message


def test_a_term_without_a_target(opd: list[str]) -> None:
    assert mistake(*opd, "+loss.x={weight: 1}").startswith("loss.x: needs a _target_, the import path of a class")
    assert mistake(*opd, "+loss.x={_target_: 5}").startswith("loss.x._target_: must be the import path")


def test_a_users_module_that_fails_on_import_shows_its_own_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opd: list[str]
) -> None:
    (tmp_path / "opd_user_broken.py").write_text("raise RuntimeError('no licence')")
    (tmp_path / "opd_user_lacking.py").write_text("import no_such_dependency")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "RuntimeError('no licence')" in mistake(*opd, "+loss.x={_target_: opd_user_broken.Loss}")
    assert "no_such_dependency" in mistake(*opd, "+loss.x={_target_: opd_user_lacking.Loss}")


# ----------------------------------------------------------------------------------------------- folders and file names


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["steps=1"], []),
        (["--config-dir", "/mine", "steps=1"], ["hydra.searchpath=[file:///mine]"]),
        (["-cd", "/mine"], ["hydra.searchpath=[file:///mine]"]),
        (["--config-dir=/mine"], ["hydra.searchpath=[file:///mine]"]),
        (["hydra.searchpath=[pkg://a.conf,pkg://b]"], ["hydra.searchpath=[pkg://a.conf,pkg://b]"]),
        (["-cd", "/c", "hydra.searchpath=[pkg://a]"], ["hydra.searchpath=[pkg://a,file:///c]"]),
    ],
)
def test_a_job_of_a_sweep_finds_the_users_folders_again(argv: list[str], expected: list[str]) -> None:
    assert search_path(argv) == expected


def test_a_job_of_a_sweep_has_a_plain_folder_name_of_its_own() -> None:
    assert folder_name("loss.distill.weight=0.5,seed=1") == "loss.distill.weight-0.5,seed-1"
    quoted = [folder_name(f"+loss.x={{_target_: a.B, weight: {w}}}") for w in (1, 2)]
    assert quoted[0] != quoted[1]
    assert not set("".join(quoted)) & set("={}:/ #'\"")
    long = [folder_name(f"student.model={'a' * 200}{end}") for end in "xy"]
    assert long[0] != long[1] and max(map(len, long)) < 120


@pytest.mark.parametrize("seed", [-1, 2**31])
def test_a_seed_out_of_range(seed: int, opd: list[str]) -> None:
    assert mistake(*opd, f"seed={seed}") == f"config: seed={seed}: must be at least 0 and below 2**31"


@pytest.mark.parametrize("group", ["loss", "teacher", "reward"])
def test_a_name_with_a_dot(group: str, opd: list[str]) -> None:
    """Only a file can write one: on the command line a dot separates keys."""
    cfg = OmegaConf.create(OmegaConf.to_container(composed(*opd)))
    cfg[group]["a.b"] = next(iter(cfg[group].values()))
    with pytest.raises(ConfigError, match=f"{group}: the name 'a.b' holds a dot"):
        load_config(cfg)


@pytest.mark.parametrize("sampler", ["hf", "vllm"])
def test_a_sampler_s_dtype_is_one_that_a_student_may_have(sampler: str, opd: list[str]) -> None:
    assert mistake(*opd, f"sampler={sampler}", "sampler.dtype=bf16").startswith("sampler.dtype: ")
    assert load_config(composed(*opd, f"sampler={sampler}", "sampler.dtype=bfloat16"))
