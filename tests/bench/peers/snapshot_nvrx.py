"""NVRx's asynchronous checkpoint in a forked process.

Its persistent worker is left out: on CPU tensors it takes no copy, and what it wrote was torn.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from nvidia_resiliency_ext.checkpointing.async_ckpt.torch_ckpt import TorchAsyncCheckpoint

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.bench.peers import snapshot_loop
from tests.bench.peers.snapshot_loop import State, Training


def without_cuda() -> None:
    """Give the few CUDA calls that it makes on its way an answer: there is one device, a CPU."""
    answers = {
        "synchronize": lambda *_: None,
        "current_device": lambda: "cpu",
        "device_count": lambda: 1,
        "set_device": lambda *_: None,
    }
    vars(torch.cuda).update(answers)


class Fork:
    """`TorchAsyncCheckpoint`: forks at the call, the child writes with torch.save."""

    def __init__(self, training: Training, folder: Path) -> None:
        without_cuda()
        self._training = training
        self._folder = folder
        self._checkpoint = TorchAsyncCheckpoint(persistent_queue=False)

    def start(self, number: int) -> None:
        self.files(number).mkdir(parents=True, exist_ok=True)
        self._checkpoint.async_save(self._training.state, str(self._file(number)))

    def staged(self) -> None:
        """The fork has the state."""

    def done(self) -> bool:
        self._checkpoint.finalize_async_save(blocking=False, no_dist=True)
        queue = self._checkpoint._get_async_calls_queue()
        return bool(queue.get_num_unfinalized_calls() == 0)

    def files(self, number: int) -> Path:
        return self._folder / f"save{number}"

    def load(self, number: int) -> State:
        loaded: State = torch.load(self._file(number), weights_only=True)
        return loaded

    def close(self) -> None:
        self._checkpoint.close()

    def _file(self, number: int) -> Path:
        return self.files(number) / f"rank{self._training.rank}.pt"


if __name__ == "__main__":
    snapshot_loop.main({"nvrx_fork": Fork})
