"""What the agent says about itself: to the command line, to /healthz and as readings."""

from __future__ import annotations

import os
import resource
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from everstep.wire.messages import Reading

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from everstep.agent.assembly import Agent

UNREACHED_S = 10.0
_PAGE_BYTES = resource.getpagesize()


class Report:
    """Looks at all parts of the agent and changes none."""

    def __init__(self, agent: Agent, *, mono: Callable[[], float] = time.monotonic) -> None:
        self.listen = ""  # known once it listens
        self._agent = agent
        self._mono = mono
        self._started_s = mono()

    def reasons(self) -> list[str]:
        """Return why the agent cannot do its work; empty when it can."""
        agent = self._agent
        reasons = agent.plugins.troubles()
        down_s = self._mono() - agent.uplink.down_since_s
        if agent.settings.coordinators and not agent.uplink.up and down_s > UNREACHED_S:
            reasons.insert(0, f"no coordinator for {down_s:.0f} s: {agent.uplink.error}")
        return reasons

    def health(self) -> Mapping[str, object]:
        """Return the short facts of /healthz."""
        agent = self._agent
        return {
            "node": agent.settings.node,
            "version": agent.version,
            "epoch": agent.epoch,
            "pid": os.getpid(),
            "uptime_s": round(self._mono() - self._started_s, 1),
            "socket": str(agent.settings.socket),
            "listen": self.listen,
            "coordinator": self._coordinator(),
            "clients": dict(self._roles()),
            "pages": len(agent.progress),
            "plugins": agent.plugins.facts(),
        }

    def status(self) -> Mapping[str, object]:
        """Return everything that the command line may want to show."""
        agent = self._agent
        return {
            **self.health(),
            "reasons": self.reasons(),
            "clients": [
                {
                    "client": client.id,
                    "role": client.hello.role,
                    "pid": client.peer.pid,
                    "uid": client.peer.uid,
                    "job": client.hello.job,
                    "generation": client.hello.generation,
                    "rank": client.hello.rank,
                }
                for client in agent.relay.clients.values()
                if client.hello
            ],
            "ranks": [msgspec.to_builtins(rank) for rank in agent.progress.ranks()],
            "memory": agent.memory.facts(),
            "findings": [
                {"source": source, **msgspec.to_builtins(finding)}
                for source, finding in agent.findings.open()
            ],
        }

    def readings(self) -> list[Reading]:
        """Return what there is to measure about the agent itself."""
        return [*self._process(), *self._counts(), *self._agent.plugins.readings()]

    def _coordinator(self) -> dict[str, object]:
        agent = self._agent
        offset = agent.uplink.offset()
        return {
            "connected": agent.uplink.up,
            "url": agent.uplink.url,
            "configured": list(agent.settings.coordinators),
            "error": agent.uplink.error,
            "clock_offset_s": offset.offset_s if offset else None,
            "clock_error_s": offset.error_s if offset else None,
        }

    def _roles(self) -> Counter[str]:
        roles = Counter({"launcher": 0, "rank": 0, "cli": 0, "memory": 0})
        roles.update(c.hello.role for c in self._agent.relay.clients.values() if c.hello)
        return roles

    def _process(self) -> Iterator[Reading]:
        times = os.times()
        yield _gauge("process.uptime", self._mono() - self._started_s, "s")
        yield _counter("process.cpu.time", times.user, "s", {"cpu.mode": "user"})
        yield _counter("process.cpu.time", times.system, "s", {"cpu.mode": "system"})
        yield _gauge("process.memory.usage", resident_bytes(), "By")
        yield _counter("everstep.agent.late", self._agent.pulse.late, "{time}")

    def _counts(self) -> Iterator[Reading]:
        agent = self._agent
        offset = agent.uplink.offset()
        yield _gauge("everstep.coordinator.connected", float(agent.uplink.up), "1")
        yield _counter(
            "everstep.coordinator.connections", agent.uplink.counts["connected"], "{connection}"
        )
        if offset:
            yield _gauge("everstep.coordinator.clock.offset", offset.offset_s, "s")
            yield _gauge("everstep.coordinator.clock.error", offset.error_s, "s")
        for role, count in self._roles().items():
            yield _gauge("everstep.clients", count, "{client}", {"role": role})
        yield _gauge("everstep.pages", len(agent.progress), "{page}")
        for owner, held in agent.memory.bytes_by_owner().items():
            job = {"everstep.job": owner.job or ""}
            yield _gauge("everstep.agent.memory_held", held, "By", job)
        yield _gauge("everstep.findings.open", len(agent.findings.open()), "{finding}")
        yield _gauge("everstep.findings.unacknowledged", agent.findings.unacknowledged, "{finding}")
        yield _counter("everstep.findings.lost", agent.findings.dropped, "{finding}")
        yield from _by("everstep.findings", agent.findings.counts, "{finding}", "severity")
        yield from _by(
            "everstep.findings.suppressed", agent.findings.suppressed, "{finding}", "source"
        )
        yield from _by("everstep.client.faults", agent.shared.faults, "{fault}", "error.type")
        yield from _by("everstep.relay.messages", agent.relay.counts, "{message}", "outcome")
        yield from _by("everstep.readings.dropped", agent.table.dropped, "{reading}", "source")


def resident_bytes() -> int:
    """Return how much memory this process holds."""
    return int(Path("/proc/self/statm").read_bytes().split()[1]) * _PAGE_BYTES


def _gauge(name: str, value: float, unit: str, attributes: dict[str, str] | None = None) -> Reading:
    return Reading(name=name, value=value, unit=unit, attributes=attributes or {})


def _counter(
    name: str, value: float, unit: str, attributes: dict[str, str] | None = None
) -> Reading:
    return Reading(name=name, value=value, unit=unit, attributes=attributes or {}, counter=True)


def _by(name: str, counts: Counter[str], unit: str, attribute: str) -> Iterator[Reading]:
    for key, count in counts.items():
        yield _counter(name, count, unit, {attribute: key})
