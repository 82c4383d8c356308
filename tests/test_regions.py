"""Thinking and content: which tokens of an answer belong to which."""

from __future__ import annotations

import pytest

from opd.regions import Region
from opd.weighting import Weigher
from tests.composing import prepare, refusal, tiny_opd
from tests.rows import rollout, row

START, END = [7, 8], [9]


@pytest.mark.parametrize(
    ("prompt", "answer", "thinking"),
    [
        ([3], [7, 8, 4, 9, 5, 6], [1, 1, 1, 1, 0, 0]),
        ([3], [4, 7, 8, 4, 9, 5], [0, 1, 1, 1, 1, 0]),  # something stands before the mark
        ([3, 7, 8], [4, 5, 9, 6], [1, 1, 1, 0]),  # the template has opened it
        ([3, 7, 8], [9, 6], [1, 0]),  # and nothing was thought
        ([3], [7, 8, 4, 5], [1, 1, 1, 1]),  # never closed
        ([3], [4, 5, 9, 6], [0, 0, 0, 0]),  # never opened
        ([3], [7, 4, 8, 9], [0, 0, 0, 0]),  # half a mark is none
        ([8], [7, 8, 9, 7, 8, 9], [1, 1, 1, 0, 0, 0]),  # the first part counts
        ([7, 8], [], []),
    ],
)
def test_thinking_and_content_share_an_answer(prompt: list[int], answer: list[int], thinking: list[float]) -> None:
    rows = [row(rollout(prompt, answer))]
    assert Region("thinking", START, END).weigh(rows, ()) == [thinking]
    assert Region("content", START, END).weigh(rows, ()) == [[1.0 - factor for factor in thinking]]


def test_tokens_that_the_student_did_not_choose_have_no_factor() -> None:
    """The mark is found in the whole answer, factors are of the trainable tokens alone."""
    made = row(rollout([3], [7, 8, 4, 9, 5], trainable=[False, False, True, True, True]))
    assert Region("thinking", START, END).weigh([made], ()) == [[1.0, 1.0, 0.0]]


def test_it_joins_a_term(tmp_path_factory: pytest.TempPathFactory) -> None:
    opd = tiny_opd(tmp_path_factory.mktemp("opd"))
    weigh = "+loss.distill.weigh.part={_target_: opd.regions.Region, part: content, start_ids: [5], end_ids: [6]}"
    assert isinstance(prepare(*opd, weigh).terms[0].weigh["part"], Weigher)
    assert "start_ids, end_ids: empty" in refusal(*opd, weigh.replace("[5]", "[]"))
