"""One record a step for the agent, one log line every few steps for people."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, ClassVar

import msgspec

if TYPE_CHECKING:
    from everstep.sdk.hooks import Page, Run, Step

log = logging.getLogger(__name__)


class ProgressConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The table `[hooks.progress]`."""

    log_every_steps: int = 50

    def __post_init__(self) -> None:
        """Raise ValueError for a negative number."""
        if self.log_every_steps < 0:
            raise ValueError(f"log_every_steps must be 0 (never) or more: {self.log_every_steps}")


class Progress:
    """Writes the page; a step counter that moves is the only heartbeat that proves anything."""

    Config: ClassVar = ProgressConfig

    def __init__(self, config: ProgressConfig, page: Page) -> None:
        self._page = page
        self._every = config.log_every_steps
        self._speaks = False
        self._tokens = 0
        self._seconds = 0.0

    def run_start(self, run: Run) -> None:
        """Let rank 0 speak for all."""
        self._speaks = run.rank == 0 and self._every > 0

    def after_update(self, step: Step) -> None:
        """Put down the finished step."""
        self._page.finished(step)
        if self._speaks:
            self._count(step)

    def _count(self, step: Step) -> None:
        self._tokens += step.tokens
        self._seconds += step.step_s
        if step.number % self._every and not step.last:
            return
        log.info(
            "step %d loss %.4f norm %.3f lr %.2e, %.0f tokens/s",
            step.number,
            step.loss,
            step.grad_norm,
            step.lr,
            self._tokens / self._seconds if self._seconds else 0.0,
        )
        self._tokens, self._seconds = 0, 0.0
