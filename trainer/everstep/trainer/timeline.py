"""When this rank came up: the moments that the coordinator's account of time is made from."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from everstep.wire.messages import RankTimeline

if TYPE_CHECKING:
    from collections.abc import Callable

    from everstep.wire.messages import Phase

Moment = Literal[
    "began_at_s", "opened_at_s", "grouped_at_s", "restored_at_s", "stepped_at_s", "saved_at_s"
]
_opened_before = threading.Event()  # this process has had a generation
_AFTER_COMM = 19  # of the fields of /proc/self/stat behind the name: starttime


class Timeline:
    """One rank's moments in one generation, each put down the first time it comes."""

    def __init__(
        self,
        *,
        job: str,
        generation: int,
        rank: int,
        began_at_s: float | None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._clock = clock
        self.told = RankTimeline(
            nonce=job,
            generation=generation,
            rank=rank,
            began_at_s=began_at_s,
            opened_at_s=clock(),
        )

    def mark(self, moment: Moment) -> bool:
        """Put a moment down; False when it was there already."""
        if getattr(self.told, moment) is not None:
            return False
        self.told = msgspec.structs.replace(self.told, **{moment: self._clock()})
        return True

    def enter(self, phase: Phase, step: int | None) -> bool:
        """Put down what entering a phase says; False when that is nothing new."""
        if phase == "first_step":
            self.told = msgspec.structs.replace(self.told, from_step=step)
            return self.mark("restored_at_s")
        if phase == "step" and self.told.restored_at_s is not None:
            return self.mark("stepped_at_s")
        return phase == "end" and self.mark("saved_at_s")


def work_began_at_s() -> float | None:
    """Return when this process began to work for the generation that it opens now.

    For its first generation that is its start, for each that it is formed into afterwards now.
    """
    if _opened_before.is_set():
        return time.time()
    _opened_before.set()
    return process_began_at_s()


def process_began_at_s(stat: Path = Path("/proc/self/stat")) -> float | None:
    """Return when this process was started, by the wall clock; None where that is not to be read.

    For a process forked from an interpreter that was warm that is the fork.
    """
    try:
        fields = stat.read_text().rpartition(")")[2].split()
        up_s = int(fields[_AFTER_COMM]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - up_s)
