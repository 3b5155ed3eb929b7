"""Runs collectors and detectors: each in its thread, under guard, and slower while it fails."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from everstep.sdk import sound
from everstep.sdk.config import ConfigError, ConfigFile
from everstep.sdk.episodes import Episodes
from everstep.sdk.guard import Failed, Guard, Outcome
from everstep.wire.messages import Finding, Reading

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    from everstep.agent.findings import Findings
    from everstep.agent.readings import Readings
    from everstep.sdk.door import Admitted, Kind

    Admit: TypeAlias = Callable[[ConfigFile, Kind, Mapping[str, object]], Sequence[Admitted]]

log = logging.getLogger(__name__)

KINDS: tuple[Kind, ...] = ("collectors", "detectors")
LONGEST_PAUSE_S = 60.0
RECHECK_S = 600.0
_ADMISSION_S = 600.0


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


def pause_s(interval_s: float, failures_in_a_row: int) -> float:
    """Return how long to leave a plugin alone: its interval, doubled with each failure.

    >>> pause_s(1.0, 0), pause_s(1.0, 3), pause_s(1.0, 99), pause_s(300.0, 1)
    (1.0, 8.0, 60.0, 300.0)
    """
    doubled = interval_s * 2.0 ** min(failures_in_a_row, 16)
    return max(interval_s, min(LONGEST_PAUSE_S, doubled))


async def admit_all(
    file: ConfigFile,
    offers: Mapping[str, object],
    admit: Admit,
) -> list[Admitted]:
    """Let the plugins in, in a thread: their imports and constructors may take their time.

    Raises ConfigError for a wrong table.
    """

    def work() -> list[Admitted] | ConfigError:
        try:
            return [one for kind in KINDS for one in admit(file, kind, offers)]
        except ConfigError as exc:
            return exc

    guard = Guard("door", timeout_s=_ADMISSION_S)
    outcome = await guard.call(work)
    guard.close()
    if isinstance(outcome, Failed):
        raise ConfigError(f"plugins: {outcome.why}")
    if isinstance(outcome.value, ConfigError):
        raise outcome.value
    return outcome.value


class Plugins:
    """All collectors and detectors of this agent."""

    def __init__(
        self,
        admitted: Sequence[Admitted],
        *,
        readings: Readings,
        findings: Findings,
        wall: Callable[[], float],
        timeout_s: float,
    ) -> None:
        self._readings = readings
        self._findings = findings
        self._wall = wall
        self._all = [_running(one, timeout_s) for one in admitted]

    async def run(self) -> None:
        """Call them all at their intervals until cancelled."""
        for one in self._all:
            self._announce(one)
        async with asyncio.TaskGroup() as group:
            for one in self._all:
                if one.admitted.plugin is not None:
                    group.create_task(self._keep_calling(one), name=one.source)

    def close(self) -> None:
        """Let their threads end, as far as they come back."""
        for one in self._all:
            one.guard.close()

    def troubles(self) -> list[str]:
        """Return one line for each plugin that should work and does not."""
        return [
            f"{one.source}: {one.guard.tally.last_error or one.admitted.why}"
            for one in self._all
            if one.state in ("failed", "failing", "hung")
        ]

    def facts(self) -> list[dict[str, object]]:
        """Return the state of each plugin, for people and for JSON."""
        return [
            {
                "kind": one.admitted.kind,
                "name": one.admitted.name,
                "source": one.admitted.source,
                "state": one.state,
                "why": one.guard.tally.last_error or one.admitted.why,
                "interval_s": one.interval_s,
                "calls": one.guard.tally.calls,
                "failures": dict(one.guard.tally.failures),
                "last_s": round(one.guard.tally.last_s, 6),
            }
            for one in self._all
        ]

    def readings(self) -> list[Reading]:
        """Return what there is to measure about the plugins themselves."""
        return [reading for one in self._all for reading in _measures(one)]

    def _announce(self, one: Running) -> None:
        seen = one.admitted
        facts = {"plugin": one.source, "from": seen.source, "state": seen.state}
        log.info("plugin", extra=facts | ({"why": seen.why} if seen.why else {}))
        if seen.state == "failed":
            self._tell(one, f"{one.source} could not be started: {seen.why}")

    async def _keep_calling(self, one: Running) -> None:
        loop = asyncio.get_running_loop()
        while one.admitted.state == "unsupported":
            await asyncio.sleep(RECHECK_S)
            await self._ask_again(one)
        while True:
            began_s = loop.time()
            outcome = await one.guard.call(self._work(one))
            self._take(one, outcome)
            await one.guard.idle()  # one that hangs is not called again before it comes back
            pause = pause_s(one.interval_s, one.guard.tally.in_a_row)
            await asyncio.sleep(max(0.0, began_s + pause - loop.time()))

    async def _ask_again(self, one: Running) -> None:
        outcome = await one.guard.call(one.admitted.plugin.supported)
        await one.guard.idle()
        if not isinstance(outcome, Failed) and outcome.value is None:
            one.admitted = replace(one.admitted, state="on", why="")
            self._announce(one)

    def _work(self, one: Running) -> Callable[[], Sequence[Reading | Finding]]:
        plugin = one.admitted.plugin
        if one.admitted.kind == "collectors":
            return lambda: sound.observations(plugin.collect())
        return lambda: sound.findings(plugin.detect(self._readings.latest(), self._wall()))

    def _take(self, one: Running, outcome: Outcome[Sequence[Reading | Finding]]) -> None:
        if isinstance(outcome, Failed):
            self._tell(one, f"{one.source} {_did(outcome)}: {outcome.why}")
            return
        self._tell(one, None)
        found = [item for item in outcome.value if isinstance(item, Finding)]
        if one.admitted.kind == "detectors":
            wrong: dict[Hashable, Finding] = {(f.name, f.component): f for f in found}
            found = one.episodes.update(wrong, self._wall())
        for finding in found:
            self._findings.add(one.source, finding)
        self._keep(one, [item for item in outcome.value if isinstance(item, Reading)])

    def _keep(self, one: Running, readings: Sequence[Reading]) -> None:
        if not readings and one.admitted.kind == "detectors":
            return
        keep_s = 3 * one.interval_s + one.guard.timeout_s
        dropped = self._readings.put(one.source, readings, keep_s=keep_s)
        if dropped and self._readings.dropped[one.source] == dropped:
            log.warning("too many readings", extra={"source": one.source, "dropped": dropped})

    def _tell(self, one: Running, wrong: str | None) -> None:
        """Report trouble once, when it begins, and its end."""
        before, at_s = one.trouble, self._wall()
        if (before is None) == (wrong is None):
            return
        trouble = Finding(
            name="plugin.failing",
            component="host",
            severity="warning",
            summary=wrong or f"{one.source} works again",
            at_s=at_s,
            suggested_action=None
            if wrong is None
            else f"mend it, or set [{one.source}] enabled = false",
            resolved=wrong is None,
        )
        one.trouble = None if wrong is None else trouble
        self._findings.add(one.source, trouble)


def _running(admitted: Admitted, timeout_s: float) -> Running:
    config: Any = admitted.config
    guard = Guard(
        f"{admitted.kind}.{admitted.name}", timeout_s=_seconds(config, "timeout_s", timeout_s)
    )
    return Running(admitted, guard, _seconds(config, "interval_s", 1.0))


def _seconds(config: object, name: str, otherwise: float) -> float:
    value = getattr(config, name, otherwise)
    return float(value) if isinstance(value, (int, float)) and value > 0 else otherwise


def _did(failed: Failed) -> str:
    return {"raised": "raised", "hung": "hangs", "nonsense": "returned nonsense"}[failed.fault]


def _measures(one: Running) -> list[Reading]:
    who = {"plugin": one.admitted.name, "kind": one.admitted.kind}
    up = 1.0 if one.state == "on" else 0.0
    out = [Reading(name="everstep.plugin.up", value=up, attributes=who)]
    if one.admitted.state != "on":
        return out
    tally = one.guard.tally
    out.append(
        Reading(name="everstep.plugin.duration", value=tally.last_s, unit="s", attributes=who)
    )
    out.append(
        Reading(
            name="everstep.plugin.calls",
            value=tally.calls,
            unit="{call}",
            attributes=who,
            counter=True,
        )
    )
    for fault, count in tally.failures.items():
        attributes = {**who, "error.type": fault}
        out.append(
            Reading(
                name="everstep.plugin.failures",
                value=count,
                unit="{failure}",
                attributes=attributes,
                counter=True,
            )
        )
    return out
