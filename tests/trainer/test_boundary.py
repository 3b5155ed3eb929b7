"""What is kept of the end of a step, and when it may be used later on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from everstep.snapshots.marker import SnapshotError
from everstep.trainer.boundary import Boundary, Facts
from everstep.trainer.content import Content
from everstep.trainer.snapshot.state import State


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Looking:
    """A model's state, each look at which takes a while, and counts."""

    def __init__(self, clock: Clock, look_s: float) -> None:
        self.model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
        self.hooks: dict[str, Any] = {"spikes": {"seen": [1.0]}}
        self.looks = 0
        self._content = Content({"model": self.model}, rank=0)
        self._clock, self._look_s = clock, look_s

    def __call__(self) -> State:
        self.looks += 1
        self._clock.now_s += self._look_s
        return self._content.state(self.hooks)


def noted(step_s: float, look_s: float = 0.001, steps: int = 1) -> tuple[Boundary, Looking]:
    clock = Clock()
    looking = Looking(clock, look_s)
    boundary = Boundary(torch.device("cpu"), clock, clock)
    for step in range(1, steps + 1):
        boundary.note(Facts(step, 12 * step, []), step_s, looking)
    return boundary, looking


def test_a_look_is_taken_at_the_end_of_each_step_that_is_long_enough_for_it() -> None:
    boundary, looking = noted(step_s=0.25, steps=5)
    assert looking.looks == 5
    assert boundary.facts == Facts(5, 60, [])
    boundary.state()


def test_short_steps_are_looked_at_twice_to_learn_what_it_costs() -> None:
    boundary, looking = noted(step_s=0.1, steps=5)
    assert looking.looks == 2, "the first time is dearer than others"
    with pytest.raises(SnapshotError, match="too short"):
        boundary.state()


def forward(model: torch.nn.Module) -> None:
    model(torch.ones(3, 2))


def update(model: torch.nn.Module) -> None:
    with torch.no_grad():
        next(model.parameters()).add_(1)


@pytest.mark.parametrize("change", [forward, update])
def test_what_a_forward_or_anybody_has_changed_since_is_no_state_of_that_step(
    change: Callable[[torch.nn.Module], None],
) -> None:
    boundary, looking = noted(step_s=1.0)
    change(looking.model)
    with pytest.raises(SnapshotError, match="changed some of the state"):
        boundary.state()


def test_hooks_that_go_on_do_not_change_what_was_seen_of_them() -> None:
    boundary, looking = noted(step_s=1.0)
    looking.hooks["spikes"]["seen"].append(2.0)
    assert boundary.state().hooks == {"spikes": {"seen": [1.0]}}


def test_a_state_that_cannot_be_looked_at_is_left_to_the_regular_snapshot() -> None:
    def broken() -> State:
        raise SnapshotError("a sparse tensor")

    boundary = Boundary(torch.device("cpu"))
    boundary.note(Facts(1, 12, []), 1.0, broken)
    with pytest.raises(SnapshotError, match="does not end"):
        boundary.state()
