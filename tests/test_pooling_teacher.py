"""A vLLM engine as teacher beside one as sampler, in one process with the trainer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from opd.engine import init_distributed
from opd.records import FullVocab
from opd.teachers import GivesFullVocab, LimitsLength, LocalTeacher, PoolingTeacher
from tests.rows import rollout
from tests.runs import Pair, opd, save_pair, training_lines

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return save_pair(tmp_path_factory.mktemp("models"))


def settings(pair: Pair, kind: str, run_dir: Path) -> list[str]:
    """Three steps sampled by vLLM, under one kind of teacher."""
    changed = ("+teacher@", "sampler=")
    common = [setting for setting in pair.train(run_dir) if not setting.startswith(changed)]
    small = ["teacher.main.kv_cache_gib=0.03", "teacher.main.max_num_seqs=32"] if kind == "vllm_pooling" else []
    return [
        *common, f"+teacher@teacher.main={kind}", *small, "sampler=vllm", "sampler.kv_cache_gib=0.03",
        "sampler.max_num_seqs=32", "steps=3",
    ]  # fmt: skip


def test_two_engines_and_the_trainer_in_one_process(pair: Pair, tmp_path: Path) -> None:
    """The same samples (the sampler's seeds are), and losses that differ by the rounding of another forward pass."""
    for kind in ("vllm_pooling", "local"):
        ended = opd(*settings(pair, kind, tmp_path / kind))
        assert ended.code == 0, ended.err
    mine, local = training_lines(tmp_path / "vllm_pooling"), training_lines(tmp_path / "local")
    assert len(mine) == len(local) == 3
    for got, expected in zip(mine, local, strict=True):
        assert got["loss/distill"] == pytest.approx(expected["loss/distill"], abs=1e-5)
        assert got["teacher/main/kl"] == pytest.approx(expected["teacher/main/kl"], abs=1e-5)


def test_probabilities_are_the_local_ones(pair: Pair) -> None:
    """Ragged rows, one with more tokens than a block of the cache holds, scored twice: to 1e-5."""
    init_distributed()
    generator = torch.Generator().manual_seed(7)
    draw = lambda count: torch.randint(3, 48, (count,), generator=generator).tolist()  # noqa: E731
    given = [rollout(draw(prompt), draw(answer)) for prompt, answer in [(2, 5), (1, 1), (200, 60), (9, 3)]]
    local, teacher = (
        LocalTeacher(str(pair.teacher)),
        PoolingTeacher(str(pair.teacher), kv_cache_gib=0.03, max_num_seqs=8),
    )
    local.start()
    teacher.start()
    assert isinstance(teacher, GivesFullVocab) and isinstance(teacher, LimitsLength) and teacher.max_len == 512
    assert teacher.score([]) == []
    head = teacher.head()
    for _ in range(2):
        for mine, right in zip(teacher.score(given), local.score(given), strict=True):
            assert isinstance(mine, FullVocab) and isinstance(right, FullVocab)
            gap = torch.softmax(head.logits(mine.hidden), -1) - torch.softmax(local.head().logits(right.hidden), -1)
            assert gap.abs().max() < 1e-5
    teacher.close()
