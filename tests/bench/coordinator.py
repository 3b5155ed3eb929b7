"""How many agents one coordinator serves, how fast, and how soon again after it was killed.

    python tests/bench/coordinator.py [--quick] [--most N]

Every agent sends a heartbeat a second with the progress of 8 ranks; all of them belong to live jobs
of 64 nodes, so everything that the coordinator watches for is watched for. A number of agents holds
while 99 of 100 heartbeats are answered within 50 ms and the coordinator's core is not full; it is
doubled until one does not. `agents` is the last that held and the other figures were taken with
that many, those with `at_1000_` in their names with 1,000.

`generation_s` is the time from a launcher's message that a rank was killed until every launcher of
its job has the next plan (the store is bound at once). `restart_s` is the time from SIGKILL of the
coordinator, started again at once, until every agent has an answer to a heartbeat and every
launcher its place again; agents come back at the real one's pace. The heartbeats of the windows in
which `heartbeat_p99_ms` is taken are spread evenly over the second.

All agents live in this process, on the same cores as the coordinator: what that adds to a
heartbeat's way counts as the coordinator's. `client_late_p99_ms` says how late this process was
with its own timers: where that is much, others had the cores. Of several windows the one with the
median p99 counts.
"""

from __future__ import annotations

import asyncio
import gc
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import uvloop

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.bench import form
from tests.bench.processes import Daemon, listens, start_coordinator
from tests.bench.swarm import Swarm

from everstep.cli.demo.ports import free_port

FIRST, JOB_NODES, BIG_JOB_NODES = 1000, 64, 1000
LEVELS = (FIRST, 2000, 4000, 8000, 10_000, 16_000)
P99_MS, FULL_CORE, ANSWERED = 50.0, 0.95, 0.97
SETTLE_S, WINDOW_S, QUIET_WAIT_S = 5.0, 8.0, 60.0
FAILURES = 5
TARGETS = {"agents": 10_000, "heartbeat_p99_ms": P99_MS, "cpu_share": 1.0, "restart_s": 5.0}


@dataclass
class Service:
    """One coordinator process on one journal, and its agents."""

    folder: Path
    port: int
    daemon: Daemon
    swarm: Swarm

    async def restart(self) -> float:
        """SIGKILL, start again, and return when all are served again."""
        swarm = self.swarm
        began_s, losses = time.perf_counter(), swarm.losses
        await asyncio.to_thread(self.daemon.kill)
        self.daemon = start_coordinator(self.folder, self.port)
        await swarm.until(lambda: swarm.losses >= losses + len(swarm), "all are cut off")
        await swarm.until(swarm.serves_all, "all are served again")
        return time.perf_counter() - began_s


@asynccontextmanager
async def service(*, job_nodes: int) -> AsyncIterator[Service]:
    """Run a coordinator and give it a swarm without agents so far."""
    folder = Path(tempfile.mkdtemp(prefix="everstep-bench-"))
    port = free_port()
    one = Service(folder, port, start_coordinator(folder, port), Swarm(port, job_nodes=job_nodes))
    try:
        await asyncio.to_thread(one.daemon.wait_until, lambda: listens(port), "it listens")
        yield one
    finally:
        await one.swarm.close()
        await asyncio.to_thread(one.daemon.close)
        shutil.rmtree(folder)


@dataclass(frozen=True, slots=True)
class Window:
    """Some seconds of nothing but heartbeats."""

    heartbeat_p99_ms: float
    heartbeats_per_s: float
    cpu_share: float
    client_cpu_share: float
    client_late_p99_ms: float
    rss_mib: float


@dataclass(frozen=True, slots=True)
class Level:
    """What a number of agents cost."""

    agents: int
    window: Window
    generation_s: float
    restart_s: float

    @property
    def holds(self) -> bool:
        """Return whether this many agents are served well."""
        seen = self.window
        answered = seen.heartbeats_per_s >= ANSWERED * self.agents
        return answered and seen.heartbeat_p99_ms <= P99_MS and seen.cpu_share <= FULL_CORE

    def figures(self) -> dict[str, float]:
        """Return all but the number of agents."""
        own = {"generation_s": self.generation_s, "restart_s": self.restart_s}
        return {**asdict(self.window), **own}


async def watch(one: Service, seconds: float) -> Window:
    """Let heartbeats come and go for so long."""
    swarm = one.swarm
    swarm.delays_s.clear()
    swarm.late_s.clear()
    cpu_s, own_s, began_s = one.daemon.cpu_s(), time.process_time(), time.perf_counter()
    await asyncio.sleep(seconds)
    took_s = time.perf_counter() - began_s
    return Window(
        # No answer at all is an answer later than this window.
        heartbeat_p99_ms=1000 * (form.percentile(swarm.delays_s, 0.99) or took_s),
        heartbeats_per_s=len(swarm.delays_s) / took_s,
        cpu_share=(one.daemon.cpu_s() - cpu_s) / took_s,
        client_cpu_share=(time.process_time() - own_s) / took_s,
        client_late_p99_ms=1000 * (form.percentile(swarm.late_s, 0.99) or took_s),
        rss_mib=one.daemon.rss_mib(),
    )


async def measure(one: Service, agents: int, windows: int) -> Level:
    """Take all figures at one number of agents."""
    swarm = one.swarm
    form.say(f"{agents} agents: connecting")
    await swarm.grow(agents)
    await swarm.until(swarm.serves_all, "all are served")
    swarm.spread()
    gc.freeze()  # our own agents are there to stay: no collection of ours need look at them
    await asyncio.sleep(SETTLE_S)
    seen = sorted([await watch(one, WINDOW_S) for _ in range(windows)], key=_p99)
    generations = [await next_generation(swarm, number) for number in range(FAILURES)]
    restart_s = await one.restart()
    level = Level(agents, seen[len(seen) // 2], form.median(generations) or 0.0, restart_s)
    form.say(f"{agents} agents: " + ", ".join(f"{k} {v:.3g}" for k, v in level.figures().items()))
    return level


def _p99(window: Window) -> float:
    return window.heartbeat_p99_ms


async def next_generation(swarm: Swarm, number: int) -> float:
    """Let a rank of one job be killed; return when all its launchers have the next plan."""
    job = swarm.jobs[number % len(swarm.jobs)]
    generation = max(agent.generation for agent in job.agents) + 1
    began_s = time.perf_counter()
    job.agents[len(job.agents) // 2].end_rank()
    await swarm.until(lambda: job.runs(generation), f"generation {generation} of {job.name}")
    return swarm.last_plan_s - began_s


async def levels(most: int, windows: int) -> list[Level]:
    """Double the agents until a number does not hold; the last one of the list may not."""
    found: list[Level] = []
    async with service(job_nodes=JOB_NODES) as one:
        for agents in (n for n in LEVELS if n <= most):
            found.append(await measure(one, agents, windows))
            if not found[-1].holds:
                break
    return found


async def big_job(nodes: int) -> float:
    """Return how long the next generation of one large job takes."""
    async with service(job_nodes=nodes) as one:
        form.say(f"one job of {nodes} nodes")
        await one.swarm.grow(nodes)
        await asyncio.sleep(SETTLE_S)
        times = [await next_generation(one.swarm, 0) for _ in range(3)]
    return form.median(times) or 0.0


def put(found: form.Form, all_levels: list[Level]) -> None:
    """Set the figures of the largest number that holds, and of the first."""
    first, last = all_levels[0], all_levels[-1]
    best = max((x for x in all_levels if x.holds), key=lambda x: x.agents, default=None)
    shown = best or first
    found.put("agents", best.agents if best else 0, _why(last))
    for name, value in shown.figures().items():
        found.put(name, value, "" if best else f"with {first.agents} agents, which do not hold")
    for name, value in first.figures().items():
        found.put(f"at_{first.agents}_{name}", value)
    found.why.setdefault("heartbeat_p99_ms", "the agents are simulated on the same cores")


def _why(last: Level) -> str:
    if last.holds:
        return "the most that was tried; it may serve more"
    seen = ", ".join(f"{k} {v:.3g}" for k, v in asdict(last.window).items())
    return f"{last.agents} did not hold: {seen}"


def main() -> None:
    """Measure and print."""
    parser = form.options(__doc__)
    parser.add_argument("--most", type=int, default=LEVELS[-1], help="try no more agents than this")
    asked = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    most = FIRST if asked.quick else min(asked.most, hard - 200)
    form.await_quiet(0.0 if asked.quick else QUIET_WAIT_S)
    found = form.Form("coordinator", TARGETS, runs=1)
    put(found, uvloop.run(levels(most, windows=1 if asked.quick else 3)))
    if asked.quick:
        found.put("generation_1000_nodes_s", None, "left out by --quick")
    else:
        found.put("generation_1000_nodes_s", uvloop.run(big_job(BIG_JOB_NODES)))
    found.print()


if __name__ == "__main__":
    main()
