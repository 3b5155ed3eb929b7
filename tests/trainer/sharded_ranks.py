"""Ranks with sharded state, for tests: `sharded_ranks.py MODE FOLDER DO`.

Started by the forge with a place in the environment. DO is `save` (train two steps, save, and put
down what every tensor was as a whole), `load` (load, and compare with that), or `hand` (save to
memory, lose that of rank 1, and load from what is left), or `fall` (the same, with an older one on
disk).
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.trainer.snapshot_bench import Bench, bench

from everstep.trainer.snapshot.slots import Slots

ID = "s000002-g1"


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    # 7 does not divide evenly; the last one is empty on the last of three ranks.
    return nn.Sequential(nn.Linear(8, 7), nn.ReLU(), nn.Linear(7, 12), nn.Linear(12, 2, bias=False))


def objects(mode: str, seed: int) -> dict[str, Any]:
    world = dist.get_world_size()
    model = network(seed)
    if mode == "fsdp":
        mesh = init_device_mesh("cpu", (world,))
        for layer in model.children():
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif mode == "tp":
        mesh = init_device_mesh("cpu", (world,))
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        if world == 1:
            plan = {}
        model = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 4))
        parallelize_module(model, mesh, plan)
    elif mode == "2d":
        both = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("data", "tensor"))
        # Five rows for each of two, which two more share unevenly.
        model = nn.Sequential(nn.Linear(8, 10), nn.ReLU(), nn.Linear(10, 4))
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(model, both["tensor"], plan)
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=both["data"])
    elif mode == "pp":
        torch.manual_seed(seed)
        stage = {f"layer{dist.get_rank()}": nn.Linear(4, 4 + dist.get_rank())}
        model = nn.ModuleDict(stage)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    return {"model": model, "optimizer": optimizer}


def train(mode: str, made: dict[str, Any]) -> None:
    model, optimizer = made["model"], made["optimizer"]
    for number in range(2):
        torch.manual_seed(number)
        if mode == "pp":
            out = next(iter(model.values()))(torch.rand(3, 4))
        else:
            out = model(torch.rand(3, 8))
        out.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def wholes(made: dict[str, Any]) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for name, thing in made.items():
        state = thing.state_dict()
        tensors = state if name == "model" else {}
        for number, values in ({} if name == "model" else state["state"]).items():
            tensors |= {f"state.{number}.{k}": v for k, v in values.items()}
        for key, value in tensors.items():
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            found[f"{name}.{key}"] = whole.detach().clone()
    return found


def hand_on(made: Bench, saved: dict[str, Any], fresh: dict[str, Any]) -> None:
    train("ddp", saved)
    made.save(saved, 2, disk=False)
    if dist.get_rank() == 1:
        made.engine.slots = Slots()
    found = made.load(fresh, ID, tiers="both")
    assert found is not None
    assert found.tier == ("peer" if dist.get_rank() == 1 else "memory")
    expected = wholes(saved)
    for name, value in wholes(fresh).items():
        assert torch.equal(value, expected[name]), name


def fall(made: Bench, saved: dict[str, Any], fresh: dict[str, Any]) -> None:
    train("fsdp", saved)
    made.save(saved, 1)
    expected = wholes(saved)
    train("fsdp", saved)
    made.save(saved, 2, disk=False)
    if dist.get_rank() == 1:
        made.engine.slots = Slots()
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("everstep.trainer.snapshot.restore").addHandler(handler)
    found = made.load(fresh, ID, "s000001-g1", tiers="both")
    assert found is not None
    assert str(found.id) == "s000001-g1"
    assert found.tier == ("disk" if dist.get_rank() == 1 else "memory")
    assert len(told) == 1
    assert told[0].startswith(f"{ID} cannot be used by all ranks: ")
    assert ("disk: " if dist.get_rank() == 1 else "rank 1 has it nowhere") in told[0]
    for name, value in wholes(fresh).items():
        assert torch.equal(value, expected[name]), name


def main() -> None:
    mode, folder, do = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    dist.init_process_group("gloo")
    group = dist.new_group(backend="gloo")
    assert group is not None
    own = folder / f"{mode}-{dist.get_rank() if mode == 'pp' else 0}.pt"
    with bench(folder / "snapshots", group) as made:
        if do == "save":
            things = objects(mode, seed=1)
            train(mode, things)
            made.save(things, 2)
            values = wholes(things)
            if mode == "pp" or dist.get_rank() == 0:
                torch.save(values, own)
        elif do == "hand":
            hand_on(made, objects(mode, seed=1), objects(mode, seed=9))
        elif do == "fall":
            fall(made, objects(mode, seed=1), objects(mode, seed=9))
        else:
            things = objects(mode, seed=9)
            assert made.load(things, ID), made.rejected
            expected, values = torch.load(own), wholes(things)
            assert values.keys() == expected.keys(), values.keys() ^ expected.keys()
            for name, value in values.items():
                assert torch.equal(value, expected[name]), name
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
