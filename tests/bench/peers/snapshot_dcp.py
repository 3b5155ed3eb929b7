"""torch's own asynchronous checkpoint, three ways, each with a stager that keeps its memory.

The save has a process group of its own: on the training group it would mix with the training's.
"""

from __future__ import annotations

import sys
import warnings
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.bench.peers import snapshot_loop
from tests.bench.peers.snapshot_loop import State, Training


class Dcp:
    """`async_save` to a folder per save. On a CPU neither pinned memory nor streams exist."""

    def __init__(
        self,
        training: Training,
        folder: Path,
        *,
        kind: AsyncCheckpointerType = AsyncCheckpointerType.THREAD,
        shared: bool = False,
        staging_thread: bool = False,
    ) -> None:
        self._state = training.state
        self._folder = folder
        self._kind = kind
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False,
                use_shared_memory=shared,
                use_async_staging=staging_thread,
                use_non_blocking_copy=False,
            )
        )
        self._group = dist.new_group(backend="gloo")
        self._staged: Future[Any] | None = None
        self._ended: Future[Any]

    def start(self, number: int) -> None:
        answer = async_save(
            dict(self._state),
            checkpoint_id=self.files(number),
            process_group=self._group,
            async_checkpointer_type=self._kind,
            async_stager=self._stager,
        )
        if isinstance(answer, Future):
            self._staged, self._ended = None, answer
        else:
            self._staged, self._ended = answer.staging_completion, answer.upload_completion

    def staged(self) -> None:
        if self._staged is not None:
            self._staged.result()

    def done(self) -> bool:
        if not self._ended.done():
            return False
        self._ended.result()
        return True

    def files(self, number: int) -> Path:
        return self._folder / f"save{number}"

    def load(self, number: int) -> State:
        loaded = {name: torch.empty_like(tensor) for name, tensor in self._state.items()}
        load(loaded, checkpoint_id=self.files(number), process_group=self._group)
        return loaded

    def close(self) -> None:
        self._stager.close()


if __name__ == "__main__":
    warnings.filterwarnings("ignore", category=FutureWarning)
    snapshot_loop.main(
        {
            "dcp_async_thread": Dcp,
            "dcp_async_process": partial(Dcp, kind=AsyncCheckpointerType.PROCESS, shared=True),
            "dcp_default_stager": partial(Dcp, staging_thread=True),
        }
    )
