"""everstep's own way to save, in the loop that its peers are measured in."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.bench.peers import snapshot_loop
from tests.bench.peers.snapshot_loop import State, Training
from tests.trainer.snapshot_bench import Bench, bench

from everstep.wire.ids import SnapshotId


class Stepped:
    """Tensors that an optimizer's step alone changes, as those of a model are."""

    def __init__(self, tensors: State) -> None:
        self.tensors = tensors
        self.param_groups = [{"params": list(tensors.values()), "lr": 0.0}]

    def state_dict(self) -> dict[str, Any]:
        return dict(self.tensors)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert state_dict.keys() == self.tensors.keys()


class Everstep:
    """The engine, with a writer of its own."""

    def __init__(self, training: Training, folder: Path) -> None:
        self._state = training.state
        self._objects = {"model": Stepped(training.state)}
        self._folder = folder
        self._stack = ExitStack()
        group = dist.new_group(backend="gloo")
        assert group is not None
        self._bench: Bench = self._stack.enter_context(bench(folder, group))
        self._group = group

    def start(self, number: int) -> None:
        self._bench.take(self._objects, number + 1)

    def staged(self) -> None:
        self._bench.engine.wait_copied()

    def done(self) -> bool:
        return self._bench.engine.wait(0.0)

    def ended_s(self) -> float | None:
        """Return when the newest was told to be durable (monotonic), None until then; rank 0."""
        return self._bench.durable_at_s if self.done() else None

    def files(self, number: int) -> Path:
        return self._folder / str(self._id(number))

    def load(self, number: int) -> State:
        loaded = {name: torch.empty_like(t) for name, t in self._state.items()}
        content = {"model": Stepped(loaded)}
        assert self._bench.load(content, str(self._id(number)))
        return loaded

    def restore(self, number: int, tier: str) -> None:
        """Bring the state back into the live tensors."""
        assert self._bench.load(self._objects, str(self._id(number)), tiers=tier)

    def close(self) -> None:
        self._stack.close()

    def _id(self, number: int) -> SnapshotId:
        return SnapshotId(number + 1, 1)


if __name__ == "__main__":
    snapshot_loop.main({"everstep": Everstep})
