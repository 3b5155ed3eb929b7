"""`--logs-specs=everstep`: torchrun's own logs, kept per generation, and what a dead rank said.

Without a redirect or tee of the user's, stderr goes to the console as ever and to a file as well,
so that the last lines of a rank that ended can be shown with the incident. torchrun's default
names the folder by its restart count, which membership changes leave alone, and would delete the
logs of the generation before.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, Std

from everstep.launch.warm import opening as warm

if TYPE_CHECKING:
    from collections.abc import Sequence

TAIL_LINES = 20
_TAIL_BYTES = 16 * 1024
_MAX_ERROR_FILE, _END_CHARS = 32 * 1024 * 1024, 8 * 1024
_KEPT_GENERATIONS = 8


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a rank left behind: the traceback of its error file, and its last lines of stderr."""

    error: str | None = None
    stderr_tail: list[str] = field(default_factory=list)


_destinations: dict[int, LogsDest] = {}


class EverstepLogs(DefaultLogsSpecs):
    """DefaultLogsSpecs with a folder per generation and stderr kept."""

    def __init__(
        self,
        log_dir: str | None = None,
        redirects: Std | dict[int, Std] = Std.NONE,
        tee: Std | dict[int, Std] = Std.NONE,
        local_ranks_filter: set[int] | None = None,
    ) -> None:
        if redirects == Std.NONE and tee == Std.NONE:
            tee = Std.ERR
        super().__init__(log_dir, redirects, tee, local_ranks_filter)
        warm.open_pool()

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Return where each local rank's streams go, and remember it for `evidence`."""
        warm.hide_from_ranks()
        generation = int(os.environ.get("EVERSTEP_GENERATION", "0"))
        named = {
            rank: {**env, "TORCHELASTIC_RESTART_COUNT": f"g{generation}"}
            for rank, env in envs.items()
        }
        destination = super().reify(named)
        for rank, env in envs.items():
            env["TORCHELASTIC_ERROR_FILE"] = named[rank]["TORCHELASTIC_ERROR_FILE"]
        _destinations[generation] = destination
        for old in sorted(_destinations)[:-_KEPT_GENERATIONS]:
            del _destinations[old]
        return destination


def carry_on(before: int, generation: int, fresh: Sequence[int]) -> None:
    """The streams of a generation are those of the one before: the ranks were not restarted.

    What the ranks that `fresh` ones (by local rank) follow left as their error is taken away.
    """
    destination = _destinations.get(before)
    if destination is None:
        return
    _destinations[generation] = destination
    for local_rank in fresh:
        if path := destination.error_files.get(local_rank):
            Path(path).unlink(missing_ok=True)


def evidence(generation: int, local_rank: int) -> Evidence:
    """Return what is known of a rank that ended; nothing with another logs_specs in use."""
    destination = _destinations.get(generation)
    if destination is None:
        return Evidence()
    return Evidence(
        _traceback(destination.error_files.get(local_rank)),
        _tail(destination.stderrs.get(local_rank)),
    )


def _traceback(path: str | None) -> str | None:
    """Return the traceback that torch's @record wrote, None without one."""
    try:
        with Path(path or "").open(encoding="utf-8", errors="replace") as file:
            message: Any = json.loads(file.read(_MAX_ERROR_FILE))["message"]
        if isinstance(message, dict):
            extra = message.get("extraInfo", {})
            message = extra.get("py_callstack") or message.get("message")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None  # the script may write there what it likes
    return _ends(str(message))


def _ends(text: str) -> str:
    """Return the text, or its first and last part: an exception may quote a whole file."""
    left_out = len(text) - 2 * _END_CHARS
    if left_out <= 0:
        return text
    return f"{text[:_END_CHARS]}\n... {left_out} characters ...\n{text[-_END_CHARS:]}"


def _tail(path: str | None) -> list[str]:
    try:
        with Path(path or "").open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    return lines[-TAIL_LINES:]
