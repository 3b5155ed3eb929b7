"""Runs one training job over the cluster and does things to it while it trains."""

from __future__ import annotations

import contextlib
import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from everstep.cli.api import Api, ApiError
from everstep.cli.demo import faults, story
from everstep.cli.demo.cluster import ClusterError
from everstep.cli.demo.report import Fault
from everstep.cli.demo.training import Recipe, arguments

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator, Sequence

    from everstep.cli.demo.cluster import Cluster, Node
    from everstep.cli.demo.story import Step

STEP_TIMEOUT_S = 120.0
_SETTLED_STEPS = 16
_POLL_S = 0.2


@dataclass
class Stage:
    """One job: its recipe, its nodes, and the view that is told of everything."""

    cluster: Cluster
    recipe: Recipe
    run_id: str
    nnodes: str
    tell: Callable[[Stage], None]
    launched: list[Node] = field(default_factory=list)
    suffered: list[Fault] = field(default_factory=list)
    now: str = ""

    @property
    def api(self) -> Api:
        """The coordinator's API."""
        return Api(self.cluster.url, self.cluster.api_token, timeout_s=3.0)

    def launch(self, nodes: Sequence[Node]) -> None:
        """Start torchrun on these nodes."""
        config = self.recipe.write()
        for node in nodes:
            self.cluster.launch(node, self.run_id, arguments(config, self.nnodes))
            if node not in self.launched:
                self.launched.append(node)

    def steps(self) -> list[Step]:
        """Return the steps that all ranks have finished so far."""
        from everstep.trainer import ledger

        folder = self.recipe.folder / "ledger"
        return story.finished(ledger.read(folder)) if folder.exists() else []

    def job(self) -> dict[str, Any] | None:
        """Return what the coordinator says of the job, None while it does not answer."""
        with contextlib.suppress(ApiError):
            for job in self.api.get("jobs")["jobs"]:
                if job["run_id"] == self.run_id:
                    found: dict[str, Any] = self.api.get(f"jobs/{job['id']}")
                    return found
        return None

    def members(self) -> list[str]:
        """Return the nodes of the generation in force."""
        job = self.job()
        plan = job.get("plan") if job else None
        return [member["node"] for member in plan["members"]] if plan else []

    def wait(self, what: str, true: Callable[[], bool], timeout_s: float = STEP_TIMEOUT_S) -> None:
        """Wait for something, showing the run meanwhile. Raises ClusterError after the timeout."""
        self.now = what
        end = time.monotonic() + timeout_s
        while not true():
            if time.monotonic() > end:
                logs = self.cluster.log("x").parent
                raise ClusterError(f"{what}: not within {timeout_s:.0f} s; see {logs}")
            self.tell(self)
            time.sleep(_POLL_S)

    def wait_for_steps(self, count: int) -> None:
        """Wait until `count` more steps are finished than now, or the last one is."""
        target = len(self.steps()) + count

        def trained() -> bool:
            steps = self.steps()
            return len(steps) >= target or (bool(steps) and steps[-1].step == self.recipe.steps)

        self.wait(f"{self.run_id}: training", trained)

    def strike(self, kind: str, rng: random.Random) -> Fault:
        """Do one fault to the run and wait until it has gone on."""
        self.wait_for_steps(_SETTLED_STEPS + rng.randrange(8))
        members = self.members()
        at_s = time.time()
        struck = faults.strike(self.cluster, kind, members, rng)
        fault = Fault(kind=kind, target=struck.target, at_s=at_s, why=faults.WHAT[kind])
        self.suffered.append(fault)
        if kind in faults.STOPS_TRAINING:
            self._await_recovery(fault)
            if struck.repair is not None:
                struck.repair()
        else:
            self._await_no_harm(fault, struck)
        return fault

    def finish(self) -> None:
        """Wait until every launcher has ended with 0. Raises ClusterError otherwise."""
        launchers = {
            node.name: node.launchers[self.run_id]
            for node in self.launched
            if self.run_id in node.launchers
        }
        self.wait(
            f"{self.run_id}: to the last step",
            lambda: all(p.poll() is not None for p in launchers.values()),
            timeout_s=300,
        )
        failed = {n: p.returncode for n, p in launchers.items() if p.returncode not in (0, -9)}
        if failed:
            logs = self.cluster.log("x").parent
            raise ClusterError(f"{self.run_id}: launchers ended with {failed}; see {logs}")

    def _await_recovery(self, fault: Fault) -> None:
        found: list[story.Recovery] = []

        def back() -> bool:
            recovery = story.recovery(self.steps(), fault.at_s)
            if recovery is not None:
                found.append(recovery)
            return bool(found)

        self.wait(f"{fault.kind} of {fault.target}: recovering", back)
        fault.resumed_s = found[0].resumed_s
        fault.steps_lost = found[0].steps_lost

    def _await_no_harm(self, fault: Fault, struck: faults.Struck) -> None:
        repair_at = time.monotonic() + (struck.repair_s or 0)
        self.wait(
            f"{fault.kind} of {fault.target}: training goes on",
            lambda: time.monotonic() >= repair_at,
        )
        if struck.repair is not None:
            struck.repair()
        self.wait(f"{fault.kind} of {fault.target}: all connected again", self._all_connected)
        self.wait_for_steps(3)
        fault.resumed_s = story.longest_gap(self.steps(), fault.at_s, time.time())
        fault.steps_lost = 0

    def _all_connected(self) -> bool:
        try:
            nodes = self.api.get("nodes")["nodes"]
        except ApiError:
            return False
        members = set(self.members())
        return all(n["connected"] for n in nodes if n["name"] in members)

    def explain(self) -> None:
        """Take detection, verdict and evictions of all faults from the coordinator's journal."""
        self.wait(f"{self.run_id}: reading the incidents", self._answers)
        incidents = self.api.get("incidents")["incidents"]
        starts = [e["at_s"] for e in self._events() if e["fact"] == "CoordinatorStarted"]
        ends = [fault.at_s for fault in self.suffered[1:]] + [math.inf]
        for fault, end_s in zip(self.suffered, ends, strict=True):
            if fault.kind == "kill-coordinator":
                _found(fault, [s for s in starts if fault.at_s < s < end_s])
            else:
                its = [i for i in incidents if fault.at_s <= i["detected_at_s"] < end_s]
                _found(fault, [i["detected_at_s"] for i in its])
                _blame(fault, sorted(its, key=_weight))

    def account(self) -> dict[str, Any]:
        """Return where the run's time went, by the coordinator's ledger."""
        found: list[dict[str, Any]] = []

        def answered() -> bool:
            job = self.job()
            found.extend([job["time"]] if job else [])
            return bool(found)

        self.wait(f"{self.run_id}: reading its ledger of time", answered)
        return found[0]

    def _events(self) -> Iterator[dict[str, Any]]:
        since = 0
        while page := self.api.get(f"events?since={since}"):
            yield from page["events"]
            if page["next"] == since:
                return
            since = page["next"]

    def _answers(self) -> bool:
        with contextlib.suppress(ApiError):
            self.api.get("incidents")
            return True
        return False


def _found(fault: Fault, times_s: Sequence[float]) -> None:
    if times_s:
        fault.detected_s = min(times_s) - fault.at_s


def _weight(incident: dict[str, Any]) -> tuple[bool, float]:
    """Order incidents by how much they explain: failures before alarms, then by time."""
    return incident["kind"] not in ("failure", "hang"), incident["detected_at_s"]


def _blame(fault: Fault, incidents: Sequence[dict[str, Any]]) -> None:
    evicted = [node for i in incidents for node in i["decision"]["evicted"]]
    fault.evicted = ", ".join(dict.fromkeys(evicted)) or None
    for incident in incidents[:1]:
        root = incident.get("root")
        fault.why = (root and root["summary"]) or incident["decision"]["why"] or fault.why
