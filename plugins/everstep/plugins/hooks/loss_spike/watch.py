"""The hook around the detector: judges the loss of all ranks and votes on the update."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from everstep.plugins.hooks.loss_spike.detector import Detector, Event, Known, LossSpikeConfig
from everstep.sdk import Finding
from everstep.sdk.hooks import Decision

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from everstep.sdk import Severity
    from everstep.sdk.hooks import Run, Step


class LossSpike:
    """Tells of odd losses; with `policy = "skip_update"` keeps spikes away from the weights.

    It judges the loss reduced over all ranks, so every rank comes to the same vote by itself.
    """

    Config: ClassVar = LossSpikeConfig

    def __init__(
        self,
        config: LossSpikeConfig,
        report: Callable[[Finding], None],
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._report = report
        self._clock = clock
        self._detector = Detector(config)
        self._speaks = False
        self._skips_in_a_row = 0
        self._told_level = 0

    def run_start(self, run: Run) -> None:
        """Leave the learning rate's warm-up alone; let rank 0 speak for all."""
        self._detector.warmup_steps = run.warmup_steps
        self._speaks = run.rank == 0

    def before_update(self, step: Step) -> Decision | None:
        """Judge this step's loss."""
        event = self._detector.see(step.number, step.loss, step.grad_norm)
        if event is None:
            self._skips_in_a_row = self._told_level = 0
            return None
        decision = self._decide(event)
        if event.level > self._told_level or event.kind == "shift":
            self._tell(step, event, decision)
        self._told_level = max(self._told_level, event.level)
        return decision

    def _decide(self, event: Event) -> Decision:
        if self._config.policy == "log" or event.level < 2:
            return Decision.PROCEED
        if self._skips_in_a_row >= self._config.max_skips:
            # It is the weights then, not the batches: skipping more would only stand still.
            return Decision.PROCEED
        self._skips_in_a_row += 1
        return Decision.SKIP_UPDATE

    def _tell(self, step: Step, event: Event, decision: Decision) -> None:
        if not self._speaks:
            return
        first = step.samples[0][0] if step.samples else 0
        stop = step.samples[-1][1] if step.samples else 0
        done = " The update is skipped." if decision is Decision.SKIP_UPDATE else ""
        self._report(
            Finding(
                name=f"loss.{event.kind}",
                component="job",
                severity=_severity(event),
                summary=f"step {step.number}: loss {event.loss:.4g}, usual "
                f"{event.usual:.4g} ({event.deviations:.1f} deviations), gradient norm "
                f"{step.grad_norm:.4g}, learning rate {step.lr:.3g}, samples {first}-{stop}.{done}",
                at_s=self._clock(),
            )
        )

    def state(self) -> Mapping[str, object]:
        """Return what the detector knows."""
        known: dict[str, object] = msgspec.to_builtins(self._detector.known())
        return known

    def restore(self, state: Mapping[str, Any]) -> None:
        """Judge the first step after a resume by what was normal before it."""
        with contextlib.suppress(msgspec.ValidationError):
            self._detector.restore(msgspec.convert(state, Known))


def _severity(event: Event) -> Severity:
    if event.kind == "outlier":
        return "info"
    return "warning" if event.kind == "shift" else "error"
