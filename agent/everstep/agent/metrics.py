"""OpenTelemetry instruments over the table of readings, as text for Prometheus."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import AlwaysOffExemplarFilter, MeterProvider
from opentelemetry.sdk.resources import Resource
from prometheus_client import CollectorRegistry, generate_latest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from opentelemetry.metrics import Meter

    from everstep.wire.messages import Reading

_Attributes: TypeAlias = tuple[tuple[str, str], ...]
_Shape: TypeAlias = tuple[str, bool, str]

_STALE_SERIES = 1000


class Exposition:
    """Turns readings into instruments, one a name, made when the name is first seen.

    The SDK never forgets a set of attributes, and jobs come and go: when `stale_series` of the
    sets that it knows are gone from the table, everything is made anew. All values are absolute,
    so nothing is lost by that and memory stays flat.
    """

    def __init__(
        self,
        resource: Mapping[str, str],
        latest: Callable[[], Sequence[Reading]],
        *,
        stale_series: int = _STALE_SERIES,
    ) -> None:
        self._resource = Resource(dict(resource))
        self._latest = latest
        self._stale_series = stale_series
        self._make()

    def text(self) -> bytes:
        """Return all present readings in Prometheus' text form. One caller at a time."""
        self._sort(self._latest())
        if len(self._known) - len(self._present) > self._stale_series:
            self._provider.shutdown()
            self._make()
            self._sort(self._latest())
        return generate_latest(self._registry)

    def _make(self) -> None:
        self._registry = CollectorRegistry()
        reader = PrometheusMetricReader(registry=self._registry, scope_info_enabled=False)
        self._provider = MeterProvider(
            [reader],
            self._resource,
            exemplar_filter=AlwaysOffExemplarFilter(),
            shutdown_on_exit=False,
        )
        self._meter: Meter = self._provider.get_meter("everstep.agent")
        self._by_name: dict[str, dict[_Attributes, Reading]] = {}
        self._shapes: dict[str, _Shape] = {}
        self._present: set[tuple[str, _Attributes]] = set()
        self._known: set[tuple[str, _Attributes]] = set()

    def _sort(self, readings: Iterable[Reading]) -> None:
        self._by_name = {}
        for reading in readings:
            shape = (reading.unit, reading.counter, reading.name)
            if reading.value is None or self._shape(reading) != shape:
                continue
            attributes = tuple(sorted(reading.attributes.items()))
            self._by_name.setdefault(reading.name, {})[attributes] = reading
        self._present = {(n, attrs) for n, series in self._by_name.items() for attrs in series}
        self._known |= self._present

    def _shape(self, reading: Reading) -> _Shape:
        # One name is one instrument: who names it first decides on unit and kind. To Prometheus
        # a.b and a_b are one name too.
        shape = self._shapes.get(reading.name.replace(".", "_"))
        if shape is None:
            shape = (reading.unit, reading.counter, reading.name)
            self._shapes[reading.name.replace(".", "_")] = shape
            make = (
                self._meter.create_observable_counter
                if reading.counter
                else self._meter.create_observable_gauge
            )
            make(reading.name, [self._observer(reading.name)], unit=reading.unit)
        return shape

    def _observer(self, name: str) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def observe(_: CallbackOptions) -> Iterable[Observation]:
            for reading in self._by_name.get(name, {}).values():
                if reading.value is not None:
                    yield Observation(reading.value, reading.attributes)

        return observe
