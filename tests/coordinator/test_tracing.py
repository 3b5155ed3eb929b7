"""A recovery as a trace: written when it is over, with the times that things had."""

from __future__ import annotations

import logging

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from tests.coordinator.world import World

from everstep.coordinator.facts import IncidentWritten
from everstep.coordinator.tracing import Recoveries, exporter_of


def traced(world: World) -> list[ReadableSpan]:
    """Return the spans of everything in a world's journal, in order of their beginning."""
    kept = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    writer = Recoveries(world.cluster, provider.get_tracer("test"))
    for fact in world.journal:
        writer.look(fact)
    provider.shutdown()
    return sorted(kept.get_finished_spans(), key=lambda s: (s.parent is not None, s.start_time))


def recovered() -> World:
    world = World(["a", "b"])
    world.snapshot_every = 5
    world.launch_all(["a", "b"], nnodes=(2, 2))
    world.until(lambda: world.steps() >= 8)
    world.kill_rank(1)
    world.until(lambda: world.failures()[-1].closed_at_s)
    return world


def test_a_recovery_is_one_trace_whose_children_tile_it() -> None:
    world = recovered()
    root, *children = traced(world)
    assert root.name == "recovery"
    assert root.attributes is not None
    incident = world.failures()[0]
    assert root.attributes["everstep.incident.id"] == incident.id
    assert root.attributes["everstep.culprit.node"] == "b"
    assert root.attributes["everstep.decision"] == "restart"
    assert root.attributes["everstep.steps_lost"] == incident.steps_lost == 3
    assert children
    ends = [root.start_time, *(c.end_time for c in children)]
    assert ends[:-1] == [c.start_time for c in children]
    assert ends[-1] == root.end_time
    assert {c.parent.span_id for c in children if c.parent} == {root.context.span_id}


def test_what_comes_to_light_after_a_recovery_is_no_second_one() -> None:
    world = recovered()
    closed = [f for f in world.facts(IncidentWritten) if f.incident.closed_at_s is not None][-1]
    world.journal.append(IncidentWritten(at_s=closed.at_s + 5, incident=closed.incident))
    assert len([s for s in traced(world) if s.parent is None]) == 1


def test_without_the_usual_variables_nothing_is_traced() -> None:
    assert exporter_of({}) is None
    assert exporter_of({"OTEL_TRACES_EXPORTER": "none"}) is None
    assert exporter_of({"OTEL_TRACES_EXPORTER": "console", "OTEL_SDK_DISABLED": "true"}) is None


def test_an_exporter_is_chosen_by_its_usual_name() -> None:
    assert isinstance(exporter_of({"OTEL_TRACES_EXPORTER": "console"}), ConsoleSpanExporter)


@pytest.mark.parametrize(
    ("environ", "package"),
    [
        ({"OTEL_TRACES_EXPORTER": "zipkin_of_old"}, "opentelemetry-exporter-zipkin-of-old"),
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            "opentelemetry-exporter-otlp-proto-grpc",
        ),
    ],
)
def test_one_that_is_not_installed_costs_one_clear_line_and_no_more(
    environ: dict[str, str], package: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        assert exporter_of(environ) is None
    (record,) = caplog.records
    assert record.__dict__["hint"] == f"pip install {package}"
