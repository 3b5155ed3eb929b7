"""One plugin while it runs: its guard, its pace and what is told about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from everstep.sdk.episodes import Episodes
from everstep.sdk.guard import Guard
from everstep.wire.messages import Finding, Reading

if TYPE_CHECKING:
    from collections.abc import Iterator

    from everstep.sdk.door import Admitted

LONGEST_PAUSE_S = 60.0


@dataclass(slots=True)
class Running:
    """One plugin and how it is doing."""

    admitted: Admitted
    guard: Guard
    interval_s: float
    episodes: Episodes = field(default_factory=Episodes)
    trouble: Finding | None = None

    @property
    def source(self) -> str:
        """Its table in the configuration, which also names it everywhere else."""
        return f"{self.admitted.kind}.{self.admitted.name}"

    @property
    def state(self) -> str:
        """Its state as the door left it, or `failing` or `hung` since."""
        if self.admitted.state != "on" or self.guard.tally.last_error is None:
            return self.admitted.state
        return "hung" if self.guard.busy else "failing"

    def facts(self) -> dict[str, object]:
        """Return how it is doing, for people and for JSON."""
        tally = self.guard.tally
        return {
            "kind": self.admitted.kind,
            "name": self.admitted.name,
            "source": self.admitted.source,
            "state": self.state,
            "why": tally.last_error or self.admitted.why,
            "interval_s": self.interval_s,
            "calls": tally.calls,
            "failures": dict(tally.failures),
            "last_s": round(tally.last_s, 6),
        }

    def measures(self) -> Iterator[Reading]:
        """Return what there is to measure about it."""
        who = {"plugin": self.admitted.name, "kind": self.admitted.kind}
        up = 1.0 if self.state == "on" else 0.0
        yield Reading(name="everstep.plugin.up", value=up, attributes=who)
        if self.admitted.state != "on":
            return
        tally = self.guard.tally
        yield Reading(name="everstep.plugin.duration", value=tally.last_s, unit="s", attributes=who)
        yield _counter("everstep.plugin.calls", tally.calls, "{call}", who)
        for fault, count in tally.failures.items():
            attributes = {**who, "error.type": fault}
            yield _counter("everstep.plugin.failures", count, "{failure}", attributes)


def running(admitted: Admitted, *, timeout_s: float) -> Running:
    """Return a plugin ready to run, at the interval and with the timeout of its own table."""
    guard = Guard(
        f"{admitted.kind}.{admitted.name}",
        timeout_s=_seconds(admitted.config, "timeout_s", timeout_s),
    )
    return Running(admitted, guard, _seconds(admitted.config, "interval_s", 1.0))


def pause_s(interval_s: float, failures_in_a_row: int) -> float:
    """Return how long to leave a plugin alone: its interval, doubled with each failure.

    >>> pause_s(1.0, 0), pause_s(1.0, 3), pause_s(1.0, 99), pause_s(300.0, 1)
    (1.0, 8.0, 60.0, 300.0)
    """
    doubled = interval_s * 2.0 ** min(failures_in_a_row, 16)
    return max(interval_s, min(LONGEST_PAUSE_S, doubled))


def next_turn_s(soonest_s: float, every_s: float) -> float:
    """Return when to call next: at a multiple of the pause, so that plugins wake up together.

    >>> next_turn_s(101.02, 1.0), next_turn_s(100.6, 1.0)
    (101.0, 101.0)
    """
    return round(soonest_s / every_s) * every_s


def _seconds(config: object, name: str, otherwise: float) -> float:
    value = getattr(config, name, otherwise)
    return float(value) if isinstance(value, (int, float)) and value > 0 else otherwise


def _counter(name: str, value: float, unit: str, attributes: dict[str, str]) -> Reading:
    return Reading(name=name, value=value, unit=unit, attributes=attributes, counter=True)
