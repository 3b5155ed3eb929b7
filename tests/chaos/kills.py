"""SIGKILLs of ranks at random moments of runs of constant size: the end is the undisturbed one."""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.lives import Life, LifeError, kill
from tests.chaos.runs import LAYOUTS, Storm, undisturbed

from everstep.cli.demo.cluster import Cluster
from everstep.cli.demo.training import Recipe, library_bytes
from everstep.trainer.snapshot import compare

STEP_S, SNAPSHOT_EVERY = 0.1, 5
GAP_S = 1.5
"""From the first steps after a kill to the next one, on the average."""
HASTY, MOST_HASTY = 0.15, 2
"""Share of kills that do not wait until the run has come back, and how many of them in a row: a
job that makes no progress in three generations is stopped, as it should be."""


@dataclass
class Outcome:
    """What became of one run."""

    seed: int
    layout: tuple[int, int]
    kills: int = 0
    took_s: float = 0.0
    exit_codes: list[int | None] = field(default_factory=list)
    final_step: int = 0
    differences: list[str] = field(default_factory=list)
    left_over: list[int] = field(default_factory=list)
    trouble: str = ""

    def good(self, steps: int) -> bool:
        return (
            not (self.trouble or self.differences or self.left_over)
            and set(self.exit_codes) == {0}
            and self.final_step == steps
        )


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the program's options."""
    parser.add_argument("--kills", type=int, default=200, help="so many at least, over all runs")
    parser.add_argument("--steps", type=int, default=400, help="of each run")
    parser.add_argument("--first", type=int, default=0, help="the first run's seed")
    parser.add_argument("--out", type=Path, default=None, help="keep logs and snapshots here")


def main(asked: argparse.Namespace) -> int:
    """Do runs until there were enough kills."""
    out = asked.out or Path(tempfile.mkdtemp(prefix="everstep-kills-"))
    killed, seed, outcomes = 0, asked.first, []
    while killed < asked.kills:
        outcome = one(seed, asked.steps, asked.kills - killed, out / f"seed{seed}")
        outcomes.append(outcome)
        good = outcome.good(asked.steps)
        sys.stderr.write(f"{'good' if good else 'FAILED'}: {outcome}\n")
        if not good:
            sys.stderr.write(
                f"  its folder: {out / f'seed{seed}'}; again: python -m tests.chaos kills "
                f"--first {seed} --kills {asked.kills - killed} --steps {asked.steps}\n"
            )
        if good and asked.out is None:
            shutil.rmtree(out / f"seed{seed}")
        killed, seed = killed + max(1, outcome.kills), seed + 1
    print(json.dumps(summed(outcomes, asked.steps)), flush=True)
    return 0 if all(o.good(asked.steps) for o in outcomes) else 1


def summed(outcomes: list[Outcome], steps: int) -> dict[str, object]:
    return {
        "chaos": "kills",
        "kills": sum(o.kills for o in outcomes),
        "runs": len(outcomes),
        "bit_equal": sum(o.good(steps) for o in outcomes),
        "failed_seeds": [o.seed for o in outcomes if not o.good(steps)],
        "by_layout": {
            f"{nodes}x{ranks}": sum(o.kills for o in outcomes if o.layout == (nodes, ranks))
            for nodes, ranks in LAYOUTS
        },
        "took_s": round(sum(o.took_s for o in outcomes), 1),
    }


def one(seed: int, steps: int, most_kills: int, folder: Path) -> Outcome:
    """Do one run and compare its end with that of a run that nobody has touched."""
    folder.mkdir(parents=True, exist_ok=True)
    nodes, ranks = LAYOUTS[seed % len(LAYOUTS)]
    outcome = Outcome(seed, (nodes, ranks))
    data = folder.parent / "library.bin"
    if not data.exists():
        library_bytes(data)
    expected = undisturbed(folder.parent, data, Storm(seed, nodes, ranks, steps, 0))
    recipe = Recipe(
        folder / "run",
        data,
        steps,
        seed=1,
        snapshot_every=SNAPSHOT_EVERY,
        micro_batch=1,
        min_step_s=STEP_S,
    )
    begin_s = time.monotonic()
    with Cluster(folder) as cluster:
        cluster.start_coordinator()
        life = Life(cluster, recipe.write(), recipe.run_dir, nodes, nodes, ranks)
        for number in range(nodes):
            cluster.add_node(f"node{number + 1}")
        for node in life.nodes:
            life.launch(node)
        try:
            for _ in strikes(life, random.Random(f"kills {seed}"), most_kills):
                outcome.kills += 1
            life.wait(life.over, "the end of the run", 600)
        except LifeError as exc:
            outcome.trouble = str(exc)
        outcome.exit_codes, outcome.left_over = life.exit_codes(), life.pids()
    outcome.took_s = round(time.monotonic() - begin_s, 1)
    final = compare.newest(recipe.run_dir / "snapshots")
    if final is not None:
        outcome.final_step = int(final.name[1:7])
        if outcome.final_step == steps:
            outcome.differences = compare.differences(final, expected)
    return outcome


def strikes(life: Life, rng: random.Random, most: int) -> Iterator[int]:
    """Kill ranks at random until the run is over or there were enough; yield their pids."""
    killed = hasty = 0
    life.await_steps(0, "the first steps")
    while killed < most and not life.over():
        generation, _ = life.newest()
        time.sleep(rng.expovariate(1 / GAP_S))
        pids = life.pids()
        if life.over() or not pids:
            continue
        victim = rng.choice(pids)
        if kill(victim):
            killed += 1
            yield victim
        if rng.random() < HASTY and hasty < MOST_HASTY:
            hasty += 1
            continue
        hasty = 0
        generation = max(generation, life.newest()[0])
        life.await_steps(generation, f"steps after generation {generation}")
