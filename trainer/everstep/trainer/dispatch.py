"""Calls the hooks at each moment: timed, counted, isolated, and switched off on all ranks alike."""

from __future__ import annotations

import logging
import time
import traceback
from typing import TYPE_CHECKING, Any

from everstep.sdk import ConfigError, Finding
from everstep.sdk.hooks import MOMENTS, Decision, Moment
from everstep.sdk.plugin import Stateful

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

log = logging.getLogger(__name__)

FAILURES_ALLOWED = 3
_BEFORE_UPDATE = ("batch", "forward", "backward", "before_update")


class Hooked:
    """One hook with what is known about how it behaves."""

    __slots__ = ("calls", "failures", "index", "name", "ns", "on", "plugin", "since_settled")

    def __init__(self, index: int, name: str, plugin: Any) -> None:
        self.index = index
        self.name = name
        self.plugin = plugin
        self.on = True
        self.calls = 0
        self.ns = 0
        self.failures = 0
        self.since_settled = 0


class Dispatch:
    """All hooks of one training process, in order of name, the same on every rank."""

    def __init__(
        self,
        plugins: Mapping[str, Any],
        *,
        report: Callable[[Finding], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Raise ConfigError for a plugin that has no method named after a moment."""
        self.hooks = [Hooked(i, name, plugins[name]) for i, name in enumerate(sorted(plugins))]
        for hook in self.hooks:
            if not any(hasattr(hook.plugin, moment) for moment in MOMENTS):
                raise ConfigError(
                    f"hook {hook.name!r} has no method for any moment: {', '.join(MOMENTS)}"
                )
        self._report = report
        self._clock = clock
        self._calls: dict[Moment, list[tuple[Hooked, Callable[[Any], object]]]] = {}
        self._untold: list[tuple[Hooked, str]] = []
        self._bind()

    def _bind(self) -> None:
        self._calls = {
            moment: [
                (hook, getattr(hook.plugin, moment))
                for hook in self.hooks
                if hook.on and hasattr(hook.plugin, moment)
            ]
            for moment in MOMENTS
        }

    def fire(self, moment: Moment, seen: Any) -> Decision:
        """Call every hook that wants the moment and return the most severe vote."""
        worst = Decision.PROCEED
        now = time.perf_counter_ns
        for hook, call in self._calls[moment]:
            begin = now()
            try:
                vote = call(seen)
            except Exception as exc:  # noqa: BLE001  a hook may raise anything; training outlives it
                vote = self._failed(hook, moment, exc)
            hook.ns += now() - begin
            hook.calls += 1
            if vote is not None and vote is not Decision.PROCEED:
                worst = max(worst, self._checked(hook, moment, vote))
        return worst

    def _checked(self, hook: Hooked, moment: Moment, vote: object) -> Decision:
        if isinstance(vote, Decision):
            return vote
        error = TypeError(f"returned {vote!r}, not a Decision or None")
        return self._failed(hook, moment, error) or Decision.PROCEED

    def _failed(self, hook: Hooked, moment: Moment, exc: Exception) -> Decision | None:
        hook.since_settled += 1
        where = traceback.extract_tb(exc.__traceback__)[-1:]
        at = f" at {where[0].filename}:{where[0].lineno}" if where else ""
        what = f"raised in {moment}: {type(exc).__name__}: {exc}{at}"
        if moment not in _BEFORE_UPDATE:
            self._tell(hook, "warning", what)
            return None
        # Not told before the ranks have settled: a hook that adds something up over them raises
        # when one is lost, and that is not the hook's fault.
        self._untold.append((hook, what))
        if getattr(hook.plugin, "touches_gradients", False):
            return Decision.SKIP_UPDATE
        return None

    def failures(self) -> list[int]:
        """Return how often each hook failed here since the last `settle`."""
        return [hook.since_settled for hook in self.hooks]

    def settle(self, everywhere: Sequence[int]) -> None:
        """Take the failures of all ranks; who has too many is off from now on, on all of them."""
        for hook, what in self._untold:
            self._tell(hook, "warning", what)
        self._untold.clear()
        for hook, failures in zip(self.hooks, everywhere, strict=True):
            hook.since_settled = 0
            hook.failures += failures
            if hook.on and hook.failures >= FAILURES_ALLOWED:
                hook.on = False
                self._tell(hook, "error", f"failed {hook.failures} times and is off for this run")
                self._bind()

    def _tell(self, hook: Hooked, severity: Any, what: str) -> None:
        self._report(
            Finding(
                name="hook.failed",
                component="job",
                severity=severity,
                summary=f"hook {hook.name} {what}",
                at_s=self._clock(),
            )
        )

    def cost(self) -> str:
        """Return what the hooks cost on the whole, for people: seconds and calls of each."""
        return ", ".join(f"{h.name} {h.ns / 1e9:.3f} s in {h.calls} calls" for h in self.hooks)

    def state(self) -> dict[str, Any]:
        """Return the state of every hook that has one."""
        states = {}
        for hook in self.hooks:
            if hook.on and isinstance(hook.plugin, Stateful):
                try:
                    states[hook.name] = dict(hook.plugin.state())
                except Exception as exc:  # noqa: BLE001  a snapshot without it beats no snapshot
                    self._failed(hook, "snapshot", exc)
        return states

    def restore(self, states: Mapping[str, Any]) -> None:
        """Give every hook its state back; one that does not fit is the hook's loss alone."""
        for hook in self.hooks:
            if hook.name in states and isinstance(hook.plugin, Stateful):
                try:
                    hook.plugin.restore(states[hook.name])
                except Exception as exc:  # noqa: BLE001  an old state must not stop a run
                    self._failed(hook, "run_start", exc)
