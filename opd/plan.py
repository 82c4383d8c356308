"""The plan that `opd check` prints: what each step will hold, and what it needs."""

from __future__ import annotations

from rich.table import Table

from opd.api_plan import expected
from opd.run import Run


def plan_table(run: Run) -> Table:
    """Terms, streams, teachers and sizes of the run, one fact per row."""
    config = run.config
    table = Table(title=f"opd: {config.experiment}, {config.steps} steps into {config.run_dir}", show_header=False)
    table.add_column(style="bold")
    table.add_column()
    for term in run.terms:
        streams = [n for n, s in config.data.streams.items() if s.terms is None or term.name in s.terms]
        weights = f"{term.weight(0.0):g} -> {term.weight(1.0 - 1.0 / config.steps):g}"
        table.add_row(
            f"loss.{term.name}",
            f"{type(term.loss).__name__} x {weights}, {term.aggregation}, on {', '.join(streams)}"
            + (f", under teacher.{term.teacher}" if term.teacher else ""),
        )
    for name, teacher in config.teacher.items():
        table.add_row(f"teacher.{name}", f"{type(teacher).__name__}: {', '.join(sorted(teacher.provides))}")
    for name, stream in config.data.streams.items():
        answers = stream.prompts * stream.samples
        table.add_row(
            f"stream {name}",
            f"{stream.prompts} prompts x {stream.samples} = {answers} answers, at most "
            f"{answers * config.sampler.params.max_tokens} sampled tokens a step; "
            f"{len(run.prompts.examples[name])} examples",
        )
    for part in expected(config, run.prompts):
        table.add_row(f"cost of {part.key}", str(part))
    for name in config.reward:
        table.add_row(f"reward.{name}", type(config.reward[name].function).__name__)
    table.add_row("credit", type(config.credit).__name__)
    held_out = f"{len(run.prompts.heldout)} prompts, {config.eval.problems} used every {config.eval.every} steps"
    table.add_row("held out", held_out)
    engine = config.engine
    stage = f"ZeRO {engine.zero_stage}, {config.student.dtype}, {engine.micro_batch_tokens} tokens a micro-batch"
    table.add_row("engine", stage)
    return table
