"""What one agent costs its node: 8 GPUs, 8 ranks that step ten times a second, a scrape every 15 s.

    python tests/bench/agent.py [--quick] [--seconds N]

The agent is a real one, connected to a real coordinator, with its default configuration: every
collector looks once a second. The ranks are real clients with real progress pages, all in this
process. The GPUs are a stand-in for the driver's library, built with gcc; it reads a file for each
answer where a driver would call the kernel. `cpu_share` is of
one core, `rss_slope_mib_per_h` a line laid through the resident memory of the second half of the
time: what the agent keeps of its ranks' steps fills up in the first.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.bench import form
from tests.bench.processes import Daemon, listens, start_coordinator

from everstep.cli.demo.ports import free_port
from everstep.wire.link import AgentLink
from everstep.wire.messages import Hello
from everstep.wire.page import PageWriter, Place, StepRecord

RANKS, GPUS, STEP_S, SCRAPE_S = 8, 8, 0.1, 15.0
WARM_UP_S, SECONDS, QUICK_SECONDS = 20.0, 900.0, 15.0
SLOPE_S, QUIET_WAIT_S = 300.0, 60.0
FAKE_DRIVER = Path(__file__).parents[1] / "plugins" / "collectors" / "nvml" / "fake_nvml.c"
LIBRARY = "libnvidia-ml.so.1"
TARGETS = {"cpu_share": 0.005, "cpu_share_all": 0.01, "rss_mib": 64.0}


class FakeRank:
    """A rank as the agent sees one: a client with a progress page that moves."""

    def __init__(self, socket: Path, rank: int) -> None:
        place = Place("bench", 1, rank, RANKS, rank, os.getpid())
        self._page = PageWriter(place)
        hello = Hello(
            role="rank",
            job=place.job,
            generation=place.generation,
            rank=rank,
            local_rank=rank,
            world_size=RANKS,
            page=True,
        )
        self._link = AgentLink(
            socket,
            hello,
            on_message=lambda _: None,
            greeting=lambda: [hello],
            page_fd=self._page.fd,
        )
        self._link.start()
        if not self._link.wait_connected(30):
            raise RuntimeError(f"the agent takes no clients: {self._link.last_error}")
        self._page.enter("step", step=0)

    def step(self, number: int) -> None:
        """Finish a step."""
        part_s = STEP_S / 4
        self._page.finished(
            StepRecord(
                number,
                time.time(),
                time.monotonic_ns(),
                STEP_S,
                part_s,
                part_s,
                part_s,
                part_s,
                0.0,
                2.0 + 1.0 / number,
                1.0,
                262_144,
                3e-4,
            )
        )

    def close(self) -> None:
        """Hang up."""
        self._link.close()
        self._page.close()


@dataclass
class Watched:
    """What was seen of the agent while it worked."""

    cpu_s: float = 0.0
    took_s: float = 0.0
    rss_mib: list[tuple[float, float]] = field(default_factory=list)
    scrapes_s: list[float] = field(default_factory=list)
    bytes: int = 0


def watch(agent: Daemon, url: str, ranks: Sequence[FakeRank], seconds: float) -> Watched:
    """Let the ranks step and scrape for so long."""
    seen = Watched()
    began_s, cpu_s = time.monotonic(), agent.cpu_s()
    due_s, scrape_s, number = began_s, began_s + min(SCRAPE_S, seconds) / 2, 0
    while (now_s := time.monotonic()) < began_s + seconds:
        number += 1
        for rank in ranks:
            rank.step(number)
        if number % 10 == 0:
            seen.rss_mib.append((now_s, agent.rss_mib()))
        if now_s >= scrape_s:
            scrape_s += SCRAPE_S
            took_s, seen.bytes = scrape(url)
            seen.scrapes_s.append(took_s)
        due_s += STEP_S
        time.sleep(max(0.0, due_s - time.monotonic()))
    seen.cpu_s, seen.took_s = agent.cpu_s() - cpu_s, time.monotonic() - began_s
    return seen


def scrape(url: str) -> tuple[float, int]:
    """Return how long it took to get the metrics, and how many bytes they are."""
    began_s = time.perf_counter()
    size = len(get(url))
    return time.perf_counter() - began_s, size


def get(url: str) -> bytes:
    """Return a page of the agent."""
    with urllib.request.urlopen(url, timeout=30) as answer:
        page: bytes = answer.read()
    return page


def _has_coordinator(url: str) -> bool:
    facts = json.loads(get(f"{url}/healthz"))
    return bool(facts["coordinator"]["connected"])


def slope_per_h(points: Sequence[tuple[float, float]]) -> float:
    """Return the slope of the line through the points with the least squares, x in seconds."""
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    above = sum((x - mean_x) * (y - mean_y) for x, y in points)
    return 3600 * above / sum((x - mean_x) ** 2 for x, _ in points)


def fake_driver(folder: Path) -> dict[str, str]:
    """Build the stand-in for the driver's library; return the environment in which it is found."""
    command = ["gcc", "-O2", "-shared", "-fPIC", f"-Wl,-soname,{LIBRARY}"]
    subprocess.run([*command, "-o", folder / LIBRARY, FAKE_DRIVER], check=True, timeout=60)
    state = folder / "driver"
    state.write_text(f"gpus={' '.join(map(str, range(GPUS)))}\ninit=0\n")
    return {"LD_LIBRARY_PATH": str(folder), "FAKE_NVML_STATE": str(state)}


@contextmanager
def running(folder: Path, environ: Mapping[str, str]) -> Iterator[tuple[Daemon, str, Path]]:
    """Run a coordinator and an agent; give the agent, its metrics' address and its socket."""
    port, socket = free_port(), folder / "agent.sock"
    with ExitStack() as stack:
        coordinator = start_coordinator(folder, port)
        stack.callback(coordinator.close)
        coordinator.wait_until(lambda: listens(port), "the coordinator listens")
        arguments = ["agent", "--node", "bench", "--socket", str(socket)]
        arguments += ["--listen", "127.0.0.1:0", "--coordinator", f"127.0.0.1:{port}"]
        agent = Daemon(arguments, folder / "agent.log", environ)
        stack.callback(agent.close)
        facts = folder / "agent.json"
        agent.wait_until(facts.exists, "the agent is ready")
        url = f"http://{json.loads(facts.read_text())['listen']}"
        agent.wait_until(lambda: _has_coordinator(url), "it has a coordinator")
        yield agent, f"{url}/metrics", socket


def measure(seconds: float, environ: Mapping[str, str], folder: Path) -> Watched:
    """Start everything, let it warm up, and watch the agent for so long."""
    with running(folder, environ) as (agent, url, socket), ExitStack() as stack:
        ranks = []
        for number in range(RANKS):
            ranks.append(FakeRank(socket, number))
            stack.callback(ranks[-1].close)
        warm_up_s = min(WARM_UP_S, seconds)
        form.say(f"warming up for {warm_up_s:.0f} s, then watching for {seconds:.0f} s")
        watch(agent, url, ranks, warm_up_s)
        return watch(agent, url, ranks, seconds)


def put(found: form.Form, seen: Watched) -> None:
    """Set all figures."""
    share = seen.cpu_s / seen.took_s
    found.put("cpu_share", share, "scraped only: pushing over OTLP comes later")
    found.put("cpu_share_all", share, "every collector that exists so far is in the core set")
    found.put("rss_mib", seen.rss_mib[-1][1])
    later = seen.rss_mib[len(seen.rss_mib) // 2 :]
    if seen.took_s >= 2 * SLOPE_S:
        found.put("rss_slope_mib_per_h", slope_per_h(later))
    else:
        found.put("rss_slope_mib_per_h", None, f"{seen.took_s:.0f} s are too short for a slope")
    found.put("scrape_ms", 1000 * (form.median(seen.scrapes_s) or 0.0))
    found.put("scrape_bytes", seen.bytes)


def main() -> None:
    """Measure and print."""
    parser = form.options(__doc__)
    parser.add_argument("--seconds", type=float, help=f"how long to watch (default {SECONDS:.0f})")
    asked = parser.parse_args()
    form.await_quiet(0.0 if asked.quick else QUIET_WAIT_S)
    found = form.Form("agent", TARGETS, runs=1)
    if shutil.which("gcc") is None:
        names = (*TARGETS, "rss_slope_mib_per_h", "scrape_ms", "scrape_bytes")
        for name in names:
            found.put(name, None, "no gcc here to build the stand-in for 8 GPUs")
    else:
        folder = Path(tempfile.mkdtemp(prefix="everstep-bench-", dir="/tmp"))
        try:
            seconds = asked.seconds or (QUICK_SECONDS if asked.quick else SECONDS)
            put(found, measure(seconds, fake_driver(folder), folder))
        finally:
            shutil.rmtree(folder)
    found.print()


if __name__ == "__main__":
    main()
