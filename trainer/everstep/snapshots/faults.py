"""The named points of a save, where tests and chaos runs let something go wrong.

`EVERSTEP_FAULT=POINT:ACTION` in the writer's environment makes it happen there, e.g.
`before-marker:kill`, `mid-file:enospc` or, for the second part that comes by,
`before-fsync:sleep=3#2`. Nobody sets that outside of tests; a writer that finds it says so in its
first line.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import threading
import time
from dataclasses import dataclass
from enum import StrEnum

from everstep.sdk.config import ConfigError

FAULT_VARIABLE = "EVERSTEP_FAULT"


class Point(StrEnum):
    """In the order in which a save comes by."""

    BEFORE_OPEN = "before-open"
    MID_FILE = "mid-file"
    BEFORE_FSYNC = "before-fsync"
    AFTER_FSYNC = "after-fsync"
    BEFORE_PART = "before-part"
    AFTER_PART = "after-part"
    BEFORE_METADATA = "before-metadata"
    AFTER_METADATA = "after-metadata"
    BEFORE_MARKER = "before-marker"
    MID_MARKER = "mid-marker"
    AFTER_MARKER = "after-marker"
    BEFORE_LATEST = "before-latest"
    AFTER_LATEST = "after-latest"
    BEFORE_RETENTION = "before-retention"
    MID_RETENTION = "mid-retention"


class Action(StrEnum):
    """What goes wrong."""

    KILL = "kill"
    EIO = "eio"
    ENOSPC = "enospc"
    EROFS = "erofs"
    SLEEP = "sleep"
    STOP = "stop"


class Faults:
    """Nothing goes wrong; the base of everything that lets it."""

    def at(self, point: Point) -> None:
        """Come by a point. Raises OSError where the fault is one of the disk."""


@dataclass
class Planned(Faults):
    """`action` happens the `nth` time that a save comes by `point`, and never again."""

    point: Point
    action: Action
    sleep_s: float = 3600.0
    nth: int = 1

    def __post_init__(self) -> None:
        self._seen = 0
        self._lock = threading.Lock()

    def at(self, point: Point) -> None:
        """Come by a point; at the right one the fault happens."""
        if point is not self.point:
            return
        with self._lock:
            self._seen += 1
            if self._seen != self.nth:
                return
        match self.action:
            case Action.KILL:
                os.kill(os.getpid(), signal.SIGKILL)
            case Action.STOP:
                # Until somebody sends SIGCONT: long after, as a frozen machine would go on.
                signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
            case Action.SLEEP:
                time.sleep(self.sleep_s)
            case Action.EIO | Action.ENOSPC | Action.EROFS:
                number = getattr(errno, self.action.name)
                raise OSError(number, f"{os.strerror(number)} (injected at {point})")


_FORM = re.compile(
    r"(?P<point>[a-z-]+):(?P<action>[a-z]+)(=(?P<s>[0-9]+(\.[0-9]+)?))?(#(?P<nth>[0-9]+))?"
)


def from_text(text: str) -> Faults:
    """Return the faults that `EVERSTEP_FAULT` names; "" is none. Raises ConfigError.

    >>> from_text("mid-file:sleep=0.5#2")
    Planned(point=<Point.MID_FILE: 'mid-file'>, action=<Action.SLEEP: 'sleep'>, sleep_s=0.5, nth=2)
    """
    if not text:
        return Faults()
    match = _FORM.fullmatch(text)
    if match is None or match["point"] not in list(Point) or match["action"] not in list(Action):
        raise ConfigError(
            f"{FAULT_VARIABLE}={text!r} is not POINT:ACTION[=SECONDS][#NTH] with a point of "
            f"{', '.join(Point)} and an action of {', '.join(Action)}"
        )
    point, action = Point(match["point"]), Action(match["action"])
    return Planned(point, action, float(match["s"] or 3600), int(match["nth"] or 1))
