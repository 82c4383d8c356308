"""Fixed-width addition, a task on which methods differ and every answer can be checked.

`^54321+98765=` reads 12345 + 56789: all numbers are written with the least significant digit first, so that a carry
always moves to the right. The right answer is `431960` (69134), after which the model writes `$`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

from opd.records import Example

HELD_OUT_MODULUS = 13


def is_held_out(a: int, b: int) -> bool:
    """Whether the pair belongs to the test split: one pair in 13, by a rule in which every digit takes part."""
    return (3 * a + 5 * b) % HELD_OUT_MODULUS == 0


def reversed_digits(value: int, width: int) -> str:
    """`value` in exactly `width` digits, least significant first."""
    text = str(value).zfill(width)
    if len(text) > width:
        raise ValueError(f"{value} does not fit in {width} digits")
    return text[::-1]


@dataclass(frozen=True)
class Addition:
    """Random addition problems of one split.

    Operands are uniform below 10**digits. With `min_digits` set, each operand first draws its own number of digits
    uniformly from min_digits to digits, which makes small operands frequent; they are still written at full width.

    Attributes:
        split: `train` or `test`; no operand pair is in both, whatever the seed.
        size: number of problems.
        seed: the same seed gives the same problems in the same order.
        digits: width of an operand; the answer has one digit more.
        min_digits: None for uniform operands.
        max_digits: largest number of digits that an operand really uses; None for `digits`.
        source: name that the rows carry.
    """

    split: Literal["train", "test"] = "train"
    size: int = 40000
    seed: int = 0
    digits: int = 5
    min_digits: int | None = None
    max_digits: int | None = None
    source: str = "addition"

    def __post_init__(self) -> None:
        if self.split not in ("train", "test"):
            raise ValueError(f"split={self.split!r}: choose train or test")
        if not 1 <= (self.min_digits or 1) <= (self.max_digits or self.digits) <= self.digits:
            raise ValueError(
                f"min_digits={self.min_digits}, max_digits={self.max_digits}, digits={self.digits}: "
                "need 1 <= min_digits <= max_digits <= digits"
            )

    def load(self) -> list[Example]:
        """Draws the problems."""
        draw = random.Random(f"addition-{self.split}-{self.seed}")
        examples = []
        while len(examples) < self.size:
            a, b = self._operand(draw), self._operand(draw)
            if is_held_out(a, b) == (self.split == "test"):
                examples.append(self._example(a, b))
        return examples

    def _operand(self, draw: random.Random) -> int:
        widest = self.max_digits or self.digits
        width = widest if self.min_digits is None else draw.randint(self.min_digits, widest)
        return draw.randrange(10**width)

    def _example(self, a: int, b: int) -> Example:
        prompt = f"^{reversed_digits(a, self.digits)}+{reversed_digits(b, self.digits)}="
        return Example(prompt=prompt, answer=reversed_digits(a + b, self.digits + 1), source=self.source)
