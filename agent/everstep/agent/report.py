"""What the agent says about itself: to the command line, to /healthz and as readings."""

from __future__ import annotations

import os
import resource
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from everstep.wire.messages import Reading

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from everstep.agent.client import Shared
    from everstep.agent.config import Settings
    from everstep.agent.findings import Findings
    from everstep.agent.plugins import Plugins
    from everstep.agent.progress import Progress
    from everstep.agent.readings import Readings
    from everstep.agent.relay import Relay
    from everstep.agent.uplink import Uplink

UNREACHED_S = 10.0
_PAGE_BYTES = resource.getpagesize()


@dataclass(slots=True)
class Report:
    """Looks at all parts of the agent and changes none."""

    settings: Settings
    version: str
    epoch: str
    uplink: Uplink
    relay: Relay
    progress: Progress
    findings: Findings
    plugins: Plugins
    table: Readings
    shared: Shared
    mono: Callable[[], float] = time.monotonic
    listen: str = ""
    late: int = 0
    started_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.started_s = self.mono()

    def reasons(self) -> list[str]:
        """Return why the agent cannot do its work; empty when it can."""
        reasons = self.plugins.troubles()
        down_s = self.mono() - self.uplink.down_since_s
        if self.settings.coordinators and not self.uplink.up and down_s > UNREACHED_S:
            reasons.insert(0, f"no coordinator for {down_s:.0f} s: {self.uplink.error}")
        if self.findings.dropped:
            reasons.append(f"{self.findings.dropped} findings were lost: no coordinator took them")
        return reasons

    def health(self) -> Mapping[str, object]:
        """Return the short facts of /healthz."""
        return {
            "node": self.settings.node,
            "version": self.version,
            "epoch": self.epoch,
            "pid": os.getpid(),
            "uptime_s": round(self.mono() - self.started_s, 1),
            "socket": str(self.settings.socket),
            "listen": self.listen,
            "coordinator": self._coordinator(),
            "clients": dict(self._roles()),
            "pages": len(self.progress),
            "plugins": self.plugins.facts(),
        }

    def status(self) -> Mapping[str, object]:
        """Return everything that the command line may want to show."""
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
                for client in self.relay.clients.values()
                if client.hello
            ],
            "ranks": [msgspec.to_builtins(rank) for rank in self.progress.ranks()],
            "findings": [
                {"source": source, **msgspec.to_builtins(finding)}
                for source, finding in self.findings.open()
            ],
        }

    def readings(self) -> list[Reading]:
        """Return what there is to measure about the agent itself."""
        return [*self._process(), *self._counts(), *self.plugins.readings()]

    def _coordinator(self) -> dict[str, object]:
        offset = self.uplink.offset()
        return {
            "connected": self.uplink.up,
            "url": self.uplink.url,
            "configured": list(self.settings.coordinators),
            "error": self.uplink.error,
            "clock_offset_s": offset.offset_s if offset else None,
            "clock_error_s": offset.error_s if offset else None,
        }

    def _roles(self) -> Counter[str]:
        roles = Counter({"launcher": 0, "rank": 0, "cli": 0})
        roles.update(c.hello.role for c in self.relay.clients.values() if c.hello)
        return roles

    def _process(self) -> Iterator[Reading]:
        times = os.times()
        yield _gauge("process.uptime", self.mono() - self.started_s, "s")
        yield _counter("process.cpu.time", times.user, "s", {"cpu.mode": "user"})
        yield _counter("process.cpu.time", times.system, "s", {"cpu.mode": "system"})
        yield _gauge("process.memory.usage", resident_bytes(), "By")
        yield _counter("everstep.agent.late", self.late, "{time}")

    def _counts(self) -> Iterator[Reading]:
        offset = self.uplink.offset()
        yield _gauge("everstep.coordinator.connected", float(self.uplink.up), "1")
        yield _counter(
            "everstep.coordinator.connections", self.uplink.counts["connected"], "{connection}"
        )
        if offset:
            yield _gauge("everstep.coordinator.clock.offset", offset.offset_s, "s")
            yield _gauge("everstep.coordinator.clock.error", offset.error_s, "s")
        for role, count in self._roles().items():
            yield _gauge("everstep.clients", count, "{client}", {"role": role})
        yield _gauge("everstep.pages", len(self.progress), "{page}")
        yield _gauge("everstep.findings.open", len(self.findings.open()), "{finding}")
        yield _gauge("everstep.findings.unacknowledged", self.findings.unacknowledged, "{finding}")
        yield _counter("everstep.findings.lost", self.findings.dropped, "{finding}")
        yield from _by("everstep.findings", self.findings.counts, "{finding}", "severity")
        yield from _by(
            "everstep.findings.suppressed", self.findings.suppressed, "{finding}", "source"
        )
        yield from _by("everstep.client.faults", self.shared.faults, "{fault}", "error.type")
        yield from _by("everstep.relay.messages", self.relay.counts, "{message}", "outcome")
        yield from _by("everstep.readings.dropped", self.table.dropped, "{reading}", "source")


def resident_bytes() -> int:
    """Return how much memory this process holds."""
    with open("/proc/self/statm", "rb") as file:  # noqa: PTH123  once a second: no Path needed
        return int(file.read().split()[1]) * _PAGE_BYTES


def _gauge(name: str, value: float, unit: str, attributes: dict[str, str] | None = None) -> Reading:
    return Reading(name=name, value=value, unit=unit, attributes=attributes or {})


def _counter(
    name: str, value: float, unit: str, attributes: dict[str, str] | None = None
) -> Reading:
    return Reading(name=name, value=value, unit=unit, attributes=attributes or {}, counter=True)


def _by(name: str, counts: Counter[str], unit: str, attribute: str) -> Iterator[Reading]:
    for key, count in counts.items():
        yield _counter(name, count, unit, {attribute: key})
