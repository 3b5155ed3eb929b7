"""When to take a snapshot; how is the engine's business."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, ClassVar, Literal

import msgspec

from everstep.plugins.hooks.snapshot.interval import Choice, Limits
from everstep.plugins.hooks.snapshot.rhythm import Adaptive, Fixed
from everstep.sdk import Finding

if TYPE_CHECKING:
    from collections.abc import Callable

    from everstep.sdk.hooks import Run, Snapshots, SnapshotTaken, Step

log = logging.getLogger(__name__)


class SnapshotConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The table `[hooks.snapshot]`."""

    every_steps: int | Literal["auto"] = 100
    min_every_steps: int = 10  # these two are the limits of "auto"
    max_every_steps: int = 1000
    memory_every_steps: int = 0
    at_end: bool = True
    keep: int = 3
    keep_every_steps: int = 0
    budget_gb: float = 0.0
    place: str = ""
    memory: Literal["auto", "off"] = "auto"
    when_busy: Literal["skip", "wait"] = "skip"

    def __post_init__(self) -> None:
        """Raise ValueError for numbers that would leave nothing to resume from."""
        if self.every_steps != "auto" and self.every_steps < 1:
            raise ValueError(
                f"every_steps must be 1 or more, not {self.every_steps}; to take none, set "
                "enabled = false"
            )
        if not 1 <= self.min_every_steps <= self.max_every_steps:
            raise ValueError(
                f"min_every_steps must be 1 or more and max_every_steps no less than that, not "
                f"{self.min_every_steps} and {self.max_every_steps}"
            )
        if self.keep < 2:
            raise ValueError(
                f"keep must be 2 or more, not {self.keep}: if the newest turns out damaged, the "
                "one before is all there is"
            )
        for name in ("memory_every_steps", "keep_every_steps", "budget_gb"):
            if (value := getattr(self, name)) < 0:
                raise ValueError(f"{name} must be 0 (off) or more, not {value}")
        if self.memory_every_steps and self.memory == "off":
            raise ValueError('memory_every_steps needs memory = "auto": it is off')


class Snapshot:
    """Asks for snapshots."""

    Config: ClassVar = SnapshotConfig

    def __init__(
        self,
        config: SnapshotConfig,
        snapshots: Snapshots,
        report: Callable[[Finding], None],
        clock: Callable[[], float],
    ) -> None:
        self._report = report
        self._clock = clock
        self._rhythm = self._made(config)
        self._every_in_memory = config.memory_every_steps
        self._at_end = config.at_end
        self._snapshots = snapshots
        snapshots.policy(
            keep=config.keep,
            at_end=config.at_end,
            wait_when_busy=config.when_busy == "wait",
            keep_every_steps=config.keep_every_steps,
            budget_gb=config.budget_gb,
            in_memory=config.memory == "auto",
            place=config.place,
        )

    def before_update(self, step: Step) -> None:
        """Ask when the step is due; the last one is taken at the run's end, where all wait."""
        if step.last and self._at_end:
            return
        if self._rhythm.is_due(step.number):
            self._snapshots.ask()
        elif self._every_in_memory and step.number % self._every_in_memory == 0:
            self._snapshots.ask(disk=False)

    def run_start(self, run: Run) -> None:
        """Count from where the run stands."""
        self._rhythm.run_start(run)

    def snapshot(self, taken: SnapshotTaken) -> None:
        """Count from here."""
        self._rhythm.snapshot(taken)

    def after_update(self, step: Step) -> None:
        """Learn from what the step took."""
        self._rhythm.after_update(step)

    def _made(self, config: SnapshotConfig) -> Fixed | Adaptive:
        if config.every_steps != "auto":
            return Fixed(config.every_steps)
        limits = Limits(config.min_every_steps, config.max_every_steps)
        return Adaptive(limits, write_s=lambda: self._snapshots.write_s, tell=self._tell)

    def _tell(self, choice: Choice) -> None:
        summary = f"every {choice.every_steps} steps: {choice.why}"
        log.info("snapshots are taken %s", summary)
        self._report(
            Finding(
                name="snapshot.interval",
                component="job",
                severity="info",
                summary=summary,
                at_s=self._clock(),
            )
        )
