"""Lists of token ids become rectangles; the one place that knows which output predicts which token."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def predictor_index(row: int, width: int, prompt_tokens: int, position: int) -> int:
    """Flat index of the model output that predicts response token `position`: one column before the token itself."""
    return row * width + prompt_tokens + position - 1


def split_by_tokens(lengths: Sequence[int], budget: int, kinds: Sequence[str] | None = None) -> list[list[int]]:
    """Row numbers in groups whose padded size (rows * longest) stays within the budget.

    Rows of one kind stand side by side, and among those similar lengths; the kind "" comes last.
    """
    kinds = [""] * len(lengths) if kinds is None else kinds
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (not kinds[i], kinds[i], -lengths[i], i)):
        if groups and max(lengths[i] for i in (*groups[-1], index)) * (len(groups[-1]) + 1) <= budget:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def pad(sequences: Sequence[Sequence[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Ids [B, T] padded on the right, and the attention mask [B, T]."""
    width = max(len(sequence) for sequence in sequences)
    ids = torch.full((len(sequences), width), pad_id, dtype=torch.long)
    mask = torch.zeros((len(sequences), width), dtype=torch.long)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)] = torch.tensor(sequence, dtype=torch.long)
        mask[row, : len(sequence)] = 1
    return ids, mask
