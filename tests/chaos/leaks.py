"""A hundred in-place re-forms and a hundred restarts in one job: nothing is left behind.

Two nodes of two ranks; one of them is struck. In place: a rank is killed behind its shim, which
torchrun does not notice. By torchrun: the shim is killed, so torchrun restarts the node's ranks.
After each, when steps go on, every process of the cluster is looked at: descriptors, memory files,
threads, and its anonymous memory, which does not change with what others share. Growth is that of
the medians of ten cycles around the 20th and of the last ten; that of memory is the slope of a line
through all in between, per cycle. Children that nobody reaps count as `zombie`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.chaos.lives import Life, LifeError, kill, marked
from tests.chaos.runs import environment

from everstep.cli.demo.cluster import Cluster
from everstep.cli.demo.training import library_bytes
from everstep.launch import reaper
from everstep.launch.warm.nursery import NAME as NURSERY

NODES = RANKS = 2
WARM_CYCLES = 20
"""Until then caches fill: imports, pools, the heap."""
MOST_GROWTH = 3
"""Descriptors or threads from the 20th cycle to the last: noise of what is on its way. One that is
lost in every tenth cycle would be 8."""
MOST_KIB_PER_CYCLE = {"rank": 96.0, "coordinator": 64.0}
MOST_KIB_PER_CYCLE_ELSE = 24.0
"""A job that fails every hour for a month does so 720 times: 17 MiB in a daemon, 68 in a rank,
which rebuilds its model, optimizer and process groups each time. The coordinator keeps the story of
its newest 256 snapshots, 128 accounts of generations and 2,000 incidents, and fills these first."""


@dataclass(frozen=True, slots=True)
class Look:
    """What one process has now."""

    fds: int
    memfds: int
    threads: int
    kib: float


@dataclass(frozen=True, slots=True)
class Row:
    """What one role had around the 20th cycle and at the end; `bad` says what has grown."""

    role: str
    early: dict[str, float]
    late: dict[str, float]
    mib: float
    kib_per_cycle: float
    bad: str


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the program's options."""
    parser.add_argument("--cycles", type=int, default=100, help="of each kind")
    parser.add_argument("--only", choices=("in-place", "restart"), help="one kind only")
    parser.add_argument("--out", type=Path, default=None, help="keep logs and figures here")


def main(asked: argparse.Namespace) -> int:
    """Do one job of both kinds of cycles."""
    out = asked.out or Path(tempfile.mkdtemp(prefix="everstep-leaks-"))
    out.mkdir(parents=True, exist_ok=True)
    begin_s, trouble = time.monotonic(), ""
    books: dict[str, Book] = {}
    with Cluster(out) as cluster:
        life = start(cluster, out)
        try:
            life.await_steps(0, "the first steps", many=12)
            for kind, strike in (("in-place", kill_rank), ("restart", kill_shim)):
                if asked.only in (None, kind):
                    books[kind] = Book()
                    cycle(life, books[kind], strike, asked.cycles)
        except LifeError as exc:
            trouble = str(exc)
    (out / "leaks.json").write_text(json.dumps({k: b.raw() for k, b in books.items()}))
    found = {kind: book.judged() for kind, book in books.items()}
    for kind, rows in found.items():
        sys.stderr.write(table(kind, rows))
    bad = [f"{k} {row.role}: {row.bad}" for k, rows in found.items() for row in rows if row.bad]
    good = not bad and not trouble
    line = {
        "chaos": "leaks",
        "good": good,
        "cycles": {kind: book.cycles for kind, book in books.items()},
        "leaks": bad,
        "trouble": trouble,
        "figures": {kind: [asdict(row) for row in rows] for kind, rows in found.items()},
        "took_s": round(time.monotonic() - begin_s, 1),
    }
    sys.stderr.write(f"its folder: {out}\n")
    print(json.dumps(line), flush=True)
    return 0 if good else 1


def start(cluster: Cluster, out: Path) -> Life:
    """Start the job: endless small steps, a snapshot every ten."""
    config = out / "run.toml"
    run_dir = out / "run"
    config.write_text(
        f'[trainer]\nrun_dir = "{run_dir}"\ndata = "{library_bytes(out / "data.bin")}"\n'
        "steps = 1000000\nledger = true\nmicro_batch = 1\nseq_len = 16\nmin_step_s = 0.02\n"
        'device = "cpu"\n\n'
        "[trainer.model]\ndim = 16\nlayers = 1\nheads = 2\nkv_heads = 1\nffn_dim = 16\n\n"
        "[hooks.snapshot]\nevery_steps = 10\n"
    )
    cluster.start_coordinator("settle_s = 0.5\n")
    life = Life(cluster, config, run_dir, NODES, NODES, RANKS)
    for name in ("struck", "other"):
        life.launch(cluster.add_node(name))
    return life


def cycle(life: Life, book: Book, strike: Callable[[Life, random.Random], bool], many: int) -> None:
    """Kill, wait until steps go on and everything is quiet, look at everybody; so many times."""
    rng = random.Random(0)
    for number in range(many):
        generation, _ = life.newest()
        life.wait(lambda: strike(life, rng), "somebody to kill", 60)
        life.await_steps(generation, f"steps after cycle {number}", many=12)
        if life.over():
            raise LifeError(f"the job has ended after {number} cycles: {life.exit_codes()}")
        book.add(look_at_all(life.cluster))


def kill_rank(life: Life, rng: random.Random) -> bool:
    """SIGKILL a rank behind its shim; its sibling survives, and so does the other node."""
    node = life.nodes[0]
    ranks = [pid for pid in node.pids() if role(pid) == "rank"]
    return bool(ranks) and kill(rng.choice(ranks))


def kill_shim(life: Life, rng: random.Random) -> bool:
    """SIGKILL what torchrun takes for its rank."""
    shims = [pid for pid in life.nodes[0].pids() if reaper.is_shim(pid)]
    return bool(shims) and kill(rng.choice(shims))


# ------------------------------------------------------------------------------- looking


def look_at_all(cluster: Cluster) -> dict[str, list[Look]]:
    """Return what each process of the cluster has, by role and node."""
    found: dict[str, list[Look]] = defaultdict(list)
    pids = marked(cluster)
    found["zombie"] = [Look(0, 0, 0, 0.0)] * zombies(pids)
    for pid in pids:
        mark = environment(pid).get("EVERSTEP_DEMO", "").split(".")
        where = mark[1] if len(mark) > 2 else ""
        try:
            found[f"{where} {role(pid)}".strip()].append(look(pid))
        except (OSError, ValueError):
            continue  # it has just ended
    return dict(found)


def zombies(parents: Sequence[int]) -> int:
    """Return how many children of these have ended and were not reaped."""
    count = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent, *_ = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        count += state == "Z" and int(parent) in parents
    return count


def role(pid: int) -> str:
    """Return what a process of everstep is."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        name = Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "gone"
    text = " ".join(command)
    if reaper.is_shim(pid):
        return "shim"
    for mark, what in (
        ("snapshots.writer", "writer"),
        ("reaper.py", "reaper"),
        ("everstep.cli coordinator", "coordinator"),
        ("everstep.cli agent", "agent"),
    ):
        if mark in text:
            return what
    if name == NURSERY:
        return "nursery"
    if "RANK" in environment(pid):
        return "rank"
    return "launcher" if "torchrun" in text or "torch.distributed.run" in text else name


def look(pid: int) -> Look:
    """Look at one process. Raises OSError when it is gone."""
    fds = [_link(path) for path in Path(f"/proc/{pid}/fd").iterdir()]
    smaps = Path(f"/proc/{pid}/smaps_rollup").read_text()
    lines = (line.split() for line in smaps.splitlines())
    kib = next(float(words[1]) for words in lines if words[0] == "Anonymous:")
    threads = len(os.listdir(f"/proc/{pid}/task"))  # noqa: PTH208  only how many
    return Look(len(fds), sum("memfd:" in text for text in fds), threads, kib)


def _link(path: Path) -> str:
    try:
        return str(path.readlink())
    except OSError:
        return ""


# ------------------------------------------------------------------------------- judging


class Book:
    """What was seen after each cycle."""

    def __init__(self) -> None:
        self._cycles: list[dict[str, list[Look]]] = []

    @property
    def cycles(self) -> int:
        return len(self._cycles)

    def add(self, seen: dict[str, list[Look]]) -> None:
        self._cycles.append(seen)

    def raw(self) -> list[dict[str, list[tuple[float, ...]]]]:
        return [
            {r: [(x.fds, x.memfds, x.threads, x.kib) for x in seen] for r, seen in c.items()}
            for c in self._cycles
        ]

    def judged(self) -> list[Row]:
        """Return a row for each role that was there most of the time."""
        roles = Counter(name for seen in self._cycles for name in seen)
        often = sorted(name for name, many in roles.items() if many > len(self._cycles) // 2)
        return [self._row(name) for name in often]

    def _row(self, name: str) -> Row:
        looks = [seen.get(name, []) for seen in self._cycles]
        memory = [sum(x.kib for x in seen) for seen in looks]
        warm = min(WARM_CYCLES, len(memory) // 2)
        counts = {
            "processes": [float(len(seen)) for seen in looks],
            "fds": [float(sum(x.fds for x in seen)) for seen in looks],
            "memfds": [float(sum(x.memfds for x in seen)) for seen in looks],
            "threads": [float(sum(x.threads for x in seen)) for seen in looks],
        }
        early = {k: statistics.median(v[max(0, warm - 5) : warm + 5]) for k, v in counts.items()}
        late = {k: statistics.median(v[-10:]) for k, v in counts.items()}
        slope = _slope(memory[warm:])
        bad = [f"{k} +{late[k] - early[k]:g}" for k in counts if late[k] - early[k] > _limit(k)]
        most = MOST_KIB_PER_CYCLE.get(name.rsplit(maxsplit=1)[-1], MOST_KIB_PER_CYCLE_ELSE)
        if len(memory) >= 2 * WARM_CYCLES and slope > most:
            bad.append(f"memory +{slope:.0f} KiB a cycle")
        mib = statistics.median(memory[-10:]) / 1024
        return Row(name, early, late, round(mib, 1), round(slope, 1), ", ".join(bad))


def _limit(kind: str) -> int:
    return 0 if kind == "processes" else MOST_GROWTH


def _slope(values: Sequence[float]) -> float:
    """Return the slope of the straight line through the values, per place."""
    if len(values) < 2:
        return 0.0
    return statistics.linear_regression(range(len(values)), values).slope


def table(kind: str, rows: Iterable[Row]) -> str:
    """Return the rows for people."""
    names = ("processes", "fds", "memfds", "threads")
    head = "".join(f"{name:>14}" for name in (*names, "MiB", "KiB/cycle"))
    lines = [f"{kind:<20}{head}"]
    for row in rows:
        cells = [f"{row.early[name]:g} -> {row.late[name]:g}" for name in names]
        text = "".join(f"{cell:>14}" for cell in (*cells, row.mib, row.kib_per_cycle))
        lines.append(f"{row.role:<20}{text}  {row.bad}")
    return "\n".join(lines) + "\n"
