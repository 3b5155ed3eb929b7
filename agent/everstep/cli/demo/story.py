"""What a run's ledger tells of a fault: when steps stopped, when they went on, what was redone.

Pure functions over the lines that the ranks put down; times are wall clock of this machine.
"""

from __future__ import annotations

import itertools
import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from everstep.trainer.ledger import Book


@dataclass(frozen=True, slots=True)
class Step:
    """One step that all ranks of a generation finished; `at_s` is when the last of them did."""

    generation: int
    step: int
    at_s: float
    loss: float | None


@dataclass(frozen=True, slots=True)
class Recovery:
    """From a fault to the first new step of all ranks."""

    resumed_s: float
    steps_lost: int


def finished(books: Iterable[Book]) -> list[Step]:
    """Return the steps that every rank of their generation finished, in order of time."""
    lines: dict[tuple[int, int], list[tuple[float, float | None]]] = {}
    worlds: dict[int, int] = {}
    for book in books:
        worlds[book.chapter.generation] = book.chapter.world_size
        for line in book.lines:
            key = (book.chapter.generation, line.step)
            lines.setdefault(key, []).append((line.at_s, line.loss))
    whole = [
        Step(generation, step, max(at for at, _ in seen), seen[0][1])
        for (generation, step), seen in lines.items()
        if len(seen) == worlds[generation]
    ]
    return sorted(whole, key=lambda s: s.at_s)


def recovery(steps: Sequence[Step], at_s: float) -> Recovery | None:
    """Return how the run came back from a fault at `at_s` that ended its generation.

    None while it has not. Steps lost are those that had been finished and were done again.
    """
    before = [s for s in steps if s.at_s <= at_s]
    generation = before[-1].generation if before else 0
    after = [s for s in steps if s.at_s > at_s and s.generation > generation]
    if not after:
        return None
    reached = max((s.step for s in steps if s.at_s < after[0].at_s), default=0)
    return Recovery(after[0].at_s - at_s, max(0, reached - (after[0].step - 1)))


def longest_gap(steps: Sequence[Step], start_s: float, end_s: float) -> float | None:
    """Return the longest time without a finished step between two moments.

    None when there was no step at all, which is no gap but a standstill.
    """
    times = [s.at_s for s in steps]
    around = [
        later - earlier
        for earlier, later in itertools.pairwise(times)
        if later > start_s and earlier < end_s
    ]
    return max(around, default=None)


def median_step_s(steps: Sequence[Step]) -> float:
    """Return the median time between neighbouring steps of one generation."""
    gaps = [
        later.at_s - earlier.at_s
        for earlier, later in itertools.pairwise(steps)
        if earlier.generation == later.generation
    ]
    return statistics.median(gaps) if gaps else 0.0


def curve(steps: Sequence[Step]) -> tuple[list[int], list[float]]:
    """Return steps and losses in order of time: a step done again goes back on itself."""
    losses = [math.nan if s.loss is None else s.loss for s in steps]
    return [s.step for s in steps], losses
