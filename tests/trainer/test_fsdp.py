"""A sharded model: the same losses as DDP's, the same promises, and the user's own shards."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
from tests.trainer.ranks import StartRanks, WriteConfig, wait_until
from tests.trainer.test_exact import TRAINER, committed, last_snapshot

from everstep.trainer import ledger
from everstep.trainer.snapshot.compare import differences

STEPS = 20


def losses(run: Path, generation: int = 1) -> list[float | None]:
    books = ledger.read(run / "ledger")
    (book,) = (b for b in books if b.chapter.rank == 0 and b.chapter.generation == generation)
    return [line.loss for line in book.lines]


def train(start_ranks: StartRanks, world: int, config: Path) -> None:
    ranks = start_ranks(world, *TRAINER, config)
    assert ranks.wait() == [0] * world, ranks.log()


def test_the_losses_are_those_of_ddp_to_rounding(
    tmp_path: Path, write_config: WriteConfig, start_ranks: StartRanks
) -> None:
    # Two ranks add up three micro-batches each, and the norm is above what grad_clip allows.
    clipped = {"steps": STEPS, "hooks": {"grad_clip": {"max_norm": 0.5}}}
    for name in ("ddp", "fsdp"):
        train(start_ranks, 2, write_config(name, data_parallel=name, **clipped))
    whole, sharded = losses(tmp_path / "ddp"), losses(tmp_path / "fsdp")
    assert len(whole) == STEPS
    assert sharded == pytest.approx(whole, rel=1e-6)


def test_a_run_that_was_killed_twice_ends_bit_equal_with_an_undisturbed_one(
    tmp_path: Path, write_config: WriteConfig, start_ranks: StartRanks
) -> None:
    settings = {"steps": 40, "micro_batch": 1, "data_parallel": "fsdp"}
    train(start_ranks, 3, write_config("undisturbed", **settings))
    config = write_config("killed", **settings)
    for step, victim in ((4, 2), (12, 0)):
        ranks = start_ranks(3, *TRAINER, config)
        wait_until(partial(committed, tmp_path / "killed", step), what="a snapshot")
        ranks.kill(victim)
        assert 0 not in ranks.wait(), "nobody may call this a success"
    train(start_ranks, 3, config)

    a, b = last_snapshot(tmp_path / "undisturbed"), last_snapshot(tmp_path / "killed")
    assert a.name.startswith("s000040")
    assert b.name == "s000040-g3"
    assert differences(a, b) == []


LOADS = """
import sys
from pathlib import Path
import torch
from torch.distributed.tensor import DTensor
from everstep.trainer import config, optim, running, train
from everstep.trainer.model import Decoder
from everstep.trainer.snapshot import compare
mine, file = config.load(Path(sys.argv[1]))
_, saved = compare.read(compare.newest(Path(mine.run_dir) / "snapshots"))
def main(session):
    # Another seed: nothing may be right before it is loaded.
    decoder = Decoder(mine.model, seq_len=mine.seq_len, seed=mine.seed + 1)
    model = session.wrap(decoder, blocks=decoder.blocks)
    optimizer = optim.adamw(model, mine)
    assert session.snapshot_state({"model": model, "optimizer": optimizer}) > 0
    found = {f"model.{n.removeprefix('module.')}": p for n, p in model.named_parameters()}
    for number, values in optimizer.state_dict()["state"].items():
        found |= {f"optimizer.state.{number}.{name}": value for name, value in values.items()}
    assert any(isinstance(p, DTensor) for p in found.values()) is (mine.data_parallel == "fsdp")
    assert len(found) == 20 * 4
    for name, value in found.items():
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        assert torch.equal(whole.detach(), saved[name]), name
running.run(mine, main, file)
"""


@pytest.mark.parametrize(
    ("saved", "world", "loaded", "other"),
    [("fsdp", 3, "fsdp", 2), ("fsdp", 4, "fsdp", 2), ("fsdp", 3, "ddp", 2), ("ddp", 2, "fsdp", 3)],
)
def test_a_snapshot_loads_bit_equal_into_another_number_of_shards_and_into_copies(
    saved: str,
    world: int,
    loaded: str,
    other: int,
    tmp_path: Path,
    write_config: WriteConfig,
    start_ranks: StartRanks,
) -> None:
    script = tmp_path / "loads.py"
    script.write_text(LOADS)
    small = {"steps": 4, "micro_batch": 1}
    train(start_ranks, world, write_config("run", data_parallel=saved, **small))
    quiet = {"hooks": {"snapshot": {"every_steps": 100, "at_end": False}}}
    config = write_config("run", data_parallel=loaded, **small, **quiet)
    ranks = start_ranks(other, script, config)
    assert ranks.wait() == [0] * other, ranks.log()


def test_a_run_goes_on_as_the_same_run_when_it_is_sharded_in_mid_course_and_back(
    tmp_path: Path, write_config: WriteConfig, start_ranks: StartRanks
) -> None:
    constant = {"lr": 1e-3, "min_lr_ratio": 1.0, "warmup_steps": 0}
    train(start_ranks, 2, write_config("whole", steps=12, **constant))
    for world, name, steps in ((2, "ddp", 4), (3, "fsdp", 8), (1, "fsdp", 10), (2, "ddp", 12)):
        train(
            start_ranks, world, write_config("mixed", data_parallel=name, steps=steps, **constant)
        )
    mixed = [loss for g in (1, 2, 3, 4) for loss in losses(tmp_path / "mixed", g)]
    assert mixed == pytest.approx(losses(tmp_path / "whole"), rel=1e-6)
    account = ledger.account(ledger.read(tmp_path / "mixed" / "ledger"), end=12 * 12)
    assert account.exactly_once


SPOILT = """
import json, math, os, sys
from pathlib import Path
import torch
from torch import nn
from everstep.trainer import Session, SessionConfig
out, rank = Path(sys.argv[1]), int(os.environ["RANK"])
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()
settings = SessionConfig(run_dir=str(out / "run"), data_parallel="fsdp")
with Session(settings) as session:
    torch.manual_seed(rank)  # all begin with the numbers of rank 0 nevertheless
    model = session.wrap(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    applied, norms = [], []
    for step in session.steps(4):
        loss = model(torch.full((2, 4), 1.0 + rank))
        loss.backward()
        if (rank, step.number) == (1, 2):
            next(model.layers[1].parameters()).grad.to_local().fill_(math.inf)
        applied.append(session.step(optimizer, loss=loss))
        norms.append(str(step.grad_norm))
    first = [p.full_tensor().tolist() for p in model.parameters()]
(out / f"{rank}.json").write_text(json.dumps([applied, norms, first]))
"""


def test_an_infinity_in_one_ranks_shard_keeps_the_update_from_all_of_them(
    tmp_path: Path, start_ranks: StartRanks
) -> None:
    script = tmp_path / "spoilt.py"
    script.write_text(SPOILT)
    ranks = start_ranks(2, script, tmp_path)
    assert ranks.wait() == [0, 0], ranks.log()
    (applied, norms, weights), other = (
        json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)
    )
    assert applied == [True, False, True, True]
    assert norms[1] == "inf"
    assert [applied, norms, weights] == other, "and the norm is the same everywhere"


NORMS = """
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor, DTensor
from everstep.plugins.hooks.grad_clip import GradClip, GradClipConfig
dist.init_process_group("gloo")
row, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
torch.manual_seed(1)
layouts = [
    (None, None), (row, [Shard(0)]), (row, [Replicate()]), (row, [Shard(1)]),
    (square, [Shard(0), Shard(1)]), (square, [Replicate(), Shard(0)]),
    (square, [Shard(1), Replicate()]), (square, [Replicate(), Replicate()]),
]
class Step:
    grad_norm = 0.0
    parameters = []
wholes = []
for size in (3, 8):  # 3 rows leave nothing for the last of four ranks
    for mesh, placements in layouts:
        whole = torch.randn(size, 6)
        wholes.append(whole.clone())
        grad = whole.clone() if mesh is None else distribute_tensor(whole, mesh, placements)
        parameter = torch.zeros_like(grad).requires_grad_()
        parameter.grad = grad
        Step.parameters.append(parameter)
part = DTensor.from_local(torch.full((5,), 0.25), row, [Partial()])
parameter = DTensor.from_local(torch.zeros(5), row, [Replicate()]).requires_grad_()
parameter.grad = part
Step.parameters.append(parameter)
wholes.append(torch.ones(5))
step = Step()
GradClip(GradClipConfig(max_norm=0.5)).before_update(step)
expected = torch.cat([w.flatten() for w in wholes]).double().norm().item()
assert abs(step.grad_norm / expected - 1) < 1e-6, (step.grad_norm, expected)
for parameter, whole in zip(Step.parameters, wholes, strict=True):
    grad = parameter.grad
    clipped = grad.full_tensor() if isinstance(grad, DTensor) else grad
    torch.testing.assert_close(clipped, whole * (0.5 / expected))
dist.destroy_process_group()
"""


def test_the_norm_of_gradients_in_any_layout_is_that_of_the_whole_ones(
    tmp_path: Path, start_ranks: StartRanks
) -> None:
    script = tmp_path / "norms.py"
    script.write_text(NORMS)
    ranks = start_ranks(4, script)
    assert ranks.wait() == [0] * 4, ranks.log()


BY_HAND = """
import os, sys, time
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel, RowwiseParallel, parallelize_module,
)
from everstep.trainer import SessionConfig, run
how, folder, stop = sys.argv[1], sys.argv[2], int(sys.argv[3])
def main(session):
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(4, 10), nn.Tanh(), nn.Linear(10, 1))
    world = session.run.world_size
    shape = {"fsdp": (world, 1), "tp": (1, world), "both": (2, world // 2)}[how]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))
    if how != "fsdp":
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(net, mesh["tensor"], plan)
    if how != "tp":
        for layer in (net[0], net[2], net):
            fully_shard(layer, mesh=mesh["data"])
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    session.snapshot_state({"model": net, "optimizer": optimizer})
    for step in session.steps(20, batch=4):
        if step.number == stop and session.run.rank == 1:
            os._exit(9)
        # Ranks that share one layer's work must have the same samples.
        every = [i for first, stop in step.samples for i in range(first, stop)]
        indices = every[mesh.get_local_rank("data") :: shape[0]]
        x = torch.as_tensor(indices).float()[:, None].expand(-1, 4).sin()
        loss = (net(x) - x.mean(1, keepdim=True)).square().mean()
        loss.backward()
        session.step(optimizer, loss=loss)
hooks = {"snapshot": {"every_steps": 5, "when_busy": "wait"}}
run(SessionConfig(run_dir=folder, seed=1), main, hooks=hooks)
"""


@pytest.mark.parametrize(("how", "world"), [("fsdp", 2), ("tp", 2), ("both", 4)])
def test_a_script_that_shards_its_model_itself_is_the_same_run_after_a_failure(
    how: str, world: int, tmp_path: Path, start_ranks: StartRanks
) -> None:
    script = tmp_path / "by_hand.py"
    script.write_text(BY_HAND)
    calm = start_ranks(world, script, how, tmp_path / "calm", "0")
    assert calm.wait() == [0] * world, calm.log()
    failed = start_ranks(world, script, how, tmp_path / "killed", "13")
    assert 0 not in failed.wait()
    again = start_ranks(world, script, how, tmp_path / "killed", "0")
    assert again.wait() == [0] * world, again.log()
    a, b = last_snapshot(tmp_path / "calm"), last_snapshot(tmp_path / "killed")
    assert b.name == "s000020-g2"
    assert differences(a, b) == []


WRAPS = """
import sys
import torch
from torch import nn
from everstep.trainer import Session, SessionConfig
with Session(SessionConfig(run_dir=sys.argv[1], data_parallel="fsdp")) as session:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    {wrap}
"""


@pytest.mark.parametrize(
    ("wrap", "told"),
    [
        ("session.wrap(net)", "Sequential has no nn.ModuleList"),
        ("session.wrap(net, blocks=[nn.Linear(2, 2)])", "a Linear among the blocks is no part of"),
        ("session.wrap(session.wrap(net, blocks=[net[0]]))", "is sharded already"),
    ],
)
def test_a_model_that_cannot_be_sharded_is_told_with_what_to_do(
    wrap: str, told: str, tmp_path: Path, start_ranks: StartRanks
) -> None:
    script = tmp_path / "wraps.py"
    script.write_text(WRAPS.replace("{wrap}", wrap))
    ranks = start_ranks(1, script, tmp_path / "run")
    assert ranks.wait() == [1]
    assert told in ranks.log()


def test_an_unknown_way_to_spread_the_model_is_one_line_and_exit_code_64(
    write_config: WriteConfig, start_ranks: StartRanks
) -> None:
    ranks = start_ranks(1, *TRAINER, write_config(data_parallel="tp"))
    assert ranks.wait() == [64]
    assert "data_parallel must be ddp or fsdp, not 'tp'" in ranks.log()


def test_a_model_of_another_shape_in_the_same_folder_is_refused(
    write_config: WriteConfig, start_ranks: StartRanks
) -> None:
    few = {"steps": 2, "data_parallel": "fsdp"}
    train(start_ranks, 2, write_config(**few))
    ranks = start_ranks(2, *TRAINER, write_config(**few, model={"dim": 64}))
    assert ranks.wait() == [64, 64]
    assert "'model' of snapshot s000002-g1 does not fit" in ranks.log()
