"""A training loop of your own under everstep: what `Session` adds is marked with (*).

    python examples/own_loop.py                                     one process, nobody watching
    torchrun --standalone --nproc-per-node=3 examples/own_loop.py   three ranks
    everstep torchrun --nnodes=2:4 --nproc-per-node=1 --rdzv-id=mine examples/own_loop.py

Kill it at any step and start it again: it goes on as if nothing had happened, bit by bit.
"""

import sys

import torch
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record

from everstep.trainer import Session, SessionConfig, run

RUN_DIR = sys.argv[1] if len(sys.argv) > 1 else "runs/own-loop"
BATCH = 24  # samples per step over all ranks


def samples(indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Make up the data: sample i is a function of i alone."""
    x = torch.stack([indices.double() * k for k in (0.1, 0.37, 0.71)], dim=1).sin().float()
    return x, x.prod(dim=1, keepdim=True)


def main(session: Session) -> None:
    """Fit a product of sines with a small network that has dropout in it."""
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(3, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 1))
    model = session.wrap(net)  # (*) DDP
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session.snapshot_state({"model": model, "optimizer": optimizer})  # (*) resumes, too
    for step in session.steps(200, batch=BATCH):  # (*) this rank's samples, exactly once
        x, y = samples(torch.from_numpy(step.indices))
        loss = ((model(x) - y) ** 2).mean()
        loss.backward()
        session.step(optimizer, loss=loss)  # (*) instead of optimizer.step() and zero_grad()


if __name__ == "__main__":
    hooks = {"snapshot": {"every_steps": 50}}
    record(run)(SessionConfig(run_dir=RUN_DIR, seed=1), main, hooks=hooks)  # (*)
