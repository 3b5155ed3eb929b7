"""A rank's memory outlives the rank: real agents, real memory files, real processes."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.agent.stage import AgentProcess, FakeCoordinator, Stage
from tests.waiting import wait_until

from everstep.agent.memory import Limits, Memory, Owner, Place
from everstep.wire.errors import MemoryRefusedError, WireError
from everstep.wire.memory import MemoryKeeper, fetch
from everstep.wire.messages import (
    ClientGone,
    Fetch,
    FromClient,
    Held,
    Hello,
    JobOver,
    Join,
    Joined,
    Refused,
    ToClient,
)

MIB = 1024 * 1024
JOIN = Join(run_id="r", nonce=None, min_nodes=1, max_nodes=1, local_world_size=1)
NOBODY = 65534

RANK = """
import os, sys
from pathlib import Path
from everstep.wire.memory import MemoryKeeper
from tests.agent.test_memory import sealed
slots = [sealed(content.encode() * 100_000) for content in sys.argv[2:]]
keeper = MemoryKeeper(Path(sys.argv[1]), "j", 3)
keeper.hold(slots, [os.fstat(fd).st_size for fd in slots])
print(keeper.wait_held(30), flush=True)
sys.stdin.read()
"""

FETCHER = """
import json, os, sys
from pathlib import Path
from everstep.wire.memory import fetch
if len(sys.argv) > 2:
    os.setresgid(*[int(sys.argv[2])] * 3)
    os.setresuid(*[int(sys.argv[2])] * 3)
fds = fetch(Path(sys.argv[1]), "j", 3, timeout_s=30)
print(json.dumps([os.pread(fd, 1 << 20, 0).decode() for fd in fds]))
"""


def memfd(size: int) -> int:
    fd = os.memfd_create("slot", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.posix_fallocate(fd, 0, size) if size else None
    return fd


def sparse(size: int) -> int:
    fd = os.memfd_create("slot", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return fd


def sealed(content: bytes) -> int:
    fd = memfd(len(content))
    os.pwrite(fd, content, 0)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return fd


def contents(fds: list[int]) -> list[bytes]:
    """Read what was fetched and close it."""
    try:
        return [os.pread(fd, 1 << 20, 0) for fd in fds]
    finally:
        for fd in fds:
            os.close(fd)


@pytest.fixture
def coordinator(stage: Stage) -> FakeCoordinator:
    return stage.coordinator()


@pytest.fixture
def agent(stage: Stage, coordinator: FakeCoordinator) -> AgentProcess:
    agent = stage.agent(coordinator)
    coordinator.expect_connected()
    return agent


@pytest.fixture
def keep() -> Iterator[Callable[..., MemoryKeeper]]:
    made: list[MemoryKeeper] = []

    def keep(
        agent: AgentProcess,
        *slots: bytes,
        job: str = "j",
        rank: int = 3,
        on_refused: Callable[[str], None] | None = None,
    ) -> MemoryKeeper:
        keeper = MemoryKeeper(agent.socket, job, rank, on_refused=on_refused)
        made.append(keeper)
        fds = [sealed(content) for content in slots]
        keeper.hold(fds, [len(content) for content in slots])
        for fd in fds:
            os.close(fd)
        return keeper

    yield keep
    for keeper in made:
        keeper.close()


def fetched_by_another_process(agent: AgentProcess, *arguments: object) -> list[str]:
    command = [sys.executable, "-c", FETCHER, str(agent.socket), *map(str, arguments)]
    out = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert out.returncode == 0, out.stderr
    found: list[str] = json.loads(out.stdout)
    return found


def held_of(agent: AgentProcess, job: str = "j") -> int:
    """Return how many bytes of a job the agent says it holds."""
    return sum(held["bytes"] for held in agent.status()["memory"] if held["job"] == job)


# ---------------------------------------------------------------------------- what it is for


@pytest.mark.e2e
def test_a_rank_that_was_killed_leaves_its_memory_to_the_next_one_bit_by_bit(
    stage: Stage, agent: AgentProcess
) -> None:
    rank = stage.run(RANK, agent.socket, "a", "b")
    assert rank.stdout is not None
    assert rank.stdout.readline() == "True\n"
    rank.kill()
    rank.wait(10)
    assert fetched_by_another_process(agent) == ["a" * 100_000, "b" * 100_000]
    assert fetch(agent.socket, "j", 4, timeout_s=30) == []
    assert fetch(agent.socket, "another", 3, timeout_s=30) == []


@pytest.mark.e2e
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_gets_nothing_whatever_it_asks_for(stage: Stage) -> None:
    agent = stage.agent()
    stage.folder.chmod(0o755)
    rank = stage.run(RANK, agent.socket, "secret")
    assert rank.stdout is not None
    assert rank.stdout.readline() == "True\n"
    assert fetched_by_another_process(agent, NOBODY) == []
    assert fetched_by_another_process(agent) == ["secret" * 100_000]


@pytest.mark.e2e
def test_what_is_handed_over_later_takes_the_place_of_what_was_before(
    agent: AgentProcess, keep: Callable[..., MemoryKeeper]
) -> None:
    keeper = keep(agent, b"old", b"old too")
    assert keeper.wait_held(30)
    slot = sealed(b"new")
    keeper.hold([slot], [3])
    os.close(slot)
    assert keeper.wait_held(30)
    assert contents(fetch(agent.socket, "j", 3, timeout_s=30)) == [b"new"]
    assert held_of(agent) == 3


@pytest.mark.e2e
def test_an_agent_that_was_killed_gets_it_again_when_it_is_back(
    agent: AgentProcess, keep: Callable[..., MemoryKeeper]
) -> None:
    keeper = keep(agent, b"kept")
    assert keeper.wait_held(30)
    agent.kill()
    wait_until("the keeper sees it go", lambda: not keeper.held)
    with pytest.raises(WireError, match="cannot be had"):
        fetch(agent.socket, "j", 3, timeout_s=1)
    agent.start()
    wait_until("the next agent holds it", lambda: held_of(agent) == 4)
    assert contents(fetch(agent.socket, "j", 3, timeout_s=30)) == [b"kept"]


@pytest.mark.e2e
def test_a_keeper_finds_an_agent_that_starts_later(
    stage: Stage, keep: Callable[..., MemoryKeeper]
) -> None:
    agent = stage.agent(start=False)
    keeper = keep(agent, b"early")
    assert not keeper.wait_held(0.3)
    agent.start()
    assert keeper.wait_held(30)


@pytest.mark.e2e
def test_holding_costs_the_agent_no_memory_and_status_and_metrics_tell_of_it(
    agent: AgentProcess, keep: Callable[..., MemoryKeeper]
) -> None:
    before = resident(agent)
    keeper = keep(agent, b"x" * 100 * MIB)
    assert keeper.wait_held(30)
    assert agent.status()["memory"] == [
        {"job": "j", "uid": os.getuid(), "bytes": 100 * MIB, "slots": 1, "ranks": [3]}
    ]
    assert f'everstep_agent_memory_held_bytes{{everstep_job="j"}} {100.0 * MIB:.9g}' in (
        agent.get("/metrics")[1].replace("1.048576e+08", f"{100.0 * MIB:.9g}")
    )
    assert resident(agent) - before < 20 * MIB


def resident(agent: AgentProcess) -> int:
    statm = Path(f"/proc/{agent.pid}/statm").read_text(encoding="ascii")
    return int(statm.split()[1]) * os.sysconf("SC_PAGESIZE")


# ---------------------------------------------------------------------------- how long


@pytest.mark.e2e
def test_memory_goes_when_nobody_of_the_job_was_connected_for_the_grace(
    stage: Stage, keep: Callable[..., MemoryKeeper]
) -> None:
    agent = stage.agent(config="[agent]\nmemory_grace_s = 1.0\n")
    other = keep(agent, b"stays", job="other")
    gone = keep(agent, b"goes")
    assert other.wait_held(30)
    assert gone.wait_held(30)
    gone.close()
    wait_until("the grace passes", lambda: held_of(agent) == 0)
    assert held_of(agent, "other") == 5
    assert "nobody of it was connected for 1 s" in agent.log


@pytest.mark.e2e
@pytest.mark.parametrize("who", ["launcher", "rank", "launcher that was told its job"])
def test_memory_stays_while_a_launcher_or_rank_of_the_job_is_there(
    stage: Stage, coordinator: FakeCoordinator, keep: Callable[..., MemoryKeeper], who: str
) -> None:
    agent = stage.agent(coordinator, config="[agent]\nmemory_grace_s = 0.4\n")
    coordinator.expect_connected()
    client = stage.client(agent)
    if who == "rank":
        client.greet(Hello(role="rank", job="j", generation=1, rank=0))
    else:
        client.greet(Hello(role="launcher"))
    if who == "launcher that was told its job":
        client.say(JOIN)
        to = coordinator.expect(FromClient).client
        coordinator.say(ToClient(client=to, body=Joined(nonce="j", node="n1")))
        client.expect(Joined)
    stranger = keep(agent, b"of a job that is gone", job="gone")
    keeper = keep(agent, b"stays")
    assert stranger.wait_held(30)
    assert keeper.wait_held(30)
    keeper.close()
    stranger.close()
    if who == "launcher":
        end_s = agent.health()["uptime_s"] + 2
        wait_until("several graces pass", lambda: agent.health()["uptime_s"] > end_s)
        assert held_of(agent, "gone")  # nobody knows yet whose launcher it is
    else:
        wait_until("the other job's memory goes", lambda: not held_of(agent, "gone"))
    assert held_of(agent) == 5
    client.close()
    wait_until("the last of the job has left", lambda: not held_of(agent))


@pytest.mark.e2e
def test_memory_goes_at_once_when_the_coordinator_says_that_the_job_is_over(
    stage: Stage,
    coordinator: FakeCoordinator,
    agent: AgentProcess,
    keep: Callable[..., MemoryKeeper],
) -> None:
    launcher = stage.client(agent)
    launcher.greet(Hello(role="launcher"))
    launcher.say(JOIN)
    to = coordinator.expect(FromClient).client
    for job in ("j", "another"):
        assert keep(agent, b"state", job=job).wait_held(30)
    coordinator.say(
        ToClient(client=to, body=JobOver(nonce="j", outcome="done", exit_code=0, why="done"))
    )
    launcher.expect(JobOver)
    assert held_of(agent) == 0
    assert held_of(agent, "another") == 5


@pytest.mark.e2e
def test_two_hundred_ranks_that_come_and_go_leave_no_descriptor_behind(stage: Stage) -> None:
    agent = stage.agent(config="[agent]\nmemory_grace_s = 0.2\n")
    before = agent.open_files()
    slot = sealed(b"state")
    for _ in range(200):
        client = stage.client(agent)
        client.greet(Hello(role="memory", job="j", rank=0, slots=[5, 5]), slot, slot)
        client.expect(Held)
        client.close()
        assert len(contents(fetch(agent.socket, "j", 0, timeout_s=30))) == 2
    os.close(slot)
    wait_until("the grace passes", lambda: not held_of(agent))
    wait_until("everything is closed", lambda: agent.open_files() <= before)


@pytest.mark.e2e
def test_a_forked_worker_holds_nothing_of_it(
    stage: Stage, keep: Callable[..., MemoryKeeper]
) -> None:
    agent = stage.agent(config="[agent]\nmemory_grace_s = 0.2\n")
    before = memory_files()  # another test's, if any
    keeper = keep(agent, b"state")
    assert keeper.wait_held(30)
    assert memory_files() - before
    ours, childs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        childs.sendall(json.dumps(sorted(memory_files() - before)).encode())
        childs.recv(1)
        os._exit(0)
    childs.close()
    try:
        assert json.loads(ours.recv(4096)) == []
        keeper.close()
        wait_until("the connection is closed though the child lives", lambda: not held_of(agent))
    finally:
        ours.close()
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def memory_files() -> set[tuple[str, int]]:
    """Return the descriptors of slots that this process has, with their inodes."""
    found = set()
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if "memfd:slot" in str(path.readlink()):
                found.add((path.name, path.stat().st_ino))
    return found


# ---------------------------------------------------------------------------- what is refused


def shrinkable() -> int:
    fd = memfd(5)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
    return fd


BAD_MEMORY: dict[str, tuple[list[int], Callable[[], list[int]], str]] = {
    "no descriptor": ([5], list, "0 descriptors came"),
    "one too few": ([5, 5], lambda: [sealed(b"state")], "1 descriptors came"),
    "one too many": ([5], lambda: [sealed(b"state"), sealed(b"state")], "2 descriptors came"),
    "nothing announced": ([], lambda: [sealed(b"state")], "0 memory files were announced"),
    "far too many": ([5] * 20, lambda: [sealed(b"state") for _ in range(20)], "at most eight"),
    "unsealed": ([5], lambda: [memfd(5)], "not sealed"),
    "half sealed": ([5], lambda: [shrinkable()], "not sealed"),
    "of another size": ([6], lambda: [sealed(b"state")], "announced with 6 bytes, and it has 5"),
    "of no size": ([0], lambda: [sealed(b"")], "0 bytes"),
    "of less than none": ([-5], lambda: [sealed(b"state")], "announced with -5 bytes"),
    "absurdly large": ([2**53], lambda: [sealed(b"state")], "and it has 5"),
    "no memory": ([5], lambda: [os.open("/dev/null", os.O_RDONLY)], "not a memory file"),
}


@pytest.mark.e2e
@pytest.mark.parametrize("kind", BAD_MEMORY)
def test_bad_memory_is_refused_with_the_reason_and_costs_nobody_else(
    stage: Stage, agent: AgentProcess, keep: Callable[..., MemoryKeeper], kind: str
) -> None:
    sizes, make, why = BAD_MEMORY[kind]
    assert keep(agent, b"good").wait_held(30)
    files = agent.open_files()
    fds = make()
    client = stage.client(agent)
    client.say(Hello(role="memory", job="j", rank=1, slots=sizes), *fds)
    for fd in fds:
        os.close(fd)
    assert why in client.expect(Refused).why
    client.expect_hang_up()
    wait_until("what came along is closed", lambda: agent.open_files() <= files)
    assert contents(fetch(agent.socket, "j", 3, timeout_s=30)) == [b"good"]


@pytest.mark.e2e
def test_memory_of_nobodys_rank_is_refused(stage: Stage, agent: AgentProcess) -> None:
    client = stage.client(agent)
    slot = sealed(b"state")
    client.say(Hello(role="memory", job="j", slots=[5]), slot)
    os.close(slot)
    assert "neither whose" in client.expect(Refused).why


@pytest.mark.e2e
def test_a_memory_client_that_says_other_things_or_asks_twice_is_not_listened_to(
    stage: Stage, coordinator: FakeCoordinator, agent: AgentProcess
) -> None:
    client = stage.client(agent)
    client.greet(Hello(role="memory", job="j", rank=1))
    client.say(JOIN)
    client.say(Fetch())
    assert client.expect(Held).sizes == []
    client.forget()
    client.say(Fetch())
    client.close()
    rank = stage.client(agent)
    rank.greet(Hello(role="rank", job="j", generation=1, rank=0))
    rank.say(Fetch())
    rank.close()
    coordinator.expect(ClientGone)
    assert [type(m.body) for m in coordinator.of(FromClient)] == [Hello]
    assert len(coordinator.of(ClientGone)) == 1  # nobody need hear of memory clients
    assert "message that its role does not send" in agent.log


@pytest.mark.e2e
def test_more_than_the_limit_is_refused_and_the_keeper_says_so_once(
    stage: Stage, keep: Callable[..., MemoryKeeper]
) -> None:
    agent = stage.agent(config="[agent]\nmemory_user_share = 1e-6\n")
    whys: list[str] = []
    keeper = keep(agent, b"x" * 10 * MIB, on_refused=whys.append)
    wait_until("the keeper hears of it", lambda: whys)
    assert "memory_user_share" in whys[0]
    assert f"user {os.getuid()}" in whys[0]
    wait_until("it tries again", lambda: agent.log.count("memory refused") >= 2)
    assert len(whys) == 1
    assert not keeper.held


# ---------------------------------------------------------------------------- the table itself


class Table(Memory):
    """A table with a clock and a free memory of its own."""

    def __init__(self, *, user_share: float = 0.75, share: float = 0.9, free: int = 1000) -> None:
        self.now_s = 0.0
        self.free = free
        self.disposed: list[int] = []
        super().__init__(
            Limits(user_share, share),
            grace_s=120.0,
            dispose=self._close,
            free_bytes=lambda: self.free,
            clock=lambda: self.now_s,
        )

    def _close(self, fd: int) -> None:
        os.close(fd)
        self.disposed.append(fd)

    def put(self, place: Place, size: int, *, allocated: bool = False) -> None:
        fd = sealed(b"x" * size) if allocated else sparse(size)
        try:
            self.hold(place, [fd], [size])
        except MemoryRefusedError:
            os.close(fd)
            raise


@pytest.fixture
def table() -> Iterator[Table]:
    table = Table()
    yield table
    table.close()


def test_one_user_leaves_room_for_the_others_and_all_leave_some_for_the_host(table: Table) -> None:
    table.put(Place(1, "a", 0), 600)
    with pytest.raises(MemoryRefusedError, match="user 1 would have"):
        table.put(Place(1, "a", 1), 200)
    table.put(Place(2, "b", 0), 250)
    with pytest.raises(MemoryRefusedError, match="all users would have"):
        table.put(Place(3, "c", 0), 100)
    table.put(Place(1, "a", 0), 640)  # in place of its own


def test_memory_that_is_taken_up_already_counts_as_free_without_it(table: Table) -> None:
    with pytest.raises(MemoryRefusedError):
        table.put(Place(1, "a", 0), 4 * MIB)
    table.free = MIB
    table.put(Place(1, "a", 0), 3 * MIB, allocated=True)
    table.free = 0
    with pytest.raises(MemoryRefusedError):
        table.put(Place(1, "a", 1), 3 * MIB, allocated=True)


def test_there_is_an_end_to_the_number_of_memory_files_of_a_user(table: Table) -> None:
    table.free = 10**12
    for rank in range(256):
        table.put(Place(1, "a", rank), 1)
    with pytest.raises(MemoryRefusedError, match="at most 256"):
        table.put(Place(1, "b", 0), 1)
    table.put(Place(1, "a", 5), 1)
    table.put(Place(2, "a", 0), 1)


def test_the_grace_begins_when_the_last_client_was_seen(table: Table) -> None:
    table.free = 10**9
    table.put(Place(1, "a", 0), 1)
    table.now_s = 119.0
    table.sweep({Owner(1, "a")})
    table.now_s = 238.0
    table.sweep({Owner(2, "a"), Owner(1, "b"), Owner(2, None)})
    assert table.slots(Place(1, "a", 0))
    table.now_s = 239.0
    table.sweep(set())
    assert not table.slots(Place(1, "a", 0))
    assert len(table.disposed) == 1


def test_a_job_that_is_over_takes_only_its_own_users_memory_along(table: Table) -> None:
    table.free = 10**9
    table.put(Place(1, "a", 0), 1)
    table.put(Place(2, "a", 0), 1)
    table.job_over(Owner(1, "a"))
    table.job_over(Owner(1, "a"))
    assert table.bytes_by_owner() == {Owner(2, "a"): 1}
