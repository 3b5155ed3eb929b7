"""Judges the clock readings of the `host` collector; pure, with a little memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from everstep.sdk import Evidence, Finding, Reading, Seconds, Severity

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_CLOCK = "everstep.host.clock."


class ClockConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """From when on a clock is wrong. `sample.toml` says it in the operator's words."""

    step_s: Seconds = 0.1
    step_shown_s: Seconds = 60.0
    offset_s: Seconds = 0.05
    offset_for_s: Seconds = 60.0
    unsynchronized_for_s: Seconds = 300.0


class ClockDetector:
    """A step is told as long as it is news; an offset or a lost source once it has lasted."""

    Config = ClockConfig

    def __init__(self, config: ClockConfig) -> None:
        self._config = config
        self._since_s: dict[str, float] = {}
        self._last_step: tuple[float, float] | None = None

    def detect(self, readings: Sequence[Reading], now_s: float) -> Iterable[Finding]:
        """Return what is wrong with the clock now."""
        clock = {
            r.name.removeprefix(_CLOCK): r.value for r in readings if r.name.startswith(_CLOCK)
        }
        step = self._step(clock.get("step"), now_s)
        offset = self._offset(clock.get("offset"), now_s)
        source = self._source(clock.get("synchronized"), clock.get("max_error"), now_s)
        return [finding for finding in (step, offset, source) if finding is not None]

    def _step(self, step_s: float | None, now_s: float) -> Finding | None:
        if step_s is not None and abs(step_s) >= self._config.step_s:
            self._last_step = (step_s, now_s)
        if self._last_step is None or now_s - self._last_step[1] > self._config.step_shown_s:
            return None
        size_s, at_s = self._last_step
        way = "forward" if size_s > 0 else "back"
        return _finding(
            "clock.stepped",
            "warning",
            f"the wall clock was set {way} by {abs(size_s):.3f} s: times of events before and "
            "after do not compare",
            at_s,
        )

    def _offset(self, offset_s: float | None, now_s: float) -> Finding | None:
        wrong = offset_s is not None and abs(offset_s) >= self._config.offset_s
        since_s = self._lasted("offset", self._config.offset_for_s, now_s, wrong=wrong)
        if since_s is None or offset_s is None:
            return None
        return _finding(
            "clock.offset",
            "warning",
            f"the clock is {offset_s * 1000:+.0f} ms off its time source and not getting there: "
            "see chronyc tracking or timedatectl timesync-status",
            since_s,
        )

    def _source(
        self, synchronized: float | None, max_error_s: float | None, now_s: float
    ) -> Finding | None:
        limit_s = self._config.unsynchronized_for_s
        since_s = self._lasted("source", limit_s, now_s, wrong=synchronized == 0)
        if since_s is None:
            return None
        bound = f" (it may be off by up to {max_error_s:.1f} s)" if max_error_s else ""
        return _finding(
            "clock.unsynchronized",
            "info",
            f"nothing keeps this clock right{bound}: start chronyd or systemd-timesyncd",
            since_s,
        )

    def _lasted(self, what: str, for_s: float, now_s: float, *, wrong: bool) -> float | None:
        """Return since when `what` is wrong, once it has been for `for_s`."""
        if not wrong:
            self._since_s.pop(what, None)
            return None
        since_s = self._since_s.setdefault(what, now_s)
        return since_s if now_s - since_s >= for_s else None


def _finding(name: str, severity: Severity, summary: str, at_s: float) -> Finding:
    return Finding(
        name=name,
        component="host",
        severity=severity,
        summary=summary,
        at_s=at_s,
        evidence=[Evidence(at_s=at_s, what=summary, source="host clock readings")],
        suggested_action="monitor",
    )
