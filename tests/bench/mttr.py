"""How long a run stands still after a fault: from the signal to the first new step of all ranks.

    python tests/bench/mttr.py [--quick] [--runs N] [--only FIGURE ...]

The training script is everstep's own, with steps of about 100 ms and a snapshot every 5 steps, for
everstep and for its peers alike, which resume from the same snapshots on disk; torchft, which wants
another loop, trains the same model in one of its own. Every run is a fresh one; all take turns. The
fault comes at some moment in the second after 20 steps are done, the same for all; times are wall
clock, and the ranks put their steps' ends down themselves.

A killed rank gets SIGKILL, a stopped one SIGSTOP. Survivors' figures are of runs that may shrink:
the first step of those that are left. A frozen node is one whose every process gets SIGSTOP, agent
and launcher included; a spare waits beside it. It is never the node that everything depends on: the
first one, where torchrun keeps its store.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.bench import form
from tests.bench.contestants import Contestant, Everstep, Shape, freeze, ranks
from tests.bench.peers.launchers import LAUNCHERS

from everstep.cli.demo import story
from everstep.cli.demo.training import library_bytes
from everstep.sdk.errors import EverstepError
from everstep.trainer import ledger

SETTLED_STEPS = 20
VICTIM = 1
ALONE = "with its only node the whole run is frozen"
START_S, GIVE_UP_S, QUIET_WAIT_S, POLL_S = 120.0, 60.0, 30.0, 0.1
TARGETS = {
    "rank_kill_all_s": 1.0,
    "rank_kill_restart_s": 2.0,
    "rank_kill_survivor_s": 0.25,
    "rank_stop_all_s": 4.0,
    "node_freeze_s": 5.0,
    "node_freeze_detected_s": 3.1,
    "one_node_rank_kill_all_s": 1.0,
    "one_node_rank_kill_restart_s": 2.0,
    "one_node_rank_stop_all_s": 4.0,
}


@dataclass(frozen=True, slots=True)
class Fault:
    """What is done to which kind of run."""

    figure: str
    shape: Shape
    strike: Callable[[Contestant], None]


def kill_rank(run: Contestant) -> None:
    """SIGKILL one rank."""
    victim = ranks(run.nodes())[VICTIM]
    os.kill(victim.pid, signal.SIGKILL)


def stop_rank(run: Contestant) -> None:
    """SIGSTOP one rank."""
    freeze([ranks(run.nodes())[VICTIM].pid])


def freeze_node(run: Contestant) -> None:
    """SIGSTOP the node of one rank."""
    nodes = run.nodes()
    freeze(nodes[ranks(nodes)[VICTIM].node])


TWO_NODES, ONE_NODE = Shape(nodes=2, ranks=1), Shape(nodes=1, ranks=2)
SHRINKING = Shape(nodes=2, ranks=1, shrinks=True)
FAULTS = (
    Fault("rank_kill_all_s", TWO_NODES, kill_rank),
    Fault("rank_kill_restart_s", replace(TWO_NODES, restarts=True), kill_rank),
    Fault("rank_kill_survivor_s", SHRINKING, kill_rank),
    Fault("rank_stop_all_s", TWO_NODES, stop_rank),
    Fault("rank_stop_survivor_s", SHRINKING, stop_rank),
    Fault("node_freeze_s", Shape(nodes=2, ranks=1, spares=1), freeze_node),
    Fault("one_node_rank_kill_all_s", ONE_NODE, kill_rank),
    Fault("one_node_rank_kill_restart_s", replace(ONE_NODE, restarts=True), kill_rank),
    Fault("one_node_rank_stop_all_s", ONE_NODE, stop_rank),
)
EVERSTEP = "everstep"
CONTESTANTS: dict[str, type[Contestant]] = {EVERSTEP: Everstep, **LAUNCHERS}


@dataclass(frozen=True, slots=True)
class Recovered:
    """What one run showed; `resumed_s` is None when it did not come back, and `why` says more."""

    resumed_s: float | None
    parts: dict[str, float] = field(default_factory=dict)
    why: str = ""


def main() -> None:
    """Measure and print."""
    parser = form.options(__doc__)
    parser.add_argument("--runs", type=int, default=5, help="runs of each kind (quick: 1)")
    names = [f.figure for f in FAULTS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="FIGURE")
    parser.add_argument("--of", nargs="+", choices=CONTESTANTS, default=[*CONTESTANTS])
    asked = parser.parse_args()
    runs = 1 if asked.quick else asked.runs
    found = form.Form("mttr", TARGETS, runs)
    contestants = {n: CONTESTANTS[n] for n in ([EVERSTEP] if asked.quick else asked.of)}
    folder = Path(tempfile.mkdtemp(prefix="everstep-mttr-"))
    try:
        data = library_bytes(folder / "data" / "library.bin")
        for fault in FAULTS:
            if fault.figure in asked.only:
                measure(found, fault, folder, data, runs, contestants)
    finally:
        shutil.rmtree(folder / "data")
        with contextlib.suppress(OSError):
            folder.rmdir()  # what did not come back is left to be looked at
    for name, kind in contestants.items():
        settle(found, name, kind, asked.only)
    found.print()


def settle(found: form.Form, name: str, kind: type[Contestant], figures: Sequence[str]) -> None:
    """Set the figures of a contestant that no run of its own gave, and what was tuned for it."""
    why_not = kind.missing()
    without = dict.fromkeys(figures, why_not) if why_not else kind.cannot
    for figure, why in {"one_node_node_freeze_s": ALONE, **without}.items():
        put(found, name, figure, None, why)
    for figure, other in kind.same.items():
        if figure in figures and not why_not:
            value = found.peers.get(name, {}).get(other)
            put(found, name, figure, value, f"it knows one way only: {other}")
    if kind.tuned and not why_not:
        found.why[name] = kind.tuned


def put(found: form.Form, name: str, figure: str, value: float | None, why: str) -> None:
    """Set a figure of everstep's or of a peer's."""
    if name == EVERSTEP:
        found.put(figure, value, why)
    else:
        found.put_peer(name, figure, value, why)


def measure(
    found: form.Form,
    fault: Fault,
    folder: Path,
    data: Path,
    runs: int,
    contestants: Mapping[str, type[Contestant]],
) -> None:
    """Do one fault to so many runs of each contestant that can take it, and set their figures."""
    able = {
        name: kind
        for name, kind in contestants.items()
        if not kind.missing() and fault.figure not in {*kind.cannot, *kind.same}
    }
    seen: dict[str, list[Recovered]] = {}
    busiest = 0.0
    for number in range(runs):
        for name, kind in able.items():
            place = folder / f"{fault.figure}-{name}-{number}"
            busy = form.await_quiet(QUIET_WAIT_S if runs > 1 else 0.0)
            busiest = max(busiest, busy)
            one = attempt(kind, fault, place, data, random.Random(number))
            seen.setdefault(name, []).append(one)
            form.say(f"{fault.figure} {name}: {_text(one)}; {busy:.0%} busy before")
            if one.resumed_s is None:
                form.say(f"its logs are kept in {place}")
            else:
                shutil.rmtree(place)
    for name, many in seen.items():
        why = f"others kept the cores up to {busiest:.0%} busy before a run{_misses(many)}"
        put(found, name, fault.figure, form.median(r.resumed_s for r in many), why)
        if name == EVERSTEP:
            put_parts(found, fault.figure.removesuffix("_s"), many)


def put_parts(found: form.Form, prefix: str, many: Sequence[Recovered]) -> None:
    """Set what the time went into, each counted from the signal."""
    for part in sorted({part for r in many for part in r.parts}):
        found.put(f"{prefix}_{part}", form.median(r.parts.get(part) for r in many))


def _misses(many: Sequence[Recovered]) -> str:
    missed = [r.why for r in many if r.resumed_s is None]
    return f"; {len(missed)} of {len(many)} runs did not go on: {missed[0]}" if missed else ""


def attempt(
    kind: type[Contestant], fault: Fault, folder: Path, data: Path, rng: random.Random
) -> Recovered:
    """Do one run; what does not even start is a run that did not go on."""
    try:
        return run(kind, fault, folder, data, rng)
    except (RuntimeError, EverstepError) as exc:
        return Recovered(None, why=str(exc))


def run(
    kind: type[Contestant], fault: Fault, folder: Path, data: Path, rng: random.Random
) -> Recovered:
    """Start a run, do the fault to it, and return how it came back."""
    training = folder / "training"
    everybody = fault.shape.nodes * fault.shape.ranks
    config = configuration(training, data, kind.trainer.get(fault.figure, {}))
    with kind(folder / "launch", fault.shape, config) as contestant:
        wait(
            lambda: len(steps(training, everybody)) >= SETTLED_STEPS, START_S, f"steps in {folder}"
        )
        time.sleep(rng.random())  # at no special moment of a step, snapshot or heartbeat
        at_s = time.time()
        fault.strike(contestant)
        enough = None if fault.shape.shrinks else everybody
        back = wait_for_recovery(training, at_s, enough)
        if back is None:
            return Recovered(None, why=f"no step within {GIVE_UP_S:.0f} s")
        parts = contestant.parts(at_s)
    opened = [b.chapter.opened_at_s for b in ledger.read(training / "ledger")]
    parts["restored_s"] = max(opened) - at_s
    parts["steps_lost"] = back.steps_lost
    parts["step_s"] = story.median_step_s(steps(training)[:SETTLED_STEPS])
    return Recovered(back.resumed_s, parts)


def wait_for_recovery(training: Path, at_s: float, everybody: int | None) -> story.Recovery | None:
    """Return how the run came back, to so many ranks if said; None when not within a minute."""
    end_s = time.monotonic() + GIVE_UP_S
    while time.monotonic() < end_s:
        back = story.recovery(steps(training, everybody), at_s)
        if back is not None:
            return back
        time.sleep(POLL_S)
    return None


def wait(true: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Poll until it is true. Raises RuntimeError when it does not come."""
    end_s = time.monotonic() + timeout_s
    while not true():
        if time.monotonic() > end_s:
            raise RuntimeError(f"not within {timeout_s:.0f} s: {what}")
        time.sleep(POLL_S)


def steps(training: Path, everybody: int | None = None) -> list[story.Step]:
    """Return the steps that all ranks of their generation have finished.

    With `everybody`, only those of generations that have so many ranks.
    """
    folder = training / "ledger"
    if not folder.exists():
        return []
    books = ledger.read(folder)
    return story.finished(b for b in books if everybody in (None, b.chapter.world_size))


def configuration(training: Path, data: Path, more: Mapping[str, float]) -> Path:
    """Write a configuration with steps of about 100 ms on one core for each of two ranks."""
    training.mkdir(parents=True)
    lines = "".join(f"{name} = {value}\n" for name, value in more.items())
    path = training / "run.toml"
    path.write_text(
        f'[trainer]\nrun_dir = "{training}"\ndata = "{data}"\nsteps = 1000000\nledger = true\n'
        'global_batch = 12\nmicro_batch = 2\nseq_len = 128\nthreads = 1\ndevice = "cpu"\n'
        f"{lines}\n"
        "[trainer.model]\ndim = 128\nlayers = 4\nheads = 4\nkv_heads = 4\nffn_dim = 384\n\n"
        "[hooks.snapshot]\nevery_steps = 5\n"
    )
    return path


def _text(one: Recovered) -> str:
    if one.resumed_s is None:
        return one.why
    return f"{one.resumed_s:.2f} s ({', '.join(f'{k} {v:.2f}' for k, v in one.parts.items())})"


if __name__ == "__main__":
    main()
