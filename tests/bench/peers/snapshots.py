"""What a save costs a loop of 35 ms steps, by each of the peers' ways to save.

    python tests/bench/peers/snapshots.py [METHOD ...] [--ranks N] [--repeats N]

`run` starts the loop with one of them (`snapshot_loop.py`), in the peer's own venv, and returns
what it found, or why it found nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.bench.peers.leftovers import swept
from tests.bench.peers.venvs import HERE, PEERS

from everstep.launch import reaper

_MARK = "EVERSTEP_BENCH"
_SETUP_S, _SAVE_S = 120.0, 130.0
_TELLING = 300


@dataclass(frozen=True)
class Method:
    """Which script saves so, and in whose venv; without a peer it is torch's own, in everstep's."""

    script: str
    peer: str | None = None
    note: str = ""

    @property
    def python(self) -> str:
        """Its interpreter."""
        return str(PEERS[self.peer].python) if self.peer else sys.executable

    def missing(self) -> str:
        """Return why it cannot be run, nothing when it can."""
        return PEERS[self.peer].missing() if self.peer else ""


METHODS = {
    "everstep": Method("snapshot_everstep.py"),
    "dcp_async_thread": Method("snapshot_dcp.py", note="its stager is kept between saves"),
    "dcp_async_process": Method("snapshot_dcp.py", note="its stager is kept between saves"),
    "dcp_default_stager": Method(
        "snapshot_dcp.py", note="stages in a thread of its own; its stager is kept between saves"
    ),
    "dlrover_flash": Method(
        "snapshot_dlrover.py",
        "dlrover",
        "under dlrover-run, with the one argument added that torch 2.13 wants of its launcher",
    ),
    "nvrx_fork": Method(
        "snapshot_nvrx.py", "nvrx", "four calls of torch.cuda are answered as for one device, a CPU"
    ),
}


def run(method: str, *, size_gb: float, ranks: int, repeats: int) -> dict[str, Any]:
    """Return the figures of one method; `size_gb` (10^9 bytes) is the state of all ranks together.

    Keys: blocked_s_per_gb, step_slowdown, durable_s, consistent and others, as
    `snapshot_loop.summary` makes them, and `note`. Without figures there is `why` instead.
    """
    how = METHODS[method]
    if why := how.missing():
        return {"method": method, "why": why}
    job = f"saves-{os.getpid()}-{time.monotonic_ns()}"
    with (
        tempfile.TemporaryDirectory(prefix="everstep-saves-") as folder,
        swept(f"{_MARK}={job}", job) as environ,
    ):
        command = [*_launcher(how, ranks), str(HERE / how.script), method]
        command += [f"--size-gb={size_gb}", f"--repeats={repeats}", f"--folder={folder}/saves"]
        said = _said(command, environ, _SETUP_S + _SAVE_S * (repeats + 1))
    found = parse(said, method)
    return {**found, "note": how.note} if "why" not in found else found


def parse(said: str, method: str) -> dict[str, Any]:
    """Return the method's JSON line out of all that its processes said, else why there is none.

    >>> parse('noise\\n{"method": "a", "blocked_s": 0.5}\\nmore noise', "a")
    {'method': 'a', 'blocked_s': 0.5}
    >>> parse("it burst", "a")
    {'method': 'a', 'why': 'it ended without figures: it burst'}
    """
    for line in reversed(said.splitlines()):
        if line.startswith('{"method"'):
            found: dict[str, Any] = json.loads(line)
            return found
    end = " ".join(said.split())[-_TELLING:]
    return {"method": method, "why": f"it ended without figures: {end}"}


def _launcher(how: Method, ranks: int) -> list[str]:
    if how.peer == "dlrover":
        launcher = [str(HERE / "dlrover_run.py"), "--standalone", "--nnodes=1"]
        return [how.python, *launcher, f"--nproc_per_node={ranks}", "--max_restarts=0"]
    torchrun = ["-m", "torch.distributed.run", "--standalone"]
    return [how.python, *torchrun, f"--nproc-per-node={ranks}"]


def _said(command: list[str], environ: Mapping[str, str], timeout_s: float) -> str:
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environ},
    ) as process:
        try:
            said, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            reaper.kill_marked(f"{_MARK}={environ[_MARK]}")
            return f"no end after {timeout_s:.0f} s"
    return said


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what was started is taken along
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("methods", nargs="*", default=list(METHODS), metavar="METHOD")
    parser.add_argument("--size-gb", type=float, default=1.0)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    asked = parser.parse_args()
    for name in asked.methods:
        sizes = {"size_gb": asked.size_gb, "ranks": asked.ranks, "repeats": asked.repeats}
        print(json.dumps(run(name, **sizes)), flush=True)
