"""Training hooks: the moments of a step, what a hook sees at each, and what it may decide.

A hook is a class with a `Config` and methods named after the moments it wants. Each takes one
argument and may return a `Decision` up to and including `before_update`:

    run_start(run)       state restored, nothing trained yet
    batch(step)          this rank's samples are in memory (only in loops that say so)
    forward(step)        the last micro-batch's forward is done
    backward(step)       the last backward is done: gradients are the mean over all ranks
                         (DTensors where the model is sharded: each rank has its part of them)
    before_update(step)  loss, tokens and decision votes of all ranks are about to be settled
    after_update(step)   the update was applied, or was skipped by all ranks alike
    snapshot(taken)      a snapshot was begun; copying and writing go on in the background
    run_end(run)         the last step is done and its snapshot is durable

What hooks vote is joined over all ranks in the one small all-reduce that a step waits for anyway;
the most severe vote wins, on every rank. A hook that raises is counted and reported; it never
makes its rank take another branch than the others, and after three failures, on whichever ranks,
it is switched off on all of them in the same step. A hook with `touches_gradients = True` that
raises before the update costs that update: half-changed gradients are applied nowhere. One that
speaks with other ranks, as a norm of sharded gradients must, does so on all of them or on none.

A hook's constructor may ask by name for `report` (hand in a Finding), `page` (a `Page`),
`snapshots` (a `Snapshots`) and `clock` (wall clock, seconds). A hook that is `Stateful` is saved
with every snapshot and restored from it; its state must then be the same on all ranks.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import torch

Moment = Literal[
    "run_start",
    "batch",
    "forward",
    "backward",
    "before_update",
    "after_update",
    "snapshot",
    "run_end",
]
MOMENTS: tuple[Moment, ...] = (
    "run_start",
    "batch",
    "forward",
    "backward",
    "before_update",
    "after_update",
    "snapshot",
    "run_end",
)


class Decision(IntEnum):
    """What to do with the step, by severity: the most severe vote of any rank wins."""

    PROCEED = 0
    SKIP_UPDATE = 1
    """Throw this step's gradients away; its samples are listed as skipped."""
    STOP = 2
    """End the run on all ranks, with an error, before the update."""


class Run(Protocol):
    """The run as one rank sees it. `steps` is the last step's number, `done` the newest one."""

    @property
    def rank(self) -> int:
        """This process among all."""
        ...

    @property
    def world_size(self) -> int:
        """How many ranks train in this generation."""
        ...

    @property
    def generation(self) -> int:
        """Counts the formations of this job's group."""
        ...

    @property
    def run_dir(self) -> Path:
        """Where this run keeps its files."""
        ...

    @property
    def steps(self) -> int:
        """The number of the last step."""
        ...

    @property
    def done(self) -> int:
        """The number of the newest finished step, 0 at the very beginning."""
        ...

    @property
    def warmup_steps(self) -> int:
        """Steps over which the learning rate rises, 0 when not known."""
        ...

    @property
    def mtbf_s(self) -> float | None:
        """How long the job trains between two failures, as far as the coordinator can say."""
        ...


class Step(Protocol):
    """The step in progress. One object serves all steps: keep values, not the object."""

    @property
    def number(self) -> int:
        """From 1; the number of updates decided so far plus one."""
        ...

    @property
    def last(self) -> bool:
        """Whether the run ends after this step."""
        ...

    @property
    def samples(self) -> Sequence[tuple[int, int]]:
        """The global sample indices of this step over all ranks, as half-open ranges."""
        ...

    @property
    def parameters(self) -> Sequence[torch.Tensor]:
        """What the optimizer updates; gradients are in `.grad`."""
        ...

    @property
    def loss(self) -> float:
        """Mean per token over all ranks, known from `before_update` on (nan before)."""
        ...

    @property
    def tokens(self) -> int:
        """Tokens (or whatever the loss is a mean of) over all ranks, from `before_update` on."""
        ...

    @property
    def lr(self) -> float:
        """The learning rate of this update, nan when the loop does not say."""
        ...

    @property
    def decision(self) -> Decision:
        """What all ranks agreed on, from `after_update` on."""
        ...

    @property
    def step_s(self) -> float:
        """Wall time since the step before was finished, from `after_update` on."""
        ...

    @property
    def data_s(self) -> float:
        """Part of it that went into getting the samples; this and the next, nan if not marked."""
        ...

    @property
    def forward_s(self) -> float:
        """Part of it in forward passes."""
        ...

    @property
    def backward_s(self) -> float:
        """Part of it in backward passes."""
        ...

    @property
    def update_s(self) -> float:
        """Part of it in hooks, agreement and optimizer."""
        ...

    @property
    def snapshot_s(self) -> float:
        """Part of it for which the snapshot taken after the step before held up the loop."""
        ...

    @property
    def grad_norm(self) -> float:
        """Global norm before clipping; nan unless a hook has set it."""
        ...

    @grad_norm.setter
    def grad_norm(self, norm: float) -> None: ...


class SnapshotTaken(Protocol):
    """A snapshot that is being copied out of the live state."""

    @property
    def id(self) -> str:
        """Step and generation, e.g. `s000120-g7`."""
        ...

    @property
    def step(self) -> int:
        """The step after which it was taken."""
        ...

    @property
    def stall_s(self) -> float:
        """How long the loop was blocked so far."""
        ...

    @property
    def final(self) -> bool:
        """Whether it is the one at the end of the run."""
        ...

    @property
    def disk(self) -> bool:
        """Whether it goes to disk, or is kept in memory only."""
        ...


class Page(Protocol):
    """The progress page that the node's agent reads."""

    def finished(self, step: Step) -> None:
        """Put down the finished step. Microseconds, no system call."""
        ...


class Snapshots(Protocol):
    """The engine that takes snapshots; a hook says when."""

    @property
    def write_s(self) -> float | None:
        """How long the newest one took to become durable; rank 0 knows, others say None."""
        ...

    def ask(self, *, disk: bool = True) -> None:
        """Ask for one after this step's update; call it from `before_update`.

        Without `disk` it is kept in memory only.
        """
        ...

    def policy(
        self,
        *,
        keep: int,
        at_end: bool,
        wait_when_busy: bool,
        keep_every_steps: int = 0,
        budget_gb: float = 0.0,
        in_memory: bool = True,
        place: str = "",
    ) -> None:
        """Say what to keep on disk: the newest `keep`, every so many steps, within a budget.

        `at_end` takes one at the end of the run; `wait_when_busy` holds the loop up where one is
        due while another is in flight. `in_memory` has the newest held in the node's memory too;
        `place` is where they go, a folder or a URL ("": below the run's own folder).
        """
        ...
