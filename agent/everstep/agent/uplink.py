"""The agent's one connection to a coordinator: opened from here, to the first that takes it in."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import time
from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import aiohttp

from everstep.agent.clock_offset import ClockOffset, Offset
from everstep.agent.resolver import Resolver
from everstep.wire.codec import MAX_FRAME_BYTES, Decoder, check_schema, encode
from everstep.wire.errors import MalformedMessageError, WireError
from everstep.wire.messages import (
    AgentHello,
    AgentToCoordinator,
    CoordinatorRefusal,
    CoordinatorToAgent,
    CoordinatorWelcome,
    Heartbeat,
    HeartbeatReply,
)

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Coroutine, Sequence

log = logging.getLogger(__name__)

_MAX_QUEUED_BYTES = 32 * 1024 * 1024
_OPEN_S, _CLOSE_S = 5.0, 0.5
_LATE_S = 1.0
_LONGEST_REFUSAL_S = 60.0
_SAY_AGAIN_S = 60.0

_decoder: Decoder[CoordinatorToAgent] = Decoder(CoordinatorToAgent)


class LinkLostError(WireError):
    """The connection to the coordinator is over, with the reason."""


class RefusedError(WireError):
    """The coordinator does not take this agent in."""

    def __init__(self, why: str, retry_s: float) -> None:
        super().__init__(why)
        self.retry_s = min(_LONGEST_REFUSAL_S, max(0.1, retry_s))


@dataclass(frozen=True, slots=True)
class Pace:
    """How often it beats, how long it waits for an answer and between attempts, in seconds."""

    heartbeat_s: float = 1.0
    reply_timeout_s: float = 5.0
    retry_first_s: float = 0.1
    retry_last_s: float = 2.0


@dataclass(frozen=True, slots=True)
class Ends:
    """What the link is made of on this side.

    `hello` is given this node's own address as the coordinator sees it, `beat` the heartbeat's
    number and the clock's offset. `changed` is called when the link comes up or goes down,
    `heard` with every message but welcomes and replies to heartbeats.
    """

    hello: Callable[[str], AgentHello]
    beat: Callable[[int, Offset | None], Heartbeat]
    changed: Callable[[], None]
    heard: Callable[[CoordinatorToAgent], None]


class Uplink:
    """Keeps one session with one of the coordinators, whatever happens to it."""

    def __init__(
        self,
        urls: Sequence[str],
        ends: Ends,
        pace: Pace,
        rng: random.Random,
        *,
        wall: Callable[[], float] = time.time,
        mono: Callable[[], float] = time.monotonic,
    ) -> None:
        self.up = False
        self.url: str | None = None
        self.error: str | None = None if urls else "no coordinator is configured"
        self.down_since_s = mono()
        self.counts: Counter[str] = Counter()
        self._urls = urls
        self._ends = ends
        self._pace = pace
        self._rng = rng
        self._wall = wall
        self._mono = mono
        self._offset = ClockOffset()
        self._numbers = itertools.count(1)
        self._sent_s: dict[int, float] = {}
        self._queue: deque[bytes] = deque()
        self._queued_bytes = 0
        self._beat_wanted = False
        self._wake = asyncio.Event()
        self._hurry = asyncio.Event()
        self._heard_s = 0.0
        self._said: tuple[str, float] = ("", 0.0)

    def send(self, message: AgentToCoordinator) -> bool:
        """Send a message; False when no coordinator is reached, and then it is gone."""
        if not self.up:
            return False
        body = encode(message)
        self._queue.append(body)
        self._queued_bytes += len(body)
        self._wake.set()
        return True

    def beat_now(self) -> None:
        """Send a heartbeat without waiting for its turn."""
        self._hurry.set()

    def offset(self) -> Offset | None:
        """Return how far the coordinator's clock is from ours."""
        return self._offset.best(mono_s=self._mono())

    async def run(self) -> None:
        """Connect, again and again, until cancelled."""
        if not self._urls:
            return
        connector = aiohttp.TCPConnector(resolver=Resolver(), force_close=True)
        async with aiohttp.ClientSession(connector=connector) as http:
            wait_s = self._pace.retry_first_s
            for url in itertools.cycle(self._urls):
                began_s = self._mono()
                refused_s = await self._try(http, url)
                if self._mono() - began_s > self._pace.retry_last_s:
                    wait_s = self._pace.retry_first_s  # it had lasted
                await asyncio.sleep(refused_s or wait_s * self._rng.uniform(0.5, 1.0))
                wait_s = min(self._pace.retry_last_s, wait_s * 2)

    async def _try(self, http: aiohttp.ClientSession, url: str) -> float:
        """Hold one session for as long as it lasts; return how long to wait when told to."""
        try:
            await self._session(http, url)
        except RefusedError as exc:
            self._failed(url, f"refused: {exc}")
            # With others to ask, the next one is asked without that delay.
            return exc.retry_s if len(self._urls) == 1 else 0.0
        except (WireError, aiohttp.ClientError, OSError, TimeoutError) as exc:
            self._failed(url, _why(exc))
        return 0.0

    def _failed(self, url: str, why: str) -> None:
        self.error = f"{url}: {why}"
        text, at_s = self._said
        if text != self.error or self._mono() - at_s > _SAY_AGAIN_S:
            self._said = (self.error, self._mono())
            log.warning("no coordinator", extra={"url": url, "why": why})

    async def _session(self, http: aiohttp.ClientSession, url: str) -> None:
        async with contextlib.AsyncExitStack() as stack:
            async with asyncio.timeout(_OPEN_S):
                ws = await stack.enter_async_context(
                    http.ws_connect(
                        url,
                        max_msg_size=MAX_FRAME_BYTES,
                        timeout=aiohttp.ClientWSTimeout(ws_close=_CLOSE_S),
                    )
                )
                welcome = await self._introduce(ws)
            self._came_up(url, welcome)
            try:
                await _first_to_end(self._read(ws), self._write(ws), self._beat())
            finally:
                self._went_down()

    async def _introduce(self, ws: aiohttp.ClientWebSocketResponse) -> CoordinatorWelcome:
        address, *_ = ws.get_extra_info("sockname") or ("",)
        await ws.send_bytes(encode(self._ends.hello(address)))
        while True:
            message = _decode(await ws.receive())
            if isinstance(message, CoordinatorRefusal):
                raise RefusedError(message.why, message.retry_s)
            if isinstance(message, CoordinatorWelcome):
                check_schema(message.schema, who=f"the coordinator ({message.version})")
                return message
            self.counts["before the welcome"] += 1

    def _came_up(self, url: str, welcome: CoordinatorWelcome) -> None:
        self._sent_s.clear()
        self._offset.forget()
        self._heard_s = self._mono()
        self.up, self.url, self.error, self._said = True, url, None, ("", 0.0)
        self.counts["connected"] += 1
        log.info("coordinator reached", extra={"url": url, "epoch": welcome.epoch})
        self._ends.changed()

    def _went_down(self) -> None:
        self.up, self.url = False, None
        self.down_since_s = self._mono()
        self._queue.clear()
        self._queued_bytes = 0
        self._ends.changed()

    async def _read(self, ws: aiohttp.ClientWebSocketResponse) -> NoReturn:
        while True:
            raw = await ws.receive()
            self._heard_s = self._mono()
            try:
                message = _decode(raw)
            except MalformedMessageError as exc:
                self.counts["malformed"] += 1
                if self.counts["malformed"] == 1:
                    log.warning("message of the coordinator skipped", extra={"why": str(exc)})
                continue
            match message:
                case HeartbeatReply():
                    self._learn(message)
                case CoordinatorRefusal():
                    raise RefusedError(message.why, message.retry_s)
                case CoordinatorWelcome():
                    self.counts["second welcome"] += 1
                case _:
                    self._ends.heard(message)

    def _learn(self, reply: HeartbeatReply) -> None:
        sent_s = self._sent_s.pop(reply.seq, None)
        if sent_s is not None:
            self._offset.add(
                sent_s,
                reply.received_at_s,
                reply.sent_at_s,
                self._wall(),
                mono_s=self._mono(),
            )

    async def _write(self, ws: aiohttp.ClientWebSocketResponse) -> NoReturn:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._beat_wanted or self._queue:
                # A heartbeat is made when its turn comes, so that it never tells old news.
                if self._beat_wanted:
                    self._beat_wanted = False
                    body = encode(self._heartbeat())
                else:
                    body = self._queue.popleft()
                    self._queued_bytes -= len(body)
                await ws.send_bytes(body)

    def _heartbeat(self) -> Heartbeat:
        beat = self._ends.beat(next(self._numbers), self.offset())
        self._sent_s[beat.seq] = beat.sent_at_s
        if len(self._sent_s) > 100:
            self._sent_s.pop(next(iter(self._sent_s)))
        return beat

    async def _beat(self) -> NoReturn:
        while True:
            self._beat_wanted = True
            self._wake.set()
            began_s = self._mono()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._pace.heartbeat_s):
                    await self._hurry.wait()
            self._hurry.clear()
            self._check(began_s)

    def _check(self, began_s: float) -> None:
        now_s = self._mono()
        if now_s - began_s > self._pace.heartbeat_s + _LATE_S:
            self._heard_s = now_s  # it was this process that stood still
        silent_s = now_s - self._heard_s
        if silent_s > self._pace.reply_timeout_s:
            raise LinkLostError(f"the coordinator was silent for {silent_s:.1f} s")
        if self._queued_bytes > _MAX_QUEUED_BYTES:
            raise LinkLostError(f"the coordinator does not read: {self._queued_bytes} bytes wait")


async def _first_to_end(*coroutines: Coroutine[Any, Any, NoReturn]) -> None:
    tasks = [asyncio.create_task(c) for c in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _why(exc: Exception) -> str:
    if isinstance(exc, TimeoutError):
        return f"no answer within {_OPEN_S:g} s"
    if isinstance(exc, aiohttp.WSServerHandshakeError):
        return f"no coordinator there: HTTP {exc.status} {exc.message}"
    cause = exc.os_error if isinstance(exc, aiohttp.ClientConnectorError) else exc
    if isinstance(cause, OSError) and cause.errno:
        return os.strerror(cause.errno)
    return str(cause) or type(cause).__name__


def _decode(raw: aiohttp.WSMessage) -> CoordinatorToAgent:
    if raw.type is aiohttp.WSMsgType.BINARY:
        return _decoder.decode(raw.data)
    if raw.type is aiohttp.WSMsgType.TEXT:
        raise MalformedMessageError("a text frame where binary ones are spoken")
    if raw.type is aiohttp.WSMsgType.ERROR:
        raise LinkLostError(str(raw.data))
    raise LinkLostError("the coordinator hung up" + (f": {raw.extra}" if raw.extra else ""))
