"""How often to take a snapshot: the time between two that loses the least of a run.

What is weighed is the time that a snapshot holds the run up against the work that a failure throws
away. J. W. Young, "A first order approximation to the optimum checkpoint interval", Communications
of the ACM 17(9), 1974; J. T. Daly, "A higher order estimate of the optimum checkpoint interval for
restart dumps", Future Generation Computer Systems 22(3), 2006.
"""

from __future__ import annotations

import math
from typing import NamedTuple

UNKNOWN_MTBF_S = 86400.0


class Measured(NamedTuple):
    """What a run has shown so far, in seconds; None is what is not known (yet)."""

    stall_s: float
    write_s: float | None
    step_s: float
    mtbf_s: float | None


class Limits(NamedTuple):
    """What the user allows, in steps."""

    least: int
    most: int


class Choice(NamedTuple):
    """How many steps lie between two snapshots, and what it was chosen by."""

    every_steps: int
    why: str


def daly_s(stall_s: float, mtbf_s: float) -> float:
    """Return the best time between two snapshots: Young's with two further terms.

    >>> round(daly_s(0.02, 5.3 * 3600), 1)
    27.6
    """
    if stall_s >= 2 * mtbf_s:
        return mtbf_s
    share = stall_s / (2 * mtbf_s)
    return math.sqrt(2 * stall_s * mtbf_s) * (1 + math.sqrt(share) / 3 + share / 9) - stall_s


def choose(measured: Measured, limits: Limits) -> Choice:
    """Return how many steps to take from one snapshot to the next.

    Not fewer than it takes to write one: the next cannot begin before the last is durable.
    """
    mtbf_s = UNKNOWN_MTBF_S if measured.mtbf_s is None else measured.mtbf_s
    best_s = daly_s(measured.stall_s, mtbf_s)
    step_s = max(measured.step_s, 1e-9)
    wanted = max(1, round(min(best_s / step_s, 1e15)))
    written = math.ceil(min((measured.write_s or 0.0) / step_s, 1e15))
    steps = min(limits.most, max(limits.least, wanted, written))
    why = f"{_facts(measured, mtbf_s)}, Young/Daly says {_time(best_s)}"
    return Choice(steps, why + _held_to(steps, wanted, written, limits))


def _held_to(steps: int, wanted: int, written: int, limits: Limits) -> str:
    if steps == wanted:
        return ""
    if steps == limits.most:
        return "; max_every_steps is less"
    if steps == written:
        return "; the one before must be written first"
    return "; min_every_steps is more"


def _facts(measured: Measured, mtbf_s: float) -> str:
    write = "not written yet" if measured.write_s is None else f"write {_time(measured.write_s)}"
    known = "" if measured.mtbf_s is not None else " (assumed)"
    return f"stall {_time(measured.stall_s)}, {write}, MTBF {_time(mtbf_s)}{known}"


def _time(seconds: float) -> str:
    """Return a duration for people.

    >>> _time(0.0213), _time(38.4), _time(19_000), _time(400_000)
    ('0.021 s', '38 s', '5.3 h', '4.6 d')
    """
    for unit, size in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.2g} s" if seconds < 100 else f"{seconds:.0f} s"
