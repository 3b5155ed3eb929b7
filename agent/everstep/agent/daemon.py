"""The agent as a process: started, kept running, stopped."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import resource
import signal
import time
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from everstep.agent import logs
from everstep.agent.assembly import Agent
from everstep.agent.config import Overrides, Settings, coordinator_url, settle
from everstep.agent.errors import AgentError
from everstep.agent.listener import Listener, bound
from everstep.agent.metrics import Exposition
from everstep.agent.plugins import admit_all
from everstep.agent.progress import Progress
from everstep.agent.web import Pages, served
from everstep.sdk import door
from everstep.sdk.config import ConfigFile
from everstep.sdk.systemd import notify

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Mapping
    from pathlib import Path

    from everstep.agent.plugins import Admit

    Beside = Callable[[ConfigFile], AbstractAsyncContextManager[str]]

log = logging.getLogger(__name__)


@asynccontextmanager
async def serve(
    file: ConfigFile, settings: Settings, *, admit: Admit = door.admit
) -> AsyncIterator[Agent]:
    """Run an agent for as long as the context lasts.

    Raises ConfigError and AgentError when it cannot start. When one of its tasks fails, which is
    a bug, the context's body is cancelled and the error comes out in an ExceptionGroup.
    """
    progress = Progress()
    offers: dict[str, object] = {"clock": time.time, "pages": progress.ranks}
    async with AsyncExitStack() as stack:
        sock = stack.enter_context(bound(settings.socket, mode=settings.socket_mode))
        agent = Agent(settings, progress, await admit_all(file, offers, admit))
        stack.callback(agent.close)
        agent.report.listen = await stack.enter_async_context(
            served(_pages(agent), settings.host, settings.port)
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


def _pages(agent: Agent) -> Pages:
    resource = {
        "service.name": "everstep-agent",
        "service.version": agent.version,
        "host.name": agent.settings.node,
    }
    return Pages(
        agent.scrape,
        Exposition(resource, agent.table.latest).text,
        lambda: (agent.report.reasons(), agent.report.health()),
    )


@asynccontextmanager
async def _running(agent: Agent) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(work, name=name) for name, work in agent.tasks().items()]
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
    _cancel_on_signals()
    with _bare_refusals(), contextlib.suppress(asyncio.CancelledError):
        async with AsyncExitStack() as stack:
            if beside is not None:
                address = await stack.enter_async_context(beside(file))
                url = coordinator_url(address, where="--with-coordinator")
                settings = replace(settings, coordinators=(url,))
            await stack.enter_async_context(serve(file, settings))
            await asyncio.Event().wait()  # for ever: only a signal ends it
    log.info("agent stopped")


@contextlib.contextmanager
def _bare_refusals() -> Iterator[None]:
    """Let an AgentError out as itself when the task group of a coordinator beside wrapped it."""
    try:
        yield
    except ExceptionGroup as group:
        if len(group.exceptions) == 1 and isinstance(group.exceptions[0], AgentError):
            raise group.exceptions[0] from None
        raise


def _cancel_on_signals() -> None:
    """Cancel the present task at the first SIGTERM or SIGINT, whatever it is waiting for."""
    loop = asyncio.get_running_loop()
    task = asyncio.current_task(loop)
    signals = (signal.SIGTERM, signal.SIGINT)

    def stop() -> None:
        for number in signals:
            loop.add_signal_handler(number, lambda: None)  # a second one must not cut the end short
        if task is not None:
            task.cancel()

    for number in signals:
        loop.add_signal_handler(number, stop)


def _raise_descriptor_limit() -> None:
    # Three descriptors a client; the usual soft limit of 1024 would be reached by 340 of them.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
