"""The HTTP API under /v1: facts as JSON, requests with a reason, events as they happen."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from everstep.coordinator import views
from everstep.coordinator.journal import JournalError
from everstep.coordinator.operator import NoSuchThingError, Operator, OperatorError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from everstep.coordinator.books import JobBook
    from everstep.coordinator.metrics import Metrics
    from everstep.coordinator.runtime import Runtime

    Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]

log = logging.getLogger(__name__)

_MAX_EVENTS = 1000
_KEEP_ALIVE_S = 15.0
_MOST_DIGITS = 18
_OPEN_PATHS = frozenset({"/healthz", "/v1/agent"})  # an agent shows its token in its hello


class _Wish(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of a request that changes something."""

    reason: str
    by: str = "operator"


class Api:
    """The routes. `status` gives what the daemon knows of itself."""

    def __init__(
        self,
        runtime: Runtime,
        metrics: Metrics,
        *,
        status: Callable[[], dict[str, Any]],
        stopping: asyncio.Event,
    ) -> None:
        self._runtime = runtime
        self._cluster = runtime.cluster
        self._metrics = metrics
        self._status = status
        self._stopping = stopping

    def routes(self) -> list[web.RouteDef]:
        """Return all of them but the agents'."""
        return [
            web.get("/healthz", self.healthz),
            web.get("/metrics", self.metrics),
            web.get("/v1/status", self.status),
            web.get("/v1/jobs", self.jobs),
            web.get("/v1/jobs/{id}", self.job),
            web.get("/v1/nodes", self.nodes),
            web.get("/v1/nodes/{name}", self.node),
            web.get("/v1/generations", self.generations),
            web.get("/v1/incidents", self.incidents),
            web.get("/v1/incidents/{id}", self.incident),
            web.get("/v1/events", self.events),
            web.get("/v1/events/stream", self.stream),
            web.post("/v1/nodes/{name}/{verb:cordon|uncordon|evict|readmit}", self.act_on_node),
            web.post("/v1/jobs/{id}/stop", self.stop),
            web.post("/v1/incidents/{id}/approve", self.approve),
        ]

    # ------------------------------------------------------------------------ facts

    async def healthz(self, _: web.Request) -> web.Response:
        """Say whether decisions can be made now."""
        error = self._runtime.journal.error
        if error is not None:
            return web.json_response({"status": "failing", "error": error}, status=503)
        return web.json_response({"status": "ok"})

    async def metrics(self, _: web.Request) -> web.Response:
        """Return the metrics in Prometheus' format."""
        body, content_type = self._metrics.exposition()
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def status(self, _: web.Request) -> web.Response:
        """Return what the coordinator knows of itself."""
        return web.json_response(self._status())

    async def jobs(self, _: web.Request) -> web.Response:
        """Return one line for each job, oldest first."""
        now_s, cluster = self._runtime.clock(), self._cluster
        found = [views.job_summary(cluster, b, now_s) for b in cluster.books.jobs.values()]
        return web.json_response({"jobs": found})

    async def job(self, request: web.Request) -> web.Response:
        """Return one job, by id or by the name of its run (the newest of that name)."""
        book = self._job(request.match_info["id"])
        return web.json_response(views.job_detail(self._cluster, book, self._runtime.clock()))

    async def nodes(self, _: web.Request) -> web.Response:
        """Return all nodes by name."""
        now_s, cluster = self._runtime.clock(), self._cluster
        books = sorted(cluster.books.nodes.values(), key=lambda n: n.name)
        return web.json_response({"nodes": [views.node_view(cluster, b, now_s) for b in books]})

    async def node(self, request: web.Request) -> web.Response:
        """Return one node."""
        return web.json_response(self._node_view(request.match_info["name"]))

    async def generations(self, request: web.Request) -> web.Response:
        """Return the history of one job's plans, or of all jobs'."""
        asked = request.query.get("job")
        books = [self._job(asked)] if asked else list(self._cluster.books.jobs.values())
        found = [g for book in books for g in views.generation_views(book)]
        return web.json_response({"generations": found})

    async def incidents(self, request: web.Request) -> web.Response:
        """Return incidents, oldest first; `job`, `open` and `limit` narrow them down."""
        found = list(self._cluster.books.incidents.values())
        if asked := request.query.get("job"):
            wanted = self._job(asked).id
            found = [i for i in found if i.job == wanted]
        if request.query.get("open", "0") not in ("0", "false"):
            found = [i for i in found if i.closed_at_s is None]
        found = found[-_number(request, "limit", default=200, most=10_000) :]
        return web.json_response({"incidents": [views.incident_summary(i) for i in found]})

    async def incident(self, request: web.Request) -> web.Response:
        """Return one incident with its evidence."""
        number = _incident_number(request)
        incident = self._cluster.books.incidents.get(number)
        if incident is None:
            raise NoSuchThingError(f"no incident {number}; `everstep incidents` lists them")
        return web.json_response(views.incident_detail(incident))

    async def events(self, request: web.Request) -> web.Response:
        """Return the journal's facts after `since`, at most `limit`; `next` is where to go on."""
        since = _number(request, "since", default=0, most=10**_MOST_DIGITS)
        limit = _number(request, "limit", default=200, most=_MAX_EVENTS)
        found = await self._read(since, limit)
        last = found[-1]["seq"] if found else since
        return web.json_response({"events": found, "next": last})

    async def stream(self, request: web.Request) -> web.StreamResponse:
        """Send events as they become durable; `Last-Event-ID` or `since` is where to go on."""
        headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-store"}
        last = request.headers.get("Last-Event-ID") or request.query.get("since")
        since = self._runtime.durable
        if last is not None:
            since = _whole(last, "an event's id is a number")
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):  # whoever listened is gone
            await response.write(b": everstep events\n\n")
            while not self._stopping.is_set():
                since = await self._send_events(response, since)
        return response

    async def _send_events(self, response: web.StreamResponse, since: int) -> int:
        committed = self._runtime.committed
        found = await self._read(since, _MAX_EVENTS)
        for view in found:
            text = json.dumps(view, separators=(",", ":"))
            event = f"id: {view['seq']}\nevent: {view['fact']}\ndata: {text}\n\n"
            await response.write(event.encode())
        if found:
            return int(found[-1]["seq"])
        try:
            async with asyncio.timeout(_KEEP_ALIVE_S):
                await committed.wait()
        except TimeoutError:
            await response.write(b": still here\n\n")  # fails when nobody reads any more
        return since

    # ------------------------------------------------------------------------ requests

    async def act_on_node(self, request: web.Request) -> web.Response:
        """Cordon, uncordon, evict or readmit a node."""
        name, verb = request.match_info["name"], request.match_info["verb"]
        operator, reason = await self._operator(request)
        getattr(operator, verb)(name, reason)
        await self._done(operator)
        return web.json_response({"ok": True, "node": self._node_view(name)})

    async def stop(self, request: web.Request) -> web.Response:
        """Stop a job."""
        operator, reason = await self._operator(request)
        book = self._job(request.match_info["id"])
        operator.stop(book.id, reason)
        await self._done(operator)
        view = views.job_summary(self._cluster, book, self._runtime.clock())
        return web.json_response({"ok": True, "job": view})

    async def approve(self, request: web.Request) -> web.Response:
        """Carry out what an incident proposes."""
        operator, reason = await self._operator(request)
        number = _incident_number(request)
        operator.approve(number, reason)
        await self._done(operator)
        incident = self._cluster.books.incidents[number]
        return web.json_response({"ok": True, "incident": views.incident_summary(incident)})

    # ------------------------------------------------------------------------ parts

    async def _operator(self, request: web.Request) -> tuple[Operator, str]:
        try:
            wish = msgspec.json.decode(await request.read(), type=_Wish)
        except msgspec.MsgspecError as exc:
            raise web.HTTPBadRequest(
                text=f'the body must be JSON like {{"reason": "why"}}: {exc}'
            ) from exc
        if not wish.reason.strip():
            raise web.HTTPBadRequest(text="a reason is needed: it is journaled with the request")
        return Operator(self._cluster, self._runtime.clock(), wish.by), wish.reason

    async def _done(self, operator: Operator) -> None:
        self._runtime.perform(operator.effects)
        await self._runtime.settle()  # what was answered with "ok" survives everything

    def _job(self, asked: str) -> JobBook:
        books = self._cluster.books.jobs
        if asked in books:
            return books[asked]
        named = [b for b in books.values() if b.spec.run_id == asked]
        if not named:
            raise NoSuchThingError(f"no job {asked!r}; `everstep jobs` lists them")
        live = [b for b in named if b.over is None]
        if len(live) > 1:  # of different users: a name must not stop a stranger's job
            ids = ", ".join(f"{b.id} of user {b.spec.uid}" for b in live)
            raise OperatorError(f"{len(live)} live jobs are called {asked!r}: say which: {ids}")
        return live[0] if live else named[-1]

    def _node_view(self, name: str) -> views.View:
        book = self._cluster.books.nodes.get(name)
        if book is None:
            raise NoSuchThingError(f"no node {name!r} was ever heard; `everstep nodes` lists them")
        return views.node_view(self._cluster, book, self._runtime.clock())

    async def _read(self, since: int, limit: int) -> list[views.View]:
        journal = self._runtime.journal
        entries = await asyncio.to_thread(journal.read, since=since, limit=limit)
        return [views.event_view(entry) for entry in entries]


def guarded(token: str) -> Any:
    """Return the middleware that asks for the token and turns every error into JSON."""

    @web.middleware
    async def middleware(request: web.Request, handler: Answer) -> web.StreamResponse:
        if token and request.path not in _OPEN_PATHS and not _may(request, token):
            why = "this coordinator asks for its token: Authorization: Bearer ..."
            headers = {"WWW-Authenticate": "Bearer"}
            return web.json_response({"error": why}, status=401, headers=headers)
        try:
            return await handler(request)
        except OperatorError as exc:
            return _error(str(exc), exc.status)
        except web.HTTPException as exc:
            return _error(_reason(request, exc), exc.status)
        except JournalError as exc:
            return _error(str(exc), 500)
        except Exception:
            log.exception("request failed", extra={"path": request.path})
            return _error("the coordinator failed at this; its log says more", 500)

    return middleware


def _may(request: web.Request, token: str) -> bool:
    scheme, _, shown = request.headers.get("Authorization", "").partition(" ")
    return scheme.lower() == "bearer" and hmac.compare_digest(
        shown.strip().encode(errors="surrogateescape"), token.encode()
    )


def _error(why: str, status: int) -> web.Response:
    return web.json_response({"error": why}, status=status)


def _reason(request: web.Request, exc: web.HTTPException) -> str:
    if exc.status == web.HTTPNotFound.status_code:
        return f"nothing at {request.path}; the API is under /v1, e.g. /v1/jobs, /v1/nodes"
    if exc.status == web.HTTPMethodNotAllowed.status_code:
        return f"{request.method} is not for {request.path}"
    return exc.text or exc.reason


def _number(request: web.Request, name: str, *, default: int, most: int) -> int:
    text = request.query.get(name)
    if text is None:
        return default
    return min(_whole(text, f"{name} is a number"), most)


def _incident_number(request: web.Request) -> int:
    return _whole(request.match_info["id"], "an incident's id is a number")


def _whole(text: str, what: str) -> int:
    """Return a whole number that Python and SQLite take."""
    if not (text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS):
        raise web.HTTPBadRequest(text=f"{what}, not {text[:_MOST_DIGITS]!r}")
    return int(text)
