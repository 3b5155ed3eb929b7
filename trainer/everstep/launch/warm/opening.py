"""Opens the launcher's pool where torchrun is about to read `PYTHON_EXEC`, or says why not."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from everstep.launch.leave import say
from everstep.launch.warm.door import NoDoorError
from everstep.launch.warm.nest import Spec
from everstep.launch.warm.pool import Pool

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import FrameType

SWITCH, PYTHON_EXEC = "EVERSTEP_WARM", "PYTHON_EXEC"
_OFF = frozenset({"0", "no", "off", "false"})

_pool: Pool | None = None


def the_pool() -> Pool | None:
    """Return this launcher's pool, None when its ranks start as ever."""
    return _pool


def open_pool() -> None:
    """Open the pool, from within torchrun's `config_from_args`, unless there is a reason not to.

    torchrun reads `PYTHON_EXEC` right after it has made its logs_specs.
    """
    global _pool  # noqa: PLW0603  torchrun hands nothing from here to its rendezvous
    arguments = _torchruns_arguments()
    if arguments is None or _pool is not None or os.environ.get(SWITCH, "1").lower() in _OFF:
        return
    if (why := _reason_against(arguments, os.environ)) is not None:
        if why:
            say(f"ranks start cold: {why}")
        return
    try:
        _pool = Pool(say)
    except (NoDoorError, OSError) as exc:
        say(f"ranks start cold: {exc}")
        return
    module = ["-m"] if arguments.module else []
    words = ["-u", *module, arguments.training_script, *arguments.training_script_args]
    argv = tuple(os.fsencode(str(word)) for word in words)
    _pool.start(Spec(argv, dict(os.environb), os.getcwd()))  # noqa: PTH109  as the shim says it
    os.environ[PYTHON_EXEC] = str(_pool.executable)


def hide_from_ranks() -> None:
    """Take `PYTHON_EXEC` out of what the ranks inherit, if it is ours."""
    if _pool is not None and os.environ.get(PYTHON_EXEC) == str(_pool.executable):
        del os.environ[PYTHON_EXEC]


def close_pool() -> None:
    """Close the pool, if there is one."""
    global _pool
    pool, _pool = _pool, None
    if pool is not None:
        pool.close()


def _reason_against(arguments: Any, environ: Mapping[str, str]) -> str | None:
    """Return why no pool is opened; "" where nobody would expect one, None for "open it"."""
    if arguments.no_python or arguments.run_path or arguments.rdzv_backend != "everstep":
        return ""
    if arguments.numa_binding is not None:
        return "--numa-binding is to place their memory, and a fork's is where the nursery's is"
    if arguments.virtual_local_rank:
        return "--virtual-local-rank hides from them which of a node's ranks they are"
    if PYTHON_EXEC in environ:
        return f"{PYTHON_EXEC}={environ[PYTHON_EXEC]} is to run them"
    return None


def _torchruns_arguments() -> Any:
    """Return the `args` of the calling `config_from_args`, None where somebody else makes us."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001  torch passes them nowhere else
    while frame is not None:
        if frame.f_code.co_name == "config_from_args":
            return frame.f_locals.get("args")
        frame = frame.f_back
    return None
