"""How a command ends: exit codes, and the one message that goes with each."""

from __future__ import annotations

import os
import sys
import traceback

DONE, FAILED, REFUSED, TERMINATED = 0, 1, 2, 143


def refuse(message: str) -> int:
    """Prints why the configuration cannot run, once; the exit code."""
    if _rank() == "0":
        print(f"opd: refused\n{message}", file=sys.stderr)
    return REFUSED


def fail(error: Exception) -> int:
    """Prints where and why a run failed, the reason last; the exit code."""
    traceback.print_exception(error)
    print(f"opd: failed on rank {_rank()}: {error}", file=sys.stderr)
    return FAILED


def _rank() -> str:
    """As `opd.ranks.rank`, without waiting for torch."""
    return os.environ.get("RANK", "0")
