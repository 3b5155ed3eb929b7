"""A cable between an agent and its coordinator that can be cut: bytes stop, sockets stay open."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from typing import Any


class Cable:
    """A TCP forwarder on loopback. While `cut` is set nothing passes and nothing is closed."""

    def __init__(self, target: tuple[str, int]) -> None:
        self.cut = False
        self.address = ("127.0.0.1", 0)
        self._target = target
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._server: asyncio.Server | None = None
        self._ends: set[asyncio.StreamWriter] = set()

    async def start(self) -> None:
        """Listen on a free port, given in `address`."""
        self._server = await asyncio.start_server(self._connect, *self.address)
        self.address = self._server.sockets[0].getsockname()[:2]

    async def set_cut(self, *, cut: bool) -> None:
        """Cut the cable, or mend it."""
        self.cut = cut
        if cut:
            self._flowing.clear()
        else:
            self._flowing.set()

    async def close(self) -> None:
        """Hang up on both sides."""
        self._flowing.set()
        if self._server is not None:
            self._server.close()
        for writer in list(self._ends):
            writer.transport.abort()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._flowing.wait()
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.transport.abort()
            return
        self._ends |= {writer, far_writer}
        try:
            await asyncio.gather(self._pump(reader, far_writer), self._pump(far_reader, writer))
        finally:
            self._ends -= {writer, far_writer}

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, OSError):
            while data := await reader.read(65536):
                await self._flowing.wait()
                writer.write(data)
                await writer.drain()
        with contextlib.suppress(ConnectionError, OSError):
            writer.close()


class Cables:
    """Runs the cables in a thread with a loop of its own, for a caller that has none."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._cables: list[Cable] = []

    def lay(self, target: tuple[str, int]) -> Cable:
        """Return a new cable to `target`."""
        cable = Cable(target)
        self._await(cable.start())
        self._cables.append(cable)
        return cable

    def set_cut(self, cable: Cable, *, cut: bool) -> None:
        """Cut one cable, or mend it."""
        self._await(cable.set_cut(cut=cut))

    def close(self) -> None:
        """Close all cables and end the thread."""
        for cable in self._cables:
            self._await(cable.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()

    def _await(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(10)
