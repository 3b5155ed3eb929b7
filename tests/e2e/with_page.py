"""Like the plain stepping script, with a Session's progress page."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from everstep.trainer import Session, SessionConfig


def main() -> None:
    out = Path(sys.argv[1])
    config = SessionConfig(run_dir=tempfile.mkdtemp(dir=out))
    with Session(config, hooks={"snapshot": {"enabled": False}}) as session:
        model = session.wrap(torch.nn.Linear(2, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        name = (
            f"rank{dist.get_rank()}-of-{dist.get_world_size()}-g{os.environ['EVERSTEP_GENERATION']}"
        )
        with (out / name).open("w") as log:
            for _ in session.steps(100_000):
                stop = torch.tensor([float((out / "stop").exists())])
                dist.all_reduce(stop)
                if stop.item() > 0:
                    break
                optimizer.zero_grad()
                loss = model(torch.ones(4, 2)).mean()
                loss.backward()
                session.step(optimizer, loss=loss)
                log.write("step\n")
                log.flush()
                time.sleep(0.02)


if __name__ == "__main__":
    main()
