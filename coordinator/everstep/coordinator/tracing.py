"""Each recovery as one OpenTelemetry trace, when the usual OTEL_* variables ask for it.

Spans are written when a recovery is over, with the times that things really had: nothing is traced
while it happens, and without the variables nothing of OpenTelemetry is even imported.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from contextlib import asynccontextmanager
from importlib.metadata import entry_points, version
from typing import TYPE_CHECKING

from everstep.coordinator import facts, history

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Tracer

    from everstep.coordinator.books import JobBook
    from everstep.coordinator.cluster import Cluster
    from everstep.coordinator.facts import AnyFact
    from everstep.coordinator.history import Recovery
    from everstep.coordinator.runtime import Runtime

log = logging.getLogger(__name__)

_GROUP = "opentelemetry_traces_exporter"
_SHUTDOWN_S = 3.0


@asynccontextmanager
async def tracing(runtime: Runtime, environ: Mapping[str, str]) -> AsyncIterator[None]:
    """Trace recoveries for as long as the context lasts, if the environment asks for it."""
    exporter = exporter_of(environ)
    if exporter is None:
        yield
        return
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    named = {"service.name": "everstep-coordinator", "service.version": version("everstep")}
    resource = Resource.create(named).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    runtime.watch.append(Recoveries(runtime.cluster, provider.get_tracer("everstep")).look)
    try:
        yield
    finally:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SHUTDOWN_S):
                await asyncio.to_thread(provider.shutdown)


def exporter_of(environ: Mapping[str, str]) -> SpanExporter | None:
    """Return the exporter that OTEL_TRACES_EXPORTER names, or OTEL_EXPORTER_OTLP_* imply.

    None when nothing is asked for, and, with one line in the log, when it is not installed.
    """
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    endpoints = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    implied = "otlp" if any(environ.get(name) for name in endpoints) else "none"
    asked = environ.get("OTEL_TRACES_EXPORTER", "").strip() or implied
    if asked == "none":
        return None
    names = _otlp_names(environ) if asked == "otlp" else (asked,)
    try:
        for name in names:
            for found in entry_points(group=_GROUP, name=name):
                exporter: SpanExporter = found.load()()
                return exporter
    except Exception as exc:  # noqa: BLE001  somebody else's package: it must not keep us from work
        log.error(  # noqa: TRY400  the reason is in one line
            "recoveries are not traced: the exporter cannot be started",
            extra={"exporter": asked, "why": f"{type(exc).__name__}: {exc}"},
        )
        return None
    hint = f"pip install opentelemetry-exporter-{names[0].replace('_', '-')}"
    log.error("recoveries are not traced: no such exporter is installed", extra={"hint": hint})
    return None


def _otlp_names(environ: Mapping[str, str]) -> tuple[str, ...]:
    protocol = environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or environ.get(
        "OTEL_EXPORTER_OTLP_PROTOCOL", ""
    )
    if protocol == "grpc":
        return ("otlp_proto_grpc",)
    return ("otlp_proto_http",) if protocol else ("otlp_proto_http", "otlp_proto_grpc")


class Recoveries:
    """Writes a trace for each incident that a job has recovered from."""

    def __init__(self, cluster: Cluster, tracer: Tracer) -> None:
        self._cluster = cluster
        self._tracer = tracer

    def look(self, fact: AnyFact) -> None:
        """Take one fact as it goes by."""
        if not isinstance(fact, facts.IncidentWritten):
            return
        incident = fact.incident
        if incident.closed_at_s != fact.at_s:
            return  # not the one that closes it
        book = self._cluster.books.jobs.get(incident.job or "")
        if book is not None:
            job = self._cluster.jobs.get(book.id)
            for recovery in history.recoveries_from([incident], book, job):
                write(self._tracer, recovery, book)


def write(tracer: Tracer, recovery: Recovery, book: JobBook) -> None:
    """Write one recovery: a root span, and one child for each of its phases."""
    from opentelemetry.context import Context
    from opentelemetry.trace import set_span_in_context

    root = tracer.start_span(
        "recovery",
        context=Context(),
        start_time=_ns(recovery.began_at_s),
        attributes=_attributes(recovery, book),
    )
    within = set_span_in_context(root, Context())
    for name, begin_s, end_s in recovery.phases:
        child = tracer.start_span(name, context=within, start_time=_ns(begin_s))
        child.end(_ns(end_s))
    root.end(_ns(recovery.resumed_at_s))


def _attributes(recovery: Recovery, book: JobBook) -> dict[str, str | int]:
    incident, root = recovery.incident, recovery.incident.root
    culprit = {} if root is None else {"node": root.node, "rank": root.rank, "layer": root.layer}
    named: dict[str, str | int | None] = {
        "everstep.job.id": book.id,
        "everstep.job.run": book.spec.run_id,
        "everstep.generation": recovery.generation,
        "everstep.incident.id": incident.id,
        "everstep.incident.kind": incident.kind,
        "everstep.decision": recovery.decision,
        "everstep.steps_lost": incident.steps_lost,
        "everstep.culprit": None if root is None else root.summary,
        **{f"everstep.culprit.{name}": value for name, value in culprit.items()},
    }
    return {name: value for name, value in named.items() if value is not None}


def _ns(at_s: float) -> int:
    return int(at_s * 1e9)
