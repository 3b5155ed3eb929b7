"""What the ranks of a case hold: a function of seed, step and rank, and of nothing else."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from tests.trainer.snapshot_bench import Values, same

from everstep.trainer import rng

SMALL = 7


class Turning(torch.optim.Optimizer):
    """Puts the next step's numbers where the last one's are, as an update does."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model.parameters(), {"lr": 0.5})
        for parameter in model.parameters():
            self.state[parameter]["moment"] = torch.zeros_like(parameter)

    def turn(self, seed: int, step: int) -> None:
        self._seed, self._step = seed, step
        self.step()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002  torch's
        for number, parameter in enumerate(self.param_groups[0]["params"]):
            size = parameter.numel()
            parameter.copy_(_numbers(self._seed, self._step, f"parameter {number}", size))
            moment = self.state[parameter]["moment"]
            moment.copy_(_numbers(self._seed, self._step, f"moment {number}", size))


class Model(torch.nn.Module):
    """One tensor that is copied while training goes on, one too small for that, one buffer."""

    def __init__(self, numbers: int) -> None:
        super().__init__()
        self.large = torch.nn.Parameter(torch.zeros(numbers))
        self.small = torch.nn.Parameter(torch.zeros(SMALL))
        self.seen = torch.nn.Buffer(torch.zeros(SMALL))


class Held:
    """The objects of one rank."""

    def __init__(self, seed: int, numbers: int, *, rank: int, own: bool) -> None:
        self.model = Model(numbers)
        self._optimizer = Turning(self.model)
        self._extra = Values()
        self._seed, self._rank, self._own = seed, rank, own

    @property
    def objects(self) -> Mapping[str, Any]:
        return {"model": self.model, "optimizer": self._optimizer, "extra": self._extra}

    def turn(self, step: int) -> None:
        """Become what this rank is at a step."""
        rng.follow(self._seed, step=step, rank=self._rank)
        self._optimizer.turn(self._seed, step)
        self.model.seen.copy_(self._seen(step))
        self._extra.values = _extra(self._seed, step)

    def differences(self, step: int) -> list[str]:
        """Return what is not, bit for bit, as it was at a step."""
        other = Held(self._seed, self.model.large.numel(), rank=self._rank, own=self._own)
        drawn = torch.rand(4)
        other.turn(step)
        found = [] if same(drawn, torch.rand(4)) else ["what is drawn at random"]
        for (name, a), b in zip(self._tensors(), (t for _, t in other._tensors()), strict=True):
            found += [] if same(a, b) else [name]
        return found + (["extra"] if self._extra.values != other._extra.values else [])

    def _seen(self, step: int) -> torch.Tensor:
        return _numbers(self._seed, step, f"seen {self._rank if self._own else 0}", SMALL)

    def _tensors(self) -> list[tuple[str, torch.Tensor]]:
        moments = [
            (f"moment {n}", s["moment"]) for n, s in enumerate(self._optimizer.state.values())
        ]
        return [*self.model.state_dict().items(), *moments]


def stored(seed: int, step: int, numbers: int) -> dict[str, torch.Tensor]:
    """Return the tensors that a snapshot of a step must have on disk, by name."""
    sizes = (numbers, SMALL)
    names = [
        ("model.large", "model.small"),
        ("optimizer.state.0.moment", "optimizer.state.1.moment"),
    ]
    out = {"model.seen": _numbers(seed, step, "seen 0", SMALL)}
    for kind, group in zip(("parameter", "moment"), names, strict=True):
        for number, name in enumerate(group):
            out[name] = _numbers(seed, step, f"{kind} {number}", sizes[number])
    return out


def _numbers(seed: int, step: int, name: str, size: int) -> torch.Tensor:
    chance = np.random.default_rng([seed, step, zlib.crc32(name.encode())])
    return torch.from_numpy(chance.random(size, dtype=np.float32))


def _extra(seed: int, step: int) -> dict[str, Any]:
    return {"step": step, "words": f"{seed} at {step} " * (1 + step % 7), "mixed": [None, (step,)]}
