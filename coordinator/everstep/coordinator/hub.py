"""The agents' WebSocket: one task reads each connection, heartbeats are answered on the spot."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import itertools
import logging
from collections import Counter, deque
from functools import lru_cache
from typing import TYPE_CHECKING

import msgspec
from aiohttp import WSMsgType, web

from everstep.wire.codec import MAX_FRAME_BYTES, Decoder, encode
from everstep.wire.errors import MalformedMessageError
from everstep.wire.messages import (
    AgentHello,
    AgentToCoordinator,
    Committed,
    CoordinatorRefusal,
    Heartbeat,
    HeartbeatReply,
    Message,
    ToClient,
)

if TYPE_CHECKING:
    from everstep.coordinator.nodes import Session
    from everstep.coordinator.runtime import Runtime
    from everstep.wire.messages import CoordinatorToAgent

log = logging.getLogger(__name__)

_HELLO_S = 10.0
_CLOSE_S = 0.5
_MAX_QUEUED = 10_000
_TOKEN_RETRY_S = 30.0

_decoder: Decoder[AgentToCoordinator] = Decoder(AgentToCoordinator)


class _ToClient(Message, frozen=True, kw_only=True, tag="ToClient"):
    client: str
    body: msgspec.Raw


@lru_cache(maxsize=4)
def _encoded_plan(body: _ById) -> msgspec.Raw:
    return msgspec.Raw(encode(body.message))


class _ById:
    """Makes a message a key by identity: a plan goes to all launchers and is encoded once."""

    def __init__(self, message: Committed) -> None:
        self.message = message

    def __hash__(self) -> int:
        return id(self.message.plan)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ById) and other.message.plan is self.message.plan


def _encoded(message: CoordinatorToAgent) -> bytes:
    if isinstance(message, ToClient) and isinstance(message.body, Committed):
        raw = _encoded_plan(_ById(message.body))
        return encode(_ToClient(client=message.client, body=raw))
    return encode(message)


class Connection:
    """The way back to one agent: what cannot be sent at once waits here, up to a limit."""

    def __init__(self, ws: web.WebSocketResponse) -> None:
        self._ws = ws
        self._queue: deque[bytes] = deque()
        self._task: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[bool] | None = None

    def send(self, message: CoordinatorToAgent) -> None:
        """Send, after what waits already; an agent that reads nothing is hung up on."""
        self._queue.append(_encoded(message))
        if len(self._queue) > _MAX_QUEUED:
            self.hang_up(f"{len(self._queue)} messages wait and none is read")
        elif self._task is None:
            self._task = asyncio.create_task(self._flush())

    def hang_up(self, why: str) -> None:
        """Close the connection; an agent that does not answer to that is cut off."""
        self._queue.clear()
        if self._closing is None:
            message = why.encode()[:120]  # a close frame has room for 123 bytes
            self._closing = asyncio.create_task(self._ws.close(message=message))

    async def end(self) -> None:
        """Take the tasks along when the connection is over."""
        for task in (self._task, self._closing):
            if task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, ConnectionError):
                    await task

    async def _flush(self) -> None:
        try:
            while self._queue:
                await self._ws.send_bytes(self._queue.popleft())
        except ConnectionError:
            self._queue.clear()  # the reader sees the end of the connection too
        finally:
            self._task = None


class Hub:
    """Serves `GET /v1/agent`."""

    def __init__(self, runtime: Runtime, token: str) -> None:
        self.counts: Counter[str] = Counter()
        self.heartbeats = 0
        self._runtime = runtime
        self._token = token.encode()
        self._numbers = itertools.count(1)
        self._open: set[web.WebSocketResponse] = set()

    async def agent(self, request: web.Request) -> web.WebSocketResponse:
        """Speak with one agent until either side hangs up."""
        ws = web.WebSocketResponse(
            compress=False, max_msg_size=MAX_FRAME_BYTES, timeout=_CLOSE_S, autoclose=True
        )
        await ws.prepare(request)
        self._open.add(ws)
        try:
            await self._serve(ws, request.remote or "")
        finally:
            self._open.discard(ws)
        return ws

    async def close(self) -> None:
        """Hang up on all agents; they will look for a coordinator and find the next one."""
        closing = [ws.close(message=b"the coordinator stops") for ws in self._open]
        await asyncio.gather(*closing, return_exceptions=True)

    async def _serve(self, ws: web.WebSocketResponse, remote: str) -> None:
        hello = await self._hello(ws, remote)
        if hello is None:
            return
        if self._token and not hmac.compare_digest(hello.token.encode(), self._token):
            self.counts["wrong token"] += 1
            why = "the token is not this coordinator's: set token_file in the agent's table [agent]"
            await self._refuse(ws, CoordinatorRefusal(why=why, retry_s=_TOKEN_RETRY_S), remote)
            return
        runtime, number = self._runtime, next(self._numbers)
        connection = Connection(ws)
        reply, effects = runtime.cluster.connect(runtime.clock(), number, hello)
        if isinstance(reply, CoordinatorRefusal):
            runtime.perform(effects)
            await self._refuse(ws, reply, remote)
            return
        runtime.links[number] = connection
        runtime.perform(effects)
        session = runtime.cluster.nodes.sessions[hello.node]
        try:
            await ws.send_bytes(encode(reply))
            await self._read(ws, session)
        except ConnectionError:
            pass  # seen as the end of the connection, which it is
        finally:
            del runtime.links[number]
            runtime.perform(runtime.cluster.closed(runtime.clock(), number, hello.node))
            await connection.end()

    async def _hello(self, ws: web.WebSocketResponse, remote: str) -> AgentHello | None:
        try:
            first = await ws.receive(timeout=_HELLO_S)
            if first.type is not WSMsgType.BINARY:
                return None
            message = _decoder.decode(first.data)
        except (TimeoutError, MalformedMessageError) as exc:
            self.counts["no hello"] += 1
            log.warning("agent did not introduce itself", extra={"why": str(exc) or "too late"})
            return None
        if not isinstance(message, AgentHello):
            self.counts["no hello"] += 1
            return None
        return message if message.address else msgspec.structs.replace(message, address=remote)

    async def _refuse(
        self, ws: web.WebSocketResponse, refusal: CoordinatorRefusal, remote: str
    ) -> None:
        log.warning("agent refused", extra={"remote": remote, "why": refusal.why})
        self.counts["refused"] += 1
        with contextlib.suppress(ConnectionError):
            await ws.send_bytes(encode(refusal))
        await ws.close()

    async def _read(self, ws: web.WebSocketResponse, session: Session) -> None:
        runtime = self._runtime
        clock, receive, send = runtime.clock, ws.receive, ws.send_bytes
        while True:
            raw = await receive()
            if raw.type is not WSMsgType.BINARY:
                if raw.type is WSMsgType.TEXT:
                    self.counts["malformed"] += 1
                    continue
                return
            now_s = clock()
            try:
                message = _decoder.decode(raw.data)
            except MalformedMessageError as exc:
                self._skip(session.node, exc)
                continue
            if type(message) is Heartbeat:
                self.heartbeats += 1
                session.take(message, now_s)
                reply = HeartbeatReply(seq=message.seq, received_at_s=now_s, sent_at_s=clock())
                await send(encode(reply))
            elif not isinstance(message, (AgentHello, Heartbeat)):
                runtime.perform(runtime.cluster.receive(now_s, session, message))

    def _skip(self, node: str, exc: MalformedMessageError) -> None:
        self.counts["malformed"] += 1
        if self.counts["malformed"] % 1000 == 1:  # the first, and a reminder
            log.warning("message of an agent skipped", extra={"node": node, "why": str(exc)})
