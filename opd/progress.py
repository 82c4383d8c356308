"""What a person sees while a run trains: a live display on a terminal, one plain line per update elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

WINDOW = 20  # updates over which the time per step is averaged


class Progress:
    """Shows step, stage times, speed, reward, teacher KL, accuracy and time left; what is missing is not shown."""

    def __init__(
        self, total_steps: int, console: Console | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._total = total_steps
        self._console = console or Console()
        self._clock = clock
        self._live: Live | None = None
        self._began = 0.0
        # Both are replaced, never changed in place: the live display reads them from a thread of its own.
        self._marks: list[tuple[int, float]] = []  # (step, when it ended)
        self._latest: dict[str, float] = {}

    def start(self, step: int) -> None:
        """Begin after `step` finished steps."""
        self._began = self._clock()
        self._marks = [(step, self._began)]
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(self, console=self._console, refresh_per_second=2)
            self._live.start()

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics of `step`, its training metrics and evaluation together or in two calls."""
        assert self._marks, "Progress.start comes before Progress.update"
        earlier = [mark for mark in self._marks if mark[0] < step]
        self._marks = [*earlier[-WINDOW:], (step, self._clock())]
        self._latest = {**self._latest, **metrics}
        if self._live is None:
            known = {name: self._latest[name] for name in ("eval/accuracy",) if name in self._latest}
            self._print(self._plain_line({**metrics, **known}))
        else:
            self._live.refresh()

    def note(self, text: str) -> None:
        """Print a line that stays, above the live display."""
        self._print(text)

    def close(self) -> None:
        """Leave the last state on the screen and give the terminal back; harmless when repeated."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def eta(self) -> float | None:
        """Seconds left by the mean wall time of recent steps, evaluations and checkpoints included; None if unknown.

        The first step, which warms everything up, counts only until there is another.
        """
        marks = self._marks[1:] if len(self._marks) > 2 else self._marks
        steps = marks[-1][0] - marks[0][0]
        if steps <= 0:
            return None
        seconds_per_step = (marks[-1][1] - marks[0][1]) / steps
        waited = self._clock() - marks[-1][1]
        return max(0.0, seconds_per_step * (self._total - marks[-1][0]) - waited)

    def __rich__(self) -> Group:
        """The live display, made anew at each refresh so that the clocks tick between updates."""
        step = self._marks[-1][0]
        clocks = f"elapsed {duration(self._clock() - self._began)}" + self._eta_text("  eta ")
        head = Table.grid(padding=(0, 1))
        head.add_row(f"step {step}/{self._total}", ProgressBar(self._total, step, width=30), clocks)
        lines = ["  ".join(readings(self._latest)), "  ".join(stage_times(self._latest))]
        return Group(head, *(Text(line) for line in lines if line))

    def _plain_line(self, metrics: Mapping[str, float]) -> str:
        head = f"step {self._marks[-1][0]:>{len(str(self._total))}}/{self._total}"
        parts = [head, *readings(metrics), " ".join(stage_times(metrics)), self._eta_text("eta ")]
        return "  ".join(part for part in parts if part)

    def _eta_text(self, before: str) -> str:
        eta = self.eta()
        return "" if eta is None else before + duration(eta)

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)


def readings(metrics: Mapping[str, float]) -> list[str]:
    """The health of a run in a few words: `reward 0.41`, `kl(main) 0.231`, `acc 0.62`, `1.9k tok/s`."""
    parts = []
    if "reward/mean" in metrics:
        parts.append(f"reward {metrics['reward/mean']:.2f}")
    for name, value in metrics.items():
        if name.startswith("teacher/") and name.endswith("/kl"):
            parts.append(f"kl({name.removeprefix('teacher/').removesuffix('/kl')}) {value:.3g}")
    if "eval/accuracy" in metrics:
        parts.append(f"acc {metrics['eval/accuracy']:.2f}")
    if "rollout/tokens_per_s" in metrics:
        parts.append(f"{short_count(metrics['rollout/tokens_per_s'])} tok/s")
    return parts


def stage_times(metrics: Mapping[str, float]) -> list[str]:
    """`sample 0.21s` for every `time/<stage>`, in the order given."""
    times = {name.removeprefix("time/"): value for name, value in metrics.items() if name.startswith("time/")}
    return [f"{stage} {seconds:.{2 if seconds < 10 else 1}f}s" for stage, seconds in times.items()]


def duration(seconds: float) -> str:
    """`1:12`, or `3:01:12` from an hour on."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def short_count(value: float) -> str:
    """Two or three digits and a unit: `850`, `1.9k`, `12k`, `3.4M`."""
    for size, unit in ((1.0, ""), (1e3, "k"), (1e6, "M")):
        scaled = value / size
        if scaled < 999.5:
            return f"{scaled:.{1 if unit and scaled < 9.95 else 0}f}{unit}"
    return f"{value:.3g}"
