"""The demo's live view: nodes, generation, step, loss, and what has been done so far."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from types import TracebackType

    from everstep.cli.demo.stage import Stage

_REFRESH_S = 0.5


class View:
    """Shows a stage at most twice a second; plain lines when the output is no terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._shown_at = 0.0
        self._said = ""

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._live.stop()

    def __call__(self, stage: Stage) -> None:
        """Show where the run is now."""
        if not self._console.is_terminal:
            if stage.now != self._said:
                self._said = stage.now
                self._console.print(stage.now)
            return
        if time.monotonic() - self._shown_at < _REFRESH_S:
            return
        self._shown_at = time.monotonic()
        self._live.update(_screen(stage), refresh=True)


def _screen(stage: Stage) -> Panel:
    job = stage.job()
    rows: list[RenderableType] = [
        Text(stage.now, style="bold"),
        _progress(stage),
        _nodes(stage, job),
        *_done(stage),
    ]
    title = f"{stage.run_id}" + (f", generation {job['generation']}" if job else "")
    return Panel(Group(*rows), title=title, title_align="left")


def _progress(stage: Stage) -> Table:
    steps = stage.steps()
    last = steps[-1] if steps else None
    grid = Table.grid(padding=(0, 2))
    grid.add_row(
        f"step {last.step if last else 0} of {stage.recipe.steps}",
        ProgressBar(total=stage.recipe.steps, completed=last.step if last else 0, width=40),
        f"loss {last.loss:.3f}" if last and last.loss is not None else "",
    )
    return grid


def _nodes(stage: Stage, job: dict[str, Any] | None) -> Table:
    plan = (job or {}).get("plan") or {}
    members = [m["node"] for m in plan.get("members", [])]
    evicted = {e["node"] for e in plan.get("evicted", [])}
    ranks = {r["node"]: r for r in (job or {}).get("ranks", [])}
    table = Table(box=None, pad_edge=False)
    for column in ("node", "role", "phase", "step"):
        table.add_column(column)
    for node in stage.launched:
        rank = ranks.get(node.name, {})
        if node.name in members:
            role, style = f"rank {members.index(node.name)}", "green"
        elif node.name in evicted:
            role, style = "evicted", "red"
        else:
            role, style = "spare", "dim"
        progress = rank.get("progress", rank)
        table.add_row(
            node.name,
            Text(role, style=style),
            str(progress.get("phase", "")),
            str(progress.get("step", "")),
        )
    return table


def _done(stage: Stage) -> list[Text]:
    lines = []
    for fault in stage.suffered[-6:]:
        after = f"{fault.resumed_s:.1f} s" if fault.resumed_s is not None else "…"
        lines.append(Text(f"{fault.kind} of {fault.target}: {after}  {fault.why}", style="dim"))
    return lines
