"""Chat requests made from our own templates and word lists; train and held-out share templates, never topics.

`python examples/smollm2/prompts.py out_dir` writes `prompts_train.jsonl` and `prompts_heldout.jsonl` there, one
`{"messages": [{"role": "user", "content": ...}], "source": ...}` per line; `prepare.py` calls `write` for you.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

SEED = 20
NUM_TRAIN, NUM_HELDOUT = 1536, 256
HELDOUT_EVERY = 6  # one topic in six is held out

TOPICS = Path(__file__).with_name("topics.toml")
LANGUAGES = ["French", "Spanish", "German", "Italian", "Portuguese"]

Pools = dict[str, list]  # name -> topics; `units` holds pairs, the others text
Maker = Callable[[random.Random, Pools], str]


def _fill(pool: str, templates: list[str]) -> Maker:
    """Requests with one topic each."""
    return lambda rng, pools: rng.choice(templates).format(rng.choice(pools[pool]))


def _translate(rng: random.Random, pools: Pools) -> str:
    word, language = rng.choice(pools["words"]), rng.choice(LANGUAGES)
    return rng.choice(['How do you say "{}" in {}?', 'Translate "{}" into {}.']).format(word, language)


def _arithmetic(rng: random.Random, pools: Pools) -> str:
    name, item = rng.choice(pools["names"]), rng.choice(pools["items"])
    have, more, few = rng.randint(5, 30), rng.randint(2, 20), rng.randint(2, 5)
    return rng.choice(
        [
            f"{name} has {have} {item} and buys {more} more. How many {item} does {name} have now?",
            f"{name} had {have + more} {item} and gave away {more}. How many are left?",
            f"{name} puts {few * more} {item} into {few} equal bags. How many {item} are in each bag?",
            f"A box holds {more} {item}. {name} has {few} full boxes. How many {item} is that? Show your steps.",
        ]
    )


def _convert(rng: random.Random, pools: Pools) -> str:
    large, small = rng.choice(pools["units"])
    number = rng.randint(2, 12)
    return rng.choice([f"Convert {number} {large} to {small}.", f"How many {small} are there in {number} {large}?"])


ONE_TOPIC: dict[str, tuple[str, list[str]]] = {  # source -> pool, templates
    "explain": (
        "concepts",
        [
            "Explain {} in simple words.",
            "What is the most important thing to know about {}?",
            "Can you tell me how {} affects everyday life?",
            "Explain {} to a ten-year-old child.",
            "Give me three facts about {}.",
            "Write a short quiz question about {} and answer it.",
            "Describe {} with a comparison from everyday life.",
            "Make an outline for a short talk about {}.",
            "What should I ask an expert about {}?",
        ],
    ),
    "write": (
        "things",
        [
            "Write a haiku about {}.",
            "Describe {} in two sentences.",
            "Write the first lines of a story about {}.",
            "Write a short poem about {}.",
            "List five words that describe {}.",
            "Give me a funny title for a story about {}.",
            "What can one see, hear and smell near {}?",
            "Write a short conversation between two people who talk about {}.",
        ],
    ),
    "advise": (
        "activities",
        [
            "Give me three tips for {}.",
            "What do I need for {}? Make a short list.",
            "What are common mistakes in {}?",
            "Write a short email to a friend who asked about {}.",
            "I am nervous about {}. What should I do first?",
            "Make a plan for one week of {}.",
            "Why do people enjoy {}, and why do some not?",
        ],
    ),
    "compare": ("pairs", ["What is the difference between {}?", "Compare {} in a few sentences."]),
    "yes_no": ("yes_no", ["{} Answer yes or no and give a reason.", "{}"]),
    "rewrite": (
        "sentences",
        ["Rewrite this sentence so that it sounds polite and correct: {}", "Turn this sentence into a question: {}"],
    ),
    "summarise": ("paragraphs", ["Summarise this text in one sentence.\n\n{}", "{}\n\nWhat is this text about?"]),
    "facts": ("countries", ["What is the capital of {}?", "Name two things that {} is famous for."]),
}
MAKERS: dict[str, Maker] = {source: _fill(*spec) for source, spec in ONE_TOPIC.items()}
MAKERS |= {"translate": _translate, "arithmetic": _arithmetic, "convert": _convert}
SHARES = {  # of the requests, the same in both files
    "explain": 0.30,
    "write": 0.22,
    "advise": 0.15,
    "arithmetic": 0.10,
    "translate": 0.05,
    "convert": 0.05,
    "compare": 0.03,
    "yes_no": 0.03,
    "facts": 0.03,
    "rewrite": 0.02,
    "summarise": 0.02,
}


def _split(rng: random.Random) -> tuple[Pools, Pools]:
    """Train and held-out topics, disjoint in every pool; France, which the README asks about, is held out."""
    train, heldout = {}, {}
    for name, pool in tomllib.loads(TOPICS.read_text(encoding="utf-8")).items():
        rng.shuffle(pool)
        pool.sort(key=lambda topic: topic != "France")
        heldout[name] = pool[::HELDOUT_EVERY]
        train[name] = [topic for topic in pool if topic not in heldout[name]]
    return train, heldout


def _draw(rng: random.Random, pools: Pools, count: int) -> list[dict]:
    """`count` different requests in random order, sources by their shares, `explain` taking what rounding leaves."""
    wanted = {source: int(share * count) for source, share in SHARES.items()}
    wanted["explain"] += count - sum(wanted.values())
    rows = []
    for source, number in wanted.items():
        texts: dict[str, None] = {}
        for _ in range(200 * number):
            if len(texts) < number:
                texts[MAKERS[source](rng, pools)] = None
        assert len(texts) == number, f"the templates of {source!r} give {len(texts)} different requests, not {number}"
        rows += [{"messages": [{"role": "user", "content": text}], "source": source} for text in texts]
    rng.shuffle(rows)
    return rows


def write(out_dir: Path) -> tuple[Path, Path]:
    """Write both files; the same bytes on every machine."""
    rng = random.Random(SEED)
    train, heldout = _split(rng)
    paths = out_dir / "prompts_train.jsonl", out_dir / "prompts_heldout.jsonl"
    out_dir.mkdir(parents=True, exist_ok=True)
    for path, pools, count in zip(paths, (train, heldout), (NUM_TRAIN, NUM_HELDOUT), strict=True):
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in _draw(rng, pools, count)]
        aside = path.with_suffix(".partial")
        aside.write_text("".join(lines), encoding="utf-8")
        os.replace(aside, path)
    return paths


if __name__ == "__main__":
    print(*write(Path(sys.argv[1] if len(sys.argv) > 1 else "outputs/smollm2")))
