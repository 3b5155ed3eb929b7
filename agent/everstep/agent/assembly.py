"""The parts of the agent, wired together."""

from __future__ import annotations

import asyncio
import logging
import random
import time
import uuid
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from everstep.agent.client import Shared
from everstep.agent.disposal import Disposal
from everstep.agent.findings import Findings
from everstep.agent.memory import Limits, Memory, available_bytes
from everstep.agent.peer import boot_id, machine_id
from everstep.agent.plugins import Plugins
from everstep.agent.pulse import Pulse
from everstep.agent.readings import Readings
from everstep.agent.relay import Relay
from everstep.agent.report import Report
from everstep.agent.uplink import Ends, Pace, Uplink
from everstep.sdk.systemd import notify
from everstep.wire.messages import (
    AgentHello,
    CoordinatorToAgent,
    FindingAck,
    Heartbeat,
    ToClient,
)

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping, Sequence

    from everstep.agent.clock_offset import Offset
    from everstep.agent.config import Settings
    from everstep.agent.progress import Progress
    from everstep.sdk.door import Admitted

log = logging.getLogger(__name__)

_SWEEP_S = 5.0


class Agent:
    """What passes between the parts; each of them knows only what it is given here."""

    def __init__(
        self, settings: Settings, progress: Progress, admitted: Sequence[Admitted]
    ) -> None:
        config = settings.config
        self.settings = settings
        self.version = version("everstep")
        self.epoch = uuid.uuid4().hex
        self.progress = progress
        self.shared = Shared(asyncio.get_running_loop(), Disposal())
        self.table = Readings(max_series=config.max_series)
        self.pulse = Pulse(
            progress,
            look_s=config.look_s,
            ping_s=settings.watchdog_s,
            ping=lambda: notify("WATCHDOG=1", settings.service_manager),
        )
        self.uplink = self._uplink(settings)
        self.findings = Findings(self.uplink.send, time.time)
        self.plugins = Plugins(
            admitted,
            readings=self.table,
            findings=self.findings,
            wall=time.time,
            timeout_s=config.plugin_timeout_s,
        )
        self.memory = Memory(
            Limits(config.memory_user_share, config.memory_share),
            grace_s=config.memory_grace_s,
            dispose=self.shared.disposal.close,
            free_bytes=available_bytes,
            clock=time.monotonic,
        )
        self.relay = Relay(
            node=settings.node,
            version=self.version,
            uplink=self.uplink,
            progress=progress,
            memory=self.memory,
            findings=self.findings,
            disposal=self.shared.disposal,
            answer=self._answer,
            clock=time.time,
        )
        self.report = Report(self)

    def tasks(self) -> dict[str, Coroutine[Any, Any, None]]:
        """Return what must run for as long as the agent does, by name."""
        return {
            "pulse": self.pulse.run(self.uplink.beat_now),
            "uplink": self.uplink.run(),
            "plugins": self.plugins.run(),
            "memory": self._sweep_memory(),
        }

    def close(self) -> None:
        """Let go of pages, memory and threads."""
        self.plugins.close()
        self.progress.close()
        self.memory.close()
        self.shared.disposal.end()

    def scrape(self) -> None:
        """Put the agent's own readings into the table, just before it is read."""
        self.table.put("agent", self.report.readings(), keep_s=60.0)

    async def _sweep_memory(self) -> None:
        every_s = min(_SWEEP_S, self.settings.config.memory_grace_s / 4)
        while True:
            await asyncio.sleep(every_s)
            if len(self.memory):
                self.memory.sweep(self.relay.owners())

    def _uplink(self, settings: Settings) -> Uplink:
        config = settings.config
        pace = Pace(
            config.heartbeat_s, config.reply_timeout_s, config.retry_first_s, config.retry_last_s
        )
        ends = Ends(self._hello, self._beat, self._link_changed, self._heard)
        return Uplink(settings.coordinators, ends, pace, random.Random())

    # ------------------------------------------------------------- what the uplink asks and says

    def _hello(self, own_address: str) -> AgentHello:
        return AgentHello(
            node=self.settings.node,
            epoch=self.epoch,
            machine_id=machine_id(),
            boot_id=boot_id(),
            address=self.settings.config.address or own_address,
            token=self.settings.token,
            version=self.version,
        )

    def _beat(self, seq: int, offset: Offset | None) -> Heartbeat:
        self.pulse.look()  # never told from memory: this process may have stood still since
        return Heartbeat(
            seq=seq,
            sent_at_s=time.time(),
            ranks=self.progress.ranks(),
            offset_s=offset.offset_s if offset else None,
            error_s=offset.error_s if offset else None,
            health="unhealthy" if self.report.reasons() else "healthy",
        )

    def _link_changed(self) -> None:
        if self.uplink.up:
            self.findings.resend()
        self.relay.link_changed()
        where = f"coordinator {self.uplink.url}" if self.uplink.up else "no coordinator"
        notify(f"STATUS={self.settings.node}: {where}", self.settings.service_manager)

    def _heard(self, message: CoordinatorToAgent) -> None:
        match message:
            case ToClient():
                self.relay.deliver(message)
            case FindingAck():
                self.findings.ack(message.seq)
            case _:
                log.debug("message without a use here", extra={"kind": type(message).__name__})

    def _answer(self, what: str) -> Mapping[str, object]:
        return {"plugins": self.plugins.facts()} if what == "plugins" else self.report.status()
