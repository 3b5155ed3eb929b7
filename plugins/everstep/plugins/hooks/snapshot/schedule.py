"""When to take a snapshot; how is the engine's business."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

import msgspec

if TYPE_CHECKING:
    from everstep.sdk.hooks import Snapshots, Step


class SnapshotConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The table `[hooks.snapshot]`."""

    every_steps: int = 100
    at_end: bool = True
    keep: int = 3
    when_busy: Literal["skip", "wait"] = "skip"

    def __post_init__(self) -> None:
        """Raise ValueError for numbers that would leave nothing to resume from."""
        if self.every_steps < 1:
            raise ValueError(
                f"every_steps must be 1 or more, not {self.every_steps}; to take none, set "
                "enabled = false"
            )
        if self.keep < 2:
            raise ValueError(
                f"keep must be 2 or more, not {self.keep}: if the newest turns out damaged, the "
                "one before is all there is"
            )


class Snapshot:
    """Asks for snapshots."""

    Config: ClassVar = SnapshotConfig

    def __init__(self, config: SnapshotConfig, snapshots: Snapshots) -> None:
        self._every = config.every_steps
        self._at_end = config.at_end
        self._snapshots = snapshots
        snapshots.policy(
            keep=config.keep, at_end=config.at_end, wait_when_busy=config.when_busy == "wait"
        )

    def before_update(self, step: Step) -> None:
        """Ask when the step is due; the last one is taken at the run's end, where all wait."""
        if step.number % self._every == 0 and not (step.last and self._at_end):
            self._snapshots.ask()
