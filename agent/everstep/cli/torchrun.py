"""`everstep torchrun`: stock torchrun with everstep's flags filled in, and printed."""

from __future__ import annotations

import importlib.util
import os
import shlex
import socket
import sys
from pathlib import Path

import typer

from everstep.wire.exit_codes import UNAVAILABLE, USAGE
from everstep.wire.ids import agent_socket

FILLED_IN = ("--rdzv-backend=everstep", "--max-restarts=1000000", "--logs-specs=everstep")


def torchrun(
    context: typer.Context,
) -> None:
    """Start a script under stock torchrun, with everstep deciding the membership.

    Everything after `torchrun` is torchrun's own: --nnodes=MIN:MAX, --nproc-per-node=N,
    --rdzv-id=NAME (the same on all nodes), then the script and its arguments. The plain command is
    printed, so that it can be used without this one.

    Exit codes: 0 done; the rank's own for a stopped job; 64 wrong arguments; 69 no agent here, or
    too few nodes in time; 75 this node was evicted; 76 stopped by an operator; 93 do not requeue.
    """
    arguments = list(context.args)
    _check(arguments)
    _check_agent(agent_socket(os.environ))
    filled = [*FILLED_IN, *arguments]
    sys.stderr.write(f"everstep: torchrun {shlex.join(filled)}\n")
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-m", "torch.distributed.run", *filled])


def _check(arguments: list[str]) -> None:
    if not arguments:
        _refuse("nothing to run: everstep torchrun --nnodes=2 --rdzv-id=my-job train.py")
    if "--standalone" in arguments:
        _refuse("--standalone replaces the rendezvous: leave it out; one node is --nnodes=1")
    if importlib.util.find_spec("torch") is None:
        _refuse("torch is not installed here: pip install 'everstep[trainer]'")


def _check_agent(path: Path) -> None:
    """Leave with 69 unless something answers on the agent's socket."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(5)
            probe.connect(str(path))
    except OSError as exc:
        sys.stderr.write(
            f"everstep: no agent on {path} ({exc.strerror or exc}). Start one with "
            "`everstep agent --coordinator HOST:PORT`, on a single machine with "
            "`everstep agent --with-coordinator`, or name its socket in EVERSTEP_SOCKET\n"
        )
        raise SystemExit(UNAVAILABLE) from exc


def _refuse(why: str) -> None:
    sys.stderr.write(f"everstep: {why}\n")
    raise SystemExit(USAGE)
