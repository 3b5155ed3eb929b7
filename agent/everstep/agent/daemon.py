"""The agent as a whole: its parts wired together, started, kept turning and stopped."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import random
import resource
import signal
import time
import uuid
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import replace
from importlib.metadata import version
from typing import TYPE_CHECKING

import msgspec

from everstep.agent import logs
from everstep.agent.client import Shared
from everstep.agent.config import Overrides, Settings, coordinator_url, settle
from everstep.agent.disposal import Disposal
from everstep.agent.findings import Findings
from everstep.agent.listener import Listener, bound
from everstep.agent.metrics import Exposition
from everstep.agent.peer import boot_id, machine_id
from everstep.agent.plugins import Plugins, admit_all
from everstep.agent.progress import Progress
from everstep.agent.readings import Readings
from everstep.agent.relay import Relay
from everstep.agent.report import Report
from everstep.agent.uplink import Ends, Pace, Uplink
from everstep.agent.web import Pages, served
from everstep.sdk import door
from everstep.sdk.config import ConfigFile
from everstep.sdk.systemd import notify
from everstep.wire.messages import (
    AgentHello,
    CoordinatorToAgent,
    FindingAck,
    Heartbeat,
    ToClient,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from everstep.agent.clock_offset import Offset
    from everstep.agent.plugins import Admit
    from everstep.sdk.door import Admitted

    Beside = Callable[[ConfigFile], AbstractAsyncContextManager[str]]

log = logging.getLogger(__name__)

LATE_S = 1.0
_OWN_S = 1.0


class Agent:
    """The parts and what passes between them."""

    def __init__(
        self, settings: Settings, progress: Progress, admitted: Sequence[Admitted]
    ) -> None:
        config = settings.config
        loop = asyncio.get_running_loop()
        self.settings = settings
        self.version = version("everstep")
        self.epoch = uuid.uuid4().hex
        self.progress = progress
        self.shared = Shared(loop, Disposal())
        self.table = Readings(max_series=config.max_series)
        pace = Pace(
            config.heartbeat_s, config.reply_timeout_s, config.retry_first_s, config.retry_last_s
        )
        ends = Ends(self._hello, self._beat, self._link_changed, self._heard)
        self.uplink = Uplink(settings.coordinators, ends, pace, random.Random())
        self.findings = Findings(self.uplink.send, time.time)
        self.plugins = Plugins(
            admitted,
            readings=self.table,
            findings=self.findings,
            wall=time.time,
            timeout_s=config.plugin_timeout_s,
        )
        self.relay = Relay(
            node=settings.node,
            version=self.version,
            uplink=self.uplink,
            progress=progress,
            findings=self.findings,
            disposal=self.shared.disposal,
            answer=self._answer,
            clock=time.time,
        )
        self.report = Report(
            settings,
            self.version,
            self.epoch,
            self.uplink,
            self.relay,
            progress,
            self.findings,
            self.plugins,
            self.table,
            self.shared,
        )
        self._looked_ns: int | None = None
        self._own_due_s = self._ping_due_s = 0.0

    # ------------------------------------------------------------------- what the parts ask for

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
        self._look()  # never told from memory: this process may have stood still since
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
        self._tell_status()

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

    # ------------------------------------------------------------------------------ its turning

    async def turn(self) -> None:
        """Look at the pages, ten times a second; the watchdog hears from here and nowhere else."""
        while True:
            if self._look():
                self.uplink.beat_now()
            now_s = time.monotonic()
            if now_s >= self._own_due_s:
                self._own_due_s = now_s + _OWN_S
                self.table.put("agent", self.report.readings(), keep_s=60.0)
            if self.settings.watchdog_s and now_s >= self._ping_due_s:
                self._ping_due_s = now_s + self.settings.watchdog_s
                notify("WATCHDOG=1", self.settings.service_manager)
            await asyncio.sleep(self.settings.config.poll_s)

    def _look(self) -> bool:
        now_ns = time.monotonic_ns()
        if self._looked_ns is not None:
            late_s = (now_ns - self._looked_ns) / 1e9 - self.settings.config.poll_s
            if late_s > LATE_S:
                self.report.late += 1
                self.progress.start_anew(now_ns)
                log.warning("the agent stood still", extra={"for_s": round(late_s, 1)})
        self._looked_ns = now_ns
        return self.progress.look(now_ns)

    def _tell_status(self) -> None:
        where = f"coordinator {self.uplink.url}" if self.uplink.up else "no coordinator"
        notify(f"STATUS={self.settings.node}: {where}", self.settings.service_manager)


@asynccontextmanager
async def serve(
    file: ConfigFile, settings: Settings, *, admit: Admit = door.admit
) -> AsyncIterator[Agent]:
    """Run an agent for as long as the context lasts.

    Raises ConfigError and AgentError when it cannot start. When one of its tasks fails, which is
    a bug, the context's body is cancelled and the error comes out in an ExceptionGroup.
    """
    progress = Progress()
    async with AsyncExitStack() as stack:
        sock = stack.enter_context(bound(settings.socket, mode=settings.socket_mode))
        offers: dict[str, object] = {"clock": time.time, "pages": progress.ranks}
        agent = Agent(settings, progress, await admit_all(file, offers, admit))
        stack.callback(agent.shared.disposal.end)
        stack.callback(progress.close)
        stack.callback(agent.plugins.close)
        resource_attributes = {
            "service.name": "everstep-agent",
            "service.version": agent.version,
            "host.name": settings.node,
        }
        pages = Pages(
            Exposition(resource_attributes, agent.table.latest).text,
            lambda: (agent.report.reasons(), agent.report.health()),
        )
        agent.report.listen = await stack.enter_async_context(
            served(pages, settings.host, settings.port)
        )
        stack.enter_context(_runtime_file(agent))
        listener = Listener(sock, agent.relay, agent.shared, most=settings.config.max_clients)
        # Last in, first out: the clients are hung up on when the coordinator can no longer hear
        # of it. They will be back; nobody is to think them gone.
        stack.callback(listener.stop)
        await stack.enter_async_context(_running(agent))
        listener.start()
        _say_ready(agent)
        try:
            yield agent
        finally:
            notify("STOPPING=1", settings.service_manager)


@asynccontextmanager
async def _running(agent: Agent) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(agent.turn(), name="turn"),
            group.create_task(agent.uplink.run(), name="uplink"),
            group.create_task(agent.plugins.run(), name="plugins"),
        ]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()


@contextlib.contextmanager
def _runtime_file(agent: Agent) -> Iterator[None]:
    """Write where everything is to agent.json beside the socket."""
    path = agent.settings.socket.with_name("agent.json")
    facts = {
        "node": agent.settings.node,
        "pid": os.getpid(),
        "epoch": agent.epoch,
        "version": agent.version,
        "socket": str(agent.settings.socket),
        "listen": agent.report.listen,
        "coordinators": agent.settings.coordinators,
    }
    draft = path.with_name(f".agent.json.{os.getpid()}")
    draft.write_bytes(msgspec.json.encode(facts) + b"\n")
    draft.replace(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def _say_ready(agent: Agent) -> None:
    settings = agent.settings
    log.info(
        "agent ready",
        extra={
            "node": settings.node,
            "socket": settings.socket,
            "listen": agent.report.listen,
            "coordinators": ",".join(settings.coordinators) or "none",
            "version": agent.version,
        },
    )
    notify(f"READY=1\nSTATUS={settings.node}: starting", settings.service_manager)


def run(
    config_file: Path | None,
    overrides: Overrides,
    *,
    environ: Mapping[str, str] | None = None,
    beside: Beside | None = None,
) -> None:
    """Run an agent until SIGTERM or SIGINT.

    `beside` is a coordinator to run in the same loop: it gives the `host:port` where it listens,
    and the agent goes there. Raises ConfigError and AgentError when it cannot start.
    """
    file = ConfigFile.load(config_file)
    settings = settle(file, overrides, os.environ if environ is None else environ)
    logs.set_up()
    _raise_descriptor_limit()
    gc.freeze()  # what the imports left behind is there to stay: no collection need look at it
    asyncio.run(_main(file, settings, beside))


async def _main(file: ConfigFile, settings: Settings, beside: Beside | None) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with AsyncExitStack() as stack:
        if beside is not None:
            address = await stack.enter_async_context(beside(file))
            url = coordinator_url(address, where="--with-coordinator")
            settings = replace(settings, coordinators=(url,))
        async with serve(file, settings):
            await stop.wait()
            log.info("agent stopping")


def _raise_descriptor_limit() -> None:
    # Three descriptors a client; the usual soft limit of 1024 would be reached by 340 of them.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
