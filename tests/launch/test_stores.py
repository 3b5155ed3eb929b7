from __future__ import annotations

import json
import socket
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.utils import store as torch_store

from everstep.launch.stores import GenerationStores, PlanStore
from everstep.wire.messages import Member, Plan

PLAN = Plan(
    job="n",
    run_id="run",
    generation=1,
    epoch=1,
    members=[
        Member(node="a", address="", local_world_size=2),
        Member(node="b", address="", local_world_size=3),
    ],
)


def test_ranks_are_assigned_from_the_plan_with_uneven_nodes() -> None:
    store = PlanStore(PLAN, lambda: None)
    assert json.loads(store.get("torchelastic/assigned_ranks/1")) == [2, 5, 2, 5]
    store.set("torchelastic/role_info/0", '{"role": "t", "rank": 0, "local_world_size": 2}')
    infos = store.multi_get([f"torchelastic/role_info/{i}" for i in range(2)])
    assert [json.loads(i)["local_world_size"] for i in infos] == [2, 3]
    assert json.loads(infos[1])["role"] == "t"


def test_torchs_own_barrier_waits_for_the_jobs_end() -> None:
    finished: list[bool] = []
    store = PlanStore(PLAN, lambda: finished.append(True))
    torch_store.barrier(store, 2, "torchelastic/agent/terminal_state")
    assert finished == [True]


def test_a_generations_store_serves_its_clients_and_is_gone_after_it() -> None:
    stores = GenerationStores()
    address, port = stores.bind(3, "127.0.0.1")
    assert stores.bind(3, "127.0.0.1") == (address, port)
    client = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=10))
    client.set("k", "v")
    assert client.get("k") == b"v"
    del client
    stores.close_before(4)
    with pytest.raises(OSError, match="refused"):
        socket.create_connection((address, port), timeout=5)


def test_an_address_that_is_not_ours_is_an_os_error() -> None:
    with pytest.raises(OSError, match="assign"):
        GenerationStores().bind(1, "192.0.2.1")
