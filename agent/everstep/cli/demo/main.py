"""`everstep demo`: everything that can break, broken on purpose, and what became of the run."""

from __future__ import annotations

import contextlib
import random
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from everstep.cli.demo import faults, story
from everstep.cli.demo.cluster import Cluster, ClusterError
from everstep.cli.demo.live import View
from everstep.cli.demo.report import Fault, Report, lost_s, picture, table, time_table
from everstep.cli.demo.stage import Stage
from everstep.cli.demo.training import GLOBAL_BATCH, Recipe, library_bytes
from everstep.cli.job_time import share
from everstep.sdk.config import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from everstep.cli.demo.cluster import Node

NODES, TRAINING = 5, 3
STEPS_AT_REST, STEPS_PER_FAULT = 40, 60
STORMY_STEP_S = 0.1  # a fast machine must not be done before the last fault is
ELASTIC_STEPS = 250
GROWN = 3  # the generation after the first and the one that shrank
FAILED = 1
GROW_SOON = "grow_settle_s = 2.0\n"
PIPE_WIDTH = 160


def demo(
    out: Annotated[
        Path, typer.Option(help="Folder for the report, the picture and all logs.")
    ] = Path("everstep-demo"),
    faults_: Annotated[
        str,
        typer.Option(
            "--faults",
            help=f"Which faults, in this order, separated by commas: {', '.join(faults.KINDS)}.",
        ),
    ] = ",".join(faults.KINDS),
    seed: Annotated[int, typer.Option(help="Chooses targets, moments and the data order.")] = 1,
    elastic: Annotated[
        bool, typer.Option(help="Also the second part: shrink to 2 nodes and grow back to 3.")
    ] = True,
) -> None:
    """Train a small model on 5 pretended nodes of this machine and break them, one after another.

    Needs nothing but the package with its `demo` extra. Takes a few minutes and leaves
    demo-report.json, loss.png and logs/ in the folder. Ctrl-C leaves no process behind.

    Example:
        everstep demo --faults kill-rank,freeze-node --seed 3

    Exit codes: 0 every promise held; 1 one did not (the report says which); 64 wrong arguments;
    69 the cluster could not be started.
    """
    kinds = _kinds(faults_)
    console = Console()
    if not console.is_terminal:
        console = Console(width=PIPE_WIDTH)
    began = time.monotonic()
    with _interruptible(), Cluster(out.resolve()) as cluster, View(console) as view:
        report = _run(cluster, kinds, seed, view, elastic=elastic)
    report.wall_s = round(time.monotonic() - began, 1)
    report.write(out / "demo-report.json")
    console.print(table(report))
    console.print(time_table(report))
    console.print(_summary(report, out))
    if not report.passed:
        raise typer.Exit(FAILED)


def _kinds(text: str) -> list[str]:
    kinds = [kind.strip() for kind in text.split(",") if kind.strip()]
    for kind in kinds:
        if kind not in faults.KINDS:
            raise ConfigError(f"--faults: {kind!r} is none of {', '.join(faults.KINDS)}")
    return kinds


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Make SIGTERM end the demo as Ctrl-C does: through every `finally`."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(cluster: Cluster, kinds: Sequence[str], seed: int, view: View, *, elastic: bool) -> Report:
    rng = random.Random(seed)
    steps = STEPS_AT_REST + STEPS_PER_FAULT * len(kinds)
    data = library_bytes(cluster.folder / "library.bin")
    cluster.start_coordinator(GROW_SOON)
    nodes = [cluster.add_node(f"node{n + 1}") for n in range(NODES)]

    def stage(run_id: str, steps: int, nnodes: str, min_step_s: float = STORMY_STEP_S) -> Stage:
        recipe = Recipe(cluster.folder / run_id, data, steps, seed, min_step_s=min_step_s)
        return Stage(cluster, recipe, run_id, nnodes, view)

    calm = stage("undisturbed", steps, f"{TRAINING}", min_step_s=0.0)
    calm.launch(nodes[:TRAINING])
    calm.finish()

    stormy = stage("demo", steps, f"{TRAINING}")
    stormy.launch(nodes)
    for kind in kinds:
        stormy.strike(kind, rng)
    stormy.finish()
    stormy.explain()
    account = stormy.account()
    suffered = list(stormy.suffered)

    exactly_once = True
    skipped: list[tuple[int, int]] = []
    if elastic:
        shrinking = stage("elastic", ELASTIC_STEPS, f"{TRAINING - 1}:{TRAINING}")
        exactly_once, skipped = _shrink_and_grow(shrinking, _healthy(cluster, nodes), rng)
        suffered += shrinking.suffered

    picture(
        cluster.folder / "loss.png", calm.steps(), stormy.steps(), stormy.suffered, account["kinds"]
    )
    return Report(
        recovered_all=all(f.resumed_s is not None for f in suffered),
        bit_equal=_bit_equal(calm, stormy),
        samples_exactly_once=exactly_once,
        skipped_windows=skipped,
        wrong_evictions=_wrong_evictions(suffered),
        steps=steps,
        wall_s=0.0,
        lost_s=round(lost_s(suffered, story.median_step_s(stormy.steps())), 2),
        faults=suffered,
        seed=seed,
        time={kind: round(s, 3) for kind, s in account["kinds"].items()},
        goodput=account["goodput"],
        ettr=account["ettr"],
        mttr_s=account["mttr_s"],
    )


def _healthy(cluster: Cluster, nodes: Sequence[Node]) -> list[Node]:
    """Return the nodes that the coordinator would still give work to."""
    found = Stage(cluster, Recipe(cluster.folder, cluster.folder, 0, 0), "", "", _nobody).api.get(
        "nodes"
    )["nodes"]
    healthy = {n["name"] for n in found if n["state"] == "healthy" and n["connected"]}
    return [node for node in nodes if node.name in healthy][:TRAINING]


def _nobody(_: Stage) -> None:
    """Watch nothing."""


def _shrink_and_grow(
    stage: Stage, nodes: Sequence[Node], rng: random.Random
) -> tuple[bool, list[tuple[int, int]]]:
    """Kill a node with no spare left, let it come back, and count every sample."""
    from everstep.trainer import ledger

    if len(nodes) < TRAINING:
        raise ClusterError(f"the second part needs {TRAINING} healthy nodes, {len(nodes)} are left")
    stage.launch(nodes)
    fault = stage.strike(faults.LAST, rng)
    stage.wait_for_steps(5)
    lost = stage.cluster.nodes[fault.target]
    stage.cluster.start_agent(lost)
    stage.launch([lost])
    stage.wait("elastic: growing back", lambda: len(stage.members()) == TRAINING)
    stage.finish()
    stage.explain()
    books = ledger.read(stage.recipe.folder / "ledger")
    account = ledger.account(books, end=stage.recipe.steps * GLOBAL_BATCH)
    grown = stage.steps()[-1].generation > 2
    return account.exactly_once and grown, list(account.skipped)


def _bit_equal(calm: Stage, stormy: Stage) -> bool:
    from everstep.trainer.snapshot import compare

    left = compare.newest(calm.recipe.folder / "snapshots")
    right = compare.newest(stormy.recipe.folder / "snapshots")
    return left is not None and right is not None and not compare.differences(left, right)


def _wrong_evictions(suffered: Sequence[Fault]) -> int:
    right = {f.target for f in suffered if f.kind in faults.EVICTS}
    evicted = {n for f in suffered for n in (f.evicted or "").split(", ") if n}
    return len(evicted - right)


def _summary(report: Report, out: Path) -> str:
    yes: Callable[[bool | None], str] = lambda held: "yes" if held else "NO"  # noqa: E731  three words
    return (
        f"every fault recovered: {yes(report.recovered_all)}   "
        f"bit-equal to the undisturbed run: {yes(report.bit_equal)}   "
        f"every sample exactly once: {yes(report.samples_exactly_once)}   "
        f"wrong evictions: {report.wrong_evictions}\n"
        f"time lost to {len(report.faults)} faults: {report.lost_s:.1f} s of {report.wall_s:.0f} s"
        f"\ngoodput: {share(report.goodput)}   ETTR: {share(report.ettr)}   "
        f"mean time to recover: {'-' if report.mttr_s is None else f'{report.mttr_s:.2f} s'}"
        f"\nreport: {out / 'demo-report.json'}   picture: {out / 'loss.png'}   "
        f"logs: {out / 'logs'}"
    )
