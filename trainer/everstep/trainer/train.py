"""The training loop, on one page: batch, forward, backward, decide, update, record."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from everstep.trainer.config import accumulation
from everstep.trainer.data import Windows
from everstep.trainer.model import Decoder
from everstep.trainer.optim import adamw, learning_rate, set_rate
from everstep.trainer.running import run

if TYPE_CHECKING:
    from everstep.sdk import ConfigFile
    from everstep.trainer.config import TrainerConfig
    from everstep.trainer.session import Session


def train(config: TrainerConfig, file: ConfigFile | None = None) -> None:
    """Train until `config.steps`, from the beginning or from where the job left off.

    Runs in each rank that torchrun starts, or alone, through any number of generations. Raises
    EverstepError with what to do about it, or whatever torch raises when a peer is lost and nobody
    orders this process into the next generation.
    """
    run(config, partial(_train, config), file)


def _train(config: TrainerConfig, session: Session) -> None:
    windows = Windows(
        Path(config.data),
        seq_len=config.seq_len,
        seed=config.seed,
        vocabulary=config.model.vocabulary,
    )
    micros = accumulation(config.global_batch, config.micro_batch, session.run.world_size)
    # Every window is full, so all ranks have equally many tokens and the mean is exact: each
    # rank scales by the tokens of all of them, and DDP or FSDP divides by the number of ranks.
    scale = session.run.world_size / (config.global_batch * config.seq_len)

    decoder = Decoder(config.model, seq_len=config.seq_len, seed=config.seed)
    tiny = torch.zeros(1, min(8, config.seq_len), dtype=torch.long, device=session.device)
    model = session.wrap(
        decoder,
        example=(tiny, tiny),
        blocks=decoder.blocks,
        ddp={"forward_sync_buffers": False},
    )
    optimizer = adamw(model, config)
    session.snapshot_state({"model": model, "optimizer": optimizer})

    steps = session.steps(config.steps, batch=config.global_batch, warmup_steps=config.warmup_steps)
    for step in steps:
        began_s = time.monotonic()
        step.lr = set_rate(optimizer, learning_rate(step.number, config))
        batch = torch.from_numpy(windows.batch(step.indices)).to(session.device)
        session.loaded()

        for micro, tokens in enumerate(batch.chunk(micros)):
            last = micro == micros - 1
            with session.accumulating(model, last=last):
                loss = model(tokens[:, :-1], tokens[:, 1:])
                session.forwarded(loss, tokens[:, 1:].numel(), last=last)
                (loss * scale).backward()
                session.backwarded(last=last)

        session.step(optimizer)
        if (left_s := config.min_step_s - (time.monotonic() - began_s)) > 0:
            time.sleep(left_s)
