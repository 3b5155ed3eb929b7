"""Faults into saves of the snapshot engine; what failed is told at once, the sum in one line."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

import torch
from tests.chaos.snapshots.cases import Case
from tests.chaos.snapshots.conduct import Outcome, conduct
from tests.chaos.snapshots.judge import CORRUPT, LOST, OTHER, TIER

from everstep.cli.demo.cluster import Cluster

_EXTRA = "memory_grace_s = 8\n"
"""Cases follow each other faster than the agent would let go of what they leave."""
_LOADED_FIRST = (
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "everstep.snapshots.writer.server",
)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the program's options."""
    parser.add_argument("--faults", type=int, default=1000, help="how many cases")
    parser.add_argument("--first", type=int, default=0, help="the first case's seed")
    parser.add_argument("--jobs", type=int, default=2, help="how many at once")
    parser.add_argument("--out", type=Path, default=None, help="keep every case's folder here")


def main(asked: argparse.Namespace) -> int:
    """Do all cases; what failed is told at once, the sum of it in one line at the end."""
    begin_s = time.monotonic()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    for module in _LOADED_FIRST:
        importlib.import_module(module)
    out = asked.out or Path(tempfile.mkdtemp(prefix="everstep-chaos-"))
    seeds = range(asked.first, asked.first + asked.faults)
    with Cluster(out / "cluster") as cluster:
        cluster.start_coordinator()
        nodes = [cluster.add_node(name, _EXTRA) for name in ("here", "elsewhere")]
        for node in nodes:
            cluster._await_socket(node)
        sockets = [node.socket for node in nodes]
        outcomes = list(_all(seeds, out, (sockets[0], sockets[1]), asked))
    if asked.out is None and all(o.good for o in outcomes):
        shutil.rmtree(out)
    summary = summed(outcomes, time.monotonic() - begin_s)
    print(json.dumps(summary), flush=True)
    return 0 if all(o.good for o in outcomes) else 1


def _all(
    seeds: range, out: Path, agents: tuple[Path, Path], asked: argparse.Namespace
) -> Iterator[Outcome]:
    # Forked, so that each worker can fork ranks that have torch already.
    with ProcessPoolExecutor(asked.jobs, mp_context=get_context("fork")) as pool:
        futures = [pool.submit(one, seed, out, agents, asked.out is not None) for seed in seeds]
        for number, future in enumerate(as_completed(futures), 1):
            outcome = future.result()
            if not outcome.good:
                _complain(outcome, out)
            if number % 50 == 0:
                sys.stderr.write(f"{number} of {len(seeds)} done\n")
            yield outcome


def one(seed: int, out: Path, agents: tuple[Path, Path], keep: bool) -> Outcome:
    """Do one case in a folder of its own, which goes when all was well."""
    folder = out / f"case{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    short = Path(tempfile.mkdtemp(prefix="esc-", dir="/tmp"))
    try:
        outcome = conduct(Case.of(seed), folder, short, agents)
    finally:
        shutil.rmtree(short, ignore_errors=True)
    if outcome.good and not keep:
        shutil.rmtree(folder)
    return outcome


def _complain(outcome: Outcome, out: Path) -> None:
    seed = outcome.case.seed
    lines = "".join(f"  {what}: {text}\n" for what, text in outcome.verdict.wrong)
    sys.stderr.write(
        f"case {seed} failed: {outcome.case}\n{lines}  its folder: {out / f'case{seed}'}\n"
        f"  again: python -m tests.chaos snapshots --first {seed} --faults 1 --out DIR\n"
    )


def summed(outcomes: list[Outcome], took_s: float) -> dict[str, object]:
    """Return the line that says it all."""
    wrong = Counter(what for o in outcomes for what in {w for w, _ in o.verdict.wrong})
    kinds: dict[str, Counter[str]] = defaultdict(Counter)
    for o in outcomes:
        kinds[o.case.kind] += Counter(faults=1, hit=int(o.hit), failed=int(not o.good))
    points = Counter(o.case.point.value for o in outcomes)
    tiers: Counter[str] = sum((o.verdict.tiers for o in outcomes), Counter())
    return {
        "chaos": "snapshots",
        "faults": len(outcomes),
        **{what: wrong[what] for what in (CORRUPT, LOST, TIER, OTHER)},
        "skipped": dict(Counter(o.skipped for o in outcomes if o.skipped)),
        "failed_seeds": sorted(o.case.seed for o in outcomes if not o.good),
        "kinds": {kind: dict(counts) for kind, counts in sorted(kinds.items())},
        "points": dict(sorted(points.items())),
        "loads": dict(tiers),
        "took_s": round(took_s, 1),
    }
