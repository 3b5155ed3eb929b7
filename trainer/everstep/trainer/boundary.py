"""What a rank had at the end of its last step, for a snapshot of it that is taken in the next one.

The tensors are the live ones: an optimizer changes them only after all ranks have agreed on a step,
and whoever takes such a snapshot keeps it from that. Everything else (schedulers, counters, hooks)
may move on at any time, so it is looked at while the step ends, where that costs next to nothing.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import torch

from everstep.snapshots.marker import SnapshotError
from everstep.trainer.snapshot.tree import local

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from everstep.trainer.order import Range
    from everstep.trainer.snapshot.state import State

_SHARE = 200
"""A look may take one part in so many of a step."""
_FORGET = 0.98


class Facts(NamedTuple):
    """Where the run stood."""

    step: int
    samples: int
    skip: list[Range]


class Boundary:
    """The end of the last step of one rank. The main thread writes it, another one may read it."""

    def __init__(
        self,
        device: torch.device,
        clock: Callable[[], float] = time.perf_counter,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self.step_s = 0.0
        self.noted_s = clock()
        self.facts: Facts | None = None
        self._device = device
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._look_s: float | None = None  # not counted the first time: that one is dearer
        self._state: State | None = None
        self._versions: list[tuple[torch.Tensor, int]] = []
        self._event: torch.cuda.Event | None = None

    def note(self, facts: Facts, step_s: float, look: Callable[[], State]) -> None:
        """Put down the end of a step that took so long."""
        self.facts, self.step_s, self.noted_s = facts, step_s, self._clock()
        self._state = None
        if self._look_s and step_s < _SHARE * self._look_s:
            self._look_s *= _FORGET
            return
        begin_s = self._cpu_clock()
        try:
            state = look()
        except SnapshotError:
            return  # who takes a regular one says what is wrong
        # A hook may go on with what it gave us.
        frozen = msgspec.msgpack.decode(msgspec.msgpack.encode(dict(state.hooks)))
        state = state._replace(hooks=frozen)
        tensors = [local(tensor) for tensor in state.tensors.values()]
        self._versions = [(tensor, _version(tensor)) for tensor in tensors]
        if self._device.type == "cuda":
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's gap
            self._event.record()
        self._look_s = 0.0 if self._look_s is None else self._cpu_clock() - begin_s
        self._state = state

    def state(self) -> State:
        """Return the state as it was then; the optimizer must be kept from going on meanwhile.

        Raises SnapshotError where that is not to be had.
        """
        if self._state is None:
            raise SnapshotError(
                "the step in flight does not end, and what the last one left was not looked at: "
                f"steps of {self.step_s:.3f} s are too short for that"
            )
        if any(_version(tensor) != then for tensor, then in self._versions):
            raise SnapshotError(
                "the step in flight does not end, and it has changed some of the state already"
            )
        return self._state

    @contextlib.contextmanager
    def behind(self) -> Iterator[None]:
        """Have this thread's copies wait for that step alone, not for what the device does now.

        A collective that never ends would hold them up otherwise.
        """
        if self._event is None:
            yield
            return
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]  # torch's gap
        stream.wait_event(self._event)
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            yield


def _version(tensor: torch.Tensor) -> int:
    return tensor._version  # noqa: SLF001  torch has no other name for it
