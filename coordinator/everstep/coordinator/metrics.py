"""The coordinator's own metrics: counted as facts go by, the rest read when somebody asks."""

from __future__ import annotations

from collections import Counter as Tally
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from everstep.coordinator import accounts, facts, history
from everstep.coordinator.views import job_state, node_state

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.metrics_core import Metric

    from everstep.coordinator.books import JobBook
    from everstep.coordinator.hub import Hub
    from everstep.coordinator.incidents import Incident
    from everstep.coordinator.runtime import Runtime

_SECONDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2, 3, 5, 10, 30, 60, 300)
_NODE_STATES = ("healthy", "cordoned", "silent", "away", "evicted", "testing", "broken")
_MOST_JOBS = 64  # live ones with series of their own, the newest
_JOB_STATES = ("forming", "running", "recovering", "done", "failed", "stopped")


class Metrics:
    """One registry of its own: two coordinators in one process do not mix."""

    def __init__(self, runtime: Runtime, hub: Hub) -> None:
        self._runtime = runtime
        self._hub = hub
        self._registry = CollectorRegistry()
        self._incidents = self._counter("incidents", "Incidents opened.", "kind")
        self._evictions = self._counter("evictions", "Nodes evicted.", "by")
        self._generations = self._counter("generations", "Plans put in force.")
        self._decide = self._histogram("decide", "From a failure's first sign to the plan.")
        self._resume = self._histogram("resume", "From a failure's first sign to the new steps.")
        self._recovery = Histogram(
            "everstep_coordinator_recovery_seconds",
            "From a failure's first sign to the first new step of all ranks.",
            ("decision",),
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._ended_time = self._counter(
            "ended_jobs_time_seconds", "What the time of jobs that are over went into.", "kind"
        )
        incidents = runtime.cluster.books.incidents
        self._seen = {n: i for n, i in incidents.items() if i.closed_at_s is None}
        self._registry.register(self)
        runtime.watch.append(self._look)

    def exposition(self) -> tuple[bytes, str]:
        """Return the text and its content type."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST

    def collect(self) -> Iterator[Metric]:
        """Yield what is read off the live state."""
        cluster, runtime, hub = self._runtime.cluster, self._runtime, self._hub
        now_s = runtime.clock()
        nodes = Tally(node_state(cluster, n, now_s) for n in cluster.books.nodes.values())
        jobs = Tally(job_state(b, cluster.jobs.get(b.id)) for b in cluster.books.jobs.values())
        yield _by_state("nodes", "Nodes by state.", _NODE_STATES, nodes)
        yield _by_state("jobs", "Jobs by state.", _JOB_STATES, jobs)
        open_ones = sum(i.closed_at_s is None for i in cluster.books.incidents.values())
        yield _gauge("incidents_open", "Incidents not closed yet.", open_ones)
        yield _gauge("agents_connected", "Agents connected now.", len(runtime.links))
        yield _gauge("epoch", "Grows with every start.", cluster.books.epoch)
        yield _gauge("loop_lag_seconds", "How late the last tick was.", runtime.lag_s)
        yield _gauge("journal_commit_seconds", "The last commit.", runtime.journal.commit_s)
        pending = runtime.journal.last - runtime.durable
        yield _gauge("journal_pending", "Facts that are not durable yet.", pending)
        failing = float(runtime.journal.error is not None)
        yield _gauge("journal_failing", "1 while the journal cannot be written.", failing)
        yield _count("heartbeats", "Heartbeats answered.", hub.heartbeats)
        yield from self._times(now_s)
        for what, count in (
            ("malformed", hub.counts["malformed"]),
            ("refused", hub.counts["refused"]),
        ):
            yield _count(f"{what}", f"Messages or agents {what}.", count)

    def _times(self, now_s: float) -> Iterator[Metric]:
        labels = ["job", "run"]
        time = GaugeMetricFamily(
            "everstep_job_time_seconds",
            "What a live job's time went into; work that is lost moves from one kind to another.",
            labels=[*labels, "kind"],
        )
        goodput = GaugeMetricFamily(
            "everstep_job_goodput_ratio", "Steps that count, over the wall time.", labels=labels
        )
        ettr = GaugeMetricFamily(
            "everstep_job_ettr_ratio", "Effective training time, over the wall time.", labels=labels
        )
        for book in self._runtime.cluster.books.live_jobs()[-_MOST_JOBS:]:
            names = [book.id, book.spec.run_id]
            sums = self._sums(book, now_s)
            for kind, seconds in sums.items():
                time.add_metric([*names, kind], seconds)
            goodput.add_metric(names, accounts.goodput(sums) or 0.0)
            ettr.add_metric(names, accounts.ettr(sums) or 0.0)
        yield from (time, goodput, ettr)

    def _sums(self, book: JobBook, now_s: float) -> dict[accounts.Kind, float]:
        job = self._runtime.cluster.jobs.get(book.id)
        return accounts.totals(accounts.spans(history.of_book(book, job), now_s))

    def _look(self, fact: facts.AnyFact) -> None:
        match fact:
            case facts.NodeMoved(state="evicted", by=by):
                self._evictions.labels("coordinator" if by == "coordinator" else "operator").inc()
            case facts.PlanCommitted():
                self._generations.inc()
            case facts.IncidentWritten(incident=incident, at_s=at_s):
                if incident.closed_at_s in (None, at_s):  # not what came to light afterwards
                    self._look_at(incident)
            case facts.JobEnded(job=job, at_s=at_s):
                self._count_time(job, at_s)
            case _:
                pass

    def _look_at(self, incident: Incident) -> None:
        before = self._seen.get(incident.id)
        self._seen[incident.id] = incident
        if before is None:
            self._incidents.labels(incident.kind).inc()
        began_s = incident.detected_at_s
        if incident.committed_at_s is not None and (before is None or not before.committed_at_s):
            self._decide.observe(incident.committed_at_s - began_s)
        if incident.resumed_at_s is not None and (before is None or not before.resumed_at_s):
            self._resume.observe(max(0.0, incident.resumed_at_s - began_s))
            self._count_recovery(incident)
        if incident.closed_at_s is not None:
            del self._seen[incident.id]

    def _count_recovery(self, incident: Incident) -> None:
        cluster = self._runtime.cluster
        book = cluster.books.jobs.get(incident.job or "")
        if book is None:
            return
        for found in history.recoveries_from([incident], book, cluster.jobs.get(book.id)):
            self._recovery.labels(found.decision).observe(found.took_s)

    def _count_time(self, job: str, at_s: float) -> None:
        book = self._runtime.cluster.books.jobs.get(job)
        for kind, seconds in self._sums(book, at_s).items() if book is not None else ():
            self._ended_time.labels(kind).inc(seconds)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"everstep_coordinator_{name}", text, labels, registry=self._registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(
            f"everstep_coordinator_{name}_seconds",
            text,
            buckets=_SECONDS,
            registry=self._registry,
        )


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"everstep_coordinator_{name}", text, value=value)


def _count(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(f"everstep_coordinator_{name}", text, value=value)


def _by_state(
    name: str, text: str, states: tuple[str, ...], found: Tally[str]
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"everstep_coordinator_{name}", text, labels=["state"])
    for state in states:
        family.add_metric([state], found[state])
    return family
