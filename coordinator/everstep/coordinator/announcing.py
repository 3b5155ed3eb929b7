"""Decisions for the actions, incidents for the notifiers: each plugin in its thread, under guard.

Whatever a plugin does or fails to do, the decision stands: it was journaled before.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import TYPE_CHECKING, Any

from everstep.coordinator import facts
from everstep.sdk import door
from everstep.sdk.guard import Failed, Guard

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from everstep.coordinator.turn import Tell
    from everstep.sdk.config import ConfigFile
    from everstep.sdk.door import Admitted, Kind

log = logging.getLogger(__name__)

KINDS: tuple[Kind, ...] = ("actions", "notifiers")
_MAX_WAITING = 1000
_VERBS = {"actions": "act", "notifiers": "notify"}


class Announcer:
    """One plugin and what it has still to be told, in order."""

    def __init__(
        self, admitted: Admitted, failed: Callable[[str, str, Mapping[str, object]], None]
    ) -> None:
        self.admitted = admitted
        self.guard = Guard(f"{admitted.kind}.{admitted.name}")
        self.dropped = 0
        self._failed = failed
        self._waiting: deque[dict[str, object]] = deque()
        self._task: asyncio.Task[None] | None = None

    def tell(self, what: dict[str, object]) -> None:
        """Tell it as soon as its turn comes; when it falls far behind, the oldest is dropped."""
        self._waiting.append(what)
        if len(self._waiting) > _MAX_WAITING:
            self._waiting.popleft()
            self.dropped += 1
        if self._task is None:
            self._task = asyncio.create_task(self._work())

    async def close(self) -> None:
        """Stop telling; a call that is out is left alone."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self.guard.close()

    async def _work(self) -> None:
        verb: Callable[[Any], None] = getattr(self.admitted.plugin, _VERBS[self.admitted.kind])
        try:
            while self._waiting:
                what = self._waiting.popleft()
                await self.guard.idle()
                outcome = await self.guard.call(lambda w=what: verb(w))  # type: ignore[misc]  # mypy cannot infer a lambda with a default
                if isinstance(outcome, Failed):
                    self._failed(self.guard.name, outcome.why, what)
        finally:
            self._task = None


class Announcers:
    """All actions and notifiers."""

    def __init__(
        self,
        admitted: Sequence[Admitted],
        record: Callable[[facts.PluginFailed], None],
        clock: Callable[[], float],
    ) -> None:
        self.admitted = admitted
        self.running = [Announcer(a, self._failed) for a in admitted if a.state == "on"]
        self._record = record
        self._clock = clock
        for one in admitted:
            if one.state == "failed":
                log.error("plugin failed", extra={"plugin": one.name, "why": one.why})

    def tell(self, tell: Tell) -> None:
        """Hand a decision or an incident to the plugins that are for it."""
        for announcer in self.running:
            if announcer.admitted.kind == tell.kind:
                announcer.tell(tell.what)

    def listing(self) -> list[dict[str, object]]:
        """Return the plugins and how they are doing."""
        tallies = {a.guard.name: a.guard.tally for a in self.running}
        found = []
        for one in self.admitted:
            tally = tallies.get(f"{one.kind}.{one.name}")
            found.append(
                {
                    "kind": one.kind,
                    "name": one.name,
                    "source": one.source,
                    "state": one.state,
                    "why": one.why or (tally.last_error if tally else None) or "",
                    "calls": tally.calls if tally else 0,
                    "failures": dict(tally.failures) if tally else {},
                }
            )
        return found

    async def close(self) -> None:
        """Stop all of them."""
        await asyncio.gather(*(a.close() for a in self.running))

    def _failed(self, plugin: str, why: str, what: Mapping[str, object]) -> None:
        log.warning("plugin failed", extra={"plugin": plugin, "why": why})
        number = what.get("incident", what.get("id"))
        incident = number if isinstance(number, int) else None
        self._record(
            facts.PluginFailed(at_s=self._clock(), plugin=plugin, why=why, incident=incident)
        )


def admit_all(file: ConfigFile) -> list[Admitted]:
    """Let the actions and notifiers in. Raises ConfigError for a wrong table."""
    return [a for kind in KINDS for a in door.admit(file, kind, {})]
