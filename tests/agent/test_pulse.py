"""When the agent looks, and what it makes of having been late."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable

import pytest

from everstep.agent.progress import Progress
from everstep.agent.pulse import Pulse


class Watched(Progress):
    """Progress that notes when it was looked at, and has a standstill due when told so."""

    def __init__(self) -> None:
        super().__init__()
        self.looks: list[int] = []
        self.anew: list[int] = []
        self.due: int | None = None

    def look(self, now_ns: int) -> bool:
        self.looks.append(now_ns)
        tell = self.due is not None and now_ns >= self.due
        self.due = None if tell else self.due
        return tell

    def due_ns(self) -> int | None:
        return self.due

    def start_anew(self, now_ns: int) -> None:
        self.anew.append(now_ns)


class Clock:
    """The real clock, with jumps."""

    def __init__(self) -> None:
        self.jumped_ns = 0

    def __call__(self) -> int:
        return time.monotonic_ns() + self.jumped_ns


@pytest.fixture
async def tasks() -> AsyncIterator[list[asyncio.Task[None]]]:
    tasks: list[asyncio.Task[None]] = []
    yield tasks
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def until(true: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not true():  # noqa: ASYNC110  what is waited for has no event
            await asyncio.sleep(0.01)


async def test_it_looks_again_and_again_and_pings_more_often_than_asked(
    tasks: list[asyncio.Task[None]],
) -> None:
    watched, pings = Watched(), []
    pulse = Pulse(watched, look_s=600, ping_s=0.1, ping=lambda: pings.append(time.monotonic()))
    tasks.append(asyncio.create_task(pulse.run(lambda: None)))
    await until(lambda: len(pings) >= 5)
    assert len(watched.looks) >= len(pings)
    assert pulse.late == 0


async def test_a_standstill_is_looked_for_at_its_very_moment(
    tasks: list[asyncio.Task[None]],
) -> None:
    watched, told = Watched(), []
    watched.due = time.monotonic_ns() + 200_000_000
    due = watched.due
    pulse = Pulse(watched, look_s=600, ping_s=None, ping=lambda: None)
    tasks.append(asyncio.create_task(pulse.run(lambda: told.append(time.monotonic_ns()))))
    await until(lambda: told)
    assert 0 <= told[0] - due < 2_000_000_000


async def test_a_look_in_between_puts_the_next_one_off(tasks: list[asyncio.Task[None]]) -> None:
    watched = Watched()
    pulse = Pulse(watched, look_s=0.5, ping_s=None, ping=lambda: None)
    tasks.append(asyncio.create_task(pulse.run(lambda: None)))
    await until(lambda: watched.looks)
    for _ in range(20):
        await asyncio.sleep(0.05)
        pulse.look()
    assert len(watched.looks) <= 24  # twenty of ours, and hardly one of its own


async def test_having_been_late_is_counted_and_every_standstill_starts_anew(
    tasks: list[asyncio.Task[None]],
) -> None:
    watched, clock = Watched(), Clock()
    pulse = Pulse(watched, look_s=0.1, ping_s=None, ping=lambda: None, clock_ns=clock)
    tasks.append(asyncio.create_task(pulse.run(lambda: None)))
    await until(lambda: watched.looks)
    clock.jumped_ns = 5_000_000_000
    await until(lambda: watched.anew)
    assert pulse.late == 1
    assert watched.anew[0] in watched.looks
