"""Evaluation: what it reports is what a plain computation on the same answers gives."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from opd.demo.addition import Addition
from opd.evaluate import EvalConfig, Evaluator
from opd.records import Mean, Reward
from opd.rewards import RewardStage, RewardTerm
from opd.students import SamplingParams
from tests.faults.parts import Letters
from tests.runs import Pair, checkpoint, checkpoint_steps, lines, opd, save_pair
from tests.tiny import tokenizer


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return save_pair(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def finished(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps, judged by the share of letters."""
    run_dir = tmp_path_factory.mktemp("finished") / "run"
    letters = ["~reward.correct", "+reward.letters._target_=tests.faults.parts.Letters"]
    ended = opd(*pair.train(run_dir, *letters, "engine.micro_batch_tokens=60"))
    assert ended.code == 0, ended.err
    return run_dir


@torch.no_grad()
def plain_evaluation(student: Path, teacher: Path) -> dict[str, float]:
    """The student's greedy answers of at most 5 tokens to the first 6 held-out problems, one at a time: sum p (log p -
    log q) of each of their tokens, averaged over all tokens; the share of letters in each text, averaged over texts."""
    p_model, q_model = (AutoModelForCausalLM.from_pretrained(path).eval() for path in (student, teacher))
    words, divergences, shares = tokenizer(), [], []
    for example in Addition("test", size=16).load()[:6]:
        prompt = words(example.prompt)["input_ids"]
        ids = list(prompt)
        while len(ids) < len(prompt) + 5 and ids[-1] != words.eos_token_id:
            ids.append(p_model(torch.tensor([ids])).logits[0, -1].argmax().item())
        log_p, log_q = (m(torch.tensor([ids])).logits[0].double().log_softmax(-1) for m in (p_model, q_model))
        for position in range(len(prompt), len(ids)):
            p = log_p[position - 1].exp()
            divergences.append((p * (log_p[position - 1] - log_q[position - 1])).sum().item())
        text = words.decode(ids[len(prompt) :], skip_special_tokens=True)
        shares.append(sum(c.isalpha() for c in text) / max(1, len(text)))
    return {"kl": sum(divergences) / len(divergences), "accuracy": sum(shares) / 6, "length": len(divergences) / 6}


def test_evaluation_equals_a_plain_computation(pair: Pair, finished: Path) -> None:
    """Before, after, and the teacher's own accuracy; rows were evaluated in several micro-batches."""
    logged = {line["step"]: line for line in lines(finished) if "eval/kl" in line}
    for step, student in ((0, pair.student), (6, checkpoint(finished, 6) / "hf")):
        plain = plain_evaluation(student, pair.teacher)
        assert logged[step]["eval/kl"] == pytest.approx(plain["kl"], rel=1e-4)
        assert logged[step]["eval/main/kl"] == logged[step]["eval/kl"]
        assert logged[step]["eval/accuracy"] == pytest.approx(plain["accuracy"])
        assert logged[step]["eval/length"] == plain["length"]
    summary = json.loads((finished / "summary.json").read_text())
    own = plain_evaluation(pair.teacher, pair.teacher)
    assert own["kl"] == 0.0
    assert summary["eval"]["teacher"] == pytest.approx(own["accuracy"])


def evaluator(terms: list[RewardTerm]) -> Evaluator:
    """Only the parts that a count needs."""
    return Evaluator(EvalConfig(), None, RewardStage(terms), None, {}, None, 48, 100, 0)  # type: ignore[arg-type]


def test_accuracy_is_the_mean_of_the_verdicts_and_merges() -> None:
    """(1 + 0 + None) and (0.5): 1.5 over 3 verdicts = 0.5, whatever the split; no verdict is no zero.

    Accuracy is the first reward by itself: what other parts or weights add to the value plays no part.
    """
    judge = evaluator([RewardTerm("letters", Letters()), RewardTerm("length", Letters(), 5.0)])
    judged = [Reward(None if part is None else 9.0, {"letters": part, "length": 3.0}) for part in (1.0, 0.0, None, 0.5)]
    parts = [judge.accuracy(judged[:3]), judge.accuracy(judged[3:])]
    total = parts[0]["eval/accuracy"] + parts[1]["eval/accuracy"]
    assert total == Mean(1.5, 3.0)
    assert evaluator([]).accuracy([Reward(None)]) == {}


@pytest.mark.parametrize("settings", [{"every": 0}, {"problems": -1}, {"samples": 0}])
def test_settings_out_of_range_are_refused(settings: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="out of range"):
        EvalConfig(**settings)


def test_evaluation_is_greedy_and_unfiltered_unless_told_otherwise() -> None:
    sampling = EvalConfig().sampling(SamplingParams(max_tokens=9, temperature=0.8))
    assert (sampling.temperature, sampling.max_tokens) == (0.0, 9)
    assert EvalConfig(temperature=1.0, max_tokens=3).sampling(SamplingParams()).max_tokens == 3


def test_eval_of_a_run_prints_json_of_its_newest_checkpoint(finished: Path) -> None:
    before = (finished / "metrics.jsonl").read_bytes()
    ended = opd("eval", str(finished))
    assert ended.code == 0, ended.err
    found = json.loads(ended.out)
    last = [line for line in lines(finished) if "eval/accuracy" in line][-1]
    assert found["step"] == 6
    for name in ("eval/accuracy", "eval/kl", "eval/length"):
        assert found[name] == pytest.approx(last[name], rel=1e-6)
    assert json.loads((finished / "eval.json").read_text()) == found
    assert (finished / "metrics.jsonl").read_bytes() == before
    assert checkpoint_steps(finished) == [4, 6]


def test_eval_of_a_run_takes_changes(finished: Path) -> None:
    """Twelve problems instead of six."""
    found = json.loads(opd("eval", str(finished), "eval.problems=12").out)
    assert found["eval/accuracy"] != json.loads((finished / "summary.json").read_text())["eval"]["after"]


def test_eval_of_an_experiment_is_the_start_model(pair: Pair, finished: Path, tmp_path: Path) -> None:
    """Nothing is written where there is no run."""
    ended = opd("eval", *pair.settings(tmp_path / "none"))
    assert ended.code == 0, ended.err
    found = json.loads(ended.out)
    assert found["step"] == 0
    assert found["eval/kl"] == pytest.approx(lines(finished)[0]["eval/kl"], rel=1e-6)
    assert 0.0 <= found["eval/accuracy"] <= 1.0
    assert not (tmp_path / "none").exists()


def test_eval_moves_nothing_aside(pair: Pair, tmp_path: Path) -> None:
    """The run was started with resume=never, which its saved configuration repeats."""
    run_dir = tmp_path / "run"
    assert opd(*pair.train(run_dir, "resume=never", "steps=1")).code == 0
    ended = opd("eval", str(run_dir))
    assert ended.code == 0, ended.err
    assert json.loads(ended.out)["step"] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_eval_of_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    ended = opd("eval", str(tmp_path))
    assert ended.code == 2
    assert "not a run folder" in ended.err
