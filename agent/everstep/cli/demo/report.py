"""The demo's outcome: `demo-report.json`, a table, and a picture of both loss curves."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import msgspec
from rich.table import Table
from rich.text import Text

from everstep.cli.demo.story import Step, curve
from everstep.cli.job_time import rows, share, words

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

_WHY_CHARS = 160


class Fault(msgspec.Struct, kw_only=True):
    """One fault: what was done to whom, and what became of it. Times are seconds from the signal.

    `resumed_s` is the first new step of all ranks; for a fault that stops nobody it is the longest
    gap between two steps. None is "did not happen".
    """

    kind: str
    target: str
    detected_s: float | None = None
    resumed_s: float | None = None
    steps_lost: int | None = None
    evicted: str | None = None
    why: str = ""
    at_s: float = msgspec.field(default=0.0, name="at_s")


class Report(msgspec.Struct, kw_only=True):
    """The whole demo, in the form that scripts read.

    `time` is the coordinator's account of the disturbed run, in seconds by kind; see
    docs/ledger.md for the kinds and the three figures made from them.
    """

    recovered_all: bool
    bit_equal: bool | None
    samples_exactly_once: bool
    skipped_windows: list[tuple[int, int]]
    wrong_evictions: int
    steps: int
    wall_s: float
    lost_s: float
    faults: list[Fault]
    seed: int = 0
    time: dict[str, float] = {}
    goodput: float | None = None
    ettr: float | None = None
    mttr_s: float | None = None

    @property
    def passed(self) -> bool:
        """Whether everything that was promised held."""
        return (
            self.recovered_all
            and self.bit_equal is not False
            and self.samples_exactly_once
            and self.wrong_evictions == 0
        )

    def write(self, path: Path) -> None:
        """Write the JSON file."""
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n")


_COLOURS = {
    "productive": "#2da44e",
    "warm_up": "#94d3a2",
    "data_wait": "#bf8700",
    "snapshot_stall": "#fae17d",
    "lost_work": "#cf222e",
    "detection": "#ff8182",
    "decision": "#8250df",
    "waiting": "#d8b9ff",
    "teardown": "#0550ae",
    "start": "#54aeff",
    "rendezvous": "#80ccff",
    "load": "#1b7c83",
}  # of what the time was spent on; grey for the rest


def lost_s(faults: Sequence[Fault], step_s: float) -> float:
    """Return the time that faults cost: each one's gap less the step that would have been."""
    return sum(max(0.0, f.resumed_s - step_s) for f in faults if f.resumed_s is not None)


def table(report: Report) -> Table:
    """Return the faults as a table for the terminal."""
    view = Table(title="What was done to the run, and what became of it", title_justify="left")
    for column in ("fault", "target"):
        view.add_column(column)
    for column in ("detected", "resumed", "steps lost"):
        view.add_column(column, justify="right")
    view.add_column("evicted")
    view.add_column("why", overflow="fold")
    for fault in report.faults:
        view.add_row(
            fault.kind,
            fault.target,
            _seconds(fault.detected_s),
            _seconds(fault.resumed_s),
            "-" if fault.steps_lost is None else str(fault.steps_lost),
            fault.evicted or "-",
            Text(_short(fault.why)),
        )
    return view


def time_table(report: Report) -> Table:
    """Return where the disturbed run's time went, as a table for the terminal."""
    view = Table(title="Where its time went", title_justify="left")
    view.add_column("kind")
    view.add_column("time", justify="right")
    view.add_column("share", justify="right")
    view.add_column("")
    for row in rows({"wall_s": sum(report.time.values()), "kinds": report.time}):
        view.add_row(*row)
    return view


def _short(why: str) -> str:
    """Leave the long part of somebody's error message to the report file."""
    return why if len(why) <= _WHY_CHARS else why[: _WHY_CHARS - 1] + "…"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"


def picture(
    path: Path,
    undisturbed: Sequence[Step],
    disturbed: Sequence[Step],
    faults: Sequence[Fault],
    time: Mapping[str, float],
) -> None:
    """Draw both loss curves over the step with the faults where they hit, and the time below."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes, below = figure.subplots(2, height_ratios=(6, 1))
    _draw_time(below, time)
    axes.plot(*curve(undisturbed), color="#8c959f", linewidth=4, label="undisturbed run")
    label = "run under faults, one line a generation"
    for _, generation in itertools.groupby(disturbed, key=lambda s: s.generation):
        axes.plot(*curve(list(generation)), color="#0969da", linewidth=1.4, label=label)
        label = "_same"
    for number, fault in enumerate(faults):
        before = [s for s in disturbed if s.at_s <= fault.at_s]
        if not before:
            continue
        axes.axvline(before[-1].step, color="#cf222e", linewidth=0.8, linestyle="--")
        axes.annotate(
            fault.kind,
            (before[-1].step, 1.0 - 0.05 * (number % 3)),
            xycoords=("data", "axes fraction"),
            xytext=(3, -10),
            textcoords="offset points",
            fontsize=9,
            color="#cf222e",
        )
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("loss (nats per byte)")
    axes.set_title("The same run, undisturbed and under faults", loc="left")
    axes.legend(loc="upper right", bbox_to_anchor=(1, 0.8))
    axes.grid(alpha=0.25)
    figure.savefig(path, dpi=110)


def _draw_time(axes: Axes, time: Mapping[str, float]) -> None:
    """Draw the shares of the disturbed run's time in one bar."""
    left_s, wall_s = 0.0, sum(time.values())
    for kind, seconds in sorted(time.items(), key=lambda kind: -kind[1]):
        if seconds <= 0:
            continue
        colour = _COLOURS.get(kind, "#8c959f")
        label = f"{words(kind)} {share(seconds / wall_s)}"
        axes.barh(0, seconds, left=left_s, color=colour, label=label)
        left_s += seconds
    axes.set_yticks([])
    axes.set_xlim(0, left_s or 1)
    axes.set_xlabel("where the time of the run under faults went (s)")
    axes.legend(ncols=6, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.6), frameon=False)
