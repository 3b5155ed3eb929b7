"""The one place that catches whatever a plugin does, and turns it into data."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
import traceback
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeAlias, TypeVar

from everstep.sdk.errors import EverstepError

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")
Fault = Literal["raised", "hung", "nonsense"]
FAULTS: tuple[Fault, ...] = ("raised", "hung", "nonsense")

_LATE_S = 1.0
_MAX_WHY = 500


class NonsenseError(EverstepError):
    """A plugin came back with something that its kind does not return."""


@dataclass(frozen=True, slots=True)
class Done(Generic[T]):
    """A call that came back in time."""

    value: T
    took_s: float


@dataclass(frozen=True, slots=True)
class Failed:
    """A call that raised, did not come back in time, or returned what it must not."""

    fault: Fault
    why: str
    took_s: float


Outcome: TypeAlias = Done[T] | Failed


@dataclass(slots=True)
class Tally:
    """What became of the calls so far; `in_a_row` counts the failures since the last success."""

    calls: int = 0
    in_a_row: int = 0
    failures: dict[Fault, int] = field(default_factory=lambda: dict.fromkeys(FAULTS, 0))
    last_s: float = 0.0
    last_error: str | None = None

    def add(self, outcome: Done[Any] | Failed) -> None:
        """Count one call."""
        self.calls += 1
        self.last_s = outcome.took_s
        if isinstance(outcome, Done):
            self.in_a_row = 0
            self.last_error = None
        else:
            self.in_a_row += 1
            self.failures[outcome.fault] += 1
            self.last_error = outcome.why


class Guard:
    """Calls one plugin in a thread of its own, one call at a time, each with a deadline.

    A call past its deadline cannot be ended, only left alone: `busy` stays true and further calls
    fail at once until it comes back; what it then returns is thrown away. All methods belong to
    one event loop. The thread is a daemon thread: a plugin that hangs never holds up an exit.
    """

    def __init__(
        self, name: str, *, timeout_s: float = 5.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.name = name
        self.timeout_s = timeout_s
        self.tally = Tally()
        self._clock = clock
        self._idle = asyncio.Event()
        self._idle.set()
        self._called_at_s = 0.0
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        """True while a call has not come back, in time or not."""
        return not self._idle.is_set()

    async def call(self, work: Callable[[], T]) -> Done[T] | Failed:
        """Run `work` in the plugin's thread; return its value or how it failed. Raises nothing."""
        outcome = await self._call(work)
        self.tally.add(outcome)
        return outcome

    async def idle(self) -> None:
        """Wait until no call is out, e.g. until one that hung has come back."""
        await self._idle.wait()

    def close(self) -> None:
        """Let the thread end, after the call that it is in."""
        self._work.put(None)

    async def _call(self, work: Callable[[], T]) -> Done[T] | Failed:
        if self.busy:
            out_s = self._clock() - self._called_at_s
            return Failed("hung", f"not called: has not come back for {out_s:.0f} s", 0.0)
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Done[T] | Failed] = loop.create_future()
        self._called_at_s = self._clock()
        self._idle.clear()

        def returned(outcome: Done[T] | Failed) -> None:
            self._idle.set()
            if not answer.done():
                answer.set_result(outcome)

        def run() -> None:
            outcome = _attempt(work, self._clock)
            with contextlib.suppress(RuntimeError):  # the loop may have ended long ago
                loop.call_soon_threadsafe(returned, outcome)

        self._start_thread()
        self._work.put(run)
        if await self._in_time(answer):
            return answer.result()
        return Failed("hung", f"did not come back within {self.timeout_s:g} s", self.timeout_s)

    async def _in_time(self, answer: asyncio.Future[Done[T] | Failed]) -> bool:
        while not answer.done():
            began_s = self._clock()
            await asyncio.wait([answer], timeout=self.timeout_s)
            # While this whole process stood still (SIGSTOP) the plugin did too: wait once more.
            if self._clock() - began_s < self.timeout_s + _LATE_S:
                break
        return answer.done()

    def _start_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=self.name, daemon=True)
            self._thread.start()

    def _serve(self) -> None:
        while (run := self._work.get()) is not None:
            run()


def _attempt(work: Callable[[], T], clock: Callable[[], float]) -> Done[T] | Failed:
    began_s = clock()
    try:
        return Done(work(), clock() - began_s)
    except NonsenseError as exc:
        return Failed("nonsense", _printable(str(exc)), clock() - began_s)
    except BaseException as exc:  # noqa: BLE001  a plugin may raise anything, SystemExit included
        return Failed("raised", _describe(exc), clock() - began_s)


def _describe(exc: BaseException) -> str:
    name = type(exc).__name__
    try:
        text = f"{name}: {exc}" if str(exc) else name
    except Exception:  # noqa: BLE001  its own text may raise too
        text = f"{name} (which cannot be shown)"
    frames = traceback.extract_tb(exc.__traceback__)
    where = f" ({PurePath(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return _printable(text) + where


def _printable(text: str) -> str:
    # Half a surrogate pair, e.g. from a file's name, could not be sent to anybody.
    return text[:_MAX_WHY].encode("utf-8", "replace").decode()
