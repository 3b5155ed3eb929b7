"""4 ranks, 3, and 4 again, with kills in between: every sample is applied exactly once."""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path

from tests.chaos.lives import JOB, Life, LifeError, kill

from everstep.cli.demo.cluster import Cluster, Node
from everstep.cli.demo.training import GLOBAL_BATCH, Recipe, library_bytes
from everstep.trainer import ledger

NODES = 4
STEP_S, SNAPSHOT_EVERY = 0.1, 5


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the program's options."""
    parser.add_argument("--rounds", type=int, default=5, help="how often a node leaves and returns")
    parser.add_argument("--steps", type=int, default=600, help="of the run")
    parser.add_argument("--seed", type=int, default=0, help="of which node, and when")
    parser.add_argument("--out", type=Path, default=None, help="keep logs and snapshots here")


def main(asked: argparse.Namespace) -> int:
    """Do one run."""
    out = asked.out or Path(tempfile.mkdtemp(prefix="everstep-elastic-"))
    out.mkdir(parents=True, exist_ok=True)
    recipe = Recipe(
        out / "run",
        library_bytes(out / "library.bin"),
        asked.steps,
        seed=1,
        snapshot_every=SNAPSHOT_EVERY,
        micro_batch=1,
        min_step_s=STEP_S,
    )
    begin_s, trouble, rounds = time.monotonic(), "", 0
    with Cluster(out) as cluster:
        cluster.start_coordinator()
        life = Life(cluster, recipe.write(), recipe.run_dir, NODES - 1, NODES)
        for number in range(NODES):
            cluster.add_node(f"node{number + 1}")
        for node in life.nodes:
            life.launch(node)
        try:
            rounds = breathe(life, random.Random(f"elastic {asked.seed}"), asked.rounds)
            life.wait(life.over, "the end of the run", 600)
        except LifeError as exc:
            trouble = str(exc)
        codes, left_over = life.exit_codes(), life.pids()
    account = ledger.account(ledger.read(recipe.run_dir / "ledger"), end=asked.steps * GLOBAL_BATCH)
    good = account.exactly_once and set(codes) == {0} and not trouble and not left_over
    found = {
        "chaos": "elastic",
        "good": good,
        "rounds": rounds,
        "worlds": sizes(recipe.run_dir),
        "samples": account.applied,
        "missing": account.missing,
        "repeated": account.repeated,
        "exit_codes": codes,
        "left_over": left_over,
        "trouble": trouble,
        "took_s": round(time.monotonic() - begin_s, 1),
    }
    sys.stderr.write(f"its folder: {out}\n")
    print(json.dumps(found), flush=True)
    return 0 if good else 1


def breathe(life: Life, rng: random.Random, rounds: int) -> int:
    """Let a node go and come back, so many times; return how often it was done."""
    life.await_steps(0, "the first steps")
    done = 0
    while done < rounds and not life.over():
        node = rng.choice(life.nodes)
        lose(node)
        life.wait(lambda: life.over() or world(life) == NODES - 1, "steps of three ranks", 120)
        if rng.random() < 0.5:
            _kill_one(life, rng)
        time.sleep(rng.uniform(0.2, 2.0))
        if life.over():
            break
        life.launch(node)
        life.wait(lambda: life.over() or world(life) == NODES, "steps of four ranks", 120)
        if rng.random() < 0.5:
            _kill_one(life, rng)
        time.sleep(rng.uniform(0.2, 2.0))
        done += 1
    return done


def lose(node: Node) -> None:
    """SIGKILL a launcher; its ranks go with it."""
    launcher = node.launchers.pop(JOB)
    launcher.kill()
    launcher.wait()


def _kill_one(life: Life, rng: random.Random) -> None:
    generation, _ = life.newest()
    if pids := life.pids():
        kill(rng.choice(pids))
        life.await_steps(generation, f"steps after generation {generation}")


def world(life: Life) -> int:
    """Return how many ranks have finished the newest step."""
    generation, _ = life.newest()
    return len([*(life.run_dir / "ledger").glob(f"*-g{generation}-r*.jsonl")])


def sizes(run_dir: Path) -> list[int]:
    """Return the world sizes in order, each as often as it changed."""
    chapters = {b.chapter.generation: b.chapter.world_size for b in ledger.read(run_dir / "ledger")}
    out: list[int] = []
    for _, size in sorted(chapters.items()):
        if not out or out[-1] != size:
            out.append(size)
    return out
