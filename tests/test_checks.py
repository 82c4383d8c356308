"""What is refused before weights load: the message names the key, both sides and the way out."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.composing import GRPO, prepare, refusal, tiny_opd, write_jsonl
from tests.tiny import CHARACTERS, save_model, tokenizer


@pytest.fixture(scope="module")
def opd(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides of a tiny distillation."""
    return tiny_opd(tmp_path_factory.mktemp("opd"))


def setting(opd: list[str], key: str) -> str:
    """The value that the tiny distillation gives to a key."""
    return next(o.partition("=")[2] for o in opd if o.startswith(f"{key}="))


# ------------------------------------------------------------------------------------------------- losses and teachers


@dataclass
class SampledOnly:
    """A teacher that knows only the probability of the sampled token."""

    provides = frozenset({"sampler_logp"})

    def tokenizer(self) -> Any:
        return tokenizer()

    def start(self) -> None: ...
    def score(self, rollouts: Any) -> list[None]:
        return [None for _ in rollouts]

    def head(self) -> None: ...
    def close(self) -> None: ...


def test_a_loss_that_needs_more_than_the_teacher_gives(opd: list[str]) -> None:
    less = ["+teacher.less={_target_: tests.test_checks.SampledOnly}", "loss.distill.teacher=less"]
    assert refusal(*opd, *less) == (
        "loss.distill (ReverseKL) needs full_vocab scores; teacher.less (SampledOnly) provides sampler_logp: "
        "use another loss or teacher"
    )


def test_a_misspelt_teacher_is_refused_with_the_nearest(opd: list[str]) -> None:
    message = refusal(*opd, "loss.distill.teacher=mian")
    assert message.startswith("loss.distill.teacher: no teacher 'mian'; did you mean main?")


def test_a_term_whose_teacher_was_taken_away(opd: list[str]) -> None:
    assert refusal(*opd, "~teacher.main") == (
        "loss.distill.teacher: no teacher 'main'; there is none; add one with +teacher@teacher.main=local "
        "teacher.main.model=..."
    )


def test_a_divergence_without_a_teacher(opd: list[str]) -> None:
    message = refusal(*opd, "loss.distill.teacher=null")
    assert message.startswith("loss.distill.teacher: missing; ReverseKL needs full_vocab scores")


def test_a_teacher_that_no_term_uses_is_noted(opd: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    run = prepare(*opd, "+teacher@teacher.spare=local", "teacher.spare.model=/no/such/folder")
    assert list(run.teachers.teachers) == ["main"]
    assert "teacher.spare: no loss term uses it" in capsys.readouterr().err


def test_no_term_at_all(opd: list[str]) -> None:
    assert refusal(*opd, "~loss.distill").startswith("loss: no term; add one, e.g. +loss@loss.distill=reverse_kl")


def test_a_stream_that_names_an_unknown_term(opd: list[str]) -> None:
    message = refusal(*opd, "data.streams.main.terms=[distil]")
    assert "data.streams.main.terms: no loss term 'distil'; did you mean distill?" in message


def test_a_term_that_no_stream_trains_on(opd: list[str]) -> None:
    message = refusal(*opd, "+loss@loss.other=forward_kl", "data.streams.main.terms=[distill]")
    assert message.startswith("loss.other: no stream trains on it")


def test_a_stream_without_terms(opd: list[str]) -> None:
    assert "data.streams.main.terms: empty" in refusal(*opd, "data.streams.main.terms=[]")


# ----------------------------------------------------------------------------------------------------- rewards, credit


def test_grpo_without_rewards(opd: list[str]) -> None:
    message = refusal(*opd, *GRPO, "~reward.correct")
    assert message == ("loss.grpo (PPOClip) needs rewards, and there is none: add e.g. +reward@reward.correct=exact")


def test_grpo_without_credit(opd: list[str]) -> None:
    message = refusal(*opd, "+loss@loss.grpo=grpo", "data.streams.main.samples=4")
    assert message == "loss.grpo (PPOClip) needs advantages, and credit=none gives none: use e.g. credit=grpo"


def test_groups_of_one_under_a_group_relative_advantage(opd: list[str]) -> None:
    message = refusal(*opd, "+loss@loss.grpo=grpo", "credit=grpo")
    assert message.startswith("data.streams.main.samples=1: loss.grpo with GRPO compares samples of one prompt")
    assert "needs at least 2" in message and "data.streams.main.terms" in message


def test_groups_of_one_are_fine_in_a_stream_without_the_term(opd: list[str]) -> None:
    reward = "+data.streams.reward={prompts: 2, samples: 2, terms: [grpo]}"
    assert prepare(*opd, "+loss@loss.grpo=grpo", "credit=grpo", "data.streams.main.terms=[distill]", reward)


# ----------------------------------------------------------------------------------------------------------- sampling


@pytest.mark.parametrize("cut", ["top_p=0.9", "top_k=2", "min_p=0.1"])
def test_truncated_sampling_under_a_ratio(cut: str, opd: list[str]) -> None:
    message = refusal(*opd, *GRPO, f"sampler.params.{cut}")
    assert message.startswith("sampler.params: top_p, top_k or min_p cut the distribution")
    assert "loss.grpo (PPOClip)" in message and "set top_p=1, top_k=0, min_p=0" in message


def test_truncated_sampling_without_a_ratio_is_allowed(opd: list[str]) -> None:
    assert prepare(*opd, "sampler.params.top_k=2")


def test_training_on_greedy_answers(opd: list[str]) -> None:
    message = refusal(*opd, "sampler.params.temperature=0")
    assert message.startswith("sampler.params.temperature=0: training needs sampled answers; use a temperature above 0")


# ------------------------------------------------------------------------------------------------------- vocabularies


def test_a_permuted_vocabulary_of_the_same_size(opd: list[str], tmp_path: Path) -> None:
    """Ids are compared with tokens: turning the alphabet round by one changes every character's id, and no size."""
    permuted = save_model(tmp_path / "permuted", order=CHARACTERS[1:] + CHARACTERS[0])
    message = refusal(*opd, f"teacher.main.model={permuted}")
    assert message.startswith("teacher.main: its vocabulary is not the student's")
    assert f"{len(CHARACTERS)} ids differ" in message
    assert "id 3 is '0' for the student and '1' for the teacher" in message
    assert "use a teacher with the student's tokenizer" in message


def test_the_vocabulary_of_a_teacher_that_only_a_weigher_reads(opd: list[str], tmp_path: Path) -> None:
    """The loss asks no teacher; the weigher's entropies are those of the teacher's own vocabulary."""
    permuted = save_model(tmp_path / "permuted", order=CHARACTERS[1:] + CHARACTERS[0])
    weigher = "{_target_: opd.weighting.TeacherConfidence}"
    message = refusal(
        *opd, *GRPO, f"teacher.main.model={permuted}", "~loss.distill", "++loss.grpo.teacher=main",
        f"++loss.grpo.weigh={{confident: {weigher}}}",
    )  # fmt: skip
    assert message.startswith("teacher.main: its vocabulary is not the student's")


def test_a_vocabulary_that_only_goes_on_is_fine(opd: list[str], tmp_path: Path) -> None:
    longer = save_model(tmp_path / "longer", order=CHARACTERS + "!?", vocab_size=64)
    assert prepare(*opd, f"teacher.main.model={longer}")


# -------------------------------------------------------------------------------------------------------------- paths


def without(*names: str) -> Callable[[Path], None]:
    """Takes files out of a model's folder."""

    def take_out(folder: Path) -> None:
        for name in names:
            (folder / name).unlink(missing_ok=True)

    return take_out


TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@pytest.mark.parametrize("key", ["student", "teacher.main"])
@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (shutil.rmtree, "no such folder"),
        (without("config.json"), "cannot be read"),
        (without(*TOKENIZER_FILES), "the folder has no tokenizer"),
        (without("model.safetensors"), "the folder has no weights"),
        (without(*TOKENIZER_FILES, "config.json", "model.safetensors", "generation_config.json"), "cannot be read"),
        (lambda folder: (folder / "config.json").write_text("{"), "cannot be read"),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), "cannot be read"),
        (lambda folder: (folder / "config.json").write_text('{"model_type": "no_such"}'), "cannot be read"),
    ],
    ids=["none", "no-config", "no-tokenizer", "no-weights", "empty", "bad-config", "bad-tokenizer", "unknown-kind"],
)
def test_a_folder_that_is_not_a_whole_model(
    key: str, damage: Callable[[Path], object], says: str, opd: list[str], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(setting(opd, "student.model"), tmp_path / "broken"))
    damage(folder)
    message = refusal(*opd, f"{key}.model={folder}")
    assert message.startswith(f"{key}.model={folder}: {says}")
    assert "give a folder with config.json, tokenizer and weights" in message
    assert "Traceback" not in message and "\n" not in message


@pytest.mark.parametrize("key", ["student", "teacher.main"])
def test_a_hub_name_that_cannot_be_reached(key: str, opd: list[str]) -> None:
    """tests/conftest.py takes the hub off line."""
    message = refusal(*opd, f"{key}.model=nobody/no-such-model")
    assert message.startswith(f"{key}.model=nobody/no-such-model: cannot be read (")


def test_both_models_missing_are_listed_together(opd: list[str]) -> None:
    lines = refusal(*opd, "student.model=/no/student", "teacher.main.model=/no/teacher").splitlines()
    assert [line.partition(":")[0] for line in lines] == ["student.model=/no/student", "teacher.main.model=/no/teacher"]


def test_answers_longer_than_the_model_can_hold(opd: list[str]) -> None:
    """The tiny models hold 512 positions; 16 + 497 = 513."""
    message = refusal(*opd, "sampler.params.max_tokens=497")
    assert "student.model=" in message and "holds at most 512 tokens" in message
    assert "data.max_prompt_tokens + sampler.params.max_tokens = 513" in message
    assert prepare(*opd, "sampler.params.max_tokens=496")


# --------------------------------------------------------------------------------------------------------------- data


def test_a_data_file_that_does_not_exist(opd: list[str]) -> None:
    assert refusal(*opd, "data.train.path=/no/such.jsonl") == "data.train.path: no file '/no/such.jsonl'"
    assert refusal(*opd, "data.heldout.path=/no/such.jsonl") == "data.heldout.path: no file '/no/such.jsonl'"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "data.train: no examples"),
        ("\n\n", "data.train: no examples"),
        ('{"prompt": "1+1="}\n{"prompt": \n', ":2 is not JSON"),
        ('{"prompt": "1+1="}\n[1]\n', ":2 has neither `prompt` nor `messages`"),
        ('{"question": "1+1="}\n', ":1 has neither `prompt` nor `messages`"),
        ('{"prompt": ""}\n', ":1 has an empty `prompt`"),
        ('{"messages": []}\n', ":1 has an empty `messages`"),
        ('{"prompt": null}\n', ":1 has neither `prompt` nor `messages`"),
        ('{"messages": [{"role": "user", "content": null}]}\n', ":1 has a message whose `content` is not text"),
        (
            '{"messages": [{"role": "user", "content": [{"type": "text", "text": "1"}]}]}\n',
            ":1 has a message whose `content` is not text",
        ),
        ('{"prompt": 5}\n', ":1 has a prompt that is neither text nor a list of messages"),
        ('{"messages": [1]}\n', ":1 has a prompt that is neither text nor a list of messages"),
        ('{"messages": [{"role": "user"}]}\n', ":1 has a prompt that is neither text nor a list of messages"),
    ],
)
def test_a_broken_data_file_names_the_line(text: str, says: str, opd: list[str], tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text(text)
    message = refusal(*opd, f"data.train.path={tmp_path}/bad.jsonl")
    assert message.startswith("data.train") and says in message


def test_a_data_file_in_another_encoding(opd: list[str], tmp_path: Path) -> None:
    (tmp_path / "latin.jsonl").write_bytes('{"prompt": "é"}'.encode("latin-1"))
    message = refusal(*opd, f"data.train.path={tmp_path}/latin.jsonl")
    assert message.startswith(f"data.train.path: {tmp_path}/latin.jsonl cannot be read as UTF-8 text")


def test_a_stream_s_own_source_is_named(opd: list[str]) -> None:
    source = "data.streams.main.source={_target_: opd.prompts.JsonlSource, path: /no/such.jsonl}"
    assert refusal(*opd, source) == "data.streams.main.source.path: no file '/no/such.jsonl'"


def test_chat_messages_without_a_chat_template(opd: list[str], tmp_path: Path) -> None:
    bare = save_model(tmp_path / "bare")
    (bare / "chat_template.jinja").unlink()
    chat = write_jsonl(tmp_path / "chat.jsonl", [{"messages": [{"role": "user", "content": "1+1"}]}])
    wanted = [f"student.model={bare}", f"data.train.path={chat}"]
    message = refusal(*opd, *wanted)
    assert message.startswith("data.train: chat messages, but the student's tokenizer has no chat template")
    assert "set student.chat_template" in message
    template = tmp_path / "mine.jinja"
    template.write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}=")
    run = prepare(*opd, *wanted, f"student.chat_template={template}")
    assert run.prompts.draw(0)[0].token_ids == tokenizer()("1+1=")["input_ids"]


def test_a_chat_template_that_does_not_exist(opd: list[str]) -> None:
    assert refusal(*opd, "student.chat_template=/no/such.jinja").startswith("student.chat_template: no file")


def test_a_prompt_over_the_limit(opd: list[str]) -> None:
    """`0+0=` has 4 tokens."""
    message = refusal(*opd, "data.max_prompt_tokens=3")
    assert message == (
        "data.train: example 0 has 4 prompt tokens, over data.max_prompt_tokens=3; raise the limit, or set "
        "data.too_long to drop or keep_end"
    )
    assert refusal(*opd, "data.max_prompt_tokens=3", "data.too_long=drop") == (
        "data.train: no examples left after dropping long prompts"
    )


# --------------------------------------------------------------------------------------------- adapters, sizes, metrics


@pytest.mark.parametrize(
    "where", ["student.lora.target_modules=[q_proj,lm_head]", "+student.lora.modules_to_save=[lm_head]",
              "student.lora.target_modules='.*_proj|lm_head'"],
)  # fmt: skip
def test_an_adapter_on_a_tied_head(where: str, opd: list[str], tmp_path: Path) -> None:
    message = refusal("student=lora", *opd, where)
    assert message.startswith("student.lora: lm_head is the head, which student.model=")
    assert "leave it out of target_modules and modules_to_save" in message
    untied = save_model(tmp_path / "untied", tied=False)
    assert prepare("student=lora", *opd, where, f"student.model={untied}")


def test_an_adapter_that_cannot_be_merged_exactly(opd: list[str]) -> None:
    assert refusal("student=lora", *opd, "+student.lora.use_dora=true").startswith("student.lora.use_dora: ")


def test_heads_in_turn_hold_those_of_one_term(opd: list[str]) -> None:
    model = next(o.partition("=")[2] for o in opd if o.startswith("teacher.main.model="))
    second = ["+teacher@teacher.start=local", f"teacher.start.model={model}", "+loss@loss.x=extrapolated"]
    given = [*opd, *second, "loss.x.reference=start"]
    assert refusal(*given, "engine.resident_heads=1").startswith("engine.resident_heads=1: loss.x compares 2 teachers")
    assert prepare(*given, "engine.resident_heads=2")


@pytest.mark.parametrize(
    ("setting", "says"),
    [("lr=-1.0", "Invalid learning rate: -1.0"), ("betas=[0.9]", "betas"), ("betas=[0.9,1.5]", "Invalid beta"),
     ("weight_decay=-0.1", "Invalid weight_decay")],
)  # fmt: skip
def test_an_optimizer_that_torch_refuses(setting: str, says: str, opd: list[str]) -> None:
    message = refusal(*opd, "engine.optimizer._target_=torch.optim.AdamW", f"++engine.optimizer.{setting}")
    assert message.startswith("engine.optimizer (AdamW): ") and says in message


@pytest.mark.parametrize(
    "size",
    ["engine.micro_batch_tokens=0", "engine.chunk_tokens=-1", "engine.max_grad_norm=-0.5", "eval.max_tokens=0",
     "eval.temperature=-1.0", "loss.distill.constant_tokens=0"],
)  # fmt: skip
def test_sizes_below_their_bound(size: str, opd: list[str]) -> None:
    assert refusal(*opd, size).startswith(f"{size}: must")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["checkpoint.best_metric=eval/accuracy", "~reward.correct"], "never measured without a reward"),
        (["checkpoint.best_metric=eval/accuracy", "data.heldout=null"], "never measured without data.heldout"),
        (["checkpoint.best_metric=eval/kl", "eval=none"], "never measured without eval.problems above 0"),
        (["checkpoint.best_metric=eval/acuracy"], "no metric is called so; did you mean eval/accuracy"),
        (["checkpoint.best_metric=accuracy"], "no metric is called so; did you mean eval/accuracy?"),
        (["checkpoint.best_metric=loss/distil"], "no loss term is called 'distil'; did you mean distill?"),
        (["checkpoint.best_metric=weight/distil"], "no loss term is called 'distil'; did you mean distill?"),
        (["checkpoint.best_metric=reward/corect"], "no reward is called 'corect'; did you mean correct?"),
        (["checkpoint.best_metric=teacher/mian/kl"], "no teacher is called 'mian'; did you mean main?"),
        (["checkpoint.best_metric=eval/mian/kl"], "no teacher is called 'mian'; did you mean main?"),
    ],
)
def test_a_best_metric_that_is_never_measured(settings: list[str], says: str, opd: list[str]) -> None:
    message = refusal(*opd, *settings)
    assert message.startswith(settings[0] + ": ")
    assert says in message


@pytest.mark.parametrize(
    "metric",
    ["eval/accuracy", "eval/kl", "eval/main/overlap16", "loss/distill", "weight/distill", "reward/mean",
     "reward/correct", "reward/informative_groups", "teacher/main/kl", "grad_norm"],
)  # fmt: skip
def test_a_best_metric_that_is_measured(metric: str, opd: list[str]) -> None:
    assert prepare(*opd, f"checkpoint.best_metric={metric}")


# ------------------------------------------------------------------------------------------ weights and their schedules


PLATEAU = "{_target_: opd.schedules.SwitchOnPlateau, before: 1, after: 0%s}"


def weight(schedule: str) -> list[str]:
    """Overrides that replace the weight of the tiny distillation."""
    return ["~loss.distill.weight", f"+loss.distill.weight={schedule}"]


@pytest.mark.parametrize(
    ("schedule", "key"),
    [
        ("nan", "loss.distill.weight=nan"),
        ("-inf", "loss.distill.weight=-inf"),
        ("{_target_: opd.schedules.Linear, start: inf, end: 0.0}", "loss.distill.weight.start=inf"),
        ("{_target_: opd.schedules.Switch, before: 1.0, after: nan}", "loss.distill.weight.after=nan"),
    ],
)
def test_a_weight_that_is_no_number(schedule: str, key: str, opd: list[str]) -> None:
    assert refusal(*opd, *weight(schedule)) == f"{key}: must be a finite number"


def test_weights_that_are_all_zero(opd: list[str]) -> None:
    assert refusal(*opd, *weight("0")).startswith("loss.distill.weight=0: no term has another weight")
    assert prepare(*opd, *weight("0"), "+loss@loss.other=forward_kl")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["data.heldout=null"], "eval/accuracy is never measured without data.heldout"),
        (["eval.problems=0"], "eval/accuracy is never measured without eval.problems above 0"),
        (["~reward.correct"], "eval/accuracy is never measured without a reward"),
    ],
)
def test_a_plateau_of_what_is_never_measured(settings: list[str], says: str, opd: list[str]) -> None:
    assert prepare(*opd, *weight(PLATEAU % ""))
    message = refusal(*opd, *weight(PLATEAU % ""), *settings)
    assert message == f"loss.distill.weight (SwitchOnPlateau): {says}; add it, or use another schedule"


@pytest.mark.parametrize(
    ("metric", "says"),
    [
        ("eval/acuracy", "metric=eval/acuracy: no metric is called so; did you mean eval/accuracy"),
        ("eval/mian/kl", "metric=eval/mian/kl: no teacher is called 'mian'; did you mean main?"),
        ("loss/distill", "metric=loss/distill is not one of an evaluation"),
    ],
)
def test_a_plateau_of_a_metric_that_no_evaluation_has(metric: str, says: str, opd: list[str]) -> None:
    message = refusal(*opd, *weight(PLATEAU % f", metric: {metric}"))
    assert message.startswith(f"loss.distill.weight (SwitchOnPlateau): {says}")


def test_a_plateau_in_another_place_than_a_weight(opd: list[str]) -> None:
    loss = "{_target_: opd.losses.JSD, beta: " + PLATEAU % "" + ", teacher: main}"
    message = refusal(*opd, f"+loss.other={loss}")
    assert message.startswith("loss.other.beta: SwitchOnPlateau follows the evaluations, and only the weight of a term")


# -------------------------------------------------------------------------------------- dynamic sampling, run folders


def test_refills_without_a_reward_or_a_term_that_needs_one(opd: list[str]) -> None:
    refills = "data.streams.main.refill_rounds=2"
    assert refusal(*opd, refills, "~reward.correct").startswith(f"{refills}: replaces groups by their rewards")
    assert refusal(*opd, refills).startswith(f"{refills}: replaces groups that give no advantage, and no loss term")
    assert prepare(*opd, *GRPO, refills)
    assert "give no advantage" in refusal(*opd, *GRPO, refills, "data.streams.main.terms=[distill]",
                                          "+data.streams.more={prompts: 2, samples: 2, terms: [grpo]}")  # fmt: skip


@pytest.mark.parametrize("below", ["", "/run", "/deep/run"])
def test_a_run_folder_that_is_a_file_or_below_one(below: str, opd: list[str], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    message = refusal(*opd, f"run_dir={tmp_path}/file{below}")
    assert message == f"run_dir={tmp_path}/file{below}: {tmp_path}/file is not a folder; give another run_dir"


def test_a_run_folder_that_cannot_be_written_to(
    opd: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The administrator may write anywhere, so the system's answer is made up."""
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != tmp_path)
    assert refusal(*opd, f"run_dir={tmp_path}/deep/run").startswith(
        f"run_dir={tmp_path}/deep/run: {tmp_path} cannot be written to"
    )


def test_several_refusals_are_listed_together(opd: list[str]) -> None:
    lines = refusal(
        *opd, "+loss@loss.grpo=grpo", "sampler.params.temperature=0", "loss.distill.teacher=mian",
        "checkpoint.best_metric=eval/acuracy",
    ).splitlines()  # fmt: skip
    starts = ["loss.distill.teacher", "loss.grpo (PPOClip) needs advantages", "sampler.params.temperature=0",
              "checkpoint.best_metric"]  # fmt: skip
    assert [line.startswith(start) for line, start in zip(lines, starts, strict=True)] == [True] * 4


def test_refusals_come_before_weights_are_read(opd: list[str], tmp_path: Path) -> None:
    """Weights that no reader could take: the run is prepared all the same, or refused for another reason."""
    folder = Path(shutil.copytree(setting(opd, "student.model"), tmp_path / "student"))
    (folder / "model.safetensors").write_text("not weights")
    assert prepare(*opd, f"student.model={folder}").stop_ids == [1]
    assert "sampler.params.temperature=0" in refusal(*opd, f"student.model={folder}", "sampler.params.temperature=0")
