"""How a command ends: exit codes, and the one message that goes with each."""

from __future__ import annotations

import os
import sys
import traceback
from types import TracebackType

DONE, REFUSED = 0, 2  # and 1, Python's own, for a failure; 128 + signal for a run that was told to stop


class Explained(RuntimeError):
    """An error whose message says all that there is to say: a command ends with it, and without a traceback."""


def refuse(message: str) -> int:
    """Prints why the configuration cannot run, once; the exit code."""
    if _rank() == "0":
        print(f"opd: refused\n{message}", file=sys.stderr)
    return REFUSED


def name_failures() -> None:
    """From here on an uncaught error of any kind ends with one line that says what failed; Python leaves with 1."""

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, Explained):
            traceback.print_exception(kind, error, trace)
        print(f"opd: failed on rank {_rank()}: {kind.__name__}: {error}", file=sys.stderr)

    sys.excepthook = report


def _rank() -> str:
    """As `opd.ranks.rank`, without waiting for torch."""
    return os.environ.get("RANK", "0")
