"""Every loss term of the catalogue: chunks, splits, padding and row order change neither its loss nor its gradient.

The trainer's arithmetic is fp32, in which two ways to add the same numbers part by some 1e-6 of the largest. Here the
models are fp64 and every `.float()` of the code is a `.double()`, so that the same may be asked for to 1e-9: what a
batch keeps in fp32 (weights, scores, facts) is the same number whichever way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from opd import objective
from opd.padding import split_by_tokens
from opd.rows import Row
from tests.catalogue import catalogue, choices, options
from tests.mixed import VOCAB, Found, Mixed, apart, save_models

RELATIVE = 1e-9


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mixed]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        torch.set_default_dtype(torch.float64)
        yield Mixed.of(save_models(tmp_path_factory.mktemp("models")), torch.float64)
        torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="module")
def model(mixed: Mixed) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(mixed.student).double()


@pytest.fixture(scope="module")
def whole(mixed: Mixed, model: nn.Module) -> Mapping[str, Found]:
    """All rows in one micro-batch, all tokens in one chunk and block."""
    return {label: mixed.plain(model, term, mixed.rows) for label, term in catalogue().items()}


def departures(
    mixed: Mixed, model: nn.Module, whole: Mapping[str, Found], rows: Sequence[Row], **how: int
) -> dict[str, float]:
    """The terms whose update comes out otherwise, and by how much."""
    found = {label: apart(mixed.plain(model, term, rows, **how), whole[label]) for label, term in catalogue().items()}
    return {label: gap for label, gap in found.items() if not gap < RELATIVE}


def sizes(rows: Sequence[Row], budget: int) -> list[int]:
    """Rows per micro-batch, of rows of 11 or 12 tokens."""
    return [len(group) for group in split_by_tokens([len(row.token_ids) for row in rows], budget)]


def test_every_term_has_something_to_say(whole: Mapping[str, Found]) -> None:
    """Else equal numbers prove nothing. And a loss's choices make a difference, all but those that this batch cannot
    tell apart: a bound that no token reaches, a length by which no future is divided.
    """
    assert {label: found for label, found in whole.items() if abs(found.loss) < 1e-3 or found.largest < 1e-2} == {}
    for option, term in options().items():
        losses = [found.loss for label, found in whole.items() if label.split()[0] == option]
        assert len(losses) <= 1 + len(list(choices(term.loss)))
        assert len({round(loss, 6) for loss in losses}) >= len(losses) - 2, option


def test_the_split_and_chunks_of_one_token_change_nothing(
    mixed: Mixed, model: nn.Module, whole: Mapping[str, Found]
) -> None:
    """Every row, and in it every token, alone."""
    assert sizes(mixed.rows, 12) == [1] * 8
    assert departures(mixed, model, whole, mixed.rows, budget=12, chunk=1) == {}


def test_an_even_split_and_blocks_within_chunks_change_nothing(
    mixed: Mixed, model: nn.Module, whole: Mapping[str, Found], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of three tokens, in blocks of two and of one."""
    monkeypatch.setattr(objective, "BLOCK_ELEMENTS", 2 * VOCAB)
    assert sizes(mixed.rows, 48) == [4, 4]
    assert departures(mixed, model, whole, mixed.rows, budget=48, chunk=3) == {}


def test_an_uneven_split_and_the_order_of_rows_change_nothing(
    mixed: Mixed, model: nn.Module, whole: Mapping[str, Found]
) -> None:
    rows = [mixed.rows[index] for index in (4, 6, 0, 3, 7, 2, 5, 1)]
    assert sizes(rows, 72) == [6, 2]
    assert departures(mixed, model, whole, rows, budget=72) == {}


def test_padding_and_rows_of_other_terms_change_nothing(
    mixed: Mixed, model: nn.Module, whole: Mapping[str, Found]
) -> None:
    """A row of 32 tokens beside those of 11 and 12: twenty columns of padding, and a row that no term trains on."""
    assert departures(mixed, model, whole, [mixed.beside, *mixed.rows]) == {}
