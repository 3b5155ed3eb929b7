"""The same training as everstep's script, as a replica group of torchft.

Model, optimizer, windows and micro-batches are everstep's; so is the ledger, in which a change of
the quorum, or of who takes part in it, is a generation. Each replica keeps its share of the batch
whatever the others do, as is torchft's way. Lives in torchft's venv, started by torchrun.
"""

from __future__ import annotations

import argparse
import logging
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torchft import Manager, Optimizer, ProcessGroupGloo
from torchft.manager import WorldSizeMode

from everstep.trainer import ledger
from everstep.trainer.config import TrainerConfig, load
from everstep.trainer.data import Windows
from everstep.trainer.model import Decoder
from everstep.trainer.optim import adamw
from everstep.trainer.order import expand

GROUP_TIMEOUT_S, TIMEOUT_S = 1, 30
CHECKPOINT_EVERY = 5


@dataclass
class Place:
    """Who this replica is among how many, and whether surplus ones are spares."""

    group: int
    groups: int
    fixed: bool


class Replica:
    """One replica: model, optimizer and torchft's manager round them."""

    def __init__(self, config: TrainerConfig, place: Place) -> None:
        self.model = Decoder(config.model, seq_len=config.seq_len, seed=config.seed)
        self.inner = adamw(self.model, config)
        self.manager = Manager(
            pg=ProcessGroupGloo(timeout=timedelta(seconds=GROUP_TIMEOUT_S)),
            load_state_dict=self.load,
            state_dict=self.state,
            min_replica_size=place.groups if place.fixed else 1,
            world_size_mode=(
                WorldSizeMode.FIXED_WITH_SPARES if place.fixed else WorldSizeMode.DYNAMIC
            ),
            replica_id=f"replica{place.group}",
            timeout=timedelta(seconds=TIMEOUT_S),
            quorum_timeout=timedelta(seconds=TIMEOUT_S),
            hostname="127.0.0.1",
        )
        self.optimizer = Optimizer(self.manager, self.inner)

    def state(self) -> dict[str, Any]:
        """Return what a peer needs to join."""
        return {"model": self.model.state_dict(), "optimizer": self.inner.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        """Take over a peer's state, or a checkpoint's."""
        self.model.load_state_dict(state["model"])
        self.inner.load_state_dict(state["optimizer"])

    def average_gradients(self) -> None:
        """Average over those that take part, in one flat buffer."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        flat = torch.cat([g.view(-1) for g in gradients])
        self.manager.allreduce(flat).wait()
        for gradient, averaged in zip(
            gradients, torch.split(flat, [g.numel() for g in gradients]), strict=True
        ):
            gradient.copy_(averaged.view_as(gradient))


@dataclass
class Diary:
    """Puts committed steps into everstep's ledger."""

    folder: Path
    group: int
    generation: int = 0
    writer: ledger.Writer | None = None

    def add(self, manager: Manager, loss: float) -> None:
        """Put down the step that was just committed, where this replica took part in it."""
        rank, world = manager.participating_rank(), manager.num_participants()
        if rank is None:
            return
        # A joiner is in the quorum for a step before it takes part.
        generation = manager._quorum_id * 100 + world
        if generation != self.generation:
            self._turn_over(generation, rank, world)
        if self.writer:
            line = ledger.Line(manager.current_step(), [], True, time.time(), loss)
            self.writer.add(line)

    def _turn_over(self, generation: int, rank: int, world: int) -> None:
        if self.writer:
            self.writer.close()
        self.generation = generation
        chapter = ledger.Chapter(
            job=f"torchft{self.group}",  # spares and joiners can hold one rank in turn
            generation=generation,
            rank=rank,
            world_size=world,
            opened_at_s=time.time(),
        )
        self.writer = ledger.Writer(self.folder, chapter)


def train(config: TrainerConfig, place: Place) -> None:
    """Train until `config.steps`."""
    torch.set_num_threads(config.threads)
    windows = Windows(
        Path(config.data),
        seq_len=config.seq_len,
        seed=config.seed,
        vocabulary=config.model.vocabulary,
    )
    replica = Replica(config, place)
    manager = replica.manager
    checkpoint = Path(config.run_dir) / "torchft.pt"
    restore(replica, checkpoint)
    diary = Diary(Path(config.run_dir) / "ledger", place.group)
    share = config.global_batch // place.groups
    micros = share // config.micro_batch
    while manager.current_step() < config.steps:
        step = manager.current_step()
        replica.optimizer.zero_grad(set_to_none=True)
        begin = (step * place.groups + place.group % place.groups) * share
        batch = torch.from_numpy(windows.batch(expand([(begin, begin + share)])))
        loss = 0.0
        for tokens in batch.chunk(micros):
            summed = replica.model(tokens[:, :-1], tokens[:, 1:])
            mean = summed / (share * config.seq_len)
            mean.backward()
            loss += mean.item()
        replica.average_gradients()
        replica.optimizer.step()
        if manager.current_step() > step:
            diary.add(manager, loss)
            if manager.participating_rank() == 0 and manager.current_step() % CHECKPOINT_EVERY == 0:
                save(replica, checkpoint)


def save(replica: Replica, path: Path) -> None:
    """Put a checkpoint in place whole."""
    partial = path.with_suffix(".partial")
    torch.save({"user": replica.state(), "torchft": replica.manager.state_dict()}, partial)
    partial.replace(path)


def restore(replica: Replica, path: Path) -> None:
    """Start from the checkpoint, if there is one; a peer that is further on replaces it."""
    if path.exists():
        saved = torch.load(path, weights_only=True)
        replica.load(saved["user"])
        replica.manager.load_state_dict(saved["torchft"])


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--group", type=int, required=True)
    parser.add_argument("--groups", type=int, required=True)
    parser.add_argument("--fixed", action="store_true")
    asked = parser.parse_args()
    train(load(asked.config)[0], Place(asked.group, asked.groups, asked.fixed))
