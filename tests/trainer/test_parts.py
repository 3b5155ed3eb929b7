"""The small parts: places, states, random numbers, rates, dispatch."""

from __future__ import annotations

import copy
import random
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from everstep.sdk import ConfigError, Finding
from everstep.sdk.hooks import Decision
from everstep.snapshots.marker import SnapshotError
from everstep.trainer import rng
from everstep.trainer.config import ModelConfig, TrainerConfig, accumulation
from everstep.trainer.dispatch import Dispatch
from everstep.trainer.model import Decoder
from everstep.trainer.place import Seat
from everstep.trainer.snapshot.tree import flatten, unflatten
from everstep.wire.ids import SnapshotId

# --------------------------------------------------------------------------------- the place


def test_without_everstep_a_rank_is_alone_and_chooses_for_itself() -> None:
    assert Seat.from_environ({}) == Seat()


def test_the_environment_of_a_rank_is_read() -> None:
    seat = Seat.from_environ(
        {
            "RANK": "2",
            "WORLD_SIZE": "3",
            "LOCAL_RANK": "0",
            "MASTER_ADDR": "h",
            "EVERSTEP_JOB": "n",
            "EVERSTEP_GENERATION": "7",
            "EVERSTEP_RESUME": "s000120-g7,s000100-g6",
            "EVERSTEP_SKIP": "24-36,0-12",
            "EVERSTEP_SOCKET": "/run/x.sock",
            "EVERSTEP_MTBF_S": "19000",
        }
    )
    assert seat == Seat(
        rank=2,
        world_size=3,
        launched=True,
        job="n",
        generation=7,
        resume=(SnapshotId(120, 7), SnapshotId(100, 6)),
        skip=((0, 12), (24, 36)),
        socket=Path("/run/x.sock"),
        mtbf_s=19000,
    )
    assert Seat.from_environ({"EVERSTEP_RESUME": ""}).resume == ()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RANK", "first"),
        ("EVERSTEP_RESUME", "latest"),
        ("EVERSTEP_SKIP", "5"),
        ("EVERSTEP_SKIP", "9-3"),
    ],
)
def test_an_environment_that_makes_no_sense_names_the_variable(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=name):
        Seat.from_environ({name: value})


def test_shares_that_do_not_come_out_even_are_refused() -> None:
    assert [accumulation(12, 2, w) for w in (1, 2, 3, 6)] == [6, 3, 2, 1]
    with pytest.raises(ConfigError, match="multiple of 8"):
        accumulation(12, 2, 4)


# -------------------------------------------------------------------------------- the states


def test_any_state_dict_comes_back_as_it_was() -> None:
    tree = {
        "model": OrderedDict(w=torch.ones(2), b=torch.tensor(1.5)),
        "state": {0: {"step": torch.tensor(3.0)}, 1: {}},
        "groups": [{"lr": 0.1, "betas": (0.9, 0.95), "params": [0, 1]}],
        "odd": [None, True, "x", b"y", 2**70, float("inf"), Counter("aab"), torch.float16, {3, 4}],
        "default": defaultdict(int, a=1),
    }
    tensors, shape = flatten(tree)
    assert sorted(tensors) == ["model.b", "model.w", "state.0.step"]
    again = unflatten(msgspec.msgpack.decode(msgspec.msgpack.encode(shape)), tensors.__getitem__)
    assert again["state"].keys() == {0, 1}, "numbers stay numbers"
    assert again["odd"] == tree["odd"]
    assert type(again["odd"][6]) is Counter
    assert again["groups"] == tree["groups"]
    assert again["default"] == {"a": 1}
    assert torch.equal(again["model"]["w"], torch.ones(2))


def test_an_optimizer_comes_back_to_the_bit() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    tensors, shape = flatten(optimizer.state_dict())
    other = torch.optim.AdamW(torch.nn.Linear(3, 3).parameters(), lr=9.0, fused=True)
    other.load_state_dict(unflatten(shape, copy.deepcopy(tensors).__getitem__))
    assert str(other.state_dict()) == str(optimizer.state_dict())


def test_two_entries_of_one_name_are_refused() -> None:
    with pytest.raises(SnapshotError, match=r"a\.b"):
        flatten({"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)})


def draw() -> list[Any]:
    return [random.random(), np.random.rand(), torch.rand(2).tolist(), random.gauss(0, 1)]


def test_random_states_go_on_where_they_were() -> None:
    rng.seed(1, step=2, rank=3)
    draw()
    packed = rng.pack()
    expected = [draw() for _ in range(3)]
    rng.seed(9, step=9, rank=9)
    rng.unpack(packed)
    assert [draw() for _ in range(3)] == expected


def test_every_rank_and_step_has_its_own_seed() -> None:
    seeds = {rng.derived(s, step=t, rank=r) for s in range(5) for t in range(50) for r in range(9)}
    assert len(seeds) == 5 * 50 * 9


def test_accumulated_gradients_equal_those_of_one_big_batch() -> None:
    config = ModelConfig(dim=32, layers=2, heads=4, kv_heads=2, ffn_dim=48)
    tokens = torch.randint(0, 256, (12, 17), generator=torch.Generator().manual_seed(1))

    def gradients(micro: int) -> list[torch.Tensor]:
        model = Decoder(config, seq_len=16, seed=3).double()
        for part in tokens.chunk(12 // micro):
            (model(part[:, :-1], part[:, 1:]) / (12 * 16)).backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    for whole, parts in zip(gradients(12), gradients(2), strict=True):
        torch.testing.assert_close(whole, parts, rtol=1e-5, atol=1e-7)


def test_a_decoder_sees_nothing_of_the_future() -> None:
    model = Decoder(ModelConfig(dim=32, layers=1, heads=2, kv_heads=1), seq_len=8, seed=3)
    tokens = torch.arange(8)[None]
    changed = tokens.clone()
    changed[0, -1] = 99
    targets = tokens.clone()
    early = targets.clone()
    early[:, -1] = -100  # what cross-entropy leaves out

    assert model(tokens, early).item() == pytest.approx(model(changed, early).item())
    assert model(tokens, targets).item() != pytest.approx(model(changed, targets).item())


def test_config_defaults_are_complete_and_sound() -> None:
    config = TrainerConfig(run_dir="r", data="d", steps=1)
    assert msgspec.convert(msgspec.to_builtins(config), TrainerConfig) == config


# --------------------------------------------------------------------------------- the hooks


class Loud:
    def before_update(self, _: object) -> Decision:
        raise ValueError("no")


class Quiet:
    def __init__(self) -> None:
        self.seen: list[object] = []

    def before_update(self, step: object) -> Decision:
        self.seen.append(step)
        return Decision.SKIP_UPDATE


def test_one_hook_that_raises_does_not_keep_the_next_from_its_vote() -> None:
    findings: list[Finding] = []
    quiet = Quiet()
    dispatch = Dispatch({"a": Loud(), "b": quiet}, report=findings.append)
    assert dispatch.fire("before_update", "step") is Decision.SKIP_UPDATE
    assert quiet.seen == ["step"]
    assert dispatch.failures() == [1, 0]
    assert not findings, "a lost rank makes hooks raise, too: nothing is told before all are heard"
    dispatch.settle([1, 0])
    assert "hook a raised in before_update: ValueError: no" in findings[0].summary
    assert "test_parts.py" in findings[0].summary, "and where"


def test_failures_anywhere_switch_a_hook_off_everywhere() -> None:
    findings: list[Finding] = []
    quiet = Quiet()
    dispatch = Dispatch({"b": quiet}, report=findings.append)
    dispatch.settle([2])
    dispatch.fire("before_update", 1)
    dispatch.settle([1])
    dispatch.fire("before_update", 2)
    assert quiet.seen == [1]
    assert findings[-1].severity == "error"


def test_a_vote_that_is_no_decision_is_a_failure() -> None:
    class Odd:
        def forward(self, _: object) -> object:
            return True

    findings: list[Finding] = []
    dispatch = Dispatch({"odd": Odd()}, report=findings.append)
    assert dispatch.fire("forward", None) is Decision.PROCEED
    assert dispatch.failures() == [1]


def test_a_hook_without_a_moment_is_refused() -> None:
    with pytest.raises(ConfigError, match="no method for any moment"):
        Dispatch({"empty": object()}, report=list[Finding]().append)
