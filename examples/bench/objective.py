"""Time and peak memory of the streamed objective, forward and backward, against naive code, TRL, Liger and the floor.

    make bench [ARGS="--shapes N,H,V ... --dtypes float32 bfloat16 --repeats 5 --json FILE --markdown FILE"]

The loss is the mean reverse KL over N tokens, with gradients in the hidden states [N, H] and the head [V, H]; teacher
and student have the same sizes. The floor is the four matrix products that nobody can avoid: student logits, teacher
logits, gradient of the hidden states, gradient of the head, in chunks of 256 tokens. Before anything is timed, every
variant's loss and gradients are compared with an fp64 calculation from the definition; the error is a column of the
table. All variants alternate in one run on one thread, so that a noisy machine disturbs them alike; times are medians
of CPU seconds over the floor's of the same round. Peak memory is what the resident set rises to above what stood
before the call.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict
from pathlib import Path

import ours
import peers
import torch
from measure import Result, measured
from problem import made
from rich.console import Console
from rich.table import Table

SHAPES = ["512,256,32768"]  # with both dtypes some minutes on two cores; others by --shapes
COLUMNS = ("variant", "CPU time over the floor", "peak extra MiB", "gradient error")


def cells(result: Result) -> tuple[str, str, str, str]:
    """One row of a table."""
    if result.absent:
        return result.variant, result.absent, "", ""
    error = "" if math.isnan(result.gradient_error) else f"{result.gradient_error:.1e}"
    return result.variant, f"{result.over_floor:.2f}", f"{result.peak_extra_mib:,.0f}", error


def markdown(title: str, results: list[Result]) -> str:
    """The table of one problem for a document."""
    lines = [COLUMNS, ("---", "---:", "---:", "---:"), *map(cells, results)]
    return f"{title}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def main() -> None:
    """Prints one table per shape and dtype."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="N,H,V")
    parser.add_argument("--dtypes", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--variants", nargs="+", metavar="WORD", help="only the variants whose name contains a word")
    parser.add_argument("--json", type=Path, help="write all numbers here")
    parser.add_argument("--markdown", type=Path, help="write the tables here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    every = ours.variants() + peers.variants()
    words = arguments.variants or [""]
    chosen = [v for v in every if v.name == ours.FLOOR or any(word in v.name for word in words)]
    console, records, tables = Console(), [], []
    for dtype in arguments.dtypes:
        for shape in arguments.shapes:
            results = measured(chosen, made(*map(int, shape.split(",")), getattr(torch, dtype)), arguments.repeats)
            title = f"N, H, V = {shape}, {dtype}"
            table = Table(title=title)
            for column in COLUMNS:
                table.add_column(column, justify="left" if column == "variant" else "right")
            for result in results:
                table.add_row(*cells(result))
            console.print(table)
            records += [{"shape": shape, "dtype": dtype, **asdict(result)} for result in results]
            tables.append(markdown(title, results))
    if arguments.json:
        arguments.json.write_text(json.dumps(records, indent=1) + "\n")
    if arguments.markdown:
        arguments.markdown.write_text("\n".join(tables))


if __name__ == "__main__":
    main()
