"""/metrics and /healthz."""

from __future__ import annotations

import asyncio
import contextlib
import errno
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from everstep.agent.errors import AgentError
from everstep.sdk.guard import Failed, Guard

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

SCRAPE_S = 10.0


class Pages:
    """Answers requests; the text of /metrics is made in a thread, one scrape at a time."""

    def __init__(
        self,
        before: Callable[[], None],
        metrics: Callable[[], bytes],
        health: Callable[[], tuple[list[str], Mapping[str, object]]],
    ) -> None:
        """`before` runs in the loop before each scrape, `metrics` in the thread.

        `health` returns the reasons why the agent is not healthy, and the facts to show.
        """
        self._before = before
        self._metrics = metrics
        self._health = health
        self._guard = Guard("scrape", timeout_s=SCRAPE_S)
        self._turn = asyncio.Lock()

    def application(self) -> web.Application:
        """Return the application with all routes."""
        app = web.Application()
        app.router.add_get("/metrics", self._serve_metrics)
        app.router.add_get("/healthz", self._serve_health)
        return app

    async def _serve_metrics(self, _: web.Request) -> web.Response:
        async with self._turn:
            self._before()
            outcome = await self._guard.call(self._metrics)
        if isinstance(outcome, Failed):
            return web.Response(status=503, text=f"metrics: {outcome.why}\n")
        return web.Response(body=outcome.value, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _serve_health(self, _: web.Request) -> web.Response:
        reasons, facts = self._health()
        status = "unhealthy" if reasons else "healthy"
        body = msgspec.json.encode({"status": status, "reasons": reasons, **facts})
        return web.Response(
            body=body, status=503 if reasons else 200, content_type="application/json"
        )

    def close(self) -> None:
        """Let the thread end."""
        self._guard.close()


@contextlib.asynccontextmanager
async def served(pages: Pages, host: str, port: int) -> AsyncIterator[str]:
    """Serve the pages and give the `host:port` where they are; port 0 takes a free one.

    Raises AgentError when the port is taken or the address is not ours.
    """
    runner = web.AppRunner(
        pages.application(), access_log=None, handle_signals=False, shutdown_timeout=0.5
    )
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as exc:
            raise AgentError(_why(host, port, exc)) from exc
        host, port = runner.addresses[0][:2]
        yield f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    finally:
        await runner.cleanup()
        pages.close()


def _why(host: str, port: int, exc: OSError) -> str:
    if exc.errno == errno.EADDRINUSE:
        return (
            f"port {port} of {host} is in use, perhaps by another agent: choose another one with "
            "--listen HOST:PORT (port 0 takes a free one) or `listen` in [agent]"
        )
    return f"cannot serve /metrics on {host}:{port}: {exc.strerror or exc}; see --listen"
