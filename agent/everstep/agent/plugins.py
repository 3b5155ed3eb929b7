"""Runs collectors and detectors: each in its thread, under guard, and slower while it fails."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

from everstep.agent.errors import AgentError
from everstep.agent.running import Running, next_turn_s, pause_s, running
from everstep.sdk import sound
from everstep.sdk.config import ConfigError, ConfigFile
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
RECHECK_S = 600.0
_ADMISSION_S = 600.0


async def admit_all(
    file: ConfigFile,
    offers: Mapping[str, object],
    admit: Admit,
) -> list[Admitted]:
    """Let the plugins in, in a thread: their imports and constructors may take their time.

    Raises ConfigError for a wrong table, AgentError when they do not come to an end.
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
        raise AgentError(f"the plugins cannot be let in: {outcome.why}")
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
        self._all = [running(one, timeout_s=timeout_s) for one in admitted]

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
        return [one.facts() for one in self._all]

    def readings(self) -> list[Reading]:
        """Return what there is to measure about the plugins themselves."""
        return [reading for one in self._all for reading in one.measures()]

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
            await asyncio.sleep(next_turn_s(began_s + pause, pause) - loop.time())

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


def _did(failed: Failed) -> str:
    return {"raised": "raised", "hung": "hangs", "nonsense": "returned nonsense"}[failed.fault]
