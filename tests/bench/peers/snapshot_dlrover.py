"""DLRover's flash checkpoint: a copy into shared memory at the call, which its agent writes down.

Started by dlrover-run, as the agent is what writes.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer, StorageType

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.bench.peers import snapshot_loop
from tests.bench.peers.snapshot_loop import State, Training

_NEWEST = "dlrover_latest.txt"


class Flash:
    """`save_checkpoint` to disk, a shard per rank."""

    def __init__(self, training: Training, folder: Path) -> None:
        self._training = training
        self._folder = folder
        self._started = 0
        self._checkpointer = DdpCheckpointer(
            str(folder), local_shard_num=training.world, global_shard_num=training.world
        )

    def start(self, number: int) -> None:
        self._started = self._step(number)
        state = dict(self._training.state)
        self._checkpointer.save_checkpoint(self._started, state, storage_type=StorageType.DISK)

    def staged(self) -> None:
        """The call has copied the state."""

    def done(self) -> bool:
        try:
            return (self._folder / _NEWEST).read_text().strip() == str(self._started)
        except FileNotFoundError:
            return False

    def files(self, number: int) -> Path:
        return self._folder / str(self._step(number))

    def load(self, number: int) -> State:
        file = self.files(number) / f"rank_{self._training.rank}.pt"
        loaded: State = torch.load(file, weights_only=True)
        return loaded

    def close(self) -> None:
        """Nothing is ours: its agent holds the memory."""

    @staticmethod
    def _step(number: int) -> int:
        return number + 1  # it takes 0 for none


if __name__ == "__main__":
    snapshot_loop.main({"dlrover_flash": Flash})
