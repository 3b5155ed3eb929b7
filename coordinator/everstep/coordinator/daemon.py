"""The coordinator as a whole: its parts wired together, started and stopped."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import os
import resource
import signal
import time
import uuid
from contextlib import AsyncExitStack, asynccontextmanager
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from aiohttp import web

from everstep.coordinator.announcing import Announcers, admit_all
from everstep.coordinator.api import Api, guarded
from everstep.coordinator.books import Books
from everstep.coordinator.cluster import Cluster
from everstep.coordinator.config import Settings, is_loopback, settle
from everstep.coordinator.hub import Hub
from everstep.coordinator.journal import Journal
from everstep.coordinator.metrics import Metrics
from everstep.coordinator.runtime import Clock, Runtime
from everstep.coordinator.tracing import tracing
from everstep.coordinator.turn import Record
from everstep.sdk.config import ConfigFile
from everstep.sdk.errors import EverstepError
from everstep.sdk.systemd import notify, watchdog_interval_s

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping
    from pathlib import Path

log = logging.getLogger(__name__)

_STOP_S = 5.0
_GC_THRESHOLDS = (50_000, 20, 100)


class CannotListenError(EverstepError):
    """The address cannot be listened on: which, who may hold it, and what to do."""


@asynccontextmanager
async def serve(
    file: ConfigFile, *, listen: str | None = None, state_dir: Path | None = None
) -> AsyncIterator[str]:
    """Run a coordinator for as long as the context lasts; gives the `host:port` it listens on.

    Raises ConfigError, JournalError and CannotListenError when it cannot start. When its clock
    fails, which is a bug, the body is cancelled and the error comes out in an ExceptionGroup.
    """
    root = os.geteuid() == 0
    settings = settle(file, os.environ, root=root, listen=listen, state_dir=state_dir)
    admitted = await asyncio.to_thread(admit_all, file)
    async with AsyncExitStack() as stack:
        runtime = await _wake(stack, settings)
        announcers = Announcers(
            admitted, lambda fact: runtime.perform([Record(fact)]), runtime.clock
        )
        stack.push_async_callback(announcers.close)
        runtime.on_tell = announcers.tell
        await stack.enter_async_context(tracing(runtime, os.environ))
        address = await _listen(stack, runtime, settings, announcers)
        group = await stack.enter_async_context(asyncio.TaskGroup())
        ticking = group.create_task(runtime.tick(), name="tick")
        stack.callback(ticking.cancel)
        _say_ready(settings, address, runtime)
        yield address


def run(
    config_file: Path | None, *, listen: str | None = None, state_dir: Path | None = None
) -> None:
    """Run a coordinator until SIGTERM or SIGINT.

    Raises ConfigError, JournalError and CannotListenError when it cannot start.
    """
    import uvloop

    file = ConfigFile.load(config_file)
    _raise_descriptor_limit()
    gc.freeze()  # what the imports left behind is there to stay: no collection need look at it
    # The usual 700 is one late moment of 100 agents: collections, each longer than the pause that
    # caused it, would then follow one another. Heartbeats are freed without any.
    gc.set_threshold(*_GC_THRESHOLDS)
    uvloop.run(_main(file, listen, state_dir, os.environ))


def _raise_descriptor_limit() -> None:
    # One descriptor an agent; the usual soft limit is 1024.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def _main(
    file: ConfigFile, listen: str | None, state_dir: Path | None, environ: Mapping[str, str]
) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with serve(file, listen=listen, state_dir=state_dir) as address:
        notify(f"READY=1\nSTATUS=listening on {address}", environ)
        pinging = asyncio.create_task(_ping(environ))
        try:
            await stop.wait()
        finally:
            notify("STOPPING=1", environ)
            pinging.cancel()
            await asyncio.gather(pinging, return_exceptions=True)
    log.info("coordinator stopped")


async def _ping(environ: Mapping[str, str]) -> None:
    interval_s = watchdog_interval_s(environ)
    if interval_s is None:
        return
    while True:
        notify("WATCHDOG=1", environ)
        await asyncio.sleep(interval_s)


async def _wake(stack: AsyncExitStack, settings: Settings) -> Runtime:
    """Open the journal, replay it, and take it over with a new epoch."""
    loop = asyncio.get_running_loop()
    clock = Clock()

    def committed(seq: int) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, nobody waits any more
            loop.call_soon_threadsafe(lambda: runtime.is_durable(seq))

    journal, books = await asyncio.to_thread(_replay, settings, committed, clock())
    stack.callback(journal.close)
    cluster = Cluster(books, settings.config, now_s=clock(), nonce=lambda: uuid.uuid4().hex[:16])
    runtime = Runtime(cluster, journal, clock)
    runtime.perform(cluster.start(clock(), version("everstep")))
    await runtime.settle()  # nobody hears of an epoch that a crash could give out again
    return runtime


def _replay(
    settings: Settings, committed: Callable[[int], None], now_s: float
) -> tuple[Journal, Books]:
    began_s = time.monotonic()
    journal = Journal(settings.state_dir, committed)
    try:
        forgotten = journal.forget_jobs(ended_before_s=now_s - settings.config.forget_jobs_s)
        books, entries = Books(), journal.read()
        for entry in entries:
            books.apply(entry.fact)
    except BaseException:
        journal.close()
        raise
    took_s = round(time.monotonic() - began_s, 3)
    log.info(
        "journal replayed",
        extra={"facts": len(entries), "jobs_forgotten": forgotten, "took_s": took_s},
    )
    return journal, books


async def _listen(
    stack: AsyncExitStack, runtime: Runtime, settings: Settings, announcers: Announcers
) -> str:
    hub = Hub(runtime, settings.token)
    stopping = asyncio.Event()
    facts = _Facts(settings, runtime, announcers)
    api = Api(runtime, Metrics(runtime, hub), status=facts.status, stopping=stopping)
    app = web.Application(middlewares=[guarded(settings.token)])
    app.add_routes([*api.routes(), web.get("/v1/agent", hub.agent)])
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=_STOP_S)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    site = web.TCPSite(runner, settings.host, settings.port, backlog=4096)
    try:
        await site.start()
    except OSError as exc:
        raise CannotListenError(_why_not(settings, exc)) from exc
    stack.push_async_callback(hub.close)
    stack.callback(runtime.is_durable, runtime.durable)  # wakes the streams, after:
    stack.callback(stopping.set)
    host, port = runner.addresses[0][:2]
    facts.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return facts.address


class _Facts:
    """What the coordinator tells of itself."""

    def __init__(self, settings: Settings, runtime: Runtime, announcers: Announcers) -> None:
        self.address = ""
        self._settings = settings
        self._runtime = runtime
        self._announcers = announcers
        self._started_s = runtime.clock()

    def status(self) -> dict[str, Any]:
        """Return the answer to GET /v1/status."""
        runtime, books = self._runtime, self._runtime.cluster.books
        return {
            "version": version("everstep"),
            "epoch": books.epoch,
            "mode": self._settings.config.mode,
            "listen": self.address,
            "pid": os.getpid(),
            "started_at_s": self._started_s,
            "now_s": runtime.clock(),
            "agents_connected": len(runtime.links),
            "jobs_live": len(runtime.cluster.jobs),
            "incidents_open": sum(i.closed_at_s is None for i in books.incidents.values()),
            "loop_lag_s": runtime.lag_s,
            "journal": {
                "path": str(runtime.journal.path),
                "last": runtime.journal.last,
                "durable": runtime.durable,
                "error": runtime.journal.error,
            },
            "plugins": self._announcers.listing(),
        }


def _why_not(settings: Settings, exc: OSError) -> str:
    where = f"{settings.host}:{settings.port}"
    if exc.errno == errno.EADDRINUSE:
        return (
            f"cannot listen on {where}: another process does, probably another coordinator "
            f"(`ss -ltnp 'sport = :{settings.port}'` names it); stop that one, or choose another "
            "address with --listen"
        )
    return f"cannot listen on {where}: {exc.strerror}; choose another address with --listen"


def _say_ready(settings: Settings, address: str, runtime: Runtime) -> None:
    log.info(
        "coordinator ready",
        extra={
            "listen": address,
            "epoch": runtime.cluster.books.epoch,
            "mode": settings.config.mode,
            "journal": str(runtime.journal.path),
        },
    )
    if not settings.token and not is_loopback(settings.host):
        log.warning("no token is set: whoever reaches this address may stop jobs")
