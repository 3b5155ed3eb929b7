"""A loop of 35 ms steps that a peer saves from, and what each save costs it.

Runs in the peer's own venv, started by torchrun or by the peer's launcher; torch is all it needs.
Every page of the state changes in every step: a saver that copies on write, or not at all, would
otherwise look better than it is. What a rank cannot overlap is called blocked: the call that begins
the save, and the wait, after a step's compute, until the state may change.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist

STEP_S = 0.035
_GB = 10**9
_TENSOR_BYTES = 16 * 2**20
_PAGE = 4096 // 4
"""Floats of a page."""
_UNDISTURBED, _GIVE_UP_S = 20, 120.0

State = dict[str, torch.Tensor]


class Saver(Protocol):
    """One way to save; `number` counts the saves."""

    def start(self, number: int) -> None:
        """Begin to save the state as it is now."""
        ...

    def staged(self) -> None:
        """Return when the state may change."""
        ...

    def done(self) -> bool:
        """Return whether this rank's save has ended. Called after every step."""
        ...

    def files(self, number: int) -> Path:
        """Return the folder that holds it then."""
        ...

    def load(self, number: int) -> State:
        """Return what was saved, from disk."""
        ...

    def close(self) -> None:
        """Let go of threads and processes."""
        ...


@dataclass(frozen=True)
class Asked:
    """The command line."""

    method: str
    size_gb: float
    repeats: int
    folder: Path


@dataclass(frozen=True)
class Save:
    """What one save cost one rank, in seconds from the call; `step_s` is the undisturbed step.

    `slowdown` compares all steps until the save had ended, blocked time apart, with undisturbed
    ones; `median_slowdown` only the middle one of them, which hides a single bad step.
    """

    blocked_s: float
    ended_s: float
    durable_s: float
    lost_s: float
    step_s: float
    slowdown: float
    median_slowdown: float
    consistent: bool


class Training:
    """Stands for a model: compute for most of a step, then a change to every page of its state."""

    def __init__(self, size_gb: float) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        share = int(size_gb * _GB / self.world)
        count = max(1, round(share / _TENSOR_BYTES))
        length = share // count // 4 // _PAGE * _PAGE
        self.state = {f"rank{self.rank}.t{i}": torch.ones(length) for i in range(count)}
        self.steps = 0
        self._weight = torch.randn(384, 384)
        self._ended = torch.zeros(1)
        self._products = 1
        self._products = self._fitting()

    def compute(self) -> None:
        """Do forward and backward."""
        x = self._weight
        for _ in range(self._products):
            x = torch.tanh(self._weight @ x)

    def update(self) -> None:
        """Change every page of the state."""
        for tensor in self.state.values():
            tensor[::_PAGE].add_(1.0)
        self.steps += 1

    def agreed(self, mine: bool) -> bool:
        """Return whether all ranks say yes: what a step's collective stands for, too."""
        self._ended.fill_(float(mine))
        dist.all_reduce(self._ended, op=dist.ReduceOp.MIN)
        return bool(self._ended.item())

    def step(self) -> float:
        """Do one undisturbed step and return its time."""
        begin = time.monotonic()
        self.compute()
        self.update()
        self.agreed(True)
        return time.monotonic() - begin

    def expected(self) -> torch.Tensor:
        """Return what each tensor holds now."""
        tensor = torch.ones_like(next(iter(self.state.values())))
        tensor[::_PAGE].add_(float(self.steps))
        return tensor

    def _fitting(self) -> int:
        # The slowest rank's numbers, so that all of them compute alike.
        update_s = _median_of(self.update)
        product_s = _median_of(self.compute)
        slowest = torch.tensor([update_s, product_s])
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        update_s, product_s = slowest.tolist()
        return int(max(1.0, (STEP_S - update_s) / product_s + 0.5))


def main(savers: dict[str, Callable[[Training, Path], Saver]]) -> None:
    """Measure the method asked for; rank 0 prints the JSON line. Ends the process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("method", choices=savers)
    parser.add_argument("--size-gb", type=float, required=True)
    parser.add_argument("--repeats", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    asked = Asked(**vars(parser.parse_args()))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    training = Training(asked.size_gb)
    saver = savers[asked.method](training, asked.folder)
    mine = [asdict(save) for save in measure(training, saver, asked.repeats)]
    everybodys: list[list[dict[str, float]]] = [mine] * dist.get_world_size()
    dist.all_gather_object(everybodys, mine)
    saver.close()
    if training.rank == 0:
        print(json.dumps(summary(asked, everybodys)), flush=True)
    dist.barrier()
    os._exit(0)  # what a saver leaves behind, threads or processes, must not hold up the end


def summary(asked: Asked, saves: list[list[dict[str, float]]]) -> dict[str, object]:
    """Return medians over the saves of the rank that is worst off."""

    def worst(name: str) -> float:
        return max(statistics.median(save[name] for save in ranks) for ranks in saves)

    return {
        "method": asked.method,
        "size_gb": asked.size_gb,
        "ranks": len(saves),
        "repeats": asked.repeats,
        "blocked_s": worst("blocked_s"),
        "blocked_s_per_gb": worst("blocked_s") / asked.size_gb,
        "step_slowdown": worst("slowdown"),
        "step_slowdown_median": worst("median_slowdown"),
        "lost_s": worst("lost_s"),
        "ended_s": worst("ended_s"),
        "durable_s": worst("durable_s"),
        "step_s": worst("step_s"),
        "consistent": all(save["consistent"] for ranks in saves for save in ranks),
    }


def measure(training: Training, saver: Saver, repeats: int) -> Iterator[Save]:
    """Save so many times, after a first one that pays for what is set up once."""
    for number in range(repeats + 1):
        save = one(training, saver, number)
        if number:
            yield save


def one(training: Training, saver: Saver, number: int) -> Save:
    """Save once beside the training. Raises TimeoutError when the save does not end."""
    step_s = statistics.median(training.step() for _ in range(_UNDISTURBED))
    expected = training.expected()
    dist.barrier()
    begin = time.monotonic()
    saver.start(number)
    blocked_s = time.monotonic() - begin
    steps: list[float] = []
    ended = False
    while not ended:
        step_begin = time.monotonic()
        training.compute()
        wait_begin = time.monotonic()
        saver.staged()
        waited_s = time.monotonic() - wait_begin
        training.update()
        ended = training.agreed(saver.done())
        blocked_s += waited_s
        steps.append(time.monotonic() - step_begin - waited_s)
        if time.monotonic() - begin > _GIVE_UP_S:
            raise TimeoutError(f"save {number} has not ended after {_GIVE_UP_S:.0f} s")
    ended_s = time.monotonic() - begin
    sync(saver.files(number))
    dist.barrier()
    durable_s = time.monotonic() - begin
    loaded = saver.load(number)
    consistent = all(torch.equal(loaded[name], expected) for name in training.state)
    del loaded
    dist.barrier()
    if training.rank == 0:
        shutil.rmtree(saver.files(number), ignore_errors=True)
    dist.barrier()
    return Save(
        blocked_s=blocked_s,
        ended_s=ended_s,
        durable_s=durable_s,
        lost_s=blocked_s + sum(steps) - step_s * len(steps),
        step_s=step_s,
        slowdown=statistics.mean(steps) / step_s - 1,
        median_slowdown=statistics.median(steps) / step_s - 1,
        consistent=consistent,
    )


def sync(folder: Path) -> None:
    """Bring every file below the folder onto the disk; those that are there already cost little."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)


def _median_of(call: Callable[[], None]) -> float:
    times = []
    for _ in range(7):
        begin = time.monotonic()
        call()
        times.append(time.monotonic() - begin)
    return statistics.median(times)
