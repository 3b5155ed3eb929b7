"""Copies the live state into a slot while training goes on.

What only an optimizer's step changes is copied by a thread during the next forward and backward;
everything else at once. Before the next step of any optimizer `wait` must have returned: until
then the sources are still being read.
"""

from __future__ import annotations

import ctypes
import threading
import time
import weakref
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

_SMALL_BYTES = 64 * 1024
_CHUNK_BYTES = 64 * 1024 * 1024
_BOUNCE_BYTES = 32 * 1024 * 1024


class Copy(NamedTuple):
    """One tensor and the slot's memory that it goes to. `steady` ones only a step changes."""

    name: str
    source: torch.Tensor
    target: torch.Tensor
    steady: bool


_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def await_all(timeout_s: float | None = None) -> bool:
    """Wait until no capture of this process is under way, whoever began it; False if too long."""
    end_s = None if timeout_s is None else time.monotonic() + timeout_s
    for thread in list(_threads):
        thread.join(None if end_s is None else max(0.0, end_s - time.monotonic()))
    return not any(thread.is_alive() for thread in list(_threads))


class Capture:
    """One copy of everything, under way in a thread of its own."""

    def __init__(
        self, copies: Iterable[Copy], done: Callable[[list[str], str, float], None]
    ) -> None:
        """Copy what must be copied now and begin with the rest.

        When all is copied the thread calls `done(changed, error, waited_s)`: the names of sources
        that were changed meanwhile, what else went wrong, and how long `wait` held up its caller.
        """
        self._done = done
        self._copied = threading.Event()
        self._looking = threading.Lock()
        self._changed: list[str] | None = None
        self._waited_s = 0.0
        now: list[Copy] = []
        later: list[Copy] = []
        for copy in copies:
            (later if _can_wait(copy) else now).append(copy)
        self._watched = [(copy, _version(copy)) for copy in later]
        self._host = [copy for copy in later if not copy.source.is_cuda]
        self._device = DeviceCopies([copy for copy in later if copy.source.is_cuda])
        at_once(now)
        self._thread = threading.Thread(target=self._run, name="everstep-capture", daemon=True)
        _threads.add(self._thread)
        self._thread.start()

    def wait(self) -> None:
        """Return when the sources may be changed: they are copied, or the device will see to it."""
        if self._changed is not None:
            return
        begin = time.perf_counter()
        self._copied.wait()
        self._waited_s = time.perf_counter() - begin
        self._device.order_behind()
        self._look()

    def _run(self) -> None:
        error = ""
        try:
            for copy in self._host:
                _copy(copy)
            self._device.bounce()
            self._copied.set()
            self._device.finish()
        except RuntimeError as exc:
            error = f"copying out of the device failed: {exc}"
        finally:
            self._copied.set()
        self._done(self._look(), error, self._waited_s)

    def _look(self) -> list[str]:
        """Return what was changed before it was allowed, and let go of the sources."""
        with self._looking:
            if self._changed is None:
                self._changed = [c.name for c, before in self._watched if _version(c) != before]
                self._watched = []
            return self._changed


@torch.no_grad()
def at_once(copies: Sequence[Copy]) -> None:
    """Copy and return when it is done."""
    if copies:
        torch._foreach_copy_([c.target for c in copies], [c.source for c in copies])
    if any(c.source.is_cuda for c in copies):
        torch.cuda.current_stream().synchronize()


class DeviceCopies:
    """Copies from the device on a stream of their own, behind what was queued so far."""

    def __init__(self, copies: Sequence[Copy]) -> None:
        """Queue those whose target is pinned; the others need `bounce`, in another thread."""
        self._event: torch.cuda.Event | None = None
        self._unpinned = [copy for copy in copies if not copy.target.is_pinned()]
        if not copies:
            return
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch's gap
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream), torch.no_grad():
            for copy in copies:
                # Its memory may not be given to another tensor before this stream has read it.
                copy.source.record_stream(self._stream)
                if copy.target.is_pinned():
                    copy.target.copy_(copy.source, non_blocking=True)
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's gap
        self._event.record(self._stream)

    def bounce(self) -> None:
        """Copy what could not be queued, through pinned memory that is written to in turn."""
        if not self._unpinned:
            return
        pinned = torch.empty(_BOUNCE_BYTES, dtype=torch.uint8, pin_memory=True)
        with torch.cuda.stream(self._stream), torch.no_grad():
            for copy in self._unpinned:
                source = copy.source.contiguous().reshape(-1).view(torch.uint8)
                target = copy.target.reshape(-1).view(torch.uint8)
                for start in range(0, source.numel(), _BOUNCE_BYTES):
                    part = source[start : start + _BOUNCE_BYTES]
                    pinned[: part.numel()].copy_(part, non_blocking=True)
                    self._stream.synchronize()
                    target[start : start + part.numel()].copy_(pinned[: part.numel()])

    def order_behind(self) -> None:
        """Let the device, not this thread, wait before it changes anything."""
        if self._event is not None:
            self._event.wait()

    def finish(self) -> None:
        """Return when the numbers are in host memory."""
        if self._event is not None:
            self._event.synchronize()


def pin(memory: torch.Tensor) -> bool:
    """Have the device read and write this host memory directly; False when it cannot."""
    if memory.is_pinned():
        return True
    try:
        error = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)  # type: ignore[no-untyped-call]  # torch's gap
    except RuntimeError:
        return False
    return int(error) == 0


def _version(copy: Copy) -> int:
    """Return how often the source was changed in place, as torch counts for autograd."""
    return copy.source._version  # noqa: SLF001  torch has no other name for it


def _can_wait(copy: Copy) -> bool:
    if not copy.steady or copy.source.numel() == 0:
        return False
    # A thread's turn on the interpreter's lock costs more than a small copy.
    return copy.source.is_cuda or copy.source.nbytes > _SMALL_BYTES


@torch.no_grad()
def _copy(copy: Copy) -> None:
    source = copy.source
    if not source.is_contiguous() or source.is_conj() or source.is_neg():
        copy.target.copy_(source)
        return
    here, there = source.data_ptr(), copy.target.data_ptr()
    for start in range(0, source.nbytes, _CHUNK_BYTES):
        # A foreign call: the interpreter's lock is released for as long as it takes.
        ctypes.memmove(there + start, here + start, min(_CHUNK_BYTES, source.nbytes - start))
