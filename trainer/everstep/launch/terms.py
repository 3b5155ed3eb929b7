"""What torchrun was asked for: its own arguments, checked against what we can promise."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from everstep.launch.leave import leave
from everstep.wire.exit_codes import USAGE
from everstep.wire.ids import agent_socket

if TYPE_CHECKING:
    from types import FrameType

    from torch.distributed.elastic.rendezvous import RendezvousParameters

OLDEST_TORCH = (2, 13)
LEAST_RESTARTS = 100
_MAX_TIMEOUT_S = 366 * 86400
DEFAULT_RUN_ID = "none"  # what torchrun passes when nobody gave --rdzv-id: everyone shares it
_OURS = ("join_timeout_s", "on_evict")
_TORCHS = ("timeout", "join_timeout", "last_call_timeout", "close_timeout", "read_timeout")


@dataclass(frozen=True, slots=True)
class Terms:
    """Everything the launcher joins with."""

    run_id: str
    min_nodes: int
    max_nodes: int
    local_world_size: int
    socket: Path
    local_address: str | None
    join_timeout_s: float
    on_evict: Literal["park", "exit"]
    command: str


def read_terms(params: RendezvousParameters) -> Terms:
    """Return what torchrun was started with; leaves with code 64 and a sentence when it can't be.

    The number of local ranks and of restarts is not among what torch hands to a handler: they are
    read from the `config` of the calling `launch_agent`, else from the command line.
    """
    _check_torch()
    if params.run_id in {"", DEFAULT_RUN_ID}:
        leave(
            USAGE,
            f"the run id is {params.run_id!r}, which every job without one shares: "
            "pass --rdzv-id=NAME, the same on all nodes of this job",
        )
    local_world_size, max_restarts = _launch_numbers()
    if max_restarts < LEAST_RESTARTS:
        leave(
            USAGE,
            f"--max-restarts is {max_restarts}: torchrun would give up before everstep decides. "
            "Pass --max-restarts=1000000 (budgets are everstep's), or use `everstep torchrun`",
        )
    join_timeout_s, on_evict = _conf(params)
    return Terms(
        run_id=params.run_id,
        min_nodes=params.min_nodes,
        max_nodes=params.max_nodes,
        local_world_size=local_world_size,
        socket=Path(params.endpoint) if params.endpoint else agent_socket(os.environ),
        local_address=params.local_addr,
        join_timeout_s=join_timeout_s,
        on_evict=on_evict,
        command=" ".join(sys.argv[1:])[:500],
    )


def _check_torch() -> None:
    version = tuple(int(n) for n in torch.__version__.split("+")[0].split(".")[:2])
    if version < OLDEST_TORCH:
        leave(
            USAGE,
            f"torch {torch.__version__} is older than {'.'.join(map(str, OLDEST_TORCH))}, the "
            "oldest whose torchrun was tested with everstep: upgrade torch, or run without "
            "--rdzv-backend=everstep",
        )


def _launch_numbers() -> tuple[int, int]:
    frame: FrameType | None = sys._getframe()  # noqa: SLF001  torch passes them nowhere else
    while frame is not None:
        if frame.f_code.co_name == "launch_agent":
            config: Any = frame.f_locals.get("config")
            if hasattr(config, "nproc_per_node") and hasattr(config, "max_restarts"):
                return int(config.nproc_per_node), int(config.max_restarts)
        frame = frame.f_back
    return _numbers_from_command_line()


def _numbers_from_command_line() -> tuple[int, int]:
    from torch.distributed.run import determine_local_world_size, get_args_parser

    quiet = io.StringIO()
    try:
        with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
            args: Any = get_args_parser().parse_args(sys.argv[1:])
            return determine_local_world_size(args.nproc_per_node), int(args.max_restarts)
    except (SystemExit, ValueError, RuntimeError):
        leave(
            USAGE,
            "cannot tell how many ranks this node runs: start the job with torchrun, "
            "`python -m torch.distributed.run` or `everstep torchrun`",
        )


def _conf(params: RendezvousParameters) -> tuple[float, Literal["park", "exit"]]:
    unknown = sorted(set(params.config) - {*_OURS, *_TORCHS})
    if unknown:
        leave(USAGE, f"--rdzv-conf: unknown {', '.join(unknown)}; known: {', '.join(_OURS)}")
    raw = params.get("join_timeout_s", params.get("join_timeout", 600.0))
    try:
        join_timeout_s = float(raw)
    except ValueError:
        leave(USAGE, f"--rdzv-conf: join_timeout_s must be seconds, not {raw!r}")
    if not 0 < join_timeout_s <= _MAX_TIMEOUT_S:
        leave(
            USAGE,
            f"--rdzv-conf: join_timeout_s must be above 0 and at most {_MAX_TIMEOUT_S}, "
            f"not {raw!r}",
        )
    on_evict = params.get("on_evict", "park")
    if on_evict not in ("park", "exit"):
        leave(USAGE, f"--rdzv-conf: on_evict must be park or exit, not {on_evict!r}")
    return join_timeout_s, on_evict
