"""The processes of a run: who am I, and sums over all. Without a launcher: world size 1, the same code."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from opd.records import Mean

T = TypeVar("T")


def rank() -> int:
    """This process's number, 0 <= rank < world_size."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """How many processes run this job."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def share(items: Sequence[T]) -> list[T]:
    """This rank's items, dealt out in turn."""
    return list(items[rank() :: world_size()])


def free_port() -> int:
    """A TCP port on the loopback interface that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def barrier() -> None:
    """Wait for all ranks."""
    if world_size() > 1:
        dist.barrier()


def gather(value: Any) -> list[Any]:
    """`value` of every rank, in rank order."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def sums(values: Mapping[str, float]) -> dict[str, float]:
    """Each value summed over ranks (fp64). Every rank must name the same keys."""
    if world_size() == 1 or not values:
        return dict(values)
    tensor = torch.tensor(list(values.values()), dtype=torch.float64)
    dist.all_reduce(tensor, group=_cpu_group())
    return dict(zip(values, tensor.tolist(), strict=True))


def merged(metrics: Mapping[str, Mean]) -> dict[str, Mean]:
    """Means merged over ranks; a rank that saw nothing of a metric may leave it out."""
    total: dict[str, Mean] = {}
    for part in gather(dict(metrics)):
        for name, mean in part.items():
            total[name] = total.get(name, Mean(0.0, 0.0)) + mean
    return total


_CPU_GROUP: list[Any] = []  # at most one process group


def _cpu_group() -> Any:
    """A gloo group for small host-side numbers, whatever back-end carries the gradients."""
    if dist.get_backend() == "gloo":
        return None
    if not _CPU_GROUP:
        _CPU_GROUP.append(dist.new_group(backend="gloo"))
    return _CPU_GROUP[0]
