"""What a snapshot costs the loop it is taken from: `python tests/bench/snapshot.py [--quick]`.

1 GB over all ranks, every page changed in every step, forward and backward as long as two copies
of the state; then once more with steps of 35 ms, beside the peers' ways to save. The last line on
stdout is one JSON object.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.bench import form
from tests.bench.form import Form
from tests.bench.peers import snapshots

TARGETS = {
    "blocked_over_copy": 0.10,
    "lost_over_copy": 0.25,
    "durable_over_raw_write": 1.15,
    "two_ranks_blocked_over_copy": 0.10,
    "two_ranks_durable_over_raw_write": 1.15,
}
HERE = Path(__file__).parent
_LIMIT_S = 900.0
_QUIET_S = 60.0

Peer = Callable[[float, int], dict[str, Any]]
"""Given a size (GB) and the number of saves, what `peers/snapshots.py` finds of one method."""


def _method(name: str) -> Peer:
    return lambda size_gb, repeats: snapshots.run(name, size_gb=size_gb, ranks=1, repeats=repeats)


PEERS: dict[str, Peer] = {name: _method(name) for name in snapshots.METHODS if name != "everstep"}


def on_ranks(script: str, size_gb: float, ranks: int, repeats: int, folder: Path) -> Any:
    """Return what rank 0 of a script printed last. Raises RuntimeError when that is nothing."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={ranks}", str(HERE / script), f"--size-gb={size_gb}"]
    command += [f"--repeats={repeats}", f"--folder={folder}"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=_LIMIT_S, env=environ
    )
    for line in reversed(done.stdout.splitlines()):
        if line.startswith(("{", "[")):
            return json.loads(line)
    raise RuntimeError(f"{script} gave no figures: {done.stderr[-2000:]}")


def worst(ranks: list[dict[str, Any]], over: str, under: str) -> float:
    """Return the median ratio of the rank that is worst off."""
    medians = [statistics.median(c[over] / c[under] for c in rank["costs"]) for rank in ranks]
    return float(max(medians))


def put(report: Form, ranks: list[dict[str, Any]], prefix: str) -> None:
    """Put the figures of one run into the report."""
    if not all(cost["consistent"] for rank in ranks for cost in rank["costs"]):
        raise RuntimeError("what was loaded is not what the state was at the call")
    report.put(f"{prefix}blocked_over_copy", worst(ranks, "blocked_s", "copy_s"))
    report.put(f"{prefix}lost_over_copy", worst(ranks, "lost_s", "copy_s"))
    report.put(f"{prefix}durable_over_raw_write", worst(ranks[:1], "durable_s", "raw_write_s"))
    report.put(f"{prefix}extra_memory_copies", max(rank["extra"] for rank in ranks))
    report.put(f"{prefix}copy_s", statistics.median(c["copy_s"] for c in ranks[0]["costs"]))


def at_peer_step(report: Form, size_gb: float, repeats: int, *, peers: bool) -> None:
    """Save from steps of 35 ms, by everstep's way and the peers'."""
    found = snapshots.run("everstep", size_gb=size_gb, ranks=1, repeats=repeats)
    for figure in ("blocked_s_per_gb", "step_slowdown", "lost_s", "durable_s"):
        report.put(f"at_peer_step_{figure}", found.get(figure), found.get("why", ""))
    for name, run in PEERS.items() if peers else ():
        form.say(f"peer {name}")
        theirs = run(size_gb, repeats)
        why = theirs.get("why", "")
        if not why and not theirs["consistent"]:
            why = "what it wrote is not what the state was at the call"
        for figure in ("blocked_s_per_gb", "step_slowdown", "lost_s", "durable_s"):
            report.put_peer(name, f"at_peer_step_{figure}", theirs.get(figure), why)


def main() -> None:
    """Measure and print."""
    quick = form.options(__doc__).parse_args().quick
    size_gb, repeats = (0.064, 3) if quick else (1.0, 7)
    report = Form("snapshot", TARGETS, runs=repeats)
    with tempfile.TemporaryDirectory(prefix="everstep-bench-") as folder:
        for ranks, prefix in ((1, ""), (2, "two_ranks_")):
            form.await_quiet(0.0 if quick else _QUIET_S)
            form.say(f"{ranks} rank(s), {size_gb} GB")
            put(report, on_ranks("saves.py", size_gb, ranks, repeats, Path(folder)), prefix)
    form.say("at steps of 35 ms")
    at_peer_step(report, size_gb, repeats, peers=not quick)
    report.print()


if __name__ == "__main__":
    main()
