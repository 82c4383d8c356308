"""What a run did, for a person: a table for the terminal, and one self-contained page with the curves."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
from rich.table import Table
from rich.text import Text

from opd.curves import draw_curves
from opd.loggers import read_jsonl
from opd.progress import duration
from opd.run_log import RunLog, labels, load_run

__all__ = ["RunLog", "load_run", "summary_table", "write_report"]

SAMPLES_SHOWN = 12  # from the start of samples.jsonl, and as many from its end


def write_report(run_dir: Path, compare: Sequence[Path] = ()) -> list[Path]:
    """Write `report/curves.png` and `report/index.html` into the run's folder and return both paths.

    The runs of `compare` join every panel and table. Raises ValueError where a folder holds no run.
    """
    runs = [load_run(path) for path in (run_dir, *compare)]
    picture = draw_curves(runs)
    folder = run_dir / "report"
    folder.mkdir(exist_ok=True)
    png, page = folder / "curves.png", folder / "index.html"
    png.write_bytes(picture)
    page.write_text(_page(runs, picture), encoding="utf-8", errors="replace")  # a sample may hold half a character
    return [png, page]


def summary_table(run: RunLog) -> Table:
    """Steps, sampled tokens, evaluation and wall time, for the terminal."""
    table = Table(title=Text(f"{run.name}  {run.path}"), title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    for fact, value in _facts(run).items():
        table.add_row(fact, value)
    return table


def _facts(run: RunLog) -> dict[str, str]:
    """The run in numbers; a fact that is not known is left out."""
    tokens, evals, seconds = run.sampled_tokens(), run.evals(), run.wall_seconds()
    after, teacher = evals.get("after"), evals.get("teacher")
    total = seconds.pop("total", sum(seconds.values()))
    facts: dict[str, str | None] = {
        "steps": f"{run.last_step()}" + ("" if run.summary is not None else " (not finished)"),
        "sampled tokens": None if tokens is None else f"{tokens:,.0f}",
        "accuracy before": _percent(evals.get("before")),
        "accuracy after": _percent(after),
        "accuracy of the teacher": _percent(teacher),
        "after / teacher": _percent(after / teacher) if after is not None and teacher else None,
        "held-out KL before": _number(evals.get("kl_before")),
        "held-out KL after": _number(evals.get("kl_after")),
        "wall time": duration(total) if total else None,
    }
    facts |= {f"time in {stage}": f"{value:,.1f} s ({value / total:.0%})" for stage, value in seconds.items() if value}
    return {fact: value for fact, value in facts.items() if value is not None}


def _percent(share: float | None) -> str | None:
    return None if share is None else f"{share:.1%}"


def _number(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:.4g}"


def _page(runs: list[RunLog], picture: bytes) -> str:
    samples = runs[0].path / "samples.jsonl"
    metrics = [{name: _number(value) for name, value in run.final_metrics().items()} for run in runs]
    versions = [run.summary["versions"] if run.summary is not None else {} for run in runs]
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(PAGE).render(
        run=runs[0],
        names=labels(runs),
        picture=base64.b64encode(picture).decode("ascii"),
        summary=_rows([_facts(run) for run in runs]),
        metrics=_rows(metrics),
        versions=_rows(versions),
        alarms=[
            (name, episode.record()) for name, run in zip(labels(runs), runs, strict=True) for episode in run.alarms
        ],
        samples=_ends(read_jsonl(samples)) if samples.exists() else [],
    )


def _rows(columns: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """name -> one cell per column, for every name that any column has."""
    names = dict.fromkeys(name for column in columns for name in column)
    return {name: ["-" if column.get(name) is None else column[name] for column in columns] for name in names}


def _ends(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the student said first and what it said last."""
    return samples if len(samples) <= 2 * SAMPLES_SHOWN else samples[:SAMPLES_SHOWN] + samples[-SAMPLES_SHOWN:]


PAGE = """\
{% macro facts(title, rows) %}
{% if rows %}
<section>
<h2>{{ title }}</h2>
<div class="wide"><table class="facts">
{% if names|length > 1 %}
<thead><tr><th></th>{% for name in names %}<th>{{ name }}</th>{% endfor %}</tr></thead>
{% endif %}
<tbody>
{% for fact, cells in rows.items() %}
<tr><th>{{ fact }}</th>{% for cell in cells %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}
</tbody>
</table></div>
</section>
{% endif %}
{% endmacro %}
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ run.name }} · opd report</title>
<style>
:root { color-scheme: light; }
body { background: #fff; color: #1a1a1a; font: 16px/1.5 system-ui, sans-serif; max-width: 1200px;
  margin: 0 auto; padding: 1.5rem; }
h1 { margin: 0; }
h2 { margin: 2rem 0 .5rem; font-size: 1.25rem; }
.path { color: #555; margin: 0; overflow-wrap: anywhere; }
img { width: 100%; height: auto; }
.wide { overflow-x: auto; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(26rem, 100%), 1fr)); column-gap: 3rem; }
table { border-collapse: collapse; }
th, td { padding: .25rem .8rem; border-bottom: 1px solid #ddd; text-align: left; vertical-align: top; }
th:first-child, td:first-child { padding-left: 0; }
tbody th { font-weight: normal; color: #444; }
.facts td, .facts thead th, .number { text-align: right; font-variant-numeric: tabular-nums; }
.text { white-space: pre-wrap; overflow-wrap: anywhere; max-height: 14rem; overflow-y: auto; min-width: 8rem;
  font: 13px/1.5 ui-monospace, monospace; }
</style>
</head>
<body>
<h1>{{ run.name }}</h1>
<p class="path">{{ run.path }}</p>
{% if run.summary is none %}
<p>Not finished: there is no summary.json yet, so this page shows what has been logged so far.</p>
{% endif %}
{{ facts("Summary", summary) }}
<h2>Alarms</h2>
{% if alarms %}
<div class="wide"><table>
<thead><tr>{% if names|length > 1 %}<th>run</th>{% endif %}<th>steps</th>
<th>what was seen, and what it usually means</th></tr></thead>
<tbody>
{% for name, alarm in alarms %}
<tr>{% if names|length > 1 %}<td>{{ name }}</td>{% endif %}
<td class="number">{{ alarm.from }} to {{ "now" if alarm.to is none else alarm.to }}</td><td>{{ alarm.text }}</td></tr>
{% endfor %}
</tbody>
</table></div>
{% else %}
<p>None.</p>
{% endif %}
<h2>Curves</h2>
<img src="data:image/png;base64,{{ picture }}" alt="Curves over the steps; the tables hold the last values">
{% if samples %}
<h2>Samples, first and last</h2>
<div class="wide"><table>
<thead><tr><th>step</th><th>prompt</th><th>expected</th><th>student</th><th>reward</th></tr></thead>
<tbody>
{% for sample in samples %}
<tr><td class="number">{{ sample.step }}</td>
{% for text in (sample.prompt, sample.answer, sample.text) %}
<td><div class="text">{{ "-" if text is none else text }}</div></td>
{% endfor %}
<td class="number">{{ "-" if sample.reward is none else sample.reward }}</td></tr>
{% endfor %}
</tbody>
</table></div>
{% endif %}
<div class="pair">
{{ facts("Final metrics", metrics) }}
{{ facts("Versions", versions) }}
</div>
</body>
</html>
"""
