"""Two stores: torchrun's questions answered from the plan, and the ranks' own of one generation.

torchrun asks its store who has which rank and waits there for the others to finish. Both answers
follow from the plan, so no byte crosses the network for them, and no stale key can be read.
"""

from __future__ import annotations

import json
import socket
import threading
from datetime import timedelta
from typing import TYPE_CHECKING

from torch._C._distributed_c10d import Store, TCPStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from everstep.wire.messages import Plan

_ROLE_INFO = "torchelastic/role_info/"
_ASSIGNED = "torchelastic/assigned_ranks/"
_LAST_OUT = "/last_member"
STORE_TIMEOUT = timedelta(minutes=5)


class PlanStore(Store):
    """Serves torchrun's role exchange and exit barrier for one generation.

    `finished` is called when torchrun waits at its exit barrier, i.e. when all local ranks ended
    with 0; it returns when the job is over.
    """

    def __init__(self, plan: Plan, finished: Callable[[], None]) -> None:
        super().__init__()
        self._plan = plan
        self._finished = finished
        self._written: dict[str, bytes] = {}
        self._role = "default"
        self._timeout = STORE_TIMEOUT

    @property
    def timeout(self) -> timedelta:
        """How long torch thinks its waits last; ours end with the job."""
        return self._timeout

    def set_timeout(self, timeout: timedelta) -> None:
        """Take torch's wish."""
        self._timeout = timeout

    def set(self, key: str, value: str | bytes) -> None:
        """Keep what this node's torchrun writes; only its own role is of use."""
        data = value.encode() if isinstance(value, str) else value
        if key.startswith(_ROLE_INFO):
            self._role = json.loads(data)["role"]
        self._written[key] = data

    def multi_set(self, keys: list[str], values: list[str | bytes]) -> None:
        """Keep several."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def get(self, key: str) -> bytes:
        """Answer from the plan, else from what was written here. Raises KeyError otherwise."""
        if key.startswith(_ASSIGNED):
            return self._assigned(int(key.removeprefix(_ASSIGNED)))
        if key.startswith(_ROLE_INFO):
            return self._role_info(int(key.removeprefix(_ROLE_INFO)))
        return self._written[key]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Answer several."""
        return [self.get(key) for key in keys]

    def add(self, key: str, amount: int) -> int:  # noqa: ARG002  torch's signature
        """Count nothing: who finished is the coordinator's knowledge, so nobody is the last."""
        return 0

    def check(self, keys: list[str]) -> bool:
        """Say whether all keys were written here."""
        return all(key in self._written for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:  # noqa: ARG002
        """Wait for the job's end at the exit barrier; everything else is here already."""
        if any(key.endswith(_LAST_OUT) for key in keys):
            self._finished()

    def _sizes(self) -> list[int]:
        return [member.local_world_size for member in self._plan.members]

    def _assigned(self, group_rank: int) -> bytes:
        sizes = self._sizes()
        base, world = sum(sizes[:group_rank]), sum(sizes)
        return json.dumps([base, world, base, world]).encode()

    def _role_info(self, group_rank: int) -> bytes:
        size = self._sizes()[group_rank]
        return json.dumps(
            {"role": self._role, "rank": group_rank, "local_world_size": size}
        ).encode()


class GenerationStores:
    """The TCPStores this launcher serves as first member: each for the ranks of one generation."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bound: dict[int, TCPStore] = {}

    def bind(self, generation: int, address: str) -> tuple[str, int]:
        """Listen on a free port of `address` ("" is all interfaces) and return (address, port).

        Asked again for a generation that is bound it returns the same port. Raises OSError.
        """
        with self._lock:
            store = self._bound.get(generation)
            if store is None:
                store = self._bound[generation] = _listen(address)
            return address or socket.getfqdn(), store.port

    def close_before(self, generation: int) -> None:
        """Close the stores of older generations; none of their ranks is left."""
        with self._lock:
            old = [self._bound.pop(g) for g in list(self._bound) if g < generation]
        del old

    def close(self) -> None:
        """Close them all."""
        with self._lock:
            self._bound.clear()


def _listen(address: str) -> TCPStore:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family)
    port = listener.getsockname()[1]
    return TCPStore(
        address or "localhost",
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=STORE_TIMEOUT,
        master_listen_fd=listener.detach(),
    )
