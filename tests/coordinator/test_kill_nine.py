"""A real coordinator process, killed with -9 in the middle and started again."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest
from tests.coordinator.fake_agent import FakeAgent, until

from everstep.cli.demo.ports import free_port


class Process:
    """`everstep coordinator`, as a service manager would run it."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.folder = folder
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = (folder / "log").open("ab")
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> float:
        """Start it; return how long it took until it answered."""
        began_s = time.monotonic()
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "everstep.cli", "coordinator"),
                *("--listen", f"127.0.0.1:{self.port}", "--state-dir", str(self.folder)),
            ],
            stderr=self.log,
        )
        while time.monotonic() - began_s < 30:
            try:
                self.get("/healthz")
            except OSError:
                time.sleep(0.02)
            else:
                return time.monotonic() - began_s
        raise AssertionError(f"did not start: {(self.folder / 'log').read_text()}")

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=5) as answer:
            return json.load(answer)

    def signal(self, number: int) -> int:
        """Send a signal and wait for the end; return the exit code."""
        assert self._process is not None
        self._process.send_signal(number)
        code = self._process.wait(20)
        self._process = None
        return code

    def pause(self) -> None:
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGCONT)

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self.log.close()


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[Process]:
    process = Process(tmp_path)
    process.start()
    yield process
    process.close()


@asynccontextmanager
async def agents(process: Process, names: str) -> AsyncIterator[list[FakeAgent]]:
    url = f"ws://127.0.0.1:{process.port}/v1/agent"
    async with AsyncExitStack() as stack:
        found = [FakeAgent(url, name, machine=name) for name in names]
        for agent in found:
            await stack.enter_async_context(agent)
        for agent in found:
            await asyncio.wait_for(agent.up.wait(), 20)
        yield found


async def test_killed_and_started_again_it_goes_on_without_disturbing_anybody(
    coordinator: Process,
) -> None:
    async with agents(coordinator, "abc") as nodes:
        launchers = [await a.launch("run", nnodes=(2, 2)) for a in nodes]
        await until(lambda: launchers[0].running == launchers[1].running == 1)
        coordinator.signal(signal.SIGKILL)
        await asyncio.to_thread(coordinator.start)
        await until(lambda: all(len(a.welcomes) == 2 for a in nodes))
        assert [w.epoch for w in nodes[0].welcomes] == [1, 2]
        await asyncio.sleep(4)  # past the grace after a start: whatever it did wrong, it did by now
        assert [la.running for la in launchers] == [1, 1, 0]
        assert [len(la.plans) for la in launchers] == [1, 1, 1]
        assert not (await asyncio.to_thread(coordinator.get, "/v1/incidents"))["incidents"]


async def test_what_happened_while_it_was_dead_is_seen_to_when_it_is_back(
    coordinator: Process,
) -> None:
    async with agents(coordinator, "abc") as nodes:
        launchers = [await a.launch("run", nnodes=(2, 2)) for a in nodes]
        await until(lambda: launchers[0].running == launchers[1].running == 1)
        coordinator.signal(signal.SIGKILL)
        await nodes[1].end_rank(launchers[1], sig=9)
        await asyncio.to_thread(coordinator.start)
        await until(lambda: launchers[0].running == launchers[1].running == 2)
        assert [m.node for m in launchers[0].plans[-1].members] == ["a", "b"]
        assert len(launchers[0].plans) == 2


@pytest.mark.parametrize("delay_s", [0.0, 0.002, 0.005, 0.02])
async def test_killed_in_the_middle_of_a_recovery_it_comes_to_one_plan(
    coordinator: Process, delay_s: float
) -> None:
    async with agents(coordinator, "abc") as nodes:
        launchers = [await a.launch("run", nnodes=(2, 2)) for a in nodes]
        await until(lambda: launchers[0].running == launchers[1].running == 1)
        await nodes[1].end_rank(launchers[1], sig=9)
        await asyncio.sleep(delay_s)
        coordinator.signal(signal.SIGKILL)
        await asyncio.to_thread(coordinator.start)
        await until(lambda: launchers[0].running == launchers[1].running > 1)
        await until(lambda: all(len(a.welcomes) == 2 for a in nodes))
        await asyncio.sleep(1)
        assert launchers[0].running == launchers[1].running
        told = {p.generation: p for la in launchers for p in la.plans}
        with closing(sqlite3.connect(coordinator.folder / "journal.sqlite")) as database:
            rows = database.execute("select body from facts where fact = 'PlanCommitted'")
            committed = [json.loads(row[0])["plan"]["generation"] for row in rows]
        assert len(committed) == len(set(committed)) == 2, "one recovery"
        assert set(told) <= set(committed)


async def test_a_frozen_coordinator_blames_nobody_for_its_own_sleep(coordinator: Process) -> None:
    async with agents(coordinator, "ab") as nodes:
        launchers = [await a.launch("run", nnodes=(2, 2)) for a in nodes]
        await until(lambda: launchers[0].running == launchers[1].running == 1)
        coordinator.pause()
        await asyncio.sleep(4)
        coordinator.go_on()
        await asyncio.sleep(3)
        assert not (await asyncio.to_thread(coordinator.get, "/v1/incidents"))["incidents"]
        assert [la.running for la in launchers] == [1, 1]


async def test_it_stops_cleanly_on_sigterm(coordinator: Process) -> None:
    async with agents(coordinator, "a"):
        code = await asyncio.to_thread(coordinator.signal, signal.SIGTERM)
    assert code == 0
    log = (coordinator.folder / "log").read_text()
    assert "coordinator stopped" in log
    assert "Traceback" not in log


def test_a_port_in_use_is_exit_code_69_and_one_line(coordinator: Process, tmp_path: Path) -> None:
    other = tmp_path / "other"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "everstep.cli", "coordinator"),
            *("--listen", f"127.0.0.1:{coordinator.port}", "--state-dir", str(other)),
        ],
        stderr=subprocess.PIPE,
        timeout=30,
        check=False,
    )
    assert done.returncode == 69
    (line,) = [x for x in done.stderr.decode().splitlines() if x.startswith("everstep:")]
    assert "another process does" in line
    assert b"Traceback" not in done.stderr
