"""The account of a real job's time against the clock, its ranks' own ledger, and its spans."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from everstep.cli.demo.cluster import Cluster
from everstep.cli.demo.faults import rank_pids
from everstep.cli.demo.stage import Stage
from everstep.cli.demo.training import Recipe
from everstep.trainer import ledger, prepare_bytes

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

STEPS, SNAPSHOT_EVERY = 60, 10


@pytest.fixture(autouse=True)
def _traces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator prints its spans into its log, soon."""
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")


@pytest.fixture
def stage(_traces: None, cluster: Cluster, out: Path) -> Stage:
    source = out / "text"
    source.write_bytes(b"every second is accounted for. " * 2000)
    data = out / "text.bin"
    prepare_bytes([source], data)
    recipe = Recipe(out / "run", data, STEPS, seed=1, snapshot_every=SNAPSHOT_EVERY)
    return Stage(cluster, recipe, "run", "2", lambda _: None)


def spans(log: Path) -> list[dict[str, Any]]:
    """Return the spans among whatever else a coordinator printed."""
    text = log.read_text(errors="replace")
    decoder = json.JSONDecoder()
    found: list[dict[str, Any]] = []
    at = 0
    while (at := text.find('{\n    "name"', at)) >= 0:
        try:
            span, at = decoder.raw_decode(text, at)
        except ValueError:
            return found  # it is still being written
        found.append(span)
    return found


def rank_lines(folder: Path) -> Iterator[tuple[int, int, float]]:
    """Yield generation, step and time of every step that rank 0 put down."""
    for book in ledger.read(folder):
        if book.chapter.rank == 0:
            for line in book.lines:
                yield book.chapter.generation, line.step, line.at_s


def test_a_killed_rank_costs_what_its_ledger_says_and_leaves_a_trace(
    cluster: Cluster, stage: Stage
) -> None:
    nodes = [cluster.add_node(name) for name in "ab"]
    stage.launch(nodes)
    stage.wait("steps", lambda: bool(stage.steps()) and stage.steps()[-1].step >= 15)
    killed_s = time.time()
    os.kill(rank_pids(nodes[1])[0][1], signal.SIGKILL)
    stage.wait("new steps", lambda: stage.steps()[-1].generation == 2)
    stage.finish()
    job = stage.job()
    assert job is not None
    account = job["time"]

    wall_s = job["over"]["at_s"] - job["created_at_s"]
    assert sum(account["kinds"].values()) == pytest.approx(wall_s, rel=0.01)
    for kind in ("waiting", "start", "rendezvous", "load", "productive", "detection", "teardown"):
        assert account["kinds"][kind] > 0, (kind, account)
    assert account["kinds"]["unknown"] < 0.01 * wall_s

    lines = list(rank_lines(stage.recipe.folder / "ledger"))
    first, second = ([x for x in lines if x[0] == g] for g in (1, 2))
    from_step = second[0][1] - 1
    kept_until_s = max(at for _, step, at in first if step <= from_step)
    assert account["kinds"]["lost_work"] == pytest.approx(killed_s - kept_until_s, abs=0.5)

    (recovery,) = account["recoveries"]
    assert recovery["steps_lost"] == first[-1][1] - from_step
    assert recovery["began_at_s"] == pytest.approx(killed_s, abs=0.5)
    resumed_s = recovery["began_at_s"] + recovery["took_s"]
    assert resumed_s == pytest.approx(second[0][2], abs=0.5)
    assert account["mttr_s"] == pytest.approx(recovery["took_s"])
    assert account["goodput"] <= account["ettr"] < 1

    _check_spans(cluster, recovery)
    _check_shown(cluster)


def _check_spans(cluster: Cluster, recovery: dict[str, Any]) -> None:
    end = time.monotonic() + 20
    while not (found := spans(cluster.log("coordinator"))):
        assert time.monotonic() < end, "no span was written"
        time.sleep(0.1)
    (root,) = [s for s in found if s["parent_id"] is None]
    assert root["name"] == "recovery"
    assert root["attributes"]["everstep.job.run"] == "run"
    assert root["attributes"]["everstep.decision"] == "restart"
    children = [s for s in found if s["parent_id"] == root["context"]["span_id"]]
    assert [c["name"] for c in children] == [p["phase"] for p in recovery["phases"]]
    assert {"detection", "start", "load", "first_step"} <= {c["name"] for c in children}
    assert {c["context"]["trace_id"] for c in children} == {root["context"]["trace_id"]}


def _check_shown(cluster: Cluster) -> None:
    command = [sys.executable, "-m", "everstep.cli", "jobs", "show", "run"]
    where = ["--coordinator", cluster.url, "--token", cluster.api_token]
    shown = subprocess.run(
        [*command, *where], check=True, capture_output=True, text=True, timeout=60
    ).stdout
    for part in ("where its time went", "productive", "lost work", "goodput", "ETTR", "MTTR"):
        assert part in shown, shown
