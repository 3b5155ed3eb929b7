"""`everstep torchrun`: stock torchrun with everstep's flags filled in, and printed."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import typer

from everstep.cli.errors import VerbError, WrongRequestError
from everstep.cli.local import no_agent
from everstep.wire.ids import agent_socket

FILLED_IN = ("--rdzv-backend=everstep", "--max-restarts=1000000", "--logs-specs=everstep")

_WITHOUT_VALUE = frozenset(
    {"-h", "--help", "--standalone", "-m", "--module", "--no-python", "--run-path"}
    | {"--virtual-local-rank"}
)
_SWITCHES = {"--no-warm": "EVERSTEP_WARM", "--no-in-place": "EVERSTEP_IN_PLACE"}
_VALUES = {
    "--preload": ("EVERSTEP_PRELOAD", "the modules: --preload=my.model,my.data"),
    "--grace": ("EVERSTEP_GRACE_S", "the seconds between SIGTERM and SIGKILL: --grace=25"),
}
_PROBE_S = 5.0


def torchrun(context: typer.Context) -> None:
    """Start a script under stock torchrun, with everstep deciding who trains.

    Everything after `torchrun` is torchrun's own, then come the script and its arguments;
    `torchrun --help` lists them all. The plain command is printed, so that it can be used without
    this one. The node's agent must run.

    Filled in, unless given:
        --rdzv-backend=everstep --max-restarts=1000000 --logs-specs=everstep

    Four options of our own, before torchrun's:
        --no-in-place      restart the ranks after each failure (EVERSTEP_IN_PLACE=0)
        --no-warm          start each rank from scratch (EVERSTEP_WARM=0)
        --preload=A,B      modules that warm ranks have loaded already (EVERSTEP_PRELOAD)
        --grace=25         seconds from SIGTERM to SIGKILL, in which the ranks save the step in
                           flight; 0: they don't (EVERSTEP_GRACE_S)

    Examples:
        everstep torchrun --nnodes=2:4 --nproc-per-node=8 --rdzv-id=my-job train.py --lr 3e-4
        everstep torchrun --nnodes=1 --nproc-per-node=2 --rdzv-id=try -m my.training

    Exit codes:
        0   done
        2   arguments that torchrun itself refuses
        64  wrong arguments, e.g. no --rdzv-id
        69  no agent here, or too few nodes in time
        75  this node was evicted (with --rdzv-conf=on_evict=exit)
        76  stopped by an operator
        93  failed again and again for no one reason: do not requeue it
        else the failed rank's own, 128 + N for signal N
    """
    arguments, environ = own_options(context.args)
    options = launcher_options(arguments)
    _check(arguments, options)
    _check_agent(Path(options.get("--rdzv-endpoint") or agent_socket(os.environ)))
    filled = [*(one for one in FILLED_IN if one.partition("=")[0] not in options), *arguments]
    settings = "".join(f"{name}={shlex.quote(value)} " for name, value in environ.items())
    sys.stderr.write(f"everstep: {settings}torchrun {shlex.join(filled)}\n")
    sys.stderr.flush()
    command = [sys.executable, "-m", "torch.distributed.run", *filled]
    os.execve(sys.executable, command, {**os.environ, **environ})


def own_options(arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return torchrun's arguments, and what our own before them put into its environment.

    >>> own_options(["--no-warm", "--nnodes=2", "train.py", "--no-warm"])
    (['--nnodes=2', 'train.py', '--no-warm'], {'EVERSTEP_WARM': '0'})
    >>> own_options(["--no-in-place", "--preload", "my.model,my.data", "train.py"])
    (['train.py'], {'EVERSTEP_IN_PLACE': '0', 'EVERSTEP_PRELOAD': 'my.model,my.data'})
    >>> own_options(["--grace=110", "train.py"])
    (['train.py'], {'EVERSTEP_GRACE_S': '110'})
    """
    rest, environ = list(arguments), {}
    while rest and rest[0].partition("=")[0] in {*_SWITCHES, *_VALUES}:
        name, equals, value = rest.pop(0).partition("=")
        if name in _SWITCHES:
            environ[_SWITCHES[name]] = "0"
            continue
        variable, what = _VALUES[name]
        if not (equals or rest):
            raise WrongRequestError(f"{name} needs {what}")
        environ[variable] = value if equals else rest.pop(0)
    _check_grace(environ)
    return rest, environ


def _check_grace(environ: Mapping[str, str]) -> None:
    text = environ.get("EVERSTEP_GRACE_S", "0")
    if not re.fullmatch(r"[0-9]+(\.[0-9]+)?", text):
        raise WrongRequestError(f"--grace needs seconds, e.g. 25 (0: off), not {text!r}")


def launcher_options(arguments: Sequence[str]) -> dict[str, str]:
    """Return torchrun's own options, as far as they stand before the script.

    >>> launcher_options(["--nnodes", "2", "--rdzv_id=a", "-m", "my.training", "--standalone"])
    {'--nnodes': '2', '--rdzv-id': 'a', '-m': ''}
    """
    found: dict[str, str] = {}
    rest = iter(arguments)
    for word in rest:
        if not word.startswith("-") or word == "--":
            break
        name, equals, value = word.partition("=")
        name = name.replace("_", "-")
        if not equals and name not in _WITHOUT_VALUE:
            value = next(rest, "")
        found[name] = value
    return found


def _check(arguments: Sequence[str], options: dict[str, str]) -> None:
    if not arguments:
        raise WrongRequestError(
            "nothing to run: everstep torchrun --nnodes=2 --rdzv-id=my-job train.py"
        )
    if "--standalone" in options:
        raise WrongRequestError(
            "--standalone replaces the rendezvous: leave it out; one node is --nnodes=1"
        )
    if (backend := options.get("--rdzv-backend", "everstep")) != "everstep":
        raise WrongRequestError(
            f"--rdzv-backend={backend} takes the membership from everstep: leave it out, or use "
            "plain torchrun"
        )
    if importlib.util.find_spec("torch") is None:
        raise WrongRequestError("torch is not installed here: pip install 'everstep[trainer]'")


def _check_agent(path: Path) -> None:
    """Raise VerbError unless something answers on the agent's socket."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(_PROBE_S)
            probe.connect(str(path))
    except OSError as exc:
        raise VerbError(no_agent(path, exc)) from exc
